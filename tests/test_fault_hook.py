from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.fault_hook import Fault, Faults, faulty
from dtrain.training.checkpoint.checkpoints import Checkpoints
from tests.ranks import RanksFailed
from tests.refusals import refused
from tests.whole_runs import metrics, records, status, train_on, weights

pytestmark = pytest.mark.usefixtures("digits")
SMALL = ("model.width=4", "data.num_workers=0", "checkpoint.best=null", "checkpoint.keep_last=9")


@pytest.mark.parametrize(
    "text", ["crash", "crash@rank=1", "melt@step=1", "crash@step=x", "crash@step=1,when=now", "nan@step=1,once=maybe"]
)
def test_a_fault_that_cannot_be_read_is_refused(text: str) -> None:
    with refused(ValueError, key="", remedy="crash@rank=1,step=5"):
        Fault.parse(text)


def started(run_dir: Path, *faults: str, rank: int = 0) -> Faults:
    """The hook of one rank, after its ``on_start``."""
    hook = Faults(faults)
    hook.on_start(mock.MagicMock(run_dir=run_dir, world=mock.Mock(rank=rank)))
    return hook


def test_a_fault_strikes_its_rank_in_its_step(tmp_path: Path) -> None:
    given = started(tmp_path, "crash@rank=1,step=5", "slow@step=3", "kill@step=2,rank=1,once=false", rank=1)
    assert [list(given.due(step, "crash", "kill", "slow")) for step in (2, 3, 5)] == [
        [Fault("kill", 2, 1, once=False)],
        [],
        [Fault("crash", 5, 1)],
    ]


def test_a_fault_strikes_once_unless_it_is_told_to_come_again(tmp_path: Path) -> None:
    for struck in (["crash", "slow"], ["slow"], ["slow"]):  # three starts
        given = started(tmp_path, "crash@step=5", "slow@step=5,once=false")
        assert [fault.kind for fault in given.due(5, "crash", "slow")] == struck


def test_a_slow_rank_is_slow_for_as_many_steps_as_it_is_told(tmp_path: Path) -> None:
    for found in ([4, 5, 6], []):  # two starts
        given = started(tmp_path, "slow@step=4,steps=3")
        assert [step for step in range(1, 10) for _ in given.due(step, "slow")] == found


@pytest.mark.slow
def test_a_crashed_run_that_is_started_again_ends_as_if_it_had_not_happened(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = (*SMALL, "train.max_steps=6", "checkpoint.every_steps=2")
    train_on(2, whole, *common)
    with pytest.raises(RanksFailed):
        train_on(2, parts, *common, faulty("crash@rank=1,step=4"))
    assert status(parts)["reason"] == "rank 1 failed: InjectedFault: injected fault: crash@step=4,rank=1"
    train_on(2, parts, *common, faulty("crash@rank=1,step=4"))
    assert re.search(r"hooks +Faults\n", capfd.readouterr().out)
    expected, got = weights(whole, 6), weights(parts, 6)
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    assert metrics(parts) == metrics(whole)
    end = status(parts)
    assert (end["state"], end["restarts"]) == ("finished", 1)
    assert end["down_seconds"] > 0
    assert {r["time/restarts"] for r in records(parts)[-4:] if "train/loss" in r} == {1}
    assert not [r for r in records(whole) if "time/restarts" in r]
    # What a start says of itself is said with its steps; an evaluation has figures of its own.
    assert not [r for r in records(parts) if "time/restarts" in r and "train/loss" not in r]


@pytest.mark.slow
def test_faults_of_numbers_samples_and_disks_are_survived_and_show_in_the_records(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = (
        "nan@rank=1,step=2",
        "corrupt_sample@rank=1,step=3",
        "slow@rank=1,step=3,seconds=0.01",
        "disk_full@step=4",
        "torn_checkpoint@step=6",
    )
    train_on(2, tmp_path, *SMALL, "train.max_steps=6", "checkpoint.every_steps=2", faulty(*given))
    by_step = {record["step"]: record for record in records(tmp_path) if "data/bad_samples" in record}
    assert [by_step[step]["precision/skipped_steps"] for step in range(1, 7)] == [0, 1, 1, 1, 1, 1]
    assert [by_step[step]["data/bad_samples"] for step in range(1, 7)] == [0, 0, 1, 1, 1, 1]
    assert "the checkpoint of step 4 could not be written" in capfd.readouterr().out
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps() == [2, 6]
    step, problems = checkpoints.newest_good()
    assert step == 2
    assert "model.safetensors" in problems[0]


@pytest.mark.slow
def test_a_hang_ends_with_a_line_for_each_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RanksFailed):
        train_on(2, tmp_path, *SMALL, "train.max_steps=6", "parallel.timeout_step=1", faulty("hang@rank=1,step=3"))
    message = capfd.readouterr().err
    assert message.count("dtrain: the run hangs (rank ") == 1
    assert "  rank 1, step 3: in _inject (fault_hook.py:" in message
    assert "  rank 0, step 3: in " in message
    assert status(tmp_path)["state"] == "failed"
    assert "rank 1, step 3: in _inject" in status(tmp_path)["reason"]
    assert "train-00" in (tmp_path / "logs" / "hang-rank-00000.txt").read_text()


@pytest.mark.slow
def test_a_killed_rank_0_leaves_no_run_that_seems_to_train(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        train_on(2, tmp_path, *SMALL, faulty("kill@step=3,rank=0"), "train.max_steps=9")
    recorded = status(tmp_path)
    assert (recorded["state"], recorded["step"]) == ("failed", 2)
    assert "another rank is gone" in recorded["reason"]
