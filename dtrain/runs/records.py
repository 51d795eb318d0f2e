"""The record of one logged step, and ``metrics.jsonl``, the file of all records.

* A *record* is a flat dict of numbers. Its *mark* is its position in the run.
* ``metrics.jsonl`` has one JSON object per line. Each line is one flushed write, so a crash can tear the last line only.
  JSON has neither NaN nor infinity: both are written as ``null``.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dtrain.files import cut_lines, open_regular, open_to_append

#: Metric names to plain Python numbers, named as in metrics.jsonl. Always has ``step`` (attempted steps, never less
#: than in the record before) and ``time`` (Unix seconds).
Record = Mapping[str, float | int]

#: Step, name and file of a picture or text.
MediaFile = tuple[int, str, Path]

#: Position of a record in a run: its step, and whether it is from the evaluation after that step. Marks ascend, and no two
#: records of a run have the same mark.
Mark = tuple[int, bool]


class Sink(Protocol):
    """A destination of records and media."""

    def log(self, record: Record) -> None:
        """Takes one record."""

    def media(self, step: int, name: str, path: Path) -> None:
        """Takes a picture (``.png``) or a text (``.txt``)."""

    def alert(self, text: str) -> None:
        """Sends a warning that the user should see soon, if the sink can."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Ends with the state and reason that status.json has. No record follows."""


def mark(record: Record) -> Mark:
    """The mark of a record."""
    return int(record["step"]), has_evaluation(record)


def has_evaluation(names: Iterable[str]) -> bool:
    """Whether metrics or media of an evaluation are among these names."""
    return any(name.startswith(("eval/", "media/")) for name in names)


def finite_metrics(record: Record) -> dict[str, float | int]:
    """The finite metrics of a record, for trackers that keep every value of a name and step.

    Of an evaluation these are the ``eval/`` metrics: the record of the step has the others, such as ``epoch``.
    """
    names = [name for name in record if name.startswith("eval/")] or [n for n in record if n not in ("step", "time")]
    return {name: record[name] for name in names if math.isfinite(record[name])}


class JsonlSink:
    """Appends records to a file.

    Args:
        path: The file; created if it does not exist.

    Raises:
        OSError: If the file cannot be written, or is a symbolic link.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)

    def log(self, record: Record) -> None:
        """Appends one record.

        Raises:
            OSError: On a write failure.
            TypeError: If a value is not a plain number.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps(finite).encode() + b"\n")
        self._file.flush()

    def media(self, step: int, name: str, path: Path) -> None:
        """Does nothing: media are files of their own."""

    def alert(self, text: str) -> None:
        """Does nothing: the ranks' logs have it."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Closes the file."""
        self._file.close()


def cut_after(path: Path, last: Mark) -> int:
    """Cuts the records of a metrics.jsonl after the mark ``last``, which a resumed run repeats.

    Lines that are not records (a torn last line, or the result of a power cut) are cut too. All of them go to
    ``cut-metrics.jsonl``, which no reader of the run uses. It has a line for each record that was logged more than once.

    Returns:
        Number of lines cut.
    """
    return cut_lines(path, lambda line: _is_kept(line, last))


def read_records(path: Path) -> Iterator[Record]:
    """The records of a metrics.jsonl, with NaN for ``null``; none if the file does not exist."""
    try:
        lines = open_regular(path)
    except FileNotFoundError:
        return
    with lines:
        for record in map(parse_record, lines):
            if record is not None:
                yield record


def parse_record(line: bytes) -> Record | None:
    """The record in a line of metrics.jsonl, with NaN for ``null``; None if the line is torn or not a record."""
    record = _parsed(line)
    return record and {name: math.nan if value is None else value for name, value in record.items()}


def send_earlier(sink: Sink, metrics: Path, resumed_step: int, media: Sequence[MediaFile]) -> None:
    """Passes the records and media of earlier starts to a sink, in the order of their marks; it drops what it has already.

    Args:
        sink: A sink that was opened now.
        metrics: The run's metrics.jsonl.
        resumed_step: The last step of earlier starts.
        media: The media of earlier starts.
    """
    files = deque(sorted(media))
    for record in read_records(metrics):
        if record["step"] > resumed_step:
            break
        while files and (files[0][0], True) < mark(record):
            sink.media(*files.popleft())
        sink.log(record)
    for file in files:
        sink.media(*file)


def _is_kept(line: bytes, last: Mark) -> bool:
    record = _parsed(line)
    return record is not None and mark(record) <= last


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if the line is torn or not a record."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
