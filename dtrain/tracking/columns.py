"""metrics.jsonl as columns of numbers, for reading runs of a million records.

A *record* is a line that holds a JSON object with a finite ``step``; a *column* is one metric over the records that have it.
Everything else in the file, which may be somebody else's or of another version, is counted and left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dtrain.tracking.run_files import lines, may_be_read

_BLOCK = 2_000  # records that are Python objects at a time: few enough to stay in the processor's caches
_BLOCK_BYTES = 2**24  # where the file is no metrics, and its lines are long
_PLAIN = {int, float, type(None)}
_LARGEST = 1e100  # what is beyond counts as infinite: single precision ends at 1e38, and sums must not overflow


@dataclass(frozen=True, eq=False)
class Columns:
    """The metrics of a run.

    Attributes:
        steps: Step of each record, float64, shape ``[records]``.
        values: Metric to the numbers of its records (int64, ascending) and its values (float64, NaN where one was not
            finite), shape ``[n]`` each.
    """

    steps: np.ndarray = field(default_factory=lambda: np.empty(0))
    values: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, float64, shape ``[n]`` each; empty where the run does not have it."""
        if name not in self.values:
            return np.empty(0), np.empty(0)
        rows, values = self.values[name]
        return self.steps[rows], values

    def together(self, *names: str) -> list[np.ndarray]:
        """Values of several metrics in the records that have all of them, float64, shape ``[n]`` each."""
        if any(name not in self.values for name in names):
            return [np.empty(0) for _ in names]
        common = self.values[names[0]][0]
        for name in names[1:]:
            common = np.intersect1d(common, self.values[name][0], assume_unique=True)
        return [self.values[name][1][np.searchsorted(self.values[name][0], common)] for name in names]


def read_columns(path: Path, gaps: list[str]) -> Columns:
    """Reads a metrics.jsonl.

    Args:
        path: The file; it may be missing, torn, or be written to.
        gaps: Gets a sentence for what is missing or damaged.
    """
    steps: list[np.ndarray] = []
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    bad: list[int] = []
    done, ended, count = 0, True, 0
    if not may_be_read(path, gaps, f"no {path.name}: nothing was logged yet"):
        return Columns()
    try:
        with path.open("rb") as file:
            for block in _blocks(file):
                records = []
                for number, line in enumerate(block, done + 1):
                    record = _record(line)
                    if record is not None:
                        records.append(record)
                    elif line.strip():
                        bad.append(number)
                for name, rows, values in _columns(records):
                    parts.setdefault(name, []).append((rows + count, values))
                steps.append(np.array([record["step"] for record in records], np.float64))
                done, count, ended = done + len(block), count + len(records), block[-1].endswith(b"\n")
    except OSError as error:
        gaps.append(f"{path.name} cannot be read ({error})")
        return Columns()
    if bad == [done] and not ended:
        gaps.append(f"{path.name}: the last line is torn, as after a crash; it is left out")
    elif bad:
        gaps.append(f"{path.name}: {len(bad)} lines are no records (the first is line {bad[0]}); they are left out")
    elif not count:
        gaps.append(f"{path.name} is empty: nothing was logged yet")
    return Columns(np.concatenate([np.empty(0), *steps]), _joined(parts))


def number(value: object) -> float:
    """A value that may be anything as float; NaN if it is no finite number, or one beyond all measure."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value) if abs(value) <= _LARGEST else math.nan
    except OverflowError:  # an integer that no float can hold
        return math.nan


def _blocks(file: BinaryIO) -> Iterator[list[bytes]]:
    block: list[bytes] = []
    nbytes = 0
    for line in lines(file):
        block.append(line)
        nbytes += len(line)
        if len(block) == _BLOCK or nbytes > _BLOCK_BYTES:
            yield block
            block, nbytes = [], 0
    if block:
        yield block


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and math.isfinite(number(record.get("step"))) else None


def _columns(records: Sequence[dict[str, Any]]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(metric, rows, values) of a block of records, a metric possibly several times."""
    # Records come in a few kinds, of which each is one table: ten times as fast as value by value.
    kinds: dict[tuple[str, ...], list[int]] = {}
    for row, record in enumerate(records):
        kinds.setdefault(tuple(record), []).append(row)
    for names, numbers in kinds.items():
        rows = np.array(numbers)
        table = [list(records[row].values()) for row in numbers]
        if set(map(type, chain.from_iterable(table))) <= _PLAIN:
            values = _table(table)
            yield from ((name, rows, values[:, column]) for column, name in enumerate(names))
            continue
        for column, name in enumerate(names):
            of_number = [_is_number(line[column]) for line in table]
            if any(of_number):
                yield name, rows[of_number], np.array([number(line[column]) for line in table])[of_number]


def _table(lines: list[list[Any]]) -> np.ndarray:
    try:
        return np.array(lines, np.float64)
    except OverflowError:  # an integer that no float can hold
        return np.array([[number(value) for value in line] for line in lines])


def _joined(parts: Mapping[str, list[tuple[np.ndarray, np.ndarray]]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    shared: dict[bytes, np.ndarray] = {}  # most metrics are in the same records
    joined = {}
    for name, blocks in parts.items():
        rows, values = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        joined[name] = (
            shared.setdefault(rows.tobytes(), rows),
            np.where(np.abs(values) <= _LARGEST, values, np.nan)[order],
        )
    return joined


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
