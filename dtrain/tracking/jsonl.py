"""metrics.jsonl: one JSON object a line, in the order of the steps.

Each line is appended by one write and flushed, so that only the last line can be torn, and only by a crash. The file is
strict JSON, which knows neither NaN nor infinity: both stand there as ``null``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from dtrain.tracking.atomic import replacing
from dtrain.tracking.record import Record


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

    def finish(self, state: str) -> None:
        """Closes the file."""
        self._file.close()


def cut_after(path: Path, step: int) -> int:
    """Drops the records after ``step``, which a resumed run is about to write again.

    Lines that are no record (a torn last one, or what a power cut left) go too. The file is replaced as a whole, and
    not touched when there is nothing to drop.

    Args:
        path: A metrics.jsonl, or nothing yet.
        step: The last step to keep.

    Returns:
        How many lines were dropped.
    """
    if not path.exists():
        return 0
    with path.open("rb") as lines:
        drop = sum(not _is_record_until(line, step) for line in lines)
    if drop:
        with path.open("rb") as lines, replacing(path) as kept:
            kept.writelines(line for line in lines if _is_record_until(line, step))
    return drop


def _is_record_until(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return False
    return isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step
