"""Charts as SVG inside a page, or as PNG files.

The SVG is part of the page (no picture of its own), so that its text can be searched and its colours follow the reader's
theme. matplotlib escapes what comes from a run in it: numbers, and the names of runs.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullFormatter

from dtrain.tracking.history import History, printable
from dtrain.tracking.report.palette import GRID, INK, colour, dashes, themed
from dtrain.tracking.report.wording import shortened

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: the reader's own font draws it
    "text.parse_math": False,  # a run may be called $\frac
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
_SIZE = 4.8, 2.7  # inches: a phone shows it without making the text small
_MOST_RESTARTS = 100
_GROUP_IDS = re.compile(r'(<g) id="[^"]*"')
_COORDINATES = re.compile(r' (?:d|x|y)="[^"]*"')
_BEYOND_CENTS = re.compile(r"(?<=\.\d\d)\d+")


@dataclass(frozen=True)
class Chart:
    """A picture, or why there is none.

    Attributes:
        name: Short, for file names.
        title: What it shows.
        draw: Draws it; None if no run has what it shows.
        note: What a reader must know about it.
        keys: Name and colour of what is shown of a run; empty if the colours are the runs'.
    """

    name: str
    title: str
    draw: Callable[[], Figure] | None
    note: str = ""
    keys: tuple[tuple[str, str], ...] = ()


def file_name(name: str) -> str:
    """A metric or a key as the name of a chart."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]


def as_svg(chart: Chart) -> str:
    """The chart as an SVG element; ``""`` if there is nothing to draw."""
    if chart.draw is None:
        return ""
    stream = io.BytesIO()
    # Salted with the name: marks and clips of several charts in one page must not share an id.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": chart.name}):
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        chart.draw().savefig(stream, format="svg", transparent=True, metadata=no_metadata)
    svg = stream.getvalue().decode()
    svg = _GROUP_IDS.sub(r"\1", svg[svg.index("<svg") :])
    return themed(_COORDINATES.sub(lambda found: _BEYOND_CENTS.sub("", found[0]), svg))


def as_png(chart: Chart, runs: Sequence[History]) -> bytes:
    """The chart as a PNG with title and legend, on white; ``b""`` if there is nothing to draw."""
    if chart.draw is None:
        return b""
    stream = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = chart.draw()
        figure.suptitle(printable(shortened(chart.title, 80)), fontsize=10)
        handles: list[Line2D | Patch] = [Patch(color=key, label=label) for label, key in chart.keys]
        if not chart.keys and len(runs) > 1:
            # matplotlib leaves out what begins with an underscore.
            labels = [f"\N{ZERO WIDTH SPACE}{shortened(run.label, 40)}" for run in runs]
            handles = [Line2D([], [], **line_style(number), label=label) for number, label in enumerate(labels)]  # type: ignore[arg-type]
        if handles:
            columns = 3 if len(handles) > 3 else len(handles)
            figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=7, frameon=False)
            figure.set_figheight(_SIZE[1] + 0.16 * -(-len(handles) // columns))
        figure.savefig(stream, format="png", dpi=200)
    return stream.getvalue()


def empty_axes() -> tuple[Figure, Axes]:
    """Axes with a grid, of the size of all charts."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=GRID, alpha=0.35, linewidth=0.6)
    return figure, axes


def axes_over_steps(runs: Sequence[History]) -> tuple[Figure, Axes]:
    """Empty axes over the steps of all runs, the same in all charts, with a mark where each was started again."""
    figure, axes = empty_axes()
    last = max((run.series("step")[1].max(initial=1.0) for run in runs), default=1.0)
    axes.set_xlim(0, 1.02 * last)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for number, run in enumerate(runs):
        for step in run.restarts[:_MOST_RESTARTS]:
            axes.axvline(step, color=colour(number), linewidth=0.7, linestyle=":", zorder=1)
        at = run.restarts[:_MOST_RESTARTS]
        axes.plot(
            *(at, [0.0] * len(at), "^"),
            transform=axes.get_xaxis_transform(),
            color=colour(number),
            markersize=6,
            clip_on=False,
            zorder=6,
        )
    return figure, axes


def plain_ticks(axis: Axis) -> None:
    """Writes the numbers of a logarithmic axis as numbers: where mathematics is not parsed, 10^3 is no power."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if 1 <= value < 1e9 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def line_style(number: int) -> dict[str, object]:
    """How the line of a run looks, by its place."""
    return {"color": colour(number), "linestyle": dashes(number), "linewidth": 1.4}
