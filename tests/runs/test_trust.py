"""Nothing of a run directory is composed that this user did not write, unless ``--trust`` is typed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.__main__ import UsageError, _as_typed
from dtrain.errors import ConfigError
from dtrain.files import read_json
from dtrain.runs.recompose import recompose, recompose_if_run, refuse_foreign_links
from dtrain.runs.run_dir import save_run
from dtrain.runs.run_spec import RunSpec
from dtrain.runs.trust import AS_TYPED, content_with_folders, is_own, mark_as_own, require_harmless
from tests.config.command_lines import compose
from tests.refusals import refused


def downloaded(folder: Path, *overrides: str, config_dirs: Sequence[str] = ()) -> str:
    """Writes the saved command line of a run that this user did not start; returns the argument that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"overrides": ["experiment=digits", *overrides], "config_dirs": list(config_dirs)}
    (folder / "overrides.yaml").write_text(yaml.safe_dump(content))
    return f"run.dir={folder}"


@pytest.mark.parametrize("override", ["optimizer.lr=0.5", "task._target_=os.system", "vars.a='$'"])
def test_a_run_of_somebody_else_needs_trust_whatever_it_says(tmp_path: Path, override: str) -> None:
    argument = downloaded(tmp_path, override)
    for typed in ([argument], [argument, "task._target_=my.Task"]):
        with refused(ConfigError, "run.dir", tmp_path, "--trust", "DTRAIN_CACHE"):
            recompose(typed)
        with refused(ConfigError, "run.dir", tmp_path, "--trust"):
            recompose_if_run(typed)
    assert override in recompose([argument, "--trust"])


@pytest.mark.slow
def test_ranks_compose_what_the_process_that_started_them_has_read(tmp_path: Path) -> None:
    save_run(RunSpec.from_composed(compose("experiment=digits", f"run.dir={tmp_path / 'mine'}", "optimizer.lr=0.5")))
    argument = f"run.dir={tmp_path / 'mine'}"
    handed = _as_typed("train", [argument, "train.max_steps=3"])
    assert handed[-1] == AS_TYPED
    downloaded(tmp_path / "mine", "task._target_=os.system")  # meanwhile
    for rewrite in (recompose, recompose_if_run):
        assert rewrite(handed) == handed[:-1]
    assert {"experiment=digits", "optimizer.lr=0.5", "train.max_steps=3"} <= {*handed}
    with pytest.raises(UsageError, match="--trust"):
        _as_typed("train", [argument])
    assert "task._target_=os.system" in _as_typed("train", [argument, "--trust"])


def test_options_of_evaluate_are_no_keys_of_the_saved_command_line(tmp_path: Path) -> None:
    save_run(RunSpec.from_composed(compose("experiment=digits", f"run.dir={tmp_path / 'mine'}", "checkpoint=default")))
    handed = _as_typed("evaluate", [f"run.dir={tmp_path / 'mine'}", "checkpoint=best", "precision=fp32,bf16"])
    assert handed[0] == "checkpoint=best"
    assert {"checkpoint=default", "precision=fp32,bf16"} <= {*handed}


@pytest.mark.parametrize("is_run", [True, False])
def test_a_directory_of_somebody_else_cannot_lead_writes_to_files_of_this_user(tmp_path: Path, is_run: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if is_run:
        downloaded(folder)
    (folder / "journal.log.lock").symlink_to("journal.log")
    refuse_foreign_links(folder)  # it leads to no other place
    (folder / "checkpoints").symlink_to(tmp_path / "mine")
    with refused(ConfigError, folder / "checkpoints", tmp_path / "mine", "--trust"):
        refuse_foreign_links(folder)
    with pytest.raises(UsageError, match="--trust"):
        _as_typed("train", ["experiment=digits", f"run.dir={folder}"])
    assert _as_typed("train", ["experiment=digits", f"run.dir={folder}", "--trust"])[-1] == AS_TYPED
    save_run(RunSpec.from_composed(compose("experiment=digits", f"run.dir={folder}")))
    refuse_foreign_links(folder)  # a run of this user may have them


def test_a_run_that_this_user_started_is_trusted_until_its_command_line_changes(tmp_path: Path) -> None:
    run = RunSpec.from_composed(
        compose("experiment=digits", f"run.dir={tmp_path / 'mine'}", "+train.hooks=[{_target_:my.Hook}]")
    )
    save_run(run)
    argument = f"run.dir={tmp_path / 'mine'}"
    assert "+train.hooks=[{_target_:my.Hook}]" in recompose([argument])
    shutil.move(tmp_path / "mine", tmp_path / "moved")
    assert recompose([f"run.dir={tmp_path / 'moved'}"])
    path = tmp_path / "moved" / "overrides.yaml"
    path.write_text(path.read_text().replace("my.Hook", "os.system"))
    with refused(ConfigError, "run.dir", path.parent, "--trust"):
        recompose([f"run.dir={tmp_path / 'moved'}"])


def test_a_mark_covers_the_presets_in_the_run_directory(tmp_path: Path) -> None:
    preset = tmp_path / "run" / "presets" / "0" / "model" / "mine.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("_target_: dtrain.models.MLP\n")
    folder = str(preset.parents[1])
    save_run(RunSpec.from_composed(compose("--config-dir", folder, "experiment=digits", f"run.dir={tmp_path / 'run'}")))
    argument = f"run.dir={tmp_path / 'run'}"
    assert folder in recompose([argument])
    preset.write_text("_target_: os.system\n")
    with refused(ConfigError, "run.dir", tmp_path / "run", "--trust"):
        recompose([argument])


def test_contents_of_several_files_cannot_be_divided_in_another_way(tmp_path: Path) -> None:
    for name, text in {"1/a.yaml": "xy", "1/b.yaml": "z", "2/a.yaml": "x", "2/b.yaml": "yz", "2/c": "data"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert content_with_folders(b"c", []) == b"c"
    assert content_with_folders(b"c", [tmp_path / "1"]) != content_with_folders(b"c", [tmp_path / "2"])
    os.truncate(tmp_path / "2" / "a.yaml", 1 << 40)
    with pytest.raises(OSError, match="bytes"):  # not read as a whole
        content_with_folders(b"c", [tmp_path / "2"])


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"overrides: [" + b"[" * 50_000, ["nested"]),
        (b"a: &i [1]\noverrides: *i\nconfig_dirs: []", ["aliases"]),
        (b"overrides: [{a: b}]\nconfig_dirs: []", ["overrides", "texts"]),
        (b"overrides: []\nconfig_dirs: [1]", ["config_dirs", "texts"]),
        (b"overrides: ['" + b"a" * (5 << 20) + b"']\nconfig_dirs: []", ["bytes"]),
        (b"overrides: !!python/name:os.system\nconfig_dirs: []", ["tags"]),
        (b"overrides: 2024-02-31", ["not valid YAML"]),
        (b"\xff", ["not valid YAML"]),
    ],
    ids=["brackets", "aliases", "mapping", "number", "large", "tag", "date", "bytes"],
)
def test_a_saved_command_line_that_dtrain_did_not_write_is_one_message(
    tmp_path: Path, content: bytes, names: list[str]
) -> None:
    (tmp_path / "overrides.yaml").write_bytes(content)
    with refused(ConfigError, tmp_path / "overrides.yaml", *names, "run.dir"):
        recompose([f"run.dir={tmp_path}", "--trust"])


@pytest.mark.parametrize(
    ("node", "names"),
    [
        ({"_target_": "torch.load"}, ["model._target_", "torch.load"]),
        ({"_target_": "torch.nn.Linear", "a": [{"_target_": "os.system"}]}, ["model.a[0]._target_", "os.system"]),
        ({"_target_": "torch.nn.modules.torch.load"}, ["torch.nn.modules.torch.load"]),
        ({"_target_": "torch.nn.modules.module.OrderedDict"}, ["OrderedDict"]),
        ({"_target_": "torch.nn.Module.load_state_dict"}, ["load_state_dict"]),
        ({"_target_": "dtrain.data.writer.ShardWriter", "pattern": "/home/me"}, ["ShardWriter"]),
        ({"_target_": "dtrain.export.main"}, ["dtrain.export.main"]),
        ({"_target_": "sentence_transformers.SentenceTransformer"}, ["sentence_transformers"]),
        ({"fields": {"png": {"decoder": "os.system"}}}, ["model.fields.png.decoder", "os.system"]),
        ({"a": "${oc.env:HOME}"}, ["model.a", "${oc.env:HOME}"]),
        ({"${oc.env:HOME}": 1}, ["${oc.env:HOME}"]),
    ],
    ids=str,
)
def test_of_an_artefact_of_somebody_else_only_known_classes_are_built(
    tmp_path: Path, node: dict[str, Any], names: list[str]
) -> None:
    with refused(ConfigError, tmp_path, *names, "--trust"):
        require_harmless(node, tmp_path, "model")


def test_classes_of_torch_and_dtrain_need_no_trust(tmp_path: Path) -> None:
    for target in ("torch.nn.Linear", "torch.optim.SGD", "dtrain.models.ResNet9", "dtrain.tasks.Classification"):
        require_harmless({"_target_": target, "width": 3, "decoder": None, "names": ["a", 1.5]}, tmp_path, "model")


def test_marks_need_a_cache_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"overrides: []"
    assert not is_own(content, "started")
    mark_as_own(content, "started")
    assert is_own(content, "started")
    assert not is_own(content, "exported")
    (tmp_path / "file").touch()
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    mark_as_own(content, "started")
    assert not is_own(content, "started")


def test_json_of_somebody_else_is_bounded(tmp_path: Path) -> None:
    deep, pipe = tmp_path / "deep.json", tmp_path / "pipe.json"
    deep.write_text("[" * 100_000)
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="too deeply"):
        read_json(deep)
    with pytest.raises(OSError, match="not a regular file"):  # it would be waited for
        read_json(pipe)
    # Names of classes beside the shards, which ${dtrain.classes:N} counts
    (tmp_path / "classes.json").symlink_to(deep)
    assert (
        compose("experiment=digits", f"data.train={tmp_path}/*.tar", "model.classes=${dtrain.classes:7}").cfg.model[
            "classes"
        ]
        == 7
    )


def test_marks_of_a_cache_that_several_people_use_are_of_this_user_alone(tmp_path: Path, monkeypatch: Any) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o777)
    monkeypatch.setenv("DTRAIN_CACHE", str(cache))
    mark_as_own(b"mine", "started")
    (folder,) = cache.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert is_own(b"mine", "started")
    folder.chmod(0o770)  # somebody else may have put the mark there
    assert not is_own(b"mine", "started")
    folder.chmod(0o700)
    folder.rename(tmp_path / "theirs")
    folder.symlink_to(tmp_path / "theirs")
    assert not is_own(b"mine", "started")
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    folder.unlink()
    (tmp_path / "theirs").rename(cache / f"started-{another}")
    assert not is_own(b"mine", "started")  # another user's folder in the place of this user's
