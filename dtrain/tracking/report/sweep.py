"""Several runs side by side: what was varied, how each came out, and which of very many are looked at closely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.tracking.history import History
from dtrain.tracking.report.goal import Goal
from dtrain.tracking.report.varied import Setting, varied

_ALL, _BEST = 8, 5  # so many lines can be told apart in a chart; so many of the best are shown of more


@dataclass(frozen=True, eq=False)
class Sweep:
    """Runs to compare.

    Attributes:
        runs: The best one first; those without a result last.
        goal: What they are ranked by; None if no run has logged a metric.
        settings: What was varied; the values are in the order of ``runs``.
        unshown: What differs, too, but is too much for a table.
        shown: The runs that are looked at closely: all in the order in which they were named, or a choice, the best first.
        choice: Which these are, in words; ``""`` if they are all.
    """

    runs: list[History]
    goal: Goal | None
    settings: list[Setting]
    unshown: list[Setting]
    shown: list[History]
    choice: str

    @classmethod
    def of(cls, runs: Sequence[History]) -> Sweep:
        """Ranks runs.

        Args:
            runs: In the order in which they were named, at least one.
        """
        goal = Goal.of(runs)
        ranked = sorted(runs, key=lambda run: goal.cost(run) if goal else 0.0)
        settings, unshown = varied(ranked)
        chosen, which = _chosen(ranked, goal)
        choice = f"Of {len(runs)} runs, what follows shows {len(chosen)}: {which}." if which else ""
        return cls(ranked, goal, settings, unshown, chosen if which else list(runs), choice)


def _chosen(ranked: list[History], goal: Goal | None) -> tuple[list[History], str]:
    """Of runs in the order of their rank, those that are looked at closely, and which these are."""
    if len(ranked) <= _ALL:
        return ranked, ""
    results = [run for run in ranked if goal is not None and goal.best(run) is not None]
    if goal is None or len(results) <= _BEST + 2:
        return ranked[: _BEST + 2], "the first ones of the table"
    middle = results[(_BEST + len(results)) // 2]
    which = f"the {_BEST} best, the middle one and the last one by {goal.metric}"
    return [*results[:_BEST], middle, results[-1]], which
