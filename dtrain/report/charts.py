"""The charts of a report as data: metrics over steps, where the time went, results over settings.

* A *chart* is a set of *lines* with common axes, or of *bars* that share out a whole. ``charts.js`` draws it on the page,
  ``pictures`` as a PNG file.
* Charts of metrics are *grouped* by the prefix of the metric. ``train/loss/web`` and ``train/loss/books`` of one run are
  lines of one chart, and so are ``eval/web/loss`` and ``eval/books/loss``.
* Long lines are shown as an ``Envelope``: a mean line inside a band from the smallest to the largest value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtrain.report.health import TIME_NAMES, RunData
from dtrain.report.style import RUN_COLOURS, count_of, format_number, format_percent, join_some, run_dashes
from dtrain.report.sweep import Goal, Setting, Sweep
from dtrain.runs.history import History

#: Prefix of metrics to the heading of their charts, in the order of the page; metrics with other prefixes come after them.
_GROUPS = {
    **{"train": "Training", "precision": "Training", "eval": "Evaluation", "time": "Speed", "throughput": "Speed"},
    **{"memory": "Memory and data", "data": "Memory and data"},
}
_TITLES = {
    "train/loss": "Training loss",
    "train/lr": "Learning rate",
    "train/grad_norm": "Gradient norm, before clipping",
    "throughput/samples_per_second": "Throughput (samples per second)",
    "time/data_wait_fraction": "Waiting for data (share of the step)",
    "throughput/mfu": "Model FLOPs utilisation (share of the device's peak)",
    "throughput/tflops_per_second": "TFLOP/s of the model",
    "time/straggler_seconds": "Slowest rank behind the median (seconds per step)",
    "memory/max_allocated_gib": "Peak memory of rank 0's GPU (GiB)",
    "memory/max_resident_gib": "Peak memory of rank 0's process (GiB)",
}
_USUAL = tuple(_TITLES)[:5]  # the page names the ones that no run has
_FITTED = ("train", "eval")  # prefixes whose y axis is fitted to the data; the others start at zero
# Counts, and metrics that are part of another chart.
_NOT_DRAWN = re.compile(
    r"(eval/(.*/)?(bad_)?samples|precision/(loss_scale|skipped_steps)|data/(bytes_per_sample|bad_samples)|comm/.*"
    r"|time/(step_seconds.*|slowest_rank|restarts|lost_seconds))$"
)
_MAX_OF_A_GROUP = 24  # charts
_MAX_RESTARTS, _MAX_SKIP_MARKS = 100, 200  # marks in a chart
_MAX_PIECES, _MIN_PIECES_A_LINE, _MAX_PIECES_A_LINE = 3_000, 60, 300
_MAX_MISSING = 3  # runs without a metric that are named
_MIN_FAMILY = 2  # metrics in a common chart
_MIN_VALUES = 3  # of a setting that has a chart
_DECADE, _WIDE_RANGE = 10.0, 50.0  # largest over smallest value from which the x axis and the y axis are logarithmic
_FAR_ABOVE = 3.0  # times the usual largest value: beyond the axis


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart.

    Attributes:
        label: Its name in the legend; empty for none.
        colour: Name of a colour of the theme.
        x: float64, shape ``[n]``, ascending.
        y: float64, shape ``[n]``.
        band: Lower and upper end of the band around it, float64, shape ``[n]`` each; None for none.
        run: Index of its run on the page; lines of a run are hidden together. None if it belongs to no run.
        style: ``line``, ``thin``, ``steps`` (constant up to the next point) or ``dots`` (points without a line).
    """

    label: str
    colour: str
    x: np.ndarray
    y: np.ndarray
    band: tuple[np.ndarray, np.ndarray] | None = None
    run: int | None = None
    style: str = "line"

    @property
    def dashes(self) -> tuple[int, ...]:
        """Lengths of dashes and gaps in pixels; empty for a solid line."""
        return run_dashes(self.run) if self.run is not None else ()


@dataclass(frozen=True, eq=False)
class Chart:
    """A chart, or the reason why there is none.

    Attributes:
        name: Short name for files.
        title: Title of the chart.
        note: Explanation below the chart, or why it is not drawn.
        lines: Its lines, or
        bars: label and shares of each bar, in the order of ``TIME_NAMES``. Without lines and bars there is nothing to draw.
        is_log: Whether the y axis is logarithmic at first.
        floor: Start of the y axis; None fits it.
        top: Largest value of a linear y axis; None fits it.
        x_label: Name of the x axis.
        x_scale: ``linear``, ``log``, or ``symlog``: logarithmic beyond ``x_threshold`` and linear below it.
        x_threshold: See ``x_scale``.
        restarts: (index of the run, its colour, step) of each restart.
    """

    name: str
    title: str
    note: str = ""
    lines: tuple[Line, ...] = ()
    bars: tuple[tuple[str, tuple[float, ...]], ...] = ()
    is_log: bool = False
    floor: float | None = None
    top: float | None = None
    x_label: str = "step"
    x_scale: str = "linear"
    x_threshold: float = 1.0
    restarts: tuple[tuple[int, str, float], ...] = ()

    @property
    def is_drawn(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.lines or self.bars)

    @property
    def is_whole(self) -> bool:
        """Whether the x axis counts something, such as steps and trials, so that its ticks are whole numbers."""
        whole = (np.isfinite(line.x) & (line.x % 1 == 0) for line in self.lines)
        return self.x_scale == "linear" and all(each.all() for each in whole)

    def as_json(self) -> dict[str, Any]:
        """What ``charts.js`` draws, in types of JSON."""
        lines = [
            {"label": line.label, "colour": line.colour, "run": line.run, "style": line.style, "dashes": line.dashes}
            | {"columns": [_rounded(column) for column in (line.x, line.y, *(line.band or ()))]}
            for line in self.lines
        ]
        names = ("is_whole", "is_log", "floor", "top", "x_label", "x_scale", "x_threshold", "restarts")
        return {"lines": lines} | {name: getattr(self, name) for name in names}


def run_charts(runs: Sequence[RunData]) -> dict[str, list[Chart]]:
    """Heading to the charts of one run or of several overlaid runs, in the order of the page."""
    histories = [run.history for run in runs]
    last = max((run.series("step")[1].max(initial=1.0) for run in histories), default=1.0)
    found = dict.fromkeys(name for run in histories for name in run.names("") if "/" in name)
    names = [*_USUAL, *(name for name in found if name not in _USUAL and not _NOT_DRAWN.match(name))]
    metrics: dict[str, list[str]] = {prefix: [] for prefix in _GROUPS}
    for name in names:
        metrics.setdefault(name.partition("/")[0], []).append(name)
    groups: dict[str, list[Chart]] = {heading: [] for heading in _GROUPS.values()}
    groups["Speed"] += [time_chart(runs), step_time_chart(histories)]
    for prefix, prefix_histories in metrics.items():
        charts = _metric_charts(histories, prefix_histories, None if prefix in _FITTED else 0.0)
        if prefix == "precision":
            charts.insert(0, scale_chart(histories))
        if left := [chart.title for chart in charts[_MAX_OF_A_GROUP:]]:
            charts[_MAX_OF_A_GROUP:] = [Chart("others", f"Further {prefix}/ metrics", f"{join_some(left)}.")]
        if prefix in ("eval", "memory") and not charts:
            charts = [Chart(prefix, f"{prefix}/", f"No run has logged any {prefix}/ metric.")]
        groups.setdefault(_GROUPS.get(prefix, prefix), []).extend(charts)
    restarts = tuple(
        (place, _run_colour(place), float(step))
        for place, run in enumerate(histories)
        for step in run.restarts[:_MAX_RESTARTS]
    )
    whole = Line("", "ink", np.array([0.0, last]), np.array([np.nan, np.nan]), style="dots")  # all have the same x axis
    return {
        heading: [
            replace(chart, restarts=restarts, lines=(*chart.lines, whole)) if chart.lines else chart for chart in charts
        ]
        for heading, charts in groups.items()
    }


def _metric_charts(runs: Sequence[History], names: Sequence[str], floor: float | None) -> list[Chart]:
    """One chart per metric; in a single run, metrics that differ only by source or evaluation set share one."""
    families: dict[str, list[str]] = {}
    labels = {}
    for name in names:
        prefix, *middle = name.split("/", 2)
        if prefix == "eval":  # eval/SET/METRIC
            middle.reverse()
        families.setdefault(f"{prefix}/{middle[0]}", []).append(name)
        labels[name] = "/".join(middle[1:])
    charts = []
    for family, members in families.items():
        nested = [name for name in members if name != family] if len(runs) == 1 else []
        alone = members if len(nested) < _MIN_FAMILY else [name for name in members if name == family]
        charts += [line_chart(runs, name, _TITLES.get(name, name), floor=floor) for name in alone]
        if parts := [line_chart(runs, name, name, floor=floor) for name in nested if name not in alone]:
            lines = tuple(
                replace(part.lines[0], label=labels[part.title], colour=_run_colour(place), run=None)
                for place, part in enumerate(parts)
            )
            name, tops = f"{family}/*", [part.top for part in parts if part.top is not None]
            top = max(tops) if len(tops) == len(parts) else None
            charts.append(replace(parts[0], name=_file_name(name), title=name, lines=lines, top=top))
    return charts


def setting_charts(sweep: Sweep) -> list[Chart]:
    """The best result over each setting with at least three different numbers, except seeds."""
    if sweep.goal is None:
        return []
    best = np.array([(sweep.goal.best(run) or (np.nan,))[0] for run in sweep.runs])
    charts = []
    for setting in sweep.settings:
        numbers = np.array(setting.numbers)
        known = np.isfinite(numbers) & np.isfinite(best)
        if not setting.is_seed and len(np.unique(numbers[known])) >= _MIN_VALUES:
            charts.append(_setting_chart(sweep, sweep.goal, setting, numbers, np.where(known, best, np.nan)))
    return charts


def _setting_chart(sweep: Sweep, goal: Goal, setting: Setting, numbers: np.ndarray, best: np.ndarray) -> Chart:
    known = np.isfinite(best)
    values, positive = np.unique(numbers[known]), numbers[known & (numbers > 0)]
    scale = "linear"
    if values[0] >= 0 and positive.max() >= _DECADE * positive.min():
        scale = "log" if values[0] > 0 else "symlog"  # a weight decay may be zero
    medians = np.array([np.median(best[known & (numbers == value)]) for value in values])
    lines = [Line("median", "soft", values, medians, style="thin")] if len(values) < known.sum() else []
    for run, number, result in zip(sweep.runs, numbers, best, strict=True):
        place = sweep.shown.index(run) if run in sweep.shown else None
        if np.isfinite(result):
            label, colour = (run.label, _run_colour(place)) if place is not None else ("", "soft")
            lines.append(Line(label, colour, np.array([number]), np.array([result]), run=place, style="dots"))
    return Chart(
        _file_name(f"setting-{setting.key}"),
        f"Best {goal.metric} over {setting.key}",
        "Grey: runs without curves." if len(sweep.shown) < len(sweep.runs) else "",
        tuple(lines),
        is_log=bool(medians.min() > 0 and np.nanmax(best) > _WIDE_RANGE * np.nanmin(best) > 0),
        x_label=setting.name,
        x_scale=scale,
        x_threshold=float(positive.min(initial=1.0)),
    )


def line_chart(runs: Sequence[History], name: str, title: str, *, floor: float | None = None) -> Chart:
    """A metric over steps.

    Args:
        runs: Each run that has the metric becomes a line.
        name: Metric.
        title: Title of the chart.
        floor: Start of the y axis, whose end leaves out start-ups and rare outliers; None fits it to all values, on a
            logarithmic scale if they need one.
    """
    having = {place: run for place, run in enumerate(runs) if run.has(name)}
    envelopes = {place: _envelope_of(run, name, len(runs)) for place, run in having.items()}
    if not having:
        return Chart(_file_name(name), title, f"No run has {name}.")
    lines = tuple(_line_of(line, runs[place], place) for place, line in envelopes.items())
    low, high = (np.concatenate([getattr(line, end) for line in envelopes.values()]) for end in ("low", "high"))
    is_log = floor is None and name != "train/lr" and bool(len(low) and high.max() > _WIDE_RANGE * low.min() > 0)
    top, top_note = _top(having.values(), name) if floor is not None else (None, "")
    not_finite = [f"{run.label} ({count})" for run in runs if (count := int(np.isnan(run.series(name)[1]).sum()))]
    nan_note = f"Values that were not finite: {join_some(not_finite)}." if not_finite else ""
    note = _sentences(_band_note(envelopes.values()), top_note, _missing(runs, name), nan_note)
    return Chart(_file_name(name), title, note, lines, is_log=is_log, floor=floor, top=top)


def _top(runs: Iterable[History], name: str) -> tuple[float | None, str]:
    """Where an axis ends so that start-ups and rare outliers do not squash the rest, and a sentence about them."""
    tops, beyond = [], []
    for run in runs:
        steps, values = run.series(name)
        steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
        starts = np.isin(steps, run.restarts) | (np.arange(len(steps)) == 0)
        usual = values if starts.all() else values[~starts]
        if len(usual):
            limit = _FAR_ABOVE * max(0.0, float(np.quantile(usual, 0.95, method="lower")))
            tops.append(max(usual[usual <= limit], default=usual.max()))
            beyond.append(values)
    top = max(tops, default=0.0)
    above = np.concatenate([np.empty(0), *beyond])
    above = above[above > 1.05 * top]
    if top <= 0 or not len(above):
        return None, ""
    return float(top), f"Above the axis: {count_of(len(above), 'value')}, up to {format_number(float(above.max()))}."


def step_time_chart(runs: Sequence[History]) -> Chart:
    """Seconds per step: median and 95th percentile where they are recorded, else the mean."""
    name, late = "time/step_seconds_p50", "time/step_seconds_p95"
    if not any(run.has(name) for run in runs):
        return line_chart(runs, "time/step_seconds", "Step time (seconds, mean between records)", floor=0.0)
    chart = line_chart(runs, name, "Step time (seconds, median and 95th percentile)", floor=0.0)
    slow = line_chart(runs, late, "", floor=0.0)
    thin = (replace(line, style="thin", label=f"{line.label} p95", band=None) for line in slow.lines)
    note = _sentences("Thin line: 95th percentile.", slow.note if slow.lines else chart.note)
    top = max(filter(None, (chart.top, slow.top)), default=None)
    return replace(chart, name="time-step-seconds", note=note, lines=(*chart.lines, *thin), top=top)


def scale_chart(runs: Sequence[History]) -> Chart:
    """The loss scale, with a mark where steps were skipped since the previous record."""
    name, title, metric = "precision-loss-scale", "Loss scale and skipped steps", "precision/loss_scale"
    skipped = {run.label: run.series("precision/skipped_steps")[1] for run in runs}
    counts = [f"{total[-1]:,.0f} in {label}" for label, total in skipped.items() if len(total) and total[-1]]
    has_counted = any(map(len, skipped.values()))
    note = f"Skipped steps: {join_some(counts) or 'none'}." if has_counted else "No run has counted its skipped steps."
    envelopes = {place: _envelope_of(run, metric, len(runs)) for place, run in enumerate(runs) if run.has(metric)}
    if not envelopes:
        return Chart(name, title, f"No run scales gradients (fp16 does). {note}")
    lines = [replace(_line_of(line, runs[place], place), style="steps") for place, line in envelopes.items()]
    for place, line in envelopes.items():
        steps, total = runs[place].series("precision/skipped_steps")
        marked = steps[np.diff(total, prepend=0.0) > 0]
        marked = marked[:: -(-len(marked) // _MAX_SKIP_MARKS) or 1]
        if len(line.steps) and len(marked):
            height = line.mean[np.searchsorted(line.steps, marked, side="right").clip(min=1) - 1]
            label = "skipped" if len(runs) == 1 else f"{runs[place].label} skipped"
            lines.append(Line(label, "bad", marked, height, run=place, style="dots"))
    notes = _sentences("Red dots: steps were skipped.", note, _band_note(envelopes.values()), _missing(runs, metric))
    return Chart(name, title, notes, tuple(lines), is_log=any((line.mean > 0).any() for line in envelopes.values()))


def time_chart(runs: Sequence[RunData]) -> Chart:
    """Where the time of each run went."""
    bars = tuple((run.history.label, tuple(run.times.shares())) for run in runs if run.times is not None)
    missing = [run.history.label for run in runs if run.times is None]
    note = f"No time/step_seconds in {join_some(missing)}." if missing else ""
    if len(runs) == len(bars) == 1:
        ((_, shares),) = bars
        note = (
            ", ".join(f"{part} {format_percent(share)}" for part, share in zip(TIME_NAMES, shares, strict=True)) + "."
        )
    return Chart("time", "Where the time goes", note, bars=bars)


@dataclass(frozen=True, eq=False)
class Envelope:
    """A line in pieces, so that no extreme value of a long line is lost.

    Attributes:
        steps: First step of each piece, float64, shape ``[k]``.
        low: Smallest value of each piece, float64, shape ``[k]``.
        mean: Mean of each piece, float64, shape ``[k]``.
        high: Largest value of each piece, float64, shape ``[k]``.
        records: Values in a piece; 1 if each value is its own piece.
    """

    steps: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    records: int

    @classmethod
    def from_points(cls, steps: np.ndarray, values: np.ndarray, most: int) -> Envelope:
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


def _envelope_of(run: History, name: str, runs: int) -> Envelope:
    return Envelope.from_points(
        *run.series(name), max(_MIN_PIECES_A_LINE, min(_MAX_PIECES_A_LINE, _MAX_PIECES // runs))
    )


def _line_of(line: Envelope, run: History, place: int) -> Line:
    band = (line.low, line.high) if line.records > 1 else None
    return Line(run.label, _run_colour(place), line.steps, line.mean, band, place)


def _run_colour(place: int) -> str:
    return f"run-{place % len(RUN_COLOURS)}"


def _rounded(values: np.ndarray) -> list[float | None]:
    """Six significant digits, which no screen exceeds; None for what is not finite, which JSON does not have."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def _band_note(lines: Iterable[Envelope]) -> str:
    records = max((line.records for line in lines), default=1)
    return f"Line: mean of {records:,} records each; band: smallest to largest value." if records > 1 else ""


def _missing(runs: Sequence[History], name: str) -> str:
    missing = [run.label for run in runs if not run.has(name)]
    which = join_some(missing) if len(missing) <= _MAX_MISSING else f"{len(missing)} of {len(runs)} runs"
    return f"No {name} in {which}." if missing else ""


def _sentences(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
