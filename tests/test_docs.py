"""README.md and docs/: commands run or are accepted, keys exist, links lead somewhere, the page of keys is fresh."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from dtrain import command_line
from dtrain.__main__ import entry_point
from dtrain.config.compose import Composed, conf_dir
from dtrain.config.schema import Config
from dtrain.data.fields.field import Field
from dtrain.doctor import __main__ as doctor
from dtrain.export import __main__ as export
from dtrain.launch.commands import COMMANDS
from dtrain.precision.policy import ROLES
from dtrain.runs.trust import mark_as_own
from tests.doc_commands import ENTRY_POINTS, accepted, call, compose_only, user_presets
from tests.doc_keys import GROUPS, check_code, is_key
from tests.doc_pages import (
    PAGES,
    ROOT,
    WEEK,
    anchors,
    blocks,
    commands,
    inline_code,
    links,
    run_in_the_week,
    unfenced_commands,
)
from tests.doc_world import execute, make_world, shortened
from tests.forked_python import forked_python

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
#: Commands of any page that were accepted or are told of; several pages show the same.
SEEN: set[tuple[str, ...]] = set()


# -- commands: run, or accepted by the program that they name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.runs for block in blocks(page, "bash"))], ids=lambda page: page.name
)
def test_what_a_page_says_to_type_works(page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    world = make_world(tmp_path, tmp_path_factory.getbasetemp())
    # What a newcomer types is really started.
    python = sys.executable if page.name == "index.md" else forked_python()
    elsewhere = [code for code, _ in run_in_the_week(page)] if page.name in WEEK else []  # by test_doc_outputs
    for block in blocks(page, "bash"):
        if block.runs and block not in elsewhere:
            try:
                execute(block.text, world, block.programs, python)
            except AssertionError as error:
                pytest.fail(f"{block}: {error}", pytrace=False)


@by_page
def test_commands_are_in_blocks_of_bash_where_they_are_run_or_say_why_not(page: Path) -> None:
    assert unfenced_commands(page) == []
    known = {"bash", "python", "yaml", ""}
    assert {block.language for block in blocks(page)} <= known, "say ```bash for what is to be typed"
    empty = [
        str(block) for block in blocks(page) if block.reason is not None and block.language not in ("bash", "python")
    ]
    assert empty == [], "only blocks of bash and python are run, so others need no reason"


@pytest.mark.slow
@by_page
def test_every_command_of_a_page_that_is_not_run_is_accepted_with_its_options_and_keys(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compose_only(monkeypatch)
    for variable in ("DTRAIN_CIFAR10", "DTRAIN_MNIST1D", "DTRAIN_TEXT", "STORAGE_TOKEN"):
        monkeypatch.setenv(variable, "somewhere")
    for name in ("mine", "old"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        content = b"{overrides: [experiment=digits], config_dirs: []}"
        (tmp_path / "runs" / name / "overrides.yaml").write_bytes(content)
        mark_as_own(content, "started")
    user_presets(tmp_path)
    for words in commands(page):
        if tuple(words) not in SEEN:
            SEEN.add(tuple(words))
            assert accepted(words, monkeypatch), f"{page.name}: {shlex.join(words)}"


def test_a_command_that_nobody_would_accept_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose_only(monkeypatch)
    train = "torchrun --standalone -m dtrain.train experiment=digits"
    for wrong in (
        f"{train} train.max_stepz=5",
        f"{train} train.max_steps=many",
        "python -m dtrain.launch launch=slurm experiment=digits launch.noodles=2",
        "python -m dtrain.doctor --secondz 3",
        "python -m dtrain.pack imagefolder photos shards --vale 0.1",
        "python -m dtrain.predict artefact photo.jpg --tops 3",
        "python -m dtrain.nothing",
        "dtrain train --nproc 2 experiment=digits train.max_stepz=5",
        "dtrain pack imagefolder photos shards --vale 0.1",
        "python -m benchmarks.order --no-such-option",
        "python -m benchmarks.nothing",
        "bash scripts/no_such_script.sh",
    ):
        assert not accepted(wrong.split(), monkeypatch), wrong
    for right in (train, "dtrain train --nproc 2 experiment=digits", "dtrain completion zsh"):
        assert accepted(right.split(), monkeypatch), right


def test_a_block_that_fails_or_that_nobody_marked_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\ntrue\nfalse | cat\ntouch after\n```\n"
        "<!-- not run: needs SLURM -->\n```bash\nfalse\n```\n"
        "<!-- not run (sbatch, srun): need SLURM -->\n```bash\nsbatch job\nsrun x && touch here\n```\n"
        "```\npython -m dtrain.train\n```\n\n    torchrun -m dtrain.train\n"
    )
    fails, left_out, partly = blocks(page, "bash")
    assert (fails.runs, left_out.runs, partly.runs) == (True, False, True)
    with pytest.raises(AssertionError, match="exit code 1"):
        execute(fails.text, tmp_path, fails.programs)
    execute(partly.text, tmp_path, partly.programs)
    assert ((tmp_path / "after").exists(), (tmp_path / "here").exists()) == (False, True)
    assert len(unfenced_commands(page)) == 2


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_every_entry_point_says_how_it_is_used(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = entry_point(name)
    assert call(module, ["--help"], monkeypatch) == 0
    message = capsys.readouterr().out
    assert re.search(rf"dtrain[. ]{name}\b", message)
    wanted = {
        "train": [f"{group}:" for group in GROUPS],
        "evaluate": ["checkpoint=", "weights=", "out=", "precision="],
        "export": [f"{option}=" for option in export.OPTIONS],
        "launch": [*COMMANDS, "--multirun", "launch.dry_run"],
    }
    for option in wanted.get(name, []):
        assert option in message, option
    for key in re.findall(r"(?:launch|export|run)\.\w+(?==)", message):
        assert is_key(key), key


def test_numerics_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        doctor.main(["numerics", "--help"])
    assert "steps=N" in capsys.readouterr().out


def test_a_documented_command_is_only_made_longer_where_it_would_take_long() -> None:
    assert "train.max_steps=8" in shortened(["-m", "dtrain.train", "experiment=digits"])
    assert "train.max_steps=10" in shortened(["-m", "dtrain.train", "experiment=digits", "train.max_epochs=6"])
    assert shortened(["-m", "dtrain.predict", "artefact", "photo.jpg"])[4:] == []


# -- code between words: keys and values


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "config.md"], ids=lambda page: page.name
)  # that one is made of the schema
def test_every_key_that_a_page_names_exists_and_takes_the_value_that_it_gives(page: Path) -> None:
    wrong = []
    for code in dict.fromkeys(inline_code(page)):
        try:
            check_code(code)
        except Exception as error:  # noqa: BLE001 - whatever refuses it, the page is to be told
            wrong.append(f"`{code}`: {error}")
    assert wrong == []


@pytest.mark.parametrize("wrong", ["trian.max_steps=5", "train.max_steps=x", "data.num_wrokers", "precision=fp17"])
def test_a_key_or_value_that_does_not_exist_is_noticed(wrong: str) -> None:
    with pytest.raises(Exception, match=r".+"):
        check_code(wrong)


# -- python and yaml


@by_page
def test_blocks_of_python_compile_and_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    names = reader_names(tmp_path) if any(block.reason is None for block in blocks(page, "python")) else {}
    for block in blocks(page, "python"):
        code = compile(block.text, str(block), "exec")
        if block.reason is None:
            exec(code, names)


@by_page
def test_blocks_of_yaml_are_configs(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "yaml")):
        content = yaml.safe_load(block.text)
        if "program" in content:  # a sweep of wandb: tests/tracking/test_wandb_sweep.py
            continue
        if "defaults" in content:
            folder = tmp_path / str(number)
            (folder / "experiment").mkdir(parents=True)
            (folder / "experiment" / "documented.yaml").write_text(block.text)
            command_line.run(lambda composed: None, ["--config-dir", str(folder), "experiment=documented"])
        else:
            OmegaConf.merge(OmegaConf.structured(Config), content)


# -- links


@by_page
def test_links_and_pictures_of_a_page_lead_somewhere(page: Path) -> None:
    dead = []
    for link in links(page):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@by_page
def test_paths_that_links_and_comments_show_are_what_they_mean(page: Path) -> None:
    wrong = []
    for text, link in re.findall(r"\[([^\]\n]+)\]\(([^)\s]+)\)", page.read_text()):
        shown = text.strip("`").replace("\\", "")
        target = (page.parent / link.partition("#")[0]).resolve()
        is_path = re.fullmatch(r"[\w./-]+(?:/[\w./-]*|\.(?:py|md))", shown) and "://" not in link
        if is_path and f"/{shown.rstrip('/')}/" not in f"{target}/":
            wrong.append(f"[{text}]({link})")
    for block in blocks(page):
        paths = re.findall(r"\b(?:tests|examples|benchmarks|scripts)/[\w./-]*", block.reason or "")
        wrong += [f"{block}: {path}" for path in paths if not (ROOT / path).exists()]
    assert wrong == []


def test_every_page_is_reached_from_the_readme_or_the_front_page_of_the_site() -> None:
    reached, new = set(), {ROOT / "README.md", ROOT / "docs" / "index.md"}
    while new:
        page = new.pop()
        reached.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page) if "://" not in link}
        new |= {target for target in targets if target.suffix == ".md" and target.exists()} - reached
    assert set(PAGES) <= reached


def test_the_readme_is_short_and_says_on_its_first_screen_what_was_not_measured() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130, "move examples of features to docs/tour.md"
    first_screen = "\n".join(lines[:30])
    for part in ("0.1.0, unreleased", "GPU yet", "| use dtrain if | use something else if |", "docs/replay.md"):
        assert part in first_screen


def test_one_spelling_of_commands() -> None:
    """torchrun and ``python -m`` are for several machines and for srun; docs/tour.md explains them."""
    spelled = re.compile(r"python3? -m dtrain\.\w+|torchrun[^|`\n]*-m dtrain")
    wrong = []
    presets = sorted(conf_dir().rglob("*.yaml"))
    for path in (*(page for page in PAGES if page.name != "tour.md"), *presets):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if spelled.search(line) and "srun " not in line:
                wrong.append(f"{path.name}:{number}: {line}")
    assert wrong == []


# -- docstrings of packages


@pytest.mark.parametrize("package", sorted((ROOT / "dtrain").glob("**/__init__.py")), ids=lambda init: init.parent.name)
def test_the_reading_list_of_a_package_has_its_files(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse(package.read_text())) or ""
    reading_list = re.split(r"[Ff]iles:|reading\s+order", docstring, maxsplit=1)[-1]
    files = [path for path in package.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    modules = {path.stem for path in files if not path.stem.startswith("__")}
    assert set(re.findall(r"``([a-z][a-z_0-9]*)``", reading_list)) == modules


# -- docs/config.md


def test_the_page_of_keys_is_what_its_script_writes(config_page: Any) -> None:
    written = (ROOT / "docs" / "config.md").read_text()
    assert written == config_page.page(), "docs/config.md is stale: run `python scripts/config_page.py`"


def test_the_page_of_keys_has_all_keys_of_a_config_and_all_presets() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    composed: list[Composed] = []
    command_line.run(composed.append, [])
    rows = re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(leaves(OmegaConf.to_container(composed[0].node, resolve=False)))
    for preset in conf_dir().glob("*/*.yaml"):
        assert f"(../conf/{preset.parent.name}/{preset.name})" in page


def test_a_key_without_a_word_about_it_is_refused_by_name(config_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    meanings = config_page.meanings
    monkeypatch.setattr(config_page, "meanings", lambda kind: {**meanings(kind), "lanes": ""})
    with pytest.raises(ValueError, match=r"data\.lanes: .*schema\.py"):
        config_page.page()


# -- the tables of docs/data.md


def test_the_tables_of_fields_are_what_their_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    data_page = importlib.import_module("data_page")
    written = data_page.PAGE.read_text()
    assert written == data_page.page(written), "docs/data.md is stale: run `python scripts/data_page.py`"
    for row in (*ROLES, *(field.name for field in dataclasses.fields(Field) if field.init and field.name != "ext")):
        assert f"\n| `{row}` |" in written


# -- what the tests above stand on


@pytest.fixture
def config_page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("config_page")


def leaves(node: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of a config's values; what a ``_target_`` takes, and an empty map, count as one."""
    if isinstance(node, dict) and node and "_target_" not in node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix


def reader_names(folder: Path) -> dict[str, Any]:
    """What blocks of python leave to the reader: shards, a loss, the rank."""
    from PIL import Image

    from tests.shards import write_tar

    (folder / "shards").mkdir()
    image = folder / "image.jpg"
    Image.new("RGB", (30, 20)).save(image)
    samples: list[tuple[str, dict[str, Any]]] = [
        (f"s{number}", {"jpg": image.read_bytes(), "cls": b"1"}) for number in range(4)
    ]
    write_tar(folder / "shards" / "train-000000.tar", samples)
    loss: Callable[..., torch.Tensor] = torch.nn.CrossEntropyLoss(reduction="none")
    return {
        "rank": 0,
        "world_size": 1,
        "device": torch.device("cpu"),
        "my_loss": loss,
        "torch": torch,
        "self": SimpleNamespace(),
        "dist": SimpleNamespace(all_reduce=lambda tensor: None),
        "model": (model := torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 224 * 224, 2))),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
    }
