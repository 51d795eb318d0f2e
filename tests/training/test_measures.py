"""What is measured changes nothing of what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dtrain.data import Batch
from dtrain.tasks import Classification
from dtrain.training import measures
from dtrain.training.task import Output
from tests.runs import records, status, train_on

pytestmark = pytest.mark.usefixtures("digits")
TASK = f"task._target_={__name__}.Inverting"
SMALL = ("model.width=4", "data.num_workers=0", "checkpoint.best=null", "train.eval_every=0", "train.max_steps=2")


class Inverting(Classification):
    """Works in place."""

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        batch["image"].neg_().add_(1)
        return super().__call__(model, batch)


def test_a_run_that_cannot_be_counted_says_so_once_and_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train_on(1, tmp_path / "counted", TASK, *SMALL)
    monkeypatch.setattr(measures, "flops_per_row", _cannot)
    capfd.readouterr()
    train_on(1, tmp_path / "not", TASK, *SMALL)
    assert capfd.readouterr().out.count("FLOPs could not be counted (TypeError: no such mode), so") == 1
    assert status(tmp_path / "not")["state"] == "finished"
    counted, plain = (records(tmp_path / name) for name in ("counted", "not"))
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert [record.get(name) for record in counted] == [record.get(name) for record in plain]
    assert "throughput/tflops_per_second" in counted[0]
    assert "throughput/tflops_per_second" not in plain[0]


def _cannot(*args: Any) -> float:
    raise TypeError("no such mode")
