"""Pictures of metrics over steps, several runs in one, as SVG that needs nothing from outside."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dtrain.tracking.history import History

#: Told apart by people who do not see all colours (Okabe and Ito 2008); without the yellow, which white swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLES = ("-", "--", ":", "-.")
_MANY_POINTS = 5_000  # beyond these a line is a picture inside the SVG, which would grow to megabytes
_FEW_POINTS = 40  # below these each is marked
_WIDE_RANGE = 50.0
_LEGEND_UP_TO = 8

Draw = Callable[[Axes, History, dict[str, object]], None]


@dataclass(frozen=True)
class Chart:
    """A picture, or why there is none.

    Attributes:
        title: What it shows.
        svg: The picture; None if no run has the metric.
        note: What it does not show.
    """

    title: str
    svg: bytes | None
    note: str = ""


def charts(runs: Sequence[History]) -> list[Chart]:
    """All pictures of a report, in order."""
    evaluations = list(dict.fromkeys(name for run in runs for name in run.names("eval/")))
    shown = [name for name in evaluations if name not in ("eval/samples", "eval/bad_samples")]
    evaluated = [
        line_chart(runs, name, f"Evaluation: {name.removeprefix('eval/').replace('_', ' ')}") for name in shown
    ]
    return [
        line_chart(runs, "train/loss", "Training loss"),
        *(evaluated or [Chart("Evaluation", None, "No run has been evaluated yet.")]),
        line_chart(runs, "train/lr", "Learning rate"),
        line_chart(runs, "train/grad_norm", "Gradient norm, before clipping"),
        loss_scale_chart(runs),
        line_chart(runs, "throughput/samples_per_second", "Throughput (samples a second)", floor=0.0),
        line_chart(runs, "time/data_wait_fraction", "Waiting for data (share of the time)", floor=0.0),
        line_chart(runs, "memory/max_allocated_gib", "Peak memory of rank 0's GPU (GiB)", floor=0.0),
    ]


def line_chart(runs: Sequence[History], name: str, title: str, floor: float | None = None) -> Chart:
    """A metric over steps.

    Args:
        runs: A line for each that has the metric.
        name: The metric.
        title: Of the chart.
        floor: Where the axis begins; None fits it, on a logarithmic scale if the values need one.
    """

    def draw(axes: Axes, run: History, style: dict[str, object]) -> None:
        steps, values = run.series(name)
        marker = "." if len(steps) < _FEW_POINTS else None
        axes.plot(steps, values, marker=marker, rasterized=len(steps) > _MANY_POINTS, **style)  # type: ignore[arg-type]

    def finish(axes: Axes, having: Sequence[History]) -> None:
        values = np.concatenate([run.series(name)[1] for run in having])
        values = values[np.isfinite(values)]
        if floor is not None:
            axes.set_ylim(bottom=floor)
        elif len(values) and values.min() > 0 and values.max() / values.min() > _WIDE_RANGE and name != "train/lr":
            axes.set_yscale("log")

    having = [run for run in runs if run.names(name)]
    if not having:
        return Chart(title, None, f"No run has {name}.")
    lost = [f"{run.label} ({count})" for run in having if (count := int(np.isnan(run.series(name)[1]).sum()))]
    notes = [_without(runs, having, name), f"Values that were not finite: {', '.join(lost)}." if lost else ""]
    return Chart(title, _picture(runs, having, draw, finish), " ".join(note for note in notes if note))


def loss_scale_chart(runs: Sequence[History]) -> Chart:
    """The loss scale, with a mark where steps were skipped since the record before."""
    title = "Loss scale, and skipped steps"
    skipped = {run.label: run.series("precision/skipped_steps")[1] for run in runs}
    counts = [f"{int(total[-1])} in {label}" for label, total in skipped.items() if len(total)]
    note = f"Skipped steps: {', '.join(counts)}." if counts else "No run has counted its skipped steps."

    def draw(axes: Axes, run: History, style: dict[str, object]) -> None:
        steps, scale = run.series("precision/loss_scale")
        axes.plot(steps, scale, drawstyle="steps-post", **style)  # type: ignore[arg-type]
        at, total = run.series("precision/skipped_steps")
        rose = np.diff(total, prepend=0.0) > 0
        height = np.interp(at[rose], steps, scale)
        axes.plot(at[rose], height, linestyle="none", marker="x", color="#B00020", markersize=7, zorder=5)

    def finish(axes: Axes, having: Sequence[History]) -> None:
        axes.set_yscale("log", base=2)

    having = [run for run in runs if run.names("precision/loss_scale")]
    if not having:
        return Chart(title, None, f"No run scales gradients (fp16 does). {note}")
    notes = ["x: steps were skipped.", note, _without(runs, having, "precision/loss_scale")]
    return Chart(title, _picture(runs, having, draw, finish), " ".join(part for part in notes if part))


def _without(runs: Sequence[History], having: Sequence[History], name: str) -> str:
    missing = [run.label for run in runs if run not in having]
    return f"No {name} in {', '.join(missing)}." if missing else ""


def _picture(
    runs: Sequence[History],
    having: Sequence[History],
    draw: Draw,
    finish: Callable[[Axes, Sequence[History]], None],
) -> bytes:
    # Text stays text: the reader's own font draws it, and it can be searched.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(5.6, 3.1), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        for number, run in enumerate(runs):
            if run in having:
                draw(axes, run, {**line_style(number), "label": run.label})
        last = max((run.series("step")[1].max(initial=1) for run in runs), default=1)
        axes.set_xlim(0, 1.02 * last)  # the same in all pictures
        axes.grid(alpha=0.25)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        finish(axes, having)
        if 1 < len(runs) <= _LEGEND_UP_TO:
            axes.legend(fontsize=7, framealpha=0.6)
        stream = io.BytesIO()
        # No date, so that the same run gives the same bytes.
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def line_style(number: int) -> dict[str, object]:
    """Colour and dashes of a run by its place."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": _STYLES[number // len(COLOURS) % len(_STYLES)],
        "linewidth": 1.4,
    }
