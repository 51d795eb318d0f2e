"""Where the time of runs went: of one run over its steps, of several side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dtrain.tracking.report.drawing import Chart, axes_over_steps
from dtrain.tracking.report.evidence import Evidence
from dtrain.tracking.report.palette import RUNS
from dtrain.tracking.report.times import NAMES, Times
from dtrain.tracking.report.wording import listed, percent, shortened

_NAME, _TITLE = "time", "Where the time goes"
_COLOURS = RUNS[1], RUNS[0], RUNS[2], RUNS[3]  # in the order of NAMES
_BINS = 60


def time_chart(runs: Sequence[Evidence]) -> Chart:
    """The shares of waiting, stepping, evaluating and saving, and interruptions."""
    having = [run for run in runs if run.times is not None]
    if not having:
        return Chart(_NAME, _TITLE, None, "No run has time/step_seconds.")
    keys = tuple(zip(NAMES, _COLOURS, strict=True))
    if len(runs) == 1 and runs[0].times is not None:
        times = runs[0].times
        shares = ", ".join(f"{name} {percent(share)}" for name, share in zip(NAMES, times.shares(), strict=True))
        return Chart(_NAME, _TITLE, lambda: _over_steps(runs[0], times), f"In all: {shares}.", keys)
    missing = [run.history.label for run in runs if run.times is None]
    note = f"No time/step_seconds in {listed(missing)}." if missing else ""
    return Chart(_NAME, _TITLE, lambda: _side_by_side(having), note, keys)


def _over_steps(run: Evidence, times: Times) -> Figure:
    figure, axes = axes_over_steps([run.history])
    edges, seconds = times.binned(_BINS)
    total = seconds.sum(axis=0)
    below = np.zeros(len(edges))
    for part, hex_colour in zip(seconds / np.where(total > 0, total, 1.0), _COLOURS, strict=True):
        above = below + np.append(part, part[-1])
        axes.fill_between(edges, below, above, step="post", color=hex_colour, linewidth=0, alpha=0.85)
        below = above
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def _side_by_side(runs: Sequence[Evidence]) -> Figure:
    figure = Figure(figsize=(4.8, max(2.7, 0.6 + 0.22 * len(runs))), layout="constrained")
    axes = figure.add_subplot()
    shares = np.stack([run.times.shares() for run in runs if run.times is not None])
    left = np.zeros(len(runs))
    for part, hex_colour in zip(shares.T, _COLOURS, strict=True):
        axes.barh(np.arange(len(runs)), part, left=left, color=hex_colour, height=0.7, alpha=0.85)
        left += part
    axes.set_yticks(np.arange(len(runs)), [shortened(run.history.label, 22) for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    return figure
