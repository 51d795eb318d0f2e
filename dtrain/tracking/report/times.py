"""Where the time of a run went, from what its records say.

Between two records of training lie the steps of the second (its mean step time and the share of it that waited for data)
and whatever else the clock on the wall saw: an evaluation, a save, or, if the run was started again in between, the time until
it trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtrain.tracking.history import History

#: What time can go into, in the order of the rows of ``Times.seconds``.
WAITING, STEPPING, PAUSING, INTERRUPTED = range(4)
NAMES = ("waiting for data", "rest of the step", "evaluating and saving", "interrupted")


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds between records.

    Attributes:
        steps: Last step of each interval, float64, shape ``[n]``, ascending.
        seconds: What they went into, float64, shape ``[4, n]``, none negative.
    """

    steps: np.ndarray
    seconds: np.ndarray

    @classmethod
    def of(cls, run: History) -> Times | None:
        """The times of a run; None if it has not recorded them."""
        steps, clock, per_step = run.columns.together("step", "time", "time/step_seconds")
        waited = run.columns.together("time/step_seconds", "time/data_wait_fraction")[1]
        if len(waited) != len(per_step):
            waited = np.zeros_like(per_step)
        order = np.argsort(steps, kind="stable")
        steps, clock, per_step, waited = (array[order] for array in (steps, clock, per_step, waited))
        per_step, waited = (np.nan_to_num(array).clip(min=0.0) for array in (per_step, waited))
        trained = per_step * np.diff(steps, prepend=0.0).clip(min=0.0)
        if not trained.sum() > 0:
            return None
        other = (np.diff(np.nan_to_num(clock), prepend=np.nan) - trained).clip(min=0.0)
        other = np.nan_to_num(other)  # before the first record there is nothing to compare the clock with
        again = np.isin(steps, run.restarts)
        waiting = trained * waited.clip(max=1.0)
        return cls(steps, np.stack([waiting, trained - waiting, other * ~again, other * again]))

    def shares(self) -> np.ndarray:
        """Share of the whole time, float64, shape ``[4]``."""
        total: np.ndarray = self.seconds.sum(axis=1)
        return total / total.sum()

    def binned(self, bins: int) -> tuple[np.ndarray, np.ndarray]:
        """Adds up neighbours.

        Args:
            bins: How many there are at most.

        Returns:
            Edges in steps, float64, shape ``[k + 1]``, and seconds, float64, shape ``[4, k]``.
        """
        starts = np.unique(np.linspace(0, len(self.steps), min(bins, len(self.steps)), endpoint=False).astype(int))
        ends = np.append(starts[1:], len(self.steps)) - 1
        return np.append(0.0, self.steps[ends]), np.add.reduceat(self.seconds, starts, axis=1)
