"""examples/hooks.py in real runs: a hook whose state changes the training is resumed, replayed and forked exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.fault_hook import faulty
from tests.ranks import RanksFailed
from tests.replay.replays import replay_on
from tests.whole_runs import ROOT, metrics, train_on, weights

# eval/samples is always 360, so the rate halves after each evaluation but the first.
HOOK = "{_target_: hooks.ReduceOnPlateau, metric: eval/samples, patience: 1}"
OPTIONS = ("schedule=constant", "model.width=4", "train.eval_every=2", "checkpoint.best=null", "checkpoint.keep_last=9")
pytestmark = pytest.mark.usefixtures("digits")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.slow
def test_a_killed_a_replayed_and_a_forked_run_have_the_rates_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole, killed, fork = (tmp_path / name for name in ("whole", "killed", "fork"))
    options = (*OPTIONS, "checkpoint.every_steps=3", "train.max_steps=9")
    train_on(2, whole, *options, f"train.hooks=[{HOOK}]")
    rates = metrics(whole, "train/lr")
    assert [rate / rates[0] for rate in rates] == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]

    samples = "{_target_: dtrain.hooks.Samples}"  # must leave no trace in the training
    kill = faulty("kill@rank=1,step=8").removeprefix("train.hooks=[").removesuffix("]")
    with pytest.raises(RanksFailed):
        train_on(2, killed, *options, "tracker.media=true", f"train.hooks=[{HOOK},{kill},{samples}]")
    train_on(2, killed, *options, "tracker.media=true", f"train.hooks=[{HOOK},{kill},{samples}]")
    assert len(list((killed / "media" / "samples").iterdir())) == 5
    train_on(2, fork, *options, f"run.fork={whole}@6", f"train.hooks=[{HOOK}]")
    for run_dir, first in ((killed, 0), (fork, 6)):
        assert metrics(run_dir, "train/lr") == rates[first:]
        ours, theirs = weights(run_dir, 9), weights(whole, 9)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert replay_on(2, whole, "replay.steps=[7,9]")["largest_difference"] == 0
