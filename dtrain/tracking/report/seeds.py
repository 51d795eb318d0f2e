"""What is left of a difference between runs when only their seeds differ: mean and spread over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtrain.tracking.history import History
from dtrain.tracking.report.health import last
from dtrain.tracking.report.standing import state
from dtrain.tracking.report.sweep import Sweep


@dataclass(frozen=True, eq=False)
class Seeds:
    """Runs that differ in their seeds only.

    Attributes:
        values: Their values of the settings of the table that are no seeds, as texts.
        runs: How many there are.
        best: Best values of the metric of those that are finished, float64, shape ``[finished]``.
        last: The last ones, shape ``[finished]``.
    """

    values: tuple[str, ...]
    runs: int
    best: np.ndarray
    last: np.ndarray


def over_seeds(sweep: Sweep) -> list[Seeds]:
    """The groups of at least two runs, the best mean first; empty without any, or without a metric.

    Runs that are not finished, or have no finite result, are counted but not averaged: a half-trained one says nothing
    about what the settings are worth.
    """
    settings = [*sweep.settings, *sweep.unshown]
    others = [setting.texts for setting in settings if not setting.is_seed]
    if sweep.goal is None or len(others) == len(settings):
        return []
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, run in enumerate(sweep.runs):
        if run.config or run.overrides:  # else nobody knows what it differs in
            groups.setdefault(tuple(texts[place] for texts in others), []).append(place)
    shown = [setting.brief for setting in sweep.settings if not setting.is_seed]
    found = [
        _seeds(sweep, tuple(texts[places[0]] for texts in shown), [sweep.runs[place] for place in places])
        for places in groups.values()
        if len(places) > 1
    ]
    sign = -1.0 if sweep.goal.largest else 1.0
    return sorted(found, key=lambda seeds: sign * float(seeds.best.mean()) if len(seeds.best) else np.inf)


def _seeds(sweep: Sweep, values: tuple[str, ...], runs: Sequence[History]) -> Seeds:
    assert sweep.goal is not None
    goal = sweep.goal
    results = [
        (best[0], last(run, goal.metric)) for run in runs if state(run) == "finished" and (best := goal.best(run))
    ]
    table = np.array(results, np.float64).reshape(-1, 2)
    return Seeds(values, len(runs), table[:, 0], table[:, 1])
