"""What runs are ranked by: a metric, and whether more of it is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtrain.tracking.history import History

_USUAL = (("eval/accuracy", True), ("eval/loss", False), ("train/loss", False))


@dataclass(frozen=True)
class Goal:
    """A metric to compare runs by.

    Attributes:
        metric: Its name.
        largest: Whether the largest value is the best one.
    """

    metric: str
    largest: bool

    @classmethod
    def configured(cls, run: History) -> Goal | None:
        """What the run chooses its best checkpoint by; None if it chooses none."""
        metric = run.config.get("checkpoint.best")
        return cls(metric, run.config.get("checkpoint.best_mode") != "min") if isinstance(metric, str) else None

    @classmethod
    def of(cls, runs: Sequence[History]) -> Goal | None:
        """What all runs choose their best checkpoint by, else the first usual metric that one has; None without any."""
        configured = {goal for run in runs if (goal := cls.configured(run)) and goal.best(run)}
        if len(configured) == 1:
            return configured.pop()
        usual = (cls(metric, largest) for metric, largest in _USUAL)
        return next((goal for goal in usual if any(goal.best(run) for run in runs)), None)

    def best(self, run: History) -> tuple[float, float] | None:
        """The best value and its step; None if the run has no finite one."""
        steps, values = run.series(self.metric)
        if not np.isfinite(values).any():
            return None
        at = int(np.nanargmax(values) if self.largest else np.nanargmin(values))
        return float(values[at]), float(steps[at])

    def cost(self, run: History) -> float:
        """The best value, so that the smallest is the best of all; infinite without one."""
        best = self.best(run)
        return math.inf if best is None else (-best[0] if self.largest else best[0])
