"""examples/hooks.py in real runs on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import RanksFailed
from tests.tracking.wandb_records import rows
from tests.whole_runs import ROOT, metrics, records, status, train_on, weights

SMALL = ("model.width=4", "data.num_workers=0", "checkpoint.best=null", "checkpoint.keep_last=9")
pytestmark = pytest.mark.usefixtures("digits")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def hook(text: str) -> str:
    return f"train.hooks=[{{_target_: hooks.{text}}}]"


@pytest.mark.slow
def test_the_backbone_is_frozen_for_an_epoch_also_after_a_resume(tmp_path: Path) -> None:
    epoch = 23
    for steps in (5, epoch, epoch + 3):  # three starts of one run
        train_on(
            2, tmp_path, *SMALL, hook("FreezeBackbone, head: '8.'"), "train.eval_every=0", f"train.max_steps={steps}"
        )
    first, frozen, end = (weights(tmp_path, step) for step in (5, epoch, epoch + 3))
    for name, weight in first.items():
        assert torch.equal(weight, frozen[name]) == (not name.startswith("8.")), name
        assert not torch.equal(frozen[name], end[name]), name


@pytest.mark.slow
def test_a_head_that_no_parameter_has_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        train_on(2, tmp_path, *SMALL, hook("FreezeBackbone, head: fc."), "train.max_steps=2")
    reason = status(tmp_path)["reason"]
    assert all(part in reason for part in ("FreezeBackbone.head", "'fc.'", "0.weight"))


@pytest.mark.slow
def test_gradient_histograms_are_in_wandb_and_no_record_of_the_run_is_lost(tmp_path: Path) -> None:
    every = hook("GradientHistograms, every: 2")
    train_on(2, tmp_path, *SMALL, every, "tracker=wandb", "tracker.mode=offline", "train.max_steps=6")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged = rows(file)
    histograms = [row for row in logged if any(name.startswith("gradients/") for name in row)]
    assert 1 <= len(histograms) <= 3  # the tracker's thread may put two into one row of so short a run
    assert sum("train/loss" in row for row in logged) == len(metrics(tmp_path)) == 6
    names = {name.split("/")[1] for name in histograms[0] if name.startswith("gradients/")}
    assert names == set(weights(tmp_path, 6))


def test_a_run_stops_early_on_all_ranks_and_counts_evaluations_of_earlier_starts(tmp_path: Path) -> None:
    stop = hook("StopEarly, metric: eval/samples, mode: max, patience: 2")  # always 360, so it never improves
    options = (*SMALL, stop, "train.eval_every=2", "checkpoint.every_steps=1")
    train_on(2, tmp_path, *options, "train.max_steps=3")  # one evaluation of step 2, one at the end
    train_on(2, tmp_path, *options, "train.max_steps=20")
    assert status(tmp_path)["state"] == "finished"
    assert status(tmp_path)["step"] == 4
    assert len([record for record in records(tmp_path) if "eval/samples" in record]) == 3


@pytest.mark.slow
def test_a_metric_that_no_evaluation_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed):
        train_on(1, tmp_path, *SMALL, hook("StopEarly, metric: eval/acuracy, mode: max"), "train.max_steps=2")
    reason = status(tmp_path)["reason"]
    assert all(part in reason for part in ("StopEarly", "'eval/acuracy'", "eval/accuracy"))
    assert status(tmp_path)["step"] == 0
