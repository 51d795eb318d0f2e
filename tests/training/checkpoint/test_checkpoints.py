from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dtrain.errors import ConfigError
from dtrain.files import size_and_hash
from dtrain.training.checkpoint import checkpoints as module
from dtrain.training.checkpoint import manifest as manifest_module
from dtrain.training.checkpoint.checkpoints import (
    BadCheckpoint,
    Checkpoint,
    Checkpoints,
    _saved_metrics,
    _write_folder,
    read_folder,
    verify_folder,
)
from dtrain.training.checkpoint.tensors import Part
from tests.ranks import run_ranks
from tests.refusals import assert_refused, refused
from tests.toys import world
from tests.training.checkpoints_for_tests import content

# -- checkpoints


def loaded_value(checkpoints: Checkpoints, step: int) -> float:
    """The value of a checkpoint, which every tensor in it must have."""
    loaded = checkpoints.load(step)
    values = {float(n) for group in loaded.tensors.values() for tensor in group.values() for n in tensor[...].flatten()}
    assert values == {loaded.state["value"]}
    return values.pop()


def left_in(folder: Path) -> list[str]:
    """What is in a folder of checkpoints besides saved.json."""
    return sorted(path.name for path in folder.iterdir() if path.name != "saved.json")


def test_a_rank_has_synced_its_file_before_it_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, int]] = []
    monkeypatch.setattr(module, "fsync_path", lambda path: synced.append((path, path.stat().st_size)))
    checkpoints = Checkpoints(tmp_path)
    staged = checkpoints.stage(10)
    part = Part(torch.ones(2), (0,), (4,))
    entry = checkpoints.write_rank(staged, Checkpoint({"model": {"weight": part}}, {}), world(1, 2))
    assert synced == [(staged / "rank-00001-of-00002.safetensors", entry["size"])]


# -- broken ones

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def damages(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """Every way in which one file is spoilt: gone, cut at some places, one bit flipped at many."""
    whole = path.read_bytes()
    yield "gone", None
    for length in sorted({0, 1, len(whole) // 2, len(whole) - 1}):
        yield f"cut to {length} of {len(whole)} bytes", whole[:length]
    yield "longer", whole + b"\0"
    for position in range(0, len(whole), max(1, len(whole) // 200)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        yield f"bit {position % 8} of byte {position} flipped", bytes(flipped)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_never_loaded_always_reported_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (10, 20, 30):
        checkpoints.save(step, content(step))
    path = checkpoints.path(30) / name
    whole = path.read_bytes()
    for damage, spoilt in damages(path):
        path.unlink() if spoilt is None else path.write_bytes(spoilt)
        with pytest.raises(BadCheckpoint, match="step-000000030: "):
            checkpoints.verify(30)
        newest, problems = checkpoints.newest_good()
        assert newest == 20, damage
        assert len(problems) == 1
        assert "step-000000030" in problems[0]
        path.write_bytes(whole)
    checkpoints.verify(30)
    assert checkpoints.newest_good() == (30, [])


# -- which ones stay


def test_the_newest_stay_and_the_older_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, content(step))
    assert checkpoints.steps() == [3, 4]


@pytest.mark.parametrize(("mode", "best"), [("max", 30), ("min", 20)])
def test_the_best_stays_as_well_and_of_equals_the_later(tmp_path: Path, mode: str, best: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, best="eval/x", best_mode=mode)
    values = {5: 0.1, 10: 0.9, 20: 0.1, 30: 0.9, 40: 0.5, 50: None, 60: 0.2}
    for step, value in values.items():
        checkpoints.save(step, content(step, {} if value is None else {"eval/x": value}))
    assert checkpoints.best_step() == best
    assert checkpoints.steps() == [best, 60]


@pytest.mark.parametrize(("metric", "best"), [("eval/loss", 2), ("eval/accuracy", 1), ("eval/cats/perplexity", 2)])
def test_without_a_mode_the_name_of_the_metric_decides_which_is_the_best(
    tmp_path: Path, metric: str, best: int
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, best=metric)
    for step, value in enumerate([0.7, 0.2, 0.3], start=1):
        checkpoints.save(step, content(step, {metric: value}))
    assert checkpoints.best_step() == best


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_metric_that_is_not_a_number_is_never_the_best(tmp_path: Path, mode: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=9, best="eval/x", best_mode=mode)
    for step, value in enumerate([float("nan"), float("inf"), 0.5, float("-inf"), float("nan")]):
        assert checkpoints.improved_by({"eval/x": value}) == (value == 0.5)
        checkpoints.save(step, content(step, {"eval/x": value}))
    assert checkpoints.best_step() == 2


@pytest.mark.parametrize(("mode", "better", "worse"), [("max", [0.0, 0.1], [-0.1]), ("min", [0.0, -0.1], [0.1])])
def test_what_improves_on_the_best_is_told_from_what_does_not(
    tmp_path: Path, mode: str, better: list[float], worse: list[float]
) -> None:
    checkpoints = Checkpoints(tmp_path, best="eval/x", best_mode=mode)
    assert checkpoints.improved_by({"eval/x": -1e9})
    assert not checkpoints.improved_by({"eval/y": 1.0})
    checkpoints.save(1, content(1.0, {"eval/x": 0.0}))
    assert all(checkpoints.improved_by({"eval/x": value}) for value in better)
    assert not any(checkpoints.improved_by({"eval/x": value}) for value in worse)


def test_a_flipped_digit_does_not_make_a_best_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=9, best="eval/x", best_mode="max")
    checkpoints.save(1, content(1.0, {"eval/x": 0.5}))
    state = checkpoints.save(2, content(2.0, {"eval/x": 0.4})) / "state.json"
    state.write_text(state.read_text().replace("0.4", "9.4"))
    assert checkpoints.best_step() == 1


def test_each_nth_stays_for_good(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_every=4)
    for step in range(1, 11):
        checkpoints.save(step, content(step))
    assert checkpoints.steps() == [4, 8, 10]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_what_was_just_saved_stays_though_broken_ones_of_later_steps_are_there(tmp_path: Path, keep_last: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last)
    for step in (10, 20, 30):
        checkpoints.save(step, content(step))
        if step > 10:  # the run goes on from 10, as often as it is killed
            (checkpoints.path(step) / "model.safetensors").write_bytes(b"torn")
    checkpoints.save(13, content(13.0))
    assert checkpoints.newest_good() == (13, [])
    assert loaded_value(checkpoints, 13) == 13.0


def test_a_broken_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.save(10, content(1.0)) / "model.safetensors").write_bytes(b"torn")
    checkpoints.save(10, content(2.0))
    assert loaded_value(checkpoints, 10) == 2.0
    assert left_in(tmp_path) == ["step-000000010"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"keep_last": 0}, ["checkpoint.keep_last", "got 0"]),
        ({"keep_every": 0}, ["checkpoint.keep_every", "got 0"]),
        ({"best_mode": "most"}, ["got 'most'", "max or min"]),
        ({"best": "eval/quality"}, ["checkpoint.best_mode", "'eval/quality'", "checkpoint.best_mode=max"]),
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, options: dict[str, object], names: list[str]) -> None:
    with refused(ValueError, *names):
        Checkpoints(tmp_path, **options)  # type: ignore[arg-type]


# -- choosing one by name


@pytest.fixture
def chosen_from(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path, keep_last=9, best="eval/x", best_mode="max")
    for step, value in ((10, 0.1), (20, 0.9), (30, 0.5)):
        checkpoints.save(step, content(step, {"eval/x": value}))
    return checkpoints


@pytest.mark.parametrize(("which", "step"), [("", 20), ("best", 20), ("latest", 30), ("10", 10), ("0030", 30)])
def test_a_checkpoint_is_chosen_by_name(chosen_from: Checkpoints, which: str, step: int) -> None:
    assert chosen_from.choose(which) == step


@pytest.mark.parametrize("which", ["40", "newest", "-10", "²"])
def test_a_name_that_there_is_not_is_refused_with_those_there_are(chosen_from: Checkpoints, which: str) -> None:
    with refused(ConfigError, "checkpoint=", which, "10, 20, 30"):
        chosen_from.choose(which)


def test_without_a_metric_for_it_there_is_no_best_and_the_latest_is_the_default(chosen_from: Checkpoints) -> None:
    plain = Checkpoints(chosen_from.directory)
    assert plain.choose("") == 30
    with refused(ConfigError, key="best", remedy="checkpoint.best=METRIC"):
        plain.choose("best")


def test_the_latest_is_the_newest_whole_one_and_a_broken_newer_one_is_reported(
    chosen_from: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    (chosen_from.path(30) / "model.safetensors").write_bytes(b"torn")
    with caplog.at_level(logging.WARNING):
        assert chosen_from.choose("latest") == 20
    assert "step-000000030: model.safetensors" in caplog.text


@pytest.mark.parametrize("which", ["20", "best", ""])
def test_a_broken_one_that_was_named_is_refused(chosen_from: Checkpoints, which: str) -> None:
    (chosen_from.path(20) / "model.safetensors").write_bytes(b"torn")
    with refused(BadCheckpoint, "step-000000020", "model.safetensors"):
        chosen_from.choose(which)


def test_a_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has none"):
        Checkpoints(tmp_path / "nowhere").choose("")


# -- saves that fail or are killed


def test_a_save_that_the_disk_refuses_leaves_the_others_and_nothing_of_itself(tmp_path: Path) -> None:
    """A real refusal: beyond a limit on the size of files the kernel says so, as it does when a disk is full."""

    def rank(number: int) -> tuple[str, list[str], float]:
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(10, content(10.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(OSError, match="safetensors") as raised:
            checkpoints.save(20, content(20.0, size=100_000))
        return str(raised.value), left_in(tmp_path), loaded_value(checkpoints, 10)

    ((message, left, value),) = run_ranks(1, rank)
    assert "File too large" in message
    assert left == ["step-000000010"]
    assert value == 10.0


@pytest.mark.parametrize("step", ["safetensors", "write_text", "fsync", "rename"])
def test_wherever_a_save_fails_the_one_before_stays(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(10, content(10.0))

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if step == "safetensors":
            patch.setattr(safetensors.torch, "save_file", refuse)
        elif step == "write_text":
            patch.setattr(Path, "write_text", refuse)
        else:
            patch.setattr(os, step, refuse)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(20, content(20.0))
    assert left_in(tmp_path) == ["step-000000010"]
    assert checkpoints.newest_good() == (10, [])
    checkpoints.save(20, content(20.0))
    assert checkpoints.steps() == [20]


def test_left_overs_of_a_killed_save_do_not_matter_and_go_at_the_next_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, content(10.0))
    for name in (".step-000000020.staged", ".step-000000005.replaced", ".step-000000020.4711"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    assert checkpoints.newest_good() == (10, [])
    checkpoints.save(20, content(20.0))
    assert left_in(tmp_path) == ["step-000000010", "step-000000020"]


@pytest.mark.parametrize("killed", [False, True], ids=["refused by the disk", "killed"])
def test_a_checkpoint_is_there_again_if_the_one_that_replaces_it_never_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    rename = os.rename

    def refusing_the_second(source: Path, target: Path) -> None:
        if str(source).endswith(".staged"):
            os._exit(9) if killed else None
            raise OSError(28, "No space left on device")
        rename(source, target)

    Checkpoints(tmp_path).save(10, content(1.0))
    monkeypatch.setattr(os, "rename", refusing_the_second)
    if not killed:
        with pytest.raises(OSError, match="No space left"):
            Checkpoints(tmp_path).save(10, content(2.0))
    elif (child := os.fork()) == 0:
        Checkpoints(tmp_path).save(10, content(2.0))
    else:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_good() == (10, [])
    assert loaded_value(checkpoints, 10) == 1.0
    checkpoints.save(20, content(3.0))
    assert checkpoints.steps() == [10, 20]
    assert loaded_value(checkpoints, 10) == 1.0


def save_until_killed(folder: Path, step: int, seconds: float) -> int:
    """CheckpointManager in a forked process, killed ``seconds`` after its first save; the last step that it said was saved."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        checkpoints = Checkpoints(folder, keep_last=1)
        while True:
            step += 1
            checkpoints.save(step, content(step, size=2000))
            os.write(writer, step.to_bytes(8, "big"))
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read(8)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        message += pipe.read()
    return int.from_bytes(message[-8:], "big")


@pytest.mark.parametrize("rounds", [15, pytest.param(80, marks=pytest.mark.slow)])
def test_a_killed_save_leaves_a_whole_checkpoint_no_older_than_the_last_that_was_done(
    tmp_path: Path, rounds: int
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, content(1.0))
    step = 1
    for number in range(rounds):
        # Anywhere in a save, which takes a few milliseconds.
        last = save_until_killed(tmp_path, step, seconds=0.0013 * (number % 40))
        newest, problems = checkpoints.newest_good()
        assert problems == []
        assert newest in (last, last + 1)
        assert loaded_value(checkpoints, newest) == newest
        step = newest
    assert step > rounds


# -- checkpoint


def written(folder: Path, value: float = 1.0) -> Path:
    _write_folder(folder, content(value, {"eval/loss": 0.5}))
    return folder


def test_what_was_saved_is_loaded_with_its_dtypes(tmp_path: Path) -> None:
    loaded = read_folder(written(tmp_path / "saved", 3.0))
    for group, tensors in content(3.0).tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(loaded.tensors[group][name][...], tensor)
            assert loaded.tensors[group][name][...].dtype == tensor.dtype
    assert loaded.state["metrics"] == _saved_metrics(tmp_path / "saved") == {"eval/loss": 0.5}


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    assert {path.suffix for path in written(tmp_path / "saved").iterdir()} == {".safetensors", ".json"}


def test_one_that_is_there_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder = written(tmp_path / "saved")
    (folder / "ema.safetensors").write_bytes(b"of another model")
    written(folder, 2.0)
    verify_folder(folder)
    assert read_folder(folder).state["value"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert not (folder / "ema.safetensors").exists()


def test_only_files_of_the_manifest_are_loaded(tmp_path: Path) -> None:
    folder = written(tmp_path / "saved")
    (folder / "ema.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert set(read_folder(folder).tensors) == {"model", "optimizer"}


@pytest.mark.parametrize("manifest", ["[]", "{}", "{", '{"model.safetensors": {}}'])
def test_a_manifest_that_does_not_list_the_state_is_refused(tmp_path: Path, manifest: str) -> None:
    folder = written(tmp_path / "saved")
    (folder / "manifest.json").write_text(manifest)
    for use in (verify_folder, read_folder):
        with refused(BadCheckpoint, "saved", "manifest.json"):
            use(folder)
    assert _saved_metrics(folder) == {}


def test_a_state_that_was_altered_has_no_metrics(tmp_path: Path) -> None:
    folder = written(tmp_path / "saved")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"metrics": {"eval/loss": 0.1}}))
    assert _saved_metrics(folder) == {}
    with refused(BadCheckpoint, "state.json", "manifest"):
        verify_folder(folder)


def test_a_checkpoint_of_another_format_is_refused_with_both(tmp_path: Path) -> None:
    _write_folder(tmp_path / "saved", Checkpoint({}, {"format": 99, "metrics": {}}))
    with refused(BadCheckpoint, "format", 99, 1):
        read_folder(tmp_path / "saved")


# -- of somebody else, or damaged so that reading it is dangerous


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "endless"])
def test_what_is_no_regular_file_is_a_broken_checkpoint_and_keeps_nobody_waiting(
    tmp_path: Path, name: str, kind: str
) -> None:
    checkpoints = Checkpoints(tmp_path, best="eval/x", best_mode="max")
    for step in (10, 20):
        checkpoints.save(step, content(step, {"eval/x": step}))
    path = checkpoints.path(20) / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    newest, problems = checkpoints.newest_good()
    assert newest == 10
    assert_refused(problems[0], "step-000000020", name)
    assert checkpoints.best_step() == (10 if name.endswith("json") else 20)


def test_a_file_of_another_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "saved")
    os.truncate(folder / "model.safetensors", 2**40)  # a terabyte of holes
    read: list[str] = []
    monkeypatch.setattr(manifest_module, "size_and_hash", lambda path: read.append(path.name) or size_and_hash(path))
    with refused(BadCheckpoint, "model.safetensors", f"{2**40} bytes"):
        verify_folder(folder)
    assert "model.safetensors" not in read


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_manifest_that_lacks_saved_tensors_is_a_broken_checkpoint(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "saved")
    manifest = json.loads((folder / "manifest.json").read_text())
    verify_folder(folder)
    del manifest[f"{name}.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with refused(BadCheckpoint, "manifest.json", f"{name}.safetensors"):
        verify_folder(folder)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_json_that_is_nested_too_deeply_is_a_broken_checkpoint(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "saved")
    text = b"[" * 200_000
    (folder / name).write_bytes(text)
    if name == "state.json":
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest[name] = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with refused(BadCheckpoint, name, "nested too deeply"):
        verify_folder(folder)
    assert _saved_metrics(folder) == {}


@pytest.mark.parametrize("entry", [{"../x": {"size": 1, "sha256": ""}}, {"x": 5}, {"x": {"size": 1}}])
def test_a_manifest_that_dtrain_did_not_write_is_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    folder = written(tmp_path / "saved")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | entry))
    with refused(BadCheckpoint, "manifest.json", next(iter(entry))):
        verify_folder(folder)


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, content(10.0))
    shutil.copytree(checkpoints.path(10), checkpoints.path(500))
    newest, problems = checkpoints.newest_good()
    assert newest == 10
    assert_refused(problems[0], "step-000000500", "of step 10", "step-000000010")


def test_the_last_save_is_recorded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.recorded() is None
    checkpoints.record(0)
    assert checkpoints.recorded() == 0
    checkpoints.save(10, content(10.0))
    assert checkpoints.recorded() == 10
    for damage in (b"", b"[]", b'{"step": "10"}', b"[" * 200_000):
        (tmp_path / "checkpoints" / "saved.json").write_bytes(damage)
        assert checkpoints.recorded() is None


@pytest.mark.parametrize("options", [{"best": "eval/x", "best_mode": "max"}, {"keep_every": 10}])
def test_a_broken_checkpoint_of_a_later_step_goes_at_the_next_save_also_if_it_would_be_kept(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, **options)
    checkpoints.save(10, content(10.0, {"eval/x": 0.1}))
    checkpoints.save(20, content(20.0, {"eval/x": 0.9}))
    (checkpoints.path(20) / "model.safetensors").write_bytes(b"torn")  # its metrics are whole
    checkpoints.save(13, content(13.0, {"eval/x": 0.2}))
    assert 20 not in checkpoints.steps()
    assert checkpoints.newest_good() == (13, [])
