"""What a confusion table says about each class: how many of it are found, how many so named are, what it is taken for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

#: Lines of a table for a person.
MOST_LINES = 20
_LONGEST_NAME = 32


@dataclass(frozen=True)
class ClassResult:
    """One class.

    Attributes:
        name: Of the class; its number where nobody gave it a name.
        count: Valid samples of it.
        recall: Share of them that were predicted to be of it; NaN if there are none.
        precision: Share of what was predicted to be of it that is; NaN if nothing was.
        taken_for: The other class that most of its samples were predicted to be of; "" if there is none.
        taken: How many these were.
    """

    name: str
    count: int
    recall: float
    precision: float
    taken_for: str
    taken: int


def class_name(number: int, names: Sequence[str] | None) -> str:
    """The name of a class, or its number where there is none."""
    return names[number] if names is not None and number < len(names) else str(number)


def per_class(confusion: Tensor, names: Sequence[str] | None = None) -> list[ClassResult]:
    """The result of each class, in the order of their numbers.

    Args:
        confusion: int64, shape ``[classes, classes]``: a row for each true class, a column for each predicted one.
        names: Of the classes, where they are known.
    """
    found = confusion.diagonal()
    counts, predicted = confusion.sum(1).tolist(), confusion.sum(0).tolist()
    taken, taken_for = (confusion - found.diag()).max(1)
    return [
        ClassResult(
            name=class_name(number, names),
            count=counts[number],
            recall=right / counts[number] if counts[number] else math.nan,
            precision=right / predicted[number] if predicted[number] else math.nan,
            taken_for=class_name(other, names) if often else "",
            taken=often,
        )
        for number, (right, often, other) in enumerate(
            zip(found.tolist(), taken.tolist(), taken_for.tolist(), strict=True)
        )
    ]


def worst_first(classes: Sequence[ClassResult]) -> list[ClassResult]:
    """Those that have samples, the lowest recall first, and of equal ones the largest."""
    return sorted((one for one in classes if one.count), key=lambda one: (one.recall, -one.count))


def table(classes: Sequence[ClassResult]) -> list[list[str]]:
    """For a person: a heading and a line for each class, the worst first, as many as one reads."""
    ranked = worst_first(classes)
    return [
        ["class", "samples", "recall", "precision", "most often taken for"],
        *(
            [
                _short(one.name),
                f"{one.count:,}",
                f"{one.recall:.2%}",
                "" if math.isnan(one.precision) else f"{one.precision:.2%}",
                f"{_short(one.taken_for)} ({one.taken / one.count:.1%})" if one.taken else "",
            ]
            for one in ranked[:MOST_LINES]
        ),
    ]


def rest(classes: Sequence[ClassResult]) -> str:
    """What ``table`` leaves out, as a sentence; "" if that is nothing."""
    ranked = worst_first(classes)
    told = []
    if more := ranked[MOST_LINES:]:
        told.append(f"{len(more):,} more with a recall from {more[0].recall:.2%} to {more[-1].recall:.2%}")
    if empty := len(classes) - len(ranked):
        told.append(f"{empty:,} without a sample")
    return ", ".join(told)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
