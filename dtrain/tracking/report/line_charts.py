"""Metrics as lines over steps, several runs in one picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dtrain.tracking.history import History
from dtrain.tracking.report.drawing import Chart, axes_over_steps, file_name, line_style, plain_ticks
from dtrain.tracking.report.envelope import Envelope, envelope
from dtrain.tracking.report.palette import BAD
from dtrain.tracking.report.wording import listed

_FEW_POINTS = 40  # below these each is marked
_WIDE_RANGE = 50.0
_ALL_PIECES, _FEWEST_PIECES, _MOST_PIECES = 3_000, 60, 300  # of all lines of a chart, of each
_MOST_MARKS = 200
_BAND = 0.25  # opacity


def line_chart(
    runs: Sequence[History], name: str, title: str, *, floor: float | None = None, thin: str | None = None
) -> Chart:
    """A metric over steps.

    Args:
        runs: A line for each that has the metric.
        name: The metric.
        title: Of the chart.
        floor: Where the axis begins; None fits it, on a logarithmic scale if the values need one.
        thin: Another metric, drawn as a thin line.
    """
    having = [run for run in runs if run.has(name)]
    if not having:
        return Chart(file_name(name), title, None, f"No run has {name}.")
    lines = {number: _pieces(run, name, len(runs)) for number, run in enumerate(runs) if run in having}
    values = np.concatenate([[*line.low, *line.high] for line in lines.values()])

    def draw() -> Figure:
        figure, axes = axes_over_steps(runs)
        for number, line in lines.items():
            _draw_line(axes, line, number, len(runs))
            if thin is not None and runs[number].has(thin):
                above = _pieces(runs[number], thin, len(runs))
                axes.plot(above.steps, above.mean, **{**line_style(number), "linewidth": 0.7})  # type: ignore[arg-type]
        if floor is not None and axes.get_ylim()[1] > floor:
            axes.set_ylim(floor, 1.04 * axes.get_ylim()[1])
        elif len(values) and values.min() > 0 and values.max() > _WIDE_RANGE * values.min() and name != "train/lr":
            axes.set_yscale("log")
            plain_ticks(axes.yaxis)
        return figure

    lost = [f"{run.label} ({count})" for run in having if (count := int(np.isnan(run.series(name)[1]).sum()))]
    notes = [
        _longest(lines.values()),
        _without(runs, having, name),
        f"Values that were not finite: {listed(lost)}." if lost else "",
    ]
    return Chart(file_name(name), title, draw, " ".join(note for note in notes if note))


def step_time_chart(runs: Sequence[History]) -> Chart:
    """Seconds a step: median and 95th percentile where they are recorded, else the mean."""
    name, late = "time/step_seconds_p50", "time/step_seconds_p95"
    if not any(run.has(name) for run in runs):
        return line_chart(runs, "time/step_seconds", "Step time (seconds, mean between records)", floor=0.0)
    chart = line_chart(runs, name, "Step time (seconds, median and 95th percentile)", floor=0.0, thin=late)
    return Chart("time-step-seconds", chart.title, chart.draw, f"Thin: 95th percentile. {chart.note}")


def scale_chart(runs: Sequence[History]) -> Chart:
    """The loss scale, with a mark where steps were skipped since the record before."""
    name, title = "precision-loss-scale", "Loss scale, and skipped steps"
    skipped = {run.label: run.series("precision/skipped_steps")[1] for run in runs}
    counts = [f"{total[-1]:,.0f} in {label}" for label, total in skipped.items() if len(total)]
    note = f"Skipped steps: {listed(counts)}." if counts else "No run has counted its skipped steps."
    having = [run for run in runs if run.has("precision/loss_scale")]
    if not having:
        return Chart(name, title, None, f"No run scales gradients (fp16 does). {note}")
    lines = {n: _pieces(run, "precision/loss_scale", len(runs)) for n, run in enumerate(runs) if run in having}

    def draw() -> Figure:
        figure, axes = axes_over_steps(runs)
        if any((line.mean > 0).any() for line in lines.values()):
            axes.set_yscale("log", base=2)
            plain_ticks(axes.yaxis)
        for number, line in lines.items():
            _draw_line(axes, line, number, len(runs), drawstyle="steps-post", marker=None)
            at, total = runs[number].series("precision/skipped_steps")
            marked = at[np.diff(total, prepend=0.0) > 0]
            marked = marked[:: -(-len(marked) // _MOST_MARKS) or 1]
            if len(line.steps):
                height = line.mean[np.searchsorted(line.steps, marked, side="right").clip(min=1) - 1]
                axes.plot(marked, height, "x", color=BAD, markersize=6, zorder=5)
        return figure

    notes = ["x: steps were skipped.", note, _longest(lines.values()), _without(runs, having, "precision/loss_scale")]
    return Chart(name, title, draw, " ".join(part for part in notes if part))


def _pieces(run: History, name: str, runs: int) -> Envelope:
    return envelope(*run.series(name), max(_FEWEST_PIECES, min(_MOST_PIECES, _ALL_PIECES // runs)))


def _draw_line(axes: Axes, line: Envelope, number: int, runs: int, **more: object) -> None:
    style = line_style(number)
    marker = "." if len(line.steps) < _FEW_POINTS else None
    axes.plot(line.steps, line.mean, **{"marker": marker, **style, **more})  # type: ignore[arg-type]
    if line.records > 1:
        alpha = _BAND / max(1.0, runs / 2)  # many bands over one another hide the lines
        axes.fill_between(line.steps, line.low, line.high, color=str(style["color"]), alpha=alpha, linewidth=0)


def _longest(lines: Iterable[Envelope]) -> str:
    records = max((line.records for line in lines), default=1)
    return f"Line: mean, band: least to largest of each {records:,} records." if records > 1 else ""


def _without(runs: Sequence[History], having: Sequence[History], name: str) -> str:
    missing = [run.label for run in runs if run not in having]
    return f"No {name} in {listed(missing)}." if missing else ""
