"""How the result of a sweep depends on each number that was varied."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dtrain.tracking.history import printable
from dtrain.tracking.report.drawing import Chart, empty_axes, file_name, plain_ticks
from dtrain.tracking.report.goal import Goal
from dtrain.tracking.report.palette import INK, RUNS
from dtrain.tracking.report.standing import state
from dtrain.tracking.report.sweep import Sweep
from dtrain.tracking.report.varied import Setting

_FEWEST = 3  # values
_DECADE, _WIDE_RANGE = 10.0, 50.0  # largest over smallest, from which on an axis is logarithmic
_FINISHED, _OTHERS = RUNS[0], RUNS[1]


def setting_charts(sweep: Sweep) -> list[Chart]:
    """The best result over each setting that has three or more numbers; seeds are none."""
    goal = sweep.goal
    if goal is None:
        return []
    best = np.array([(goal.best(run) or (np.nan,))[0] for run in sweep.runs])
    finished = np.array([state(run) == "finished" for run in sweep.runs])
    drawn = []
    for setting in sweep.settings:
        numbers = np.array(setting.numbers)
        known = np.isfinite(numbers) & np.isfinite(best)
        if not setting.is_seed and len(np.unique(numbers[known])) >= _FEWEST:
            drawn.append(_chart(goal, setting, numbers[known], best[known], finished[known]))
    return drawn


def _chart(goal: Goal, setting: Setting, numbers: np.ndarray, best: np.ndarray, finished: np.ndarray) -> Chart:
    def draw() -> Figure:
        figure, axes = empty_axes()
        axes.set_xlabel(printable(setting.name))
        _scale(axes, numbers, best)
        values = np.unique(numbers)
        axes.plot(values, [np.median(best[numbers == value]) for value in values], color=INK, linewidth=0.7)
        for which, colour in ((finished, _FINISHED), (~finished, _OTHERS)):
            axes.plot(numbers[which], best[which], "o", color=colour, markersize=4, alpha=0.7, linewidth=0)
        return figure

    keys = [("finished", _FINISHED), *([] if finished.all() else [("not finished", _OTHERS)])]
    name = file_name(f"setting-{setting.key}")
    return Chart(name, f"Best {goal.metric} over {setting.key}", draw, "Line: median.", tuple(keys))


def _scale(axes: Axes, numbers: np.ndarray, best: np.ndarray) -> None:
    positive = numbers[numbers > 0]
    if numbers.min() >= 0 and positive.max() >= _DECADE * positive.min():
        if numbers.min() > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=positive.min())  # shows nothing at all, as weight decay may be, too
        plain_ticks(axes.xaxis)
    if best.min() > 0 and best.max() > _WIDE_RANGE * best.min():
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)
