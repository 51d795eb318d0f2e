"""Results of a checkpoint's evaluation as text, as JSON, per class, and as a picture of the confusion table.

* A *confusion table* has a row for each true class and a column for each predicted one, int64, shape ``[classes,
  classes]``.
* The files of an evaluation are named after the checkpoint, weights, precision and the beginning of the data's
  fingerprint: ``step-000000276-ema-bf16-1c4f09ab.json``. Repeating an evaluation replaces them.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dtrain import __version__
from dtrain.console import align_rows
from dtrain.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COUNTS = ("samples", "bad_samples")
_TABLE_ROWS = 20  # classes of a printed table
_TABLE_NAME = 32  # characters of a class name in it


@dataclass(frozen=True, eq=False)
class CheckpointEvaluation:
    """The evaluation of one checkpoint in one precision, and its cost.

    Attributes:
        checkpoint: The checkpoint's folder.
        weights: ``ema`` or ``raw``.
        precision: Name of the precision preset.
        data: ``data.eval`` of the config, and the description of the data's index.
        config: The groups of the config that affect the result.
        ranks: Number of ranks.
        metrics: By name, without ``eval/``.
        tables: By name, int64.
        seconds: Wall time, the start of the loader's workers included.
        memory: Highest peak memory of all ranks, by the name of the metric.
    """

    checkpoint: Path
    weights: str
    precision: str
    data: Mapping[str, object]
    config: Mapping[str, object]
    ranks: int
    metrics: Mapping[str, float]
    tables: Mapping[str, Tensor]
    seconds: float
    memory: Mapping[str, float]

    @property
    def cost(self) -> dict[str, float]:
        """Seconds, samples per second, peak memory."""
        return {
            "time/seconds": self.seconds,
            "throughput/samples_per_second": self.metrics["samples"] / self.seconds,
            **self.memory,
        }

    @property
    def not_finite(self) -> dict[str, float]:
        """The metrics that are infinite or NaN."""
        return {name: value for name, value in self.metrics.items() if not math.isfinite(value)}


# -- text


def evaluation_banner(one: CheckpointEvaluation) -> dict[str, str]:
    """Rows for ``print_banner``."""
    return {
        "checkpoint": f"{one.checkpoint} ({one.weights} weights)",
        "data": str(one.data["eval"]),
        "precision": one.precision,
        **{f"eval/{name}": _number(value) for name, value in one.metrics.items()},
        **{name: f"{value:.4g}" for name, value in one.cost.items()},
    }


def side_by_side(several: Sequence[CheckpointEvaluation]) -> list[list[str]]:
    """A table of cells: a heading, and one row per precision with its differences from the first."""
    # Metrics that a task derives are missing where the loss is not finite.
    compared = list(dict.fromkeys(name for one in several for name in one.metrics if not _is_count(name)))
    heading = ["precision", *(f"eval/{name}" for name in (*compared, *_COUNTS)), *several[0].cost]
    return [
        heading,
        *(
            [
                one.precision,
                *(_with_difference(one, several[0], name) for name in compared),
                *(f"{int(one.metrics[name]):,}" for name in _COUNTS),
                *(f"{value:.4g}" for value in one.cost.values()),
            ]
            for one in several
        ),
    ]


def explain_not_finite(several: Sequence[CheckpointEvaluation]) -> str:
    """A message that names the metrics that are not finite, with remedies; ``""`` if all are finite."""
    found = [
        f"{', '.join(f'eval/{name} is {value}' for name, value in one.not_finite.items())} in {one.precision}"
        for one in several
        if one.not_finite
    ]
    if not found:
        return ""
    return (
        f"evaluation: {'; '.join(found)} ({several[0].checkpoint}). If the metric is finite in fp32, the model exceeds the "
        "range of the precision: use precision=bf16, or keep the modules that exceed it in fp32 (precision.keep_fp32). If "
        "it is not, the run has diverged: evaluate an earlier checkpoint=STEP; or the task counts no row of these data for "
        "that metric."
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table of ``side_by_side`` or ``class_table`` as text, indented: names to the left, numbers to the right."""
    return indent(align_rows(rows, numbers=range(1, len(rows[0]))), "  ").rstrip()


def _is_count(name: str) -> bool:
    """Whether a metric is a count, also of a set: ``web/samples``."""
    return name.rpartition("/")[2] in _COUNTS


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _with_difference(one: CheckpointEvaluation, first: CheckpointEvaluation, name: str) -> str:
    if name not in one.metrics:
        return ""
    value = _number(one.metrics[name])
    if one is first or name not in first.metrics:
        return value
    return f"{value} ({one.metrics[name] - first.metrics[name]:+.2g})"


# -- files


def write_evaluation(folder: Path, one: CheckpointEvaluation, names: Sequence[str] | None) -> list[Path]:
    """Writes an evaluation as JSON, and its confusion table, if there is one, as a picture.

    Args:
        folder: Created if it does not exist.
        one: The evaluation.
        names: Class names; None if they are not known.

    Returns:
        The files.

    Raises:
        OSError: On a write failure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{one.checkpoint.name}-{one.weights}-{one.precision}-{str(one.data['fingerprint'])[:8]}"
    files = {f"{stem}.json": json.dumps(_json_content(one, names), allow_nan=False).encode()}
    if "confusion" in one.tables:
        files[f"{stem}-confusion.png"] = confusion_picture(one.tables["confusion"], names)
    for name, content in files.items():
        with replace_file(folder / name) as file:
            file.write(content)
    return [folder / name for name in files]


def _json_content(one: CheckpointEvaluation, names: Sequence[str] | None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "checkpoint": one.checkpoint.name,
        "weights": one.weights,
        "precision": one.precision,
        "data": dict(one.data),
        "config": dict(one.config),
        "ranks": one.ranks,
        "metrics": _finite({f"eval/{name}": value for name, value in one.metrics.items()}),
        "not_finite": [f"eval/{name}" for name in one.not_finite],
        "cost": _finite(one.cost),
        "time": time.time(),
        "versions": {"dtrain": __version__, "torch": torch.__version__},
    }
    if "confusion" in one.tables:
        content["classes"] = [_finite(dataclasses.asdict(each)) for each in per_class(one.tables["confusion"], names)]
    return content | {"tables": {name: table.tolist() for name, table in one.tables.items()}}


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """None for NaN and infinity, which JSON does not have; as in metrics.jsonl."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


# -- per class


@dataclass(frozen=True)
class ClassResult:
    """The result of one class.

    Attributes:
        name: The class name; its number if it has none.
        count: Valid samples of the class.
        recall: Share of these samples that were predicted correctly; NaN without samples.
        precision: Share of the predictions of this class that are correct; NaN without predictions.
        taken_for: The wrong class that was predicted most often for its samples; ``""`` if there is none.
        taken: Number of these predictions.
    """

    name: str
    count: int
    recall: float
    precision: float
    taken_for: str
    taken: int


def per_class(confusion: Tensor, names: Sequence[str] | None = None) -> list[ClassResult]:
    """The result of each class, in the order of the class numbers.

    Args:
        confusion: A confusion table, int64, shape ``[classes, classes]``.
        names: Class names; None if they are not known.
    """
    correct = confusion.diagonal()
    counts, predicted = confusion.sum(1).tolist(), confusion.sum(0).tolist()
    taken, taken_for = (confusion - correct.diag()).max(1)
    return [
        ClassResult(
            name=_class_name(number, names),
            count=counts[number],
            recall=right / counts[number] if counts[number] else math.nan,
            precision=right / predicted[number] if predicted[number] else math.nan,
            taken_for=_class_name(other, names) if often else "",
            taken=often,
        )
        for number, (right, often, other) in enumerate(
            zip(correct.tolist(), taken.tolist(), taken_for.tolist(), strict=True)
        )
    ]


def worst_first(classes: Sequence[ClassResult]) -> list[ClassResult]:
    """The classes with samples, by ascending recall; of classes with equal recall, the larger one first."""
    return sorted((one for one in classes if one.count), key=lambda one: (one.recall, -one.count))


def class_table(classes: Sequence[ClassResult]) -> list[list[str]]:
    """A table of cells: a heading and one row per class, the 20 worst classes first."""
    return [
        ["class", "samples", "recall", "precision", "most often taken for"],
        *(
            [
                _shortened(one.name, _TABLE_NAME),
                f"{one.count:,}",
                f"{one.recall:.2%}",
                "" if math.isnan(one.precision) else f"{one.precision:.2%}",
                f"{_shortened(one.taken_for, _TABLE_NAME)} ({one.taken / one.count:.1%})" if one.taken else "",
            ]
            for one in worst_first(classes)[:_TABLE_ROWS]
        ),
    ]


def class_table_omissions(classes: Sequence[ClassResult]) -> str:
    """A sentence about the classes that ``class_table`` omits; ``""`` if there are none."""
    ranked = worst_first(classes)
    parts = []
    if more := ranked[_TABLE_ROWS:]:
        parts.append(f"{len(more):,} more with a recall from {more[0].recall:.2%} to {more[-1].recall:.2%}")
    if empty := len(classes) - len(ranked):
        parts.append(f"{empty:,} without a sample")
    return ", ".join(parts)


def _class_name(number: int, names: Sequence[str] | None) -> str:
    return names[number] if names is not None and number < len(names) else str(number)


def _shortened(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


# -- picture of the confusion table

_CELLS_WITH_COUNTS = 24  # classes up to which a cell has room for its count
_AXIS_NAMES = 120  # classes up to which each has room for its name
_AXIS_NAMES_OF_MORE = 40
_AXIS_NAME = 18  # characters of a class name
_CELLS = 250  # cells per side; with more classes, a cell stands for several
_DPI = 120
_GAMMA = 0.4  # makes small shares visible
_DARK = 0.35  # share from which a cell is too dark for black text


def confusion_picture(table: Tensor, names: Sequence[str] | None = None) -> bytes:
    """Draws a confusion table, for ten classes or thousands.

    The colour of a cell is its share of the row, so that rare classes are as visible as frequent ones. A row without
    samples is grey. With many classes a cell stands for several neighbouring classes and shows the largest of their
    shares, because a single confusion would be too small to see.

    Args:
        table: int64, shape ``[classes, classes]``.
        names: Class names; None if they are not known.

    Returns:
        A PNG file; equal tables give equal bytes.

    Raises:
        ValueError: If the table is not square, or empty.
    """
    # Imported here because the import takes half a second, and many runs draw no picture.
    import matplotlib
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    counts = table.cpu().numpy()
    classes = len(counts)
    if counts.shape != (classes, classes) or not classes:
        raise ValueError(f"confusion_picture: got a table of shape {list(counts.shape)}, want [classes, classes].")
    totals = counts.sum(axis=1, keepdims=True)
    share = np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
    with matplotlib.rc_context({"font.size": 9}), warnings.catch_warnings():
        # Letters that the font lacks are drawn as boxes, which needs no warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        side = min(4.5 + 0.3 * classes, 15.0)
        figure = Figure(figsize=(side, 0.86 * side), dpi=_DPI, layout="constrained")
        axes = figure.add_subplot()
        colours = matplotlib.colormaps["Blues"].with_extremes(bad="0.85")
        each = -(-classes // _CELLS)
        end = each * -(-classes // each) - 0.5
        extent = (-0.5, end, end, -0.5)
        norm = PowerNorm(_GAMMA, vmin=0, vmax=1)
        image = axes.imshow(_block_maxima(share, each), cmap=colours, norm=norm, extent=extent, interpolation="nearest")
        if classes <= _CELLS_WITH_COUNTS:
            _write_counts(axes, counts, share)
        _name_classes(axes, classes, names)
        samples, right = int(counts.sum()), int(counts.trace())
        title = f"{samples:,} samples, {right / samples:.2%} correct" if samples else "no samples"
        axes.set_title(title if each == 1 else f"{title}; a cell: the largest share among {each} x {each} classes")
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        bar = figure.colorbar(image, ax=axes, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1], shrink=0.8)
        bar.ax.set_yticklabels(["0", "1 %", "5 %", "10 %", "25 %", "50 %", "100 %"])
        bar.set_label("share of the true class")
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _block_maxima(share: np.ndarray, each: int) -> np.ndarray:
    """The maximum of each block of ``each`` x ``each`` cells; NaN for a block of NaN."""
    if each == 1:
        return share
    starts = np.arange(0, len(share), each)
    maxima: np.ndarray = np.fmax.reduceat(np.fmax.reduceat(share, starts, axis=0), starts, axis=1)
    return maxima


def _write_counts(axes: Axes, counts: np.ndarray, share: np.ndarray) -> None:
    size = 9 if len(counts) <= 12 else 7
    for row, column in np.argwhere(counts > 0).tolist():
        colour = "white" if share[row, column] > _DARK else "black"
        axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=colour, fontsize=size)


def _name_classes(axes: Axes, classes: int, names: Sequence[str] | None) -> None:
    every = 1 if classes <= _AXIS_NAMES else -(-classes // _AXIS_NAMES_OF_MORE)
    shown = range(0, classes, every)
    labels = [_shortened(_class_name(number, names), _AXIS_NAME) for number in shown]
    size = 9 if classes <= 30 else 5 if every == 1 and classes > 60 else 7
    upright = max(map(len, labels)) > 3 or classes > 30
    axes.set_xticks(shown, labels, rotation=90 if upright else 0, fontsize=size)
    axes.set_yticks(shown, labels, fontsize=size)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # a name with two $ is not a formula
    if classes > 60:
        axes.tick_params(length=2, pad=1)
