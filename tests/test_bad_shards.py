"""``data.bad_shards=skip``: a run without a damaged shard is one run, whatever becomes of the shard later."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from benchmarks.fault_hook import faulty
from tests.ranks import RanksFailed
from tests.refusals import assert_refused
from tests.replay.replays import assert_trace_is_the_log, replay_on
from tests.shards import stored_keys
from tests.test_evaluate import evaluated, numbers
from tests.whole_runs import train_on, weights

USUAL = (
    *("train.max_steps=12", "checkpoint.every_steps=6", "checkpoint.keep_last=9", "checkpoint.best=null"),
    *("train.eval_every=0", "data.record_keys=true", "data.prepare=null"),
    "data.bad_shards=skip",
)


@pytest.fixture
def folder(digits: Path, tmp_path: Path) -> Path:
    """The digits, with a training shard and an evaluation shard that are cut."""
    shutil.copytree(digits, tmp_path / "data", ignore=shutil.ignore_patterns("*.idx"))
    for name in (sorted(digits.glob("train-*.tar"))[1].name, sorted(digits.glob("test-*.tar"))[0].name):
        shutil.copy(tmp_path / "data" / name, tmp_path / f"whole-{name}")
        os.truncate(tmp_path / "data" / name, 20_000)
    return tmp_path / "data"


def repair(folder: Path) -> None:
    for whole in folder.parent.glob("whole-*"):
        shutil.copy(whole, folder / whole.name.removeprefix("whole-"))


def train(folder: Path, run_dir: Path, *overrides: str, ranks: int = 1) -> None:
    chosen = {override.partition("=")[0] for override in overrides}
    usual = [it for it in USUAL if it.partition("=")[0] not in chosen]
    data = [f"data.train={folder}/train-*.tar", f"data.eval={folder}/test-*.tar"]
    train_on(ranks, run_dir, *data, *usual, *overrides)


def left_out(run_dir: Path) -> dict[str, dict[str, list[str]]]:
    record = json.loads((run_dir / "bad-shards.json").read_text())
    return {split: {source: list(names) for source, names in of.items()} for split, of in record.items()}


@pytest.mark.slow
def test_resumed_run_leaves_out_the_same_shards(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    cut = [path.name.removeprefix("whole-") for path in sorted(tmp_path.glob("whole-*.tar"))]
    train(folder, whole, "data.max_bad_shards=2")
    assert left_out(whole) == {"train": {"": [cut[1]]}, "eval": {"": [cut[0]]}}
    assert f"without 1 damaged: {cut[1]}" in capfd.readouterr().out
    with pytest.raises(RanksFailed):
        train(folder, run_dir, "data.max_bad_shards=2", faulty("kill@rank=0,step=9"))
    repair(folder)
    train(folder, run_dir, "data.max_bad_shards=2")
    assert left_out(run_dir) == left_out(whole)
    for name in ("model", "optimizer"):
        ours, theirs = weights(run_dir, 12, name), weights(whole, 12, name)
        assert all(ours[key].equal(theirs[key]) for key in theirs)


@pytest.mark.slow
def test_replay_trace_and_fork_leave_out_the_same_shards(folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    train(folder, whole, "data.max_bad_shards=2")
    repair(folder)
    assert replay_on(1, whole, "replay.steps=[4,11]")["equal"]
    assert_trace_is_the_log(whole)
    train(folder, tmp_path / "fork", f"run.fork={whole}@6")
    ours, theirs = weights(tmp_path / "fork", 12), weights(whole, 12)
    assert all(ours[key].equal(theirs[key]) for key in theirs)
    for number, fresh in enumerate((["run.fork_data=restart", f"run.fork={whole}@6"], [])):
        train(folder, tmp_path / str(number), *fresh, "train.max_steps=8")
        assert left_out(tmp_path / str(number)) == {"train": {}, "eval": {}}


@pytest.mark.slow
def test_an_evaluation_leaves_out_the_same_shards_unless_it_is_on_other_data(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "run", "data.max_bad_shards=2", "train.max_steps=6")
    names = [path.name for path in sorted(folder.glob("test-*.tar"))]
    repair(folder)
    sizes = [len(stored_keys([str(folder / name)])) for name in names]
    code, shown = evaluated(2, f"run.dir={tmp_path / 'run'}")
    assert (code, numbers(shown)["samples"]) == (0, sum(sizes[1:])), shown
    code, shown = evaluated(1, f"run.dir={tmp_path / 'run'}", f"data.eval={folder}/{names[0]}")
    assert (code, numbers(shown)["samples"]) == (0, sizes[0]), shown


@pytest.mark.slow
def test_a_shard_that_breaks_later_is_refused_on_resume(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(folder, tmp_path / "run", "train.max_steps=6")
    last = sorted(folder.glob("train-*.tar"))[-1]
    os.truncate(last, 9_000)
    capfd.readouterr()
    with pytest.raises(RanksFailed):
        train(folder, tmp_path / "run", "data.max_bad_shards=90%")
    assert_refused(capfd.readouterr().err, "data.train", last.name, "Earlier starts of the run used it", "Restore it")


def test_a_damaged_shard_is_refused_by_default_and_nothing_is_written(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RanksFailed):
        train(folder, tmp_path / "run", "data.bad_shards=refuse")
    assert_refused(capfd.readouterr().err, "data.train", "train-", "data.bad_shards=skip", "dtrain pack repair")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_was_not_asked_to_leave_out_shards_does_not_begin_to(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cut = next(path.name for path in tmp_path.glob("whole-train*")).removeprefix("whole-")
    repair(folder)
    train(folder, tmp_path / "run", "train.max_steps=6", "data.bad_shards=refuse")
    assert not (tmp_path / "run" / "bad-shards.json").exists()
    os.truncate(folder / cut, 20_000)
    capfd.readouterr()
    with pytest.raises(RanksFailed):
        train(folder, tmp_path / "run")
    assert_refused(capfd.readouterr().err, cut, "Earlier starts of the run used it")
