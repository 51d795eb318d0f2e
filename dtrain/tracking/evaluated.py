"""A checkpoint as it was evaluated in one precision, and how a person reads one or several of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

_COUNTS = ("samples", "bad_samples")


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What was evaluated, what came out, and what it cost.

    Attributes:
        checkpoint: Its folder.
        weights: ``ema`` or ``raw``.
        precision: Name of the precision's preset.
        data: What the data are: ``eval`` as the config names it, and what their index says.
        config: The parts of the config that the numbers depend on, by group.
        ranks: How many shared the work.
        metrics: By name.
        tables: By name, int64.
        seconds: From the first batch that was asked for to the result, the start of the loader's workers included.
        memory: The peak, as ``peak_memory`` names it, of the rank that took most.
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
        """Seconds, samples a second, memory."""
        return {
            "time/seconds": self.seconds,
            "throughput/samples_per_second": self.metrics["samples"] / self.seconds,
            **self.memory,
        }

    @property
    def not_finite(self) -> dict[str, float]:
        """The metrics that are infinite or not a number."""
        return {name: value for name, value in self.metrics.items() if not math.isfinite(value)}


def banner(one: Evaluated) -> dict[str, str]:
    """For ``print_banner``."""
    return {
        "checkpoint": f"{one.checkpoint} ({one.weights} weights)",
        "data": str(one.data["eval"]),
        "precision": one.precision,
        **{f"eval/{name}": _number(value) for name, value in one.metrics.items()},
        **{name: f"{value:.4g}" for name, value in one.cost.items()},
    }


def side_by_side(several: Sequence[Evaluated]) -> list[list[str]]:
    """A heading, and a line for each precision with its differences to the first."""
    # What a task concludes is missing where the loss is not finite.
    compared = list(dict.fromkeys(name for one in several for name in one.metrics if name not in _COUNTS))
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


def not_finite(several: Sequence[Evaluated]) -> str:
    """Which metrics of which precision are not finite, and what to do; "" if all are."""
    told = [
        f"{', '.join(f'eval/{name} is {value}' for name, value in one.not_finite.items())} in {one.precision}"
        for one in several
        if one.not_finite
    ]
    if not told:
        return ""
    return (
        f"evaluation: {'; '.join(told)} ({several[0].checkpoint}). If it is finite in fp32, the model leaves the range of the "
        "precision: take precision=bf16, or keep the modules that do in fp32 (precision.keep_fp32). If it is not, the run "
        "has diverged: take an earlier checkpoint=STEP; or the task counts no row of these data for that metric."
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  "
        + "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _with_difference(one: Evaluated, first: Evaluated, name: str) -> str:
    if name not in one.metrics:
        return ""
    value = _number(one.metrics[name])
    if one is first or name not in first.metrics:
        return value
    return f"{value} ({one.metrics[name] - first.metrics[name]:+.2g})"
