"""metrics.jsonl: one JSON object a line, in the order of the steps.

Each line is appended by one write and flushed, so that only the last line can be torn, and only by a crash. The file is
strict JSON, which knows neither NaN nor infinity: both stand there as ``null``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.tracking.atomic import replacing
from dtrain.tracking.record import Mark, Record, mark


class JsonlSink:
    """Appends records to a file.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def log(self, record: Record) -> None:
        """Appends one record. Raises OSError if the disk refuses, TypeError if a value is not a plain number."""
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def media(self, step: int, name: str, path: Path) -> None:
        """Does nothing: media are files of their own."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Closes the file."""
        self._file.close()


def cut_after(path: Path, last: Mark) -> int:
    """Drops the records after ``last``, which a resumed run is about to write again.

    Lines that are no record (a torn last one, or what a power cut left) go too. The file is replaced as a whole, and
    not touched when there is nothing to drop.

    Args:
        path: A metrics.jsonl, or nothing yet.
        last: The last mark to keep.

    Returns:
        How many lines were dropped.
    """
    if not path.exists():
        return 0
    with path.open("rb") as lines:
        drop = sum(not _is_kept(line, last) for line in lines)
    if drop:
        with path.open("rb") as lines, replacing(path) as kept:
            kept.writelines(line for line in lines if _is_kept(line, last))
    return drop


def read_records(path: Path) -> Iterator[Record]:
    """The records of a metrics.jsonl, or of nothing yet; what was not finite is NaN."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for record in map(_record, lines):
            if record is not None:
                yield {name: math.nan if value is None else value for name, value in record.items()}


def _is_kept(line: bytes, last: Mark) -> bool:
    record = _record(line)
    return record is not None and mark(record) <= last


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it is torn or none."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
