"""Imports inside dtrain: down the layers, without cycles, and without what a command does not need.

The layers are in pyproject.toml; ``lint-imports`` checks them from the command line. Imports for type checking count.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]

#: By module (``.*`` stands for all modules of a package): packages that importing it must not load, and for whose sake.
NOT_LOADED = {
    "dtrain.__main__": ("hydra", "omegaconf", "torch", "numpy"),  # dtrain --help answers at once
    "dtrain.distributed.torchrun": ("hydra", "omegaconf", "torch", "numpy"),  # every torchrun on the machine loads it
    "dtrain.report.*": ("hydra", "omegaconf", "wandb"),  # reads finished runs only, on any machine
    "dtrain.errors": ("hydra", "omegaconf", "torch"),  # loader workers import it
    "dtrain.files": ("hydra", "omegaconf", "torch"),  # loader workers import it
    "dtrain.runs.records": ("hydra", "torch", "wandb"),
    "dtrain.runs.run_dir": ("hydra", "torch", "wandb"),  # dtrain.report reads the status
    "dtrain.runs.history": ("hydra", "torch", "wandb"),
    "dtrain.tracking.sinks": ("hydra", "torch", "wandb", "tensorboard", "matplotlib"),  # not every run uses them
    "dtrain.runs.evaluation_results": (
        "hydra",
        "wandb",
        "matplotlib",
    ),  # only the confusion picture needs matplotlib
    "dtrain.data.*": ("hydra", "wandb", "matplotlib", "webdataset", "sklearn", "rich"),  # loader workers import it
}
#: What a training without a tracker does not use.
NOT_IN_A_TRAINING = (
    "wandb",
    "matplotlib",
    "webdataset",
    "sklearn",
    "jinja2",
    "tensorboard",
    "aiohttp",
    "onnx",
    "optuna",
)


def test_imports_go_down_the_layers() -> None:
    # In a process of its own, because import-linter configures logging, which disables the loggers of all other tests.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"imports that break the layers in pyproject.toml:\n{done.stdout}{done.stderr}"


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph("dtrain", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        # The cycle comes in the order imported, importer, ...
        cycle = error.args[1][::-1]
        lines = [
            f"{importer} imports {imported} in line {detail['line_number']}: {detail['line_contents']}"
            for importer, imported in itertools.pairwise(cycle)
            for detail in graph.get_import_details(importer=importer, imported=imported)[:1]
        ]
        pytest.fail("\n".join(["a cycle of imports:", *lines]), pytrace=False)


def test_only_the_config_knows_omegaconf() -> None:
    # Everything else gets the dataclasses of the schema.
    importers = set()
    for path in (ROOT / "dtrain").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "omegaconf" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "omegaconf" for name in names):
                importers.add(path.relative_to(ROOT / "dtrain").as_posix())
    outside = {path for path in importers if not path.startswith("config/")}
    assert outside == {"completion.py"}  # it lists the keys without composing a config


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_LOADED)
def test_an_import_does_not_load_what_it_does_not_need(name: str) -> None:
    folder = ROOT.joinpath(*name.removesuffix(".*").split("."))
    paths = [path.relative_to(ROOT).with_suffix("") for path in folder.rglob("*.py") if path.stem != "__init__"]
    modules = [".".join(path.parts) for path in paths] if name.endswith(".*") else [name]
    code = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    unwanted = [package for package in NOT_LOADED[name] if package in loaded]
    assert not unwanted, f"importing {name} loads {', '.join(unwanted)}; import it in the function that needs it"


@pytest.mark.slow
def test_a_training_without_a_tracker_loads_no_package_that_it_does_not_use(digits: Path, tmp_path: Path) -> None:
    arguments = [
        "experiment=digits",
        "train.max_steps=1",
        "tracker=none",
        "data.num_workers=0",
        f"run.dir={tmp_path}/run",
    ]
    code = "import sys; from dtrain import train; train.main(); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "finished at step 1" in done.stdout, done.stderr
    assert not set(NOT_IN_A_TRAINING).intersection(done.stderr.split())


def test_the_help_of_a_training_does_not_load_torch() -> None:
    code = "import sys; from dtrain.__main__ import main; code = main(); sys.exit('torch' in sys.modules or code)"
    command = [sys.executable, "-c", code, "train", "experiment=digits", "--cfg", "job"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SmallCNN" in done.stdout
