"""The charts of a report as PNG files, drawn by matplotlib in the colours of the light theme."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from dtrain.errors import printable
from dtrain.files import replace_file
from dtrain.report.charts import Chart, Line
from dtrain.report.health import TIME_NAMES
from dtrain.report.style import THEME, shorten

_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a run may be called $\frac
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_SIZE = 4.8, 2.7  # inches
_LINE, _KEY = 88, 8  # characters that fit into the width of a legend, and that the key of a line takes
_BESIDE = 22  # characters of a label next to its bar; longer ones are above it
_FEW_POINTS = 40  # with fewer, each point has a marker


def write_charts(charts: Iterable[Chart], folder: Path) -> None:
    """Writes each chart that has something to draw as a PNG into a folder, which is created if necessary.

    Raises:
        OSError: On a write failure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names: set[str] = set()
    for chart in (chart for chart in charts if chart.is_drawn):
        # Metrics that differ in punctuation only have the same file name.
        name = chart.name if chart.name not in names else f"{chart.name}-{len(names)}"
        names.add(name)
        with replace_file(folder / f"{name}.png") as file:
            file.write(picture(chart))


def picture(chart: Chart) -> bytes:
    """The chart as a PNG with title and legend, on white."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        handles = _draw_bars(chart, figure) if chart.bars else _draw_lines(chart, figure)
        figure.suptitle(printable(shorten(chart.title, 80)), fontsize=10, wrap=True)
        if len(handles) > 1:
            texts = [_wrapped(str(handle.get_label())) for handle in handles]
            columns = max(1, min(3, len(handles), _LINE // (_KEY + max(map(len, texts)))))
            rows = sum(text.count("\n") for text in texts) + -(-len(handles) // columns)
            # matplotlib leaves out labels that start with an underscore.
            labels = [f"\N{ZERO WIDTH SPACE}{text}" for text in texts]
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=7, frameon=False)
            figure.set_figheight(figure.get_figheight() + 0.16 * rows)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=200)
    return stream.getvalue()


def _draw_lines(chart: Chart, figure: Figure) -> list[Any]:
    """Returns the legend handles."""
    axes = figure.add_subplot()
    axes.grid(color=_colour("line"), linewidth=0.6)
    axes.set_xlabel(printable(chart.x_label))
    drawn = [axes.plot(line.x, line.y, label=line.label, **_line_style(line))[0] for line in chart.lines]
    for line in chart.lines:
        if line.band is not None:
            axes.fill_between(line.x, *line.band, color=_colour(line.colour), alpha=0.2, linewidth=0)
    if chart.x_scale != "linear":
        axes.set_xscale(chart.x_scale, **({"linthresh": chart.x_threshold} if chart.x_scale == "symlog" else {}))
        if chart.x_scale == "log" and axes.get_xlim()[1] < 100 * axes.get_xlim()[0]:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif chart.is_whole:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if chart.x_label == "step":
            axes.set_xlim(left=0)
    for _, colour, step in chart.restarts:
        axes.axvline(step, color=_colour(colour), linewidth=0.7, linestyle=":", zorder=1)
    if chart.is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif chart.floor is not None:
        top = axes.get_ylim()[1] if chart.top is None else 1.05 * chart.top
        axes.set_ylim(chart.floor, max(top, chart.floor + 1e-12))
    return [handle for handle, line in zip(drawn, chart.lines, strict=True) if line.label]


def _draw_bars(chart: Chart, figure: Figure) -> list[Any]:
    labels = [_wrapped(label) for label, _ in chart.bars]
    beside = max(map(len, labels)) <= _BESIDE
    lines = 0 if beside else 1 + max(label.count("\n") for label in labels)
    figure.set_figheight(max(_SIZE[1], 0.6 + (0.22 + 0.12 * lines) * len(labels)))
    axes = figure.add_subplot()
    left = [0.0] * len(chart.bars)
    for part in range(len(TIME_NAMES)):
        widths = [shares[part] for _, shares in chart.bars]
        height = 0.7 / (1 + lines / 2)
        axes.barh(range(len(left)), widths, left=left, color=_colour(f"time-{part}"), height=height)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(left)), labels if beside else [""] * len(left))
    axes.tick_params(left=beside)
    for place, label in enumerate(labels if not beside else ()):
        axes.text(0, place - 0.55 * height, label, fontsize=7, verticalalignment="bottom")
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    return [Patch(color=_colour(f"time-{part}"), label=name) for part, name in enumerate(TIME_NAMES)]


def _line_style(line: Line) -> dict[str, Any]:
    if line.style == "dots":
        return {"color": _colour(line.colour), "marker": "o", "markersize": 4, "linewidth": 0}
    style = {"color": _colour(line.colour), "linewidth": 0.7 if line.style == "thin" else 1.4}
    style |= {"linestyle": (0, line.dashes) if line.dashes else "-"}
    if line.style == "steps":
        return style | {"drawstyle": "steps-post"}
    return style | {"marker": "." if len(line.x) < _FEW_POINTS else None}


def _wrapped(label: str) -> str:
    """A label in lines that fit into the width of a picture."""
    return "\n".join(textwrap.wrap(printable(shorten(label)), _LINE - 2 * _KEY)) or " "


def _colour(name: str) -> str:
    return THEME[name][0]


def _plain(value: float, _: object) -> str:
    """Plain numbers on logarithmic axes: without math text, 10^3 would not be typeset."""
    return f"{value:,.0f}" if 1 <= value < 1e9 else f"{value:g}"
