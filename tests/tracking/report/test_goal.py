"""Runs are ranked by what they themselves choose their best checkpoint by."""

from __future__ import annotations

import math
from pathlib import Path

from dtrain.tracking.report.goal import Goal
from tests.tracking.report.runs_for_tests import point_of, run_of, steady


def test_the_metric_of_the_best_checkpoint_is_taken_if_all_agree_else_a_usual_one(tmp_path: Path) -> None:
    one = point_of(tmp_path / "1", {"run.seed": 1}, [0.5], best="eval/accuracy")
    waits = point_of(tmp_path / "2", {"run.seed": 2}, best="eval/f1")  # nothing to compare it by yet
    assert Goal.of([waits, one]) == Goal("eval/accuracy", largest=True)
    loss = run_of(tmp_path / "3", [{"step": 1, "eval/loss": 2.0, "train/loss": 1.0}])
    loss.config.update({"checkpoint.best": "train/loss", "checkpoint.best_mode": "min"})
    assert Goal.of([loss]) == Goal("train/loss", largest=False)
    assert Goal.of([loss, one]) == Goal("eval/accuracy", largest=True)
    assert Goal.of([run_of(tmp_path / "4", steady())]) == Goal("train/loss", largest=False)
    assert Goal.of([waits]) is None


def test_the_best_value_is_finite_and_comes_with_its_step(tmp_path: Path) -> None:
    run = point_of(tmp_path / "1", {}, [0.3, None, 0.9, 0.9, 0.1])
    assert Goal("eval/accuracy", largest=True).best(run) == (0.9, 30.0)
    assert Goal("eval/accuracy", largest=False).best(run) == (0.1, 50.0)
    lost = point_of(tmp_path / "2", {}, [None, None])
    assert Goal("eval/accuracy", largest=True).best(lost) is None
    assert Goal("eval/accuracy", largest=True).cost(lost) == math.inf
