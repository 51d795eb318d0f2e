"""Compares recomputed steps with the records of a run.

* The *difference* of a step is the largest relative difference of its loss, gradient norm and learning rate. A value that is
  not finite is ``None`` (``null`` in JSON); two such values are equal, and one of them and a number have no difference.
* The *tolerance* is 0 if bits must be equal: a deterministic run on CPUs with the same ranks, device, torch, threads and keys.
  Otherwise it is 1e-4, because sums are then rounded in a different order.
* A run without ``steps.bin`` is compared by the windows of ``metrics.jsonl``: means over the steps since the record before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtrain.console import align_rows
from dtrain.replay.recorded import RecordedRun
from dtrain.runs.starts import Start

TOLERANCE = 1e-4
#: Exit codes.
EQUAL, DIFFERENT, NOTHING_COMPARED = 0, 1, 2
_NAMES = ("loss", "grad_norm", "lr")
_MOST_SHOWN = 40  # steps in the table

Values = Mapping[str, float | None]


@dataclass(frozen=True)
class StepComparison:
    """A step, or the window of steps that ends with it.

    Attributes:
        step: The step.
        recorded: Loss, gradient norm and learning rate in the records; None without a record.
        recomputed: The same now.
        same_decision: Whether the step was applied, or skipped, in both.
    """

    step: int
    recorded: Values | None
    recomputed: Values
    same_decision: bool = True

    @property
    def difference(self) -> float | None:
        """The largest relative difference; None if there is no record, or a value is finite on one side only."""
        if self.recorded is None or not self.same_decision:
            return None
        found = [_difference(self.recorded[name], self.recomputed[name]) for name in _NAMES]
        return None if None in found else max(value for value in found if value is not None)

    @property
    def contrast(self) -> str:
        """Why there is no difference."""
        return "not finite" if self.same_decision else "skipped once"

    @property
    def equal(self) -> bool:
        """Whether the values are the same bits."""
        return self.difference == 0

    def to_json(self) -> dict[str, Any]:
        """The entry of the JSON file."""
        return {
            "step": self.step,
            "equal": self.equal,
            "difference": self.difference,
            "recorded": self.recorded,
            "recomputed": self.recomputed,
        }


@dataclass(frozen=True)
class Comparison:
    """The result of a replay.

    Attributes:
        steps: The steps, ascending.
        checkpoints: Step of each compared checkpoint to the names of its tensors and states that differ.
        tolerance: Largest relative difference that is accepted.
        reasons: Why bits may differ; [] if they must not.
        ended: Why the replay ended before the last step; "" if it did not.
    """

    steps: Sequence[StepComparison]
    checkpoints: Mapping[int, Sequence[str]]
    tolerance: float
    reasons: Sequence[str]
    ended: str = ""

    @property
    def compared(self) -> list[StepComparison]:
        """The steps that have a record."""
        return [step for step in self.steps if step.recorded is not None]

    @property
    def largest(self) -> float | None:
        """The largest difference; None if a step has none, because a value is finite, or the step applied, on one side only."""
        found = [step.difference for step in self.compared]
        return None if None in found else max((value for value in found if value is not None), default=0.0)

    @property
    def exit_code(self) -> int:
        """0 within the tolerance, 1 beyond it, 2 if nothing could be compared."""
        if not self.compared and not self.checkpoints:
            return NOTHING_COMPARED
        within = all(step.difference is not None and step.difference <= self.tolerance for step in self.compared)
        bits = self.tolerance > 0 or not any(self.checkpoints.values())
        return EQUAL if within and bits and not self.ended else DIFFERENT

    def to_json(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return {
            "equal": bool(self.compared) and all(step.equal for step in self.compared) and not self.ended,
            "largest_difference": self.largest,
            "tolerance": self.tolerance,
            "reasons": list(self.reasons),
            "ended": self.ended,
            "checkpoints": [
                {"step": step, "equal": not names, "different": list(names)} for step, names in self.checkpoints.items()
            ],
            "steps": [step.to_json() for step in self.steps],
        }

    def table(self) -> str:
        """One line for each step, or those with the largest differences."""
        shown: Sequence[StepComparison] = self.steps
        if len(shown) > _MOST_SHOWN:
            unequal = sorted(self.compared, key=lambda step: -_order(step))[: _MOST_SHOWN // 2]
            shown = sorted(
                {step.step: step for step in (*self.steps[:10], *unequal, *self.steps[-10:])}.values(), key=_step
            )
        rows = [["step", "loss", "recomputed", "norm", "recomputed", "lr", "difference"]]
        for it in shown:
            then: Values = it.recorded or dict.fromkeys(_NAMES)
            pairs = [_text(values[name]) for name in ("loss", "grad_norm") for values in (then, it.recomputed)]
            verdict = "no record" if it.recorded is None else "equal" if it.equal else _text(it.difference, it.contrast)
            rows.append([f"{it.step}", *pairs, _text(it.recomputed["lr"]), verdict])
        left_out = len(self.steps) - len(shown)
        return align_rows(rows, numbers=range(6)) + (f"... and {left_out:,} more steps\n" if left_out else "")

    def last_line(self) -> str:
        """The result in one line."""
        lines = [
            f"checkpoints: {sum(not names for names in self.checkpoints.values())} of {len(self.checkpoints)} equal"
        ]
        different = {step: names for step, names in self.checkpoints.items() if names}
        for step, names in different.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines[0] += f"; in that of step {step}, {', '.join(names[:3])}{more} differ"
        if not self.checkpoints:
            lines = []
        if self.ended:
            lines.append(f"the replay ended before its last step: {self.ended}")
        number, total = len(self.compared), len(self.steps)
        why = f" (tolerance {self.tolerance:g}: {'; '.join(self.reasons)})" if self.reasons else ""
        why = (f", {total - number} without a record" if number < total else "") + why
        largest = _text(self.largest, "not finite") if self.largest is None else f"{self.largest:.1e}"
        if self.exit_code == NOTHING_COMPARED:
            lines.append(f"replay: none of {total} steps has a record, so nothing could be compared")
        elif self.exit_code == DIFFERENT:
            beyond = [it for it in self.compared if it.difference is None or it.difference > self.tolerance]
            first = f", first in step {beyond[0].step}" if beyond else ""
            verdict = "within the tolerance" if self.reasons else "equal"
            lines.append(
                f"replay: {number - len(beyond)} of {number} steps {verdict}, largest difference {largest}{first}{why}"
            )
        elif all(it.equal for it in self.compared):
            lines.append(f"replay: {number} of {number} steps equal{why}")
        else:
            lines.append(f"replay: {number} of {number} steps within {largest}{why}")
        return "\n".join(lines)


def compare_steps(run: RecordedRun, votes: np.ndarray, first: int) -> Iterator[StepComparison]:
    """Compares recomputed votes (``VOTE``) with the records, from step ``first`` on."""
    if not len(run.votes):
        yield from _compare_windows(run, votes, first)
        return
    recorded = {int(vote["step"]): vote for vote in run.votes}
    for vote in votes[votes["step"] >= first]:
        step = int(vote["step"])
        then = recorded.get(step)
        same = then is None or bool(then["applied"]) == bool(vote["applied"])
        yield StepComparison(step, None if then is None else _values(then), _values(vote), same)


def _compare_windows(run: RecordedRun, votes: np.ndarray, first: int) -> Iterator[StepComparison]:
    steps = votes["step"]
    for before, last, record in run.windows():
        window = votes[(steps > before) & (steps <= last)]
        if len(window) != last - before or before + 1 < first:
            continue
        applied = window[window["applied"] > 0]
        if not len(applied):
            continue
        now = {
            "loss": applied["loss_sum"].sum() / applied["count"].sum(),
            "grad_norm": applied["grad_norm"].mean(),
            "lr": applied["lr"][-1],
        }
        then = {name: _finite(record.get(f"train/{name}", math.nan)) for name in _NAMES}
        yield StepComparison(last, then, {name: _finite(float(value)) for name, value in now.items()})


def differences(start: Start, now: Start, changes: Sequence[str]) -> list[str]:
    """What differs between the conditions of a start and those of its replay, such as ``ranks: 2 -> 1``.

    Args:
        start: The start whose steps are recomputed.
        now: The replay, in the same terms.
        changes: Keys of the config that differ, such as ``precision.name: fp32 -> bf16``.
    """
    found = [
        f"{name}: {then} -> {here}"
        for name, then, here in (
            ("ranks", start.ranks, now.ranks),
            ("device", start.device, now.device),
            ("threads", start.threads, now.threads),
            ("torch", start.versions.get("torch"), now.versions.get("torch")),
        )
        if then and then != here
    ]
    return [*found, *changes]


def reasons_for_tolerance(other: Sequence[str], device: torch.device, *, deterministic: bool) -> list[str]:
    """Why the bits of a replay may differ from those of the run; [] if they must not.

    Args:
        other: The result of ``differences``.
        device: The device of the replay.
        deterministic: Whether the run uses deterministic algorithms.
    """
    reasons = list(other)
    if device.type != "cpu":
        reasons.append("GPUs add up in a different order each time" if not deterministic else "on a GPU")
    elif not deterministic:
        reasons.append("train.deterministic=false")
    return reasons


def _values(vote: np.void) -> dict[str, float | None]:
    count = float(vote["count"])
    loss = float(vote["loss_sum"]) / count if count else math.nan
    return {"loss": _finite(loss), "grad_norm": _finite(float(vote["grad_norm"])), "lr": _finite(float(vote["lr"]))}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _difference(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return 0.0 if one is other else None
    return abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0


def _order(step: StepComparison) -> float:
    return math.inf if step.difference is None else step.difference


def _step(step: StepComparison) -> int:
    return step.step


def _text(value: float | None, otherwise: str = "-") -> str:
    return otherwise if value is None else f"{value:.6g}"
