"""A confusion table as a picture: a row for each true class, a column for each predicted one."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from dtrain.tracking.per_class import class_name

_NUMBERS_UP_TO = 24  # classes whose cells have room for a count
_NAMES_UP_TO = 120  # classes that each have room for a name
_NAMES_AMONG_MORE = 40
_CELLS_UP_TO = 250  # a side; beyond, a cell stands for several classes
_LONGEST_NAME = 18
_DPI = 120
_GAMMA = 0.4  # shows small shares larger than they are
_DARK = 0.35  # shares from which on a cell is too dark for black text


def confusion_picture(table: Tensor, names: Sequence[str] | None = None) -> bytes:
    """Draws a confusion table, for some ten classes or some thousand.

    A cell's colour is its share of the row, so that rare classes are seen as well as others. A row without a sample is
    grey. With many classes a cell stands for several neighbours and has the largest of their shares: a single confusion
    would be too small to be seen.

    Args:
        table: int64, shape ``[classes, classes]``.
        names: Of the classes, where they are known.

    Returns:
        A PNG file; the same table gives the same bytes.

    Raises:
        ValueError: If the table is not square, or empty.
    """
    counts = table.cpu().numpy()
    classes = len(counts)
    if counts.shape != (classes, classes) or not classes:
        raise ValueError(f"confusion_picture: got a table of shape {list(counts.shape)}, want [classes, classes].")
    totals = counts.sum(axis=1, keepdims=True)
    share = np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
    with matplotlib.rc_context({"font.size": 9}), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes, which says enough.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        side = min(4.5 + 0.3 * classes, 15.0)
        figure = Figure(figsize=(side, 0.86 * side), dpi=_DPI, layout="constrained")
        axes = figure.add_subplot()
        colours = matplotlib.colormaps["Blues"].with_extremes(bad="0.85")
        each = -(-classes // _CELLS_UP_TO)
        end = each * -(-classes // each) - 0.5
        extent = (-0.5, end, end, -0.5)
        norm = PowerNorm(_GAMMA, vmin=0, vmax=1)
        image = axes.imshow(_largest_of(share, each), cmap=colours, norm=norm, extent=extent, interpolation="nearest")
        if classes <= _NUMBERS_UP_TO:
            _write_counts(axes, counts, share)
        _name_classes(axes, classes, names)
        samples, right = int(counts.sum()), int(counts.trace())
        title = f"{samples:,} samples, {right / samples:.2%} right" if samples else "no sample"
        axes.set_title(title if each == 1 else f"{title}; a cell: the largest share among {each} x {each} classes")
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        bar = figure.colorbar(image, ax=axes, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1], shrink=0.8)
        bar.ax.set_yticklabels(["0", "1 %", "5 %", "10 %", "25 %", "50 %", "100 %"])
        bar.set_label("share of the true class")
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _largest_of(share: np.ndarray, each: int) -> np.ndarray:
    """The largest number of each block of ``each`` x ``each``; NaN where there is none."""
    if each == 1:
        return share
    starts = np.arange(0, len(share), each)
    largest: np.ndarray = np.fmax.reduceat(np.fmax.reduceat(share, starts, axis=0), starts, axis=1)
    return largest


def _write_counts(axes: Axes, counts: np.ndarray, share: np.ndarray) -> None:
    size = 9 if len(counts) <= 12 else 7
    for row, column in np.argwhere(counts > 0).tolist():
        colour = "white" if share[row, column] > _DARK else "black"
        axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=colour, fontsize=size)


def _name_classes(axes: Axes, classes: int, names: Sequence[str] | None) -> None:
    every = 1 if classes <= _NAMES_UP_TO else -(-classes // _NAMES_AMONG_MORE)
    shown = range(0, classes, every)
    labels = [class_name(number, names) for number in shown]
    labels = [label if len(label) <= _LONGEST_NAME else label[: _LONGEST_NAME - 1] + "…" for label in labels]
    size = 9 if classes <= 30 else 5 if every == 1 and classes > 60 else 7
    upright = max(map(len, labels)) > 3 or classes > 30
    axes.set_xticks(shown, labels, rotation=90 if upright else 0, fontsize=size)
    axes.set_yticks(shown, labels, fontsize=size)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # a name with two $ is no formula
    if classes > 60:
        axes.tick_params(length=2, pad=1)
