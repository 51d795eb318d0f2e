"""The charts of a report, drawn by matplotlib: metrics over steps, where the time went, results over settings.

A ``Chart`` is drawn on demand, as an SVG inside the page or as a PNG file. The SVG keeps its text as text, so that it can be
searched, and takes its colours from the theme of the page. matplotlib escapes the labels and numbers of a run.
Long lines are shown as an ``Envelope``: a mean line inside a band from the smallest to the largest value.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from dtrain.reporting.health import TIME_NAMES, RunData, TimeBreakdown, run_state
from dtrain.reporting.style import (
    BAD,
    GRID,
    INK,
    RUN_COLOURS,
    format_percent,
    join_some,
    run_colour,
    run_dashes,
    shorten,
    themed,
)
from dtrain.reporting.sweep import Goal, Setting, Sweep
from dtrain.tracking.history import History, printable

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "text.parse_math": False,  # a run may be called $\frac
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
_SIZE = 4.8, 2.7  # inches: a phone shows it without making the text small

#: Metric, title, start of the y axis (None: fitted to the data). The page lists those that a run lacks.
_USUAL: tuple[tuple[str, str, float | None], ...] = (
    ("train/lr", "Learning rate", None),
    ("train/grad_norm", "Gradient norm, before clipping", None),
    ("throughput/samples_per_second", "Throughput (samples per second)", 0.0),
    ("time/data_wait_fraction", "Waiting for data (share of the step)", 0.0),
)
_MACHINE = {
    "throughput/mfu": "Model FLOPs utilisation (share of the device's peak)",
    "throughput/tflops_per_second": "TFLOP/s of the model",
    "time/straggler_seconds": "Slowest rank behind the median (seconds per step)",
    "memory/max_allocated_gib": "Peak memory of rank 0's GPU (GiB)",
    "memory/max_resident_gib": "Peak memory of rank 0's process (GiB)",
}
_NOT_DRAWN = ("eval/samples", "eval/bad_samples")
_MAX_OF_A_KIND = 12  # charts of further metrics for each of evaluation, training and machine
_TIME_COLOURS = RUN_COLOURS[1], RUN_COLOURS[0], RUN_COLOURS[2], RUN_COLOURS[3]  # in the order of TIME_NAMES
_TIME_BINS = 60
_MAX_RESTARTS, _MAX_SKIP_MARKS = 100, 200  # marks in a chart
_FEW_POINTS = 40  # with fewer, each point has a marker
_MAX_PIECES, _MIN_PIECES_A_LINE, _MAX_PIECES_A_LINE = 3_000, 60, 300
_BAND_OPACITY = 0.25
_MIN_VALUES = 3  # of a setting that has a chart
_DECADE, _WIDE_RANGE = 10.0, 50.0  # largest over smallest value from which the x axis and the y axis are logarithmic


@dataclass(frozen=True)
class Chart:
    """A chart, or the reason why there is none.

    Attributes:
        name: Short name for files.
        title: Title of the chart.
        draw: Draws it; None if no run has the data.
        note: Explanation below the chart, or why it is not drawn.
        keys: (label, colour) of each part; empty if the colours are those of the runs.
    """

    name: str
    title: str
    draw: Callable[[], Figure] | None
    note: str = ""
    keys: tuple[tuple[str, str], ...] = ()

    def svg(self) -> str:
        """The chart as an SVG element; ``""`` if there is nothing to draw."""
        if self.draw is None:
            return ""
        stream = io.StringIO()
        # The salt makes ids of markers and clip paths unique on a page with several charts.
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name}):
            no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.draw().savefig(stream, format="svg", transparent=True, metadata=no_metadata)
        svg = stream.getvalue()
        svg = re.sub(r'(<g) id="[^"]*"', r"\1", svg[svg.index("<svg") :])  # the same in all charts, and not used
        return themed(svg)

    def png(self, runs: Sequence[History]) -> bytes:
        """The chart as a PNG with title and legend, on white; ``b""`` if there is nothing to draw."""
        if self.draw is None:
            return b""
        stream = io.BytesIO()
        with matplotlib.rc_context(_STYLE):
            figure = self.draw()
            figure.suptitle(printable(shorten(self.title, 80)), fontsize=10)
            handles: list[Line2D | Patch] = [Patch(color=colour, label=label) for label, colour in self.keys]
            if not handles and len(runs) > 1:
                # matplotlib leaves out labels that start with an underscore.
                labels = [f"\N{ZERO WIDTH SPACE}{shorten(run.label, 40)}" for run in runs]
                handles = [Line2D([], [], label=label, **_line_style(place)) for place, label in enumerate(labels)]
            if handles:
                columns = min(3, len(handles))
                figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=7, frameon=False)
                figure.set_figheight(_SIZE[1] + 0.16 * -(-len(handles) // columns))
            figure.savefig(stream, format="png", dpi=200)
        return stream.getvalue()


def run_charts(runs: Sequence[RunData]) -> list[Chart]:
    """All charts of one run or of several overlaid runs, in the order of the page."""
    histories = [run.history for run in runs]
    known = {"train/loss", *_NOT_DRAWN, *(name for name, *_ in _USUAL)}
    more = [name for name in dict.fromkeys(name for run in histories for name in run.names("")) if name not in known]
    evaluated = [name for name in more if name.startswith("eval/")]
    trained = [name for name in more if name.startswith("train/")]
    machine = [name for name in more if name.startswith(("throughput/", "memory/")) or name in _MACHINE]
    charts = [line_chart(histories, "train/loss", "Training loss")]
    charts += [line_chart(histories, name, f"Evaluation: {_words(name)}") for name in evaluated[:_MAX_OF_A_KIND]]
    charts += [] if evaluated else [Chart("evaluation", "Evaluation", None, "No run has been evaluated yet.")]
    charts += [line_chart(histories, name, f"Training: {_words(name)}") for name in trained[:_MAX_OF_A_KIND]]
    charts += [scale_chart(histories), time_chart(runs), step_time_chart(histories)]
    charts += [line_chart(histories, name, title, floor=floor) for name, title, floor in _USUAL]
    titles = {name: _MACHINE.get(name, _words(name)) for name in machine[:_MAX_OF_A_KIND]}
    charts += [line_chart(histories, name, title, floor=0.0) for name, title in titles.items()]
    if not any(name.startswith("memory/") for name in machine):
        charts.append(Chart("memory", "Peak memory", None, "No run has recorded it."))
    if left := [name for names in (evaluated, trained, machine) for name in names[_MAX_OF_A_KIND:]]:
        charts.append(Chart("others", "Further metrics", None, f"Not drawn: {join_some(left)}."))
    return charts


def setting_charts(sweep: Sweep) -> list[Chart]:
    """The best result over each setting with at least three different numbers, except seeds."""
    goal = sweep.goal
    if goal is None:
        return []
    best = np.array([(goal.best(run) or (np.nan,))[0] for run in sweep.runs])
    finished = np.array([run_state(run) == "finished" for run in sweep.runs])
    charts = []
    for setting in sweep.settings:
        numbers = np.array(setting.numbers)
        known = np.isfinite(numbers) & np.isfinite(best)
        if not setting.is_seed and len(np.unique(numbers[known])) >= _MIN_VALUES:
            charts.append(_setting_chart(goal, setting, numbers[known], best[known], finished[known]))
    return charts


def line_chart(
    runs: Sequence[History], name: str, title: str, *, floor: float | None = None, thin: str | None = None
) -> Chart:
    """A metric over steps.

    Args:
        runs: Each run that has the metric becomes a line.
        name: Metric.
        title: Title of the chart.
        floor: Start of the y axis; None fits it, on a logarithmic scale if the values need one.
        thin: Another metric, drawn as a thin line.
    """
    lines = {place: _envelope_of(run, name, len(runs)) for place, run in enumerate(runs) if run.has(name)}
    if not lines:
        return Chart(_file_name(name), title, None, f"No run has {name}.")
    values = np.concatenate([[*line.low, *line.high] for line in lines.values()])

    def draw() -> Figure:
        figure, axes = _axes_over_steps(runs)
        for place, line in lines.items():
            _draw_line(axes, line, place, len(runs))
            if thin is not None and runs[place].has(thin):
                other = _envelope_of(runs[place], thin, len(runs))
                thin_style = {"linewidth": 0.7, "marker": _marker(other), "markersize": 3}
                axes.plot(other.steps, other.mean, **(_line_style(place) | thin_style))
        if floor is not None and axes.get_ylim()[1] > floor:
            axes.set_ylim(floor, 1.04 * axes.get_ylim()[1])
        elif len(values) and values.min() > 0 and values.max() > _WIDE_RANGE * values.min() and name != "train/lr":
            axes.set_yscale("log")
            _plain_ticks(axes.yaxis)
        return figure

    not_finite = [f"{run.label} ({count})" for run in runs if (count := int(np.isnan(run.series(name)[1]).sum()))]
    nan_note = f"Values that were not finite: {join_some(not_finite)}." if not_finite else ""
    note = _sentences(_band_note(lines.values()), _missing(runs, name), nan_note)
    return Chart(_file_name(name), title, draw, note)


def step_time_chart(runs: Sequence[History]) -> Chart:
    """Seconds per step: median and 95th percentile where they are recorded, else the mean."""
    name, late = "time/step_seconds_p50", "time/step_seconds_p95"
    if not any(run.has(name) for run in runs):
        return line_chart(runs, "time/step_seconds", "Step time (seconds, mean between records)", floor=0.0)
    chart = line_chart(runs, name, "Step time (seconds, median and 95th percentile)", floor=0.0, thin=late)
    note = _sentences("Thin line: 95th percentile.", chart.note)
    return Chart("time-step-seconds", chart.title, chart.draw, note)


def scale_chart(runs: Sequence[History]) -> Chart:
    """The loss scale, with a mark where steps were skipped since the previous record."""
    name, title, metric = "precision-loss-scale", "Loss scale and skipped steps", "precision/loss_scale"
    skipped = {run.label: run.series("precision/skipped_steps")[1] for run in runs}
    counts = [f"{total[-1]:,.0f} in {label}" for label, total in skipped.items() if len(total)]
    note = f"Skipped steps: {join_some(counts)}." if counts else "No run has counted its skipped steps."
    lines = {place: _envelope_of(run, metric, len(runs)) for place, run in enumerate(runs) if run.has(metric)}
    if not lines:
        return Chart(name, title, None, f"No run scales gradients (fp16 does). {note}")

    def draw() -> Figure:
        figure, axes = _axes_over_steps(runs)
        if any((line.mean > 0).any() for line in lines.values()):
            axes.set_yscale("log", base=2)
            _plain_ticks(axes.yaxis)
        for place, line in lines.items():
            _draw_line(axes, line, place, len(runs), drawstyle="steps-post", marker=None)
            steps, total = runs[place].series("precision/skipped_steps")
            marked = steps[np.diff(total, prepend=0.0) > 0]
            marked = marked[:: -(-len(marked) // _MAX_SKIP_MARKS) or 1]
            if len(line.steps):
                height = line.mean[np.searchsorted(line.steps, marked, side="right").clip(min=1) - 1]
                axes.plot(marked, height, "x", color=BAD, markersize=6, zorder=5)
        return figure

    notes = _sentences("x: steps were skipped.", note, _band_note(lines.values()), _missing(runs, metric))
    return Chart(name, title, draw, notes)


def time_chart(runs: Sequence[RunData]) -> Chart:
    """Where the time went: of one run over its steps, of several side by side."""
    name, title = "time", "Where the time goes"
    having = [(run.history, run.times) for run in runs if run.times is not None]
    if not having:
        return Chart(name, title, None, "No run has time/step_seconds.")
    keys = tuple(zip(TIME_NAMES, _TIME_COLOURS, strict=True))
    if len(runs) > 1:
        missing = [run.history.label for run in runs if run.times is None]
        note = f"No time/step_seconds in {join_some(missing)}." if missing else ""
        return Chart(name, title, lambda: _draw_times_side_by_side(having), note, keys)
    ((history, times),) = having
    shares = [f"{part} {format_percent(share)}" for part, share in zip(TIME_NAMES, times.shares(), strict=True)]
    return Chart(name, title, lambda: _draw_times_over_steps(history, times), f"In total: {', '.join(shares)}.", keys)


@dataclass(frozen=True, eq=False)
class Envelope:
    """A line in pieces, so that no extreme value of a long line is lost.

    Attributes:
        steps: First step of each piece, float64, shape ``[k]``.
        low: Smallest value of each piece, float64, shape ``[k]``.
        mean: Mean of each piece, float64, shape ``[k]``.
        high: Largest value of each piece, float64, shape ``[k]``.
        records: Values in a piece; 1 if each value is a piece of its own.
    """

    steps: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    records: int

    @classmethod
    def of(cls, steps: np.ndarray, values: np.ndarray, most: int) -> Envelope:
        """Cuts a line into pieces of equally many values, unless it has at most ``2 * most`` values.

        Args:
            steps: float64, shape ``[n]``.
            values: float64, shape ``[n]``; values that are not finite are left out.
            most: Largest number of pieces, at least 1.
        """
        finite = np.isfinite(values)
        steps, values = steps[finite], values[finite]
        if len(values) <= 2 * most:
            return cls(steps, values, values, values, 1)
        records = -(-len(values) // most)
        starts = np.arange(0, len(values), records)
        with np.errstate(over="ignore", invalid="ignore"):  # the sum of a hundred 1e308
            mean = np.add.reduceat(values, starts) / np.diff(starts, append=len(values))
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        return cls(steps[starts], low, mean, high, records)


def _setting_chart(goal: Goal, setting: Setting, numbers: np.ndarray, best: np.ndarray, finished: np.ndarray) -> Chart:
    def draw() -> Figure:
        figure, axes = _axes()
        axes.set_xlabel(printable(setting.name))
        positive = numbers[numbers > 0]
        if numbers.min() >= 0 and positive.max() >= _DECADE * positive.min():
            if numbers.min() > 0:
                axes.set_xscale("log")
            else:  # a weight decay may be zero
                axes.set_xscale("symlog", linthresh=positive.min())
            _plain_ticks(axes.xaxis)
        if best.min() > 0 and best.max() > _WIDE_RANGE * best.min():
            axes.set_yscale("log")
            _plain_ticks(axes.yaxis)
        values = np.unique(numbers)
        axes.plot(values, [np.median(best[numbers == value]) for value in values], color=INK, linewidth=0.7)
        for which, colour in ((finished, RUN_COLOURS[0]), (~finished, RUN_COLOURS[1])):
            axes.plot(numbers[which], best[which], "o", color=colour, markersize=4, alpha=0.7, linewidth=0)
        return figure

    keys = [("finished", RUN_COLOURS[0]), *([] if finished.all() else [("not finished", RUN_COLOURS[1])])]
    title = f"Best {goal.metric} over {setting.key}"
    return Chart(_file_name(f"setting-{setting.key}"), title, draw, "Line: median.", tuple(keys))


def _draw_times_over_steps(run: History, times: TimeBreakdown) -> Figure:
    figure, axes = _axes_over_steps([run])
    edges, seconds = times.binned(_TIME_BINS)
    total = seconds.sum(axis=0)
    shares = seconds / np.where(total > 0, total, 1.0)
    heights = np.concatenate([shares, shares[:, -1:]], axis=1)  # steps-post needs a value at the last edge
    axes.stackplot(edges, heights, step="post", colors=_TIME_COLOURS, linewidth=0, alpha=0.85)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def _draw_times_side_by_side(runs: Sequence[tuple[History, TimeBreakdown]]) -> Figure:
    figure = Figure(figsize=(_SIZE[0], max(_SIZE[1], 0.6 + 0.22 * len(runs))), layout="constrained")
    axes = figure.add_subplot()
    places, left = np.arange(len(runs)), np.zeros(len(runs))
    for part, colour in zip(np.stack([times.shares() for _, times in runs]).T, _TIME_COLOURS, strict=True):
        axes.barh(places, part, left=left, color=colour, height=0.7, alpha=0.85)
        left += part
    axes.set_yticks(places, [shorten(run.label, 22) for run, _ in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=GRID, alpha=0.35, linewidth=0.6)
    return figure, axes


def _axes_over_steps(runs: Sequence[History]) -> tuple[Figure, Axes]:
    """Axes over the steps of all runs, with a mark at each restart."""
    figure, axes = _axes()
    last = max((run.series("step")[1].max(initial=1.0) for run in runs), default=1.0)
    axes.set_xlim(0, 1.02 * last)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    bottom: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "markersize": 6, "clip_on": False, "zorder": 6}
    for place, run in enumerate(runs):
        steps, colour = run.restarts[:_MAX_RESTARTS], run_colour(place)
        for step in steps:
            axes.axvline(step, color=colour, linewidth=0.7, linestyle=":", zorder=1)
        axes.plot(steps, np.zeros(len(steps)), "^", color=colour, **bottom)
    return figure, axes


def _draw_line(axes: Axes, line: Envelope, place: int, runs: int, **style: Any) -> None:
    axes.plot(line.steps, line.mean, **({"marker": _marker(line)} | _line_style(place) | style))
    if line.records > 1:
        opacity = _BAND_OPACITY / max(1.0, runs / 2)  # many bands over one another hide the lines
        axes.fill_between(line.steps, line.low, line.high, color=run_colour(place), alpha=opacity, linewidth=0)


def _marker(line: Envelope) -> str | None:
    return "." if len(line.steps) < _FEW_POINTS else None


def _line_style(place: int) -> dict[str, Any]:
    return {"color": run_colour(place), "linestyle": run_dashes(place), "linewidth": 1.4}


def _plain_ticks(axis: Axis) -> None:
    """Labels a logarithmic axis with plain numbers: without math text, 10^3 would not be typeset."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if 1 <= value < 1e9 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _envelope_of(run: History, name: str, runs: int) -> Envelope:
    return Envelope.of(*run.series(name), max(_MIN_PIECES_A_LINE, min(_MAX_PIECES_A_LINE, _MAX_PIECES // runs)))


def _band_note(lines: Iterable[Envelope]) -> str:
    records = max((line.records for line in lines), default=1)
    return f"Line: mean of {records:,} records each; band: smallest to largest value." if records > 1 else ""


def _missing(runs: Sequence[History], name: str) -> str:
    missing = [run.label for run in runs if not run.has(name)]
    return f"No {name} in {join_some(missing)}." if missing else ""


def _sentences(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _words(name: str) -> str:
    return name.partition("/")[2].replace("_", " ")


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
