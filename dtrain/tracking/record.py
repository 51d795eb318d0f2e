"""The record: what a run has to say about one logged step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: A flat dict of plain Python numbers, named as in metrics.jsonl. ``step`` (attempted steps, never less than in the
#: record before) and ``time`` (Unix seconds) are always there.
Record = Mapping[str, float | int]

#: Where in a run a record is: its step, and whether it is of the evaluation after that step. Records come in the order of
#: their marks, and no two of a run have the same.
Mark = tuple[int, bool]


def mark(record: Record) -> Mark:
    """The mark of a record."""
    return int(record["step"]), has_evaluation(record)


def has_evaluation(names: Iterable[str]) -> bool:
    """Whether what an evaluation found, or a picture of it, is among these names."""
    return any(name.startswith(("eval/", "media/")) for name in names)
