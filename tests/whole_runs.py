"""Whole training runs for tests: the entry point itself, in real processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from dtrain import command_line, train
from dtrain.config import compose, schema
from dtrain.config.explain import options_last
from dtrain.runs.run_dir import code_commits
from dtrain.training import build
from dtrain.training.checkpoint.checkpoints import read_folder
from tests.forked_python import forked_python
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
#: Workers cost a third of a short run: tests that are about them set their number.
QUIET = ("tracker=none", "train.log_every=1", "train.deterministic=true", "data.num_workers=0")


def train_on(ranks: int, run_dir: Path, *overrides: str, experiment: str = "digits", timeout: float = 250) -> None:
    """Trains ``experiment`` with ``ranks`` forked processes, for at most ``timeout`` seconds."""
    chosen = {override.partition("=")[0] for override in overrides}
    quiet = [override for override in QUIET if override.partition("=")[0] not in chosen]
    arguments = [f"experiment={experiment}", f"run.dir={run_dir}", *quiet, *overrides]
    composed = _composed(arguments)
    commits = _commits(Path.cwd())
    Image.init()  # loads the formats of images, which each rank would do

    def rank(number: int) -> None:
        with (
            mock.patch.object(compose, "_call_hydra", composed or compose._call_hydra),
            mock.patch.object(build, "code_commits", return_value=commits),
        ):
            command_line.run(train.train, arguments)

    run_ranks(ranks, rank, init=False, timeout=timeout)


@functools.cache
def _commits(folder: Path) -> dict[str, str]:
    """The commits of the code: git takes a tenth of the time of a short run for them."""
    return code_commits()


def _composed(arguments: list[str]) -> Callable[[Callable[[DictConfig], None], list[str]], None] | None:
    """Hydra's work on these arguments, done once for all ranks: it takes as long as a short run.

    Returns:
        A ``compose._call_hydra`` that knows the result; None if the config is wrong, which each rank has to find.
    """
    found: list[tuple[DictConfig, Any]] = []
    schema.register()
    compose._register_resolvers()
    try:
        compose._call_hydra(lambda cfg: found.append((cfg, HydraConfig.instance().cfg)), options_last(arguments))
    except Exception:  # noqa: BLE001 - shown by the ranks
        return None

    def known(job: Callable[[DictConfig], None], arguments: list[str]) -> None:
        cfg, HydraConfig.instance().cfg = found[0]
        job(cfg)

    return known


def torchrun(
    ranks: int, *arguments: str, module: str = "dtrain.train", timeout: float = 250, **environment: str
) -> Any:
    """Runs an entry point under torchrun, in forks; returns the completed process with its output as text."""
    command = [forked_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        check=False,
    )


def alive(pid: int) -> bool:
    """Whether a process runs; an ended process without its parent may stay a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.strip().startswith("Z")


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a folder: path to time of the last change in nanoseconds, and content of the files."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def metrics(run_dir: Path, name: str = "train/loss") -> list[float]:
    """A metric's values, in the order of the log."""
    return [record[name] for record in records(run_dir) if name in record]


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def status(run_dir: Path) -> dict[str, Any]:
    """status.json."""
    content = json.loads((run_dir / "status.json").read_text())
    assert isinstance(content, dict)
    return content


def weights(run_dir: Path, step: int, name: str = "model") -> dict[str, Tensor]:
    """The tensors of a checkpoint; those of a sharded one are put together from the files of its ranks."""
    folder = run_dir / "checkpoints" / f"step-{step:09d}"
    if (folder / f"{name}.safetensors").exists():
        return load_file(folder / f"{name}.safetensors")
    return {key: tensor[...] for key, tensor in read_folder(folder).stored(name).items()}
