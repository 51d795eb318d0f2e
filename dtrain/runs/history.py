"""Reads run directories for display: metrics, status and config of finished, running and damaged runs.

* A *record* is a line of metrics.jsonl that holds a JSON object with a finite ``step``.
* A *column* is one metric over the records that have it, as arrays.
* A *gap* is a sentence about a missing or damaged file, instead of an error.

A run directory may belong to another user. Only regular files of a plausible size are read, YAML is limited to what dtrain
writes, and no content can raise an error. Nothing here is used to resume a run.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dtrain.errors import printable
from dtrain.files import parse_yaml
from dtrain.runs.run_dir import NUMBERS, bounded_lines, may_be_read, read_status

#: The value in ``differences`` of a run that does not have the key.
ABSENT = object()

_METRICS, _CONFIG, _OVERRIDES, _STATUS = "metrics.jsonl", "config.yaml", "overrides.yaml", "status.json"
_FIRST_FILES = (".lock", ".job", "logs/torchrun")  # a queued run, or one that failed early, has nothing else
_DIRECTORY_DEPTH = 4  # levels searched for runs, as in sweeps/lr=0.1/seed=2
_MAX_BYTES = 200_000  # a config of dtrain has a few thousand bytes
_PARALLEL_BYTES = 50_000_000  # of metrics.jsonl; one process reads this many in half a second
_BLOCK = 2_000  # records parsed at a time: few enough to stay in the processor's caches
_BLOCK_BYTES = 2**24  # limits a block where the lines are long
_MAX_ABS = 1e100  # larger values count as not finite: float32 ends at 1e38, and sums must not overflow
_PLAIN_TYPES = {int, float, type(None)}


def run_directories(paths: Sequence[Path]) -> list[Path]:
    """Replaces each directory that is not a run by the runs below it.

    Args:
        paths: Run directories, or directories with runs up to four levels below them.

    Returns:
        Run directories, in the order of ``paths``.

    Raises:
        ValueError: If a path is not a directory, or there is no run in it or below it.
    """
    return [directory for path in paths for directory in _runs_of(path)]


def read_all(paths: Sequence[Path], places: Mapping[Path, str] | None = None) -> list[History]:
    """Reads run directories, each once, with unique labels. Large ones are read in several processes.

    Args:
        paths: Run directories.
        places: Path to what is shown for it, the URL of those that were fetched from a mirror.

    Raises:
        ValueError: If a path is not a run directory.
    """
    unique = list({path.resolve(): path for path in paths}.values())
    labels = list(map(printable, _labels([path.resolve() for path in unique])))
    processes = min(len(unique), os.cpu_count() or 1)
    if processes > 1 and sum(map(_metrics_size, unique)) > _PARALLEL_BYTES:
        with ProcessPoolExecutor(processes) as pool:
            runs = list(pool.map(History.read, unique, labels))
    else:
        runs = list(map(History.read, unique, labels))
    urls = {path: url for path, url in (places or {}).items() if str(path) != url}
    return [replace(run, place=urls.get(run.path, str(run.path.resolve()))) for run in runs]


@dataclass(frozen=True, eq=False)
class History:
    """One run.

    Attributes:
        path: Run directory.
        label: Name of the run among the others.
        columns: Metrics.
        status: Content of status.json; empty if it is missing or damaged.
        config: Dotted key to value.
        overrides: Command line of the first start.
        gaps: Sentences about what is missing or damaged.
        place: Where the run is: its directory, or the URL of its mirror.

    Example:
        ``History.read(Path("runs/digits"), "digits").last("eval/accuracy")``
    """

    path: Path
    label: str
    columns: Columns
    status: dict[str, Any]
    config: dict[str, Any]
    overrides: list[str]
    gaps: list[str]
    place: str = ""

    @classmethod
    def read(cls, path: Path, label: str) -> History:
        """Reads a run directory.

        Raises:
            ValueError: If ``path`` is not a directory, or has no file of a run.
        """
        if not path.is_dir():
            raise ValueError(f"{path} is not a directory. Name the directory of a run (run.dir).")
        if not is_run(path):
            raise ValueError(f"{path} holds no run: none of {_METRICS}, {_CONFIG}, {_STATUS} exists.")
        gaps: list[str] = []
        columns = read_columns(path / _METRICS, gaps)
        status = _read_status(path, gaps)
        config = _read_yaml(path / _CONFIG, gaps)
        overrides = _read_yaml(path / _OVERRIDES, gaps).get("overrides")
        command = [str(item) for item in overrides] if isinstance(overrides, list) else []
        return cls(path, label, columns, status, dict(flatten(config)), command, gaps)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, float64, shape ``[n]`` each; empty if the run does not have it."""
        return (self.columns.steps, self.columns.steps) if name == "step" else self.columns.series(name)

    def last(self, name: str) -> float:
        """Last value of a metric; NaN if there is none or it was not finite."""
        values = self.series(name)[1]
        return float(values[-1]) if len(values) else math.nan

    def has(self, name: str) -> bool:
        """Whether any record has the metric."""
        return name in self.columns.values

    def names(self, prefix: str) -> list[str]:
        """Metrics whose names start with ``prefix``, in order of appearance."""
        return [name for name in self.columns.values if name.startswith(prefix)]

    @property
    def restarts(self) -> np.ndarray:
        """Step of the first record after each restart, float64, shape ``[n]``."""
        steps, count = self.series("time/restarts")
        return steps[np.diff(count, prepend=0.0) > 0]


def is_run(path: Path) -> bool:
    """Whether a directory is a run directory, also of a queued run or one that failed before its first step."""
    # os.path.exists: False where the folder may not be searched.
    return any(os.path.exists(path / name) for name in (_METRICS, _CONFIG, _STATUS, *_FIRST_FILES))


def differences(runs: Sequence[History]) -> dict[str, list[Any]]:
    """Config keys that differ between runs, except ``run.dir``, sorted, with each run's value or ``ABSENT``."""
    keys = sorted({key for run in runs for key in run.config} - {"run.dir"})
    values = {key: [run.config.get(key, ABSENT) for run in runs] for key in keys}
    # An empty list, such as train.hooks, does not differ from its absence in a run of a different version.
    compared = {key: [ABSENT if value in ([], {}) else value for value in row] for key, row in values.items()}
    return {key: row for key, row in values.items() if any(value != compared[key][0] for value in compared[key])}


def flatten(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each leaf of nested mappings; an empty mapping is a leaf."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True, eq=False)
class Columns:
    """The metrics of a run.

    Attributes:
        steps: Step of each record, float64, shape ``[records]``.
        values: Metric to the indices of its records (int64, ascending, shape ``[n]``) and its values (float64, shape
            ``[n]``, NaN for values that were not finite).
    """

    steps: np.ndarray = field(default_factory=lambda: np.empty(0))
    values: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, float64, shape ``[n]`` each; empty if the run does not have it."""
        if name not in self.values:
            return np.empty(0), np.empty(0)
        rows, values = self.values[name]
        return self.steps[rows], values

    def in_common(self, *names: str) -> list[np.ndarray]:
        """Values of several metrics in the records that have all of them, float64, shape ``[n]`` each."""
        if any(name not in self.values for name in names):
            return [np.empty(0) for _ in names]
        common = self.values[names[0]][0]
        for name in names[1:]:
            common = np.intersect1d(common, self.values[name][0], assume_unique=True)
        return [self.values[name][1][np.searchsorted(self.values[name][0], common)] for name in names]


def read_columns(path: Path, gaps: list[str]) -> Columns:
    """Reads a metrics.jsonl. Lines that are not records are counted and left out.

    Args:
        path: The file. It may be missing, truncated, or still being written.
        gaps: Receives a sentence about what is missing or damaged.
    """
    steps: list[np.ndarray] = []
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    bad: list[int] = []
    line_count, record_count, complete = 0, 0, True
    if not may_be_read(path, gaps, f"no {path.name}: nothing was logged yet"):
        return Columns()
    try:
        with path.open("rb") as file:
            for block in _blocks(file):
                records = []
                for number, line in enumerate(block, line_count + 1):
                    record = _parse_record(line)
                    if record is not None:
                        records.append(record)
                    elif line.strip():
                        bad.append(number)
                for name, rows, values in _columns_of(records):
                    parts.setdefault(name, []).append((rows + record_count, values))
                steps.append(np.array([record["step"] for record in records], np.float64))
                line_count, record_count = line_count + len(block), record_count + len(records)
                complete = block[-1].endswith(b"\n")
    except OSError as error:
        gaps.append(f"{path.name} cannot be read ({error})")
        return Columns()
    if bad == [line_count] and not complete:
        gaps.append(f"{path.name}: the last line is incomplete, as after a crash; it is left out")
    elif bad:
        gaps.append(f"{path.name}: lines that are not records are left out: {len(bad)}, the first is line {bad[0]}")
    elif not record_count:
        gaps.append(f"{path.name} is empty: nothing was logged yet")
    return Columns(np.concatenate([np.empty(0), *steps]), _concatenate(parts))


def as_float(value: object) -> float:
    """A value of any type as a float; NaN if it is not a finite number, or beyond 1e100."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value) if abs(value) <= _MAX_ABS else math.nan
    except OverflowError:  # an integer that no float can hold
        return math.nan


def _blocks(file: BinaryIO) -> Iterator[list[bytes]]:
    block: list[bytes] = []
    nbytes = 0
    for line in bounded_lines(file):
        block.append(line)
        nbytes += len(line)
        if len(block) == _BLOCK or nbytes > _BLOCK_BYTES:
            yield block
            block, nbytes = [], 0
    if block:
        yield block


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and math.isfinite(as_float(record.get("step"))) else None


def _columns_of(records: Sequence[dict[str, Any]]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(metric, rows, values) of a block of records; a metric may come several times."""
    # Records with the same keys form one table, which numpy converts ten times as fast as single values.
    rows_of_keys: dict[tuple[str, ...], list[int]] = {}
    for row, record in enumerate(records):
        rows_of_keys.setdefault(tuple(record), []).append(row)
    for names, numbers in rows_of_keys.items():
        rows = np.array(numbers)
        table = [list(records[row].values()) for row in numbers]
        if set(map(type, chain.from_iterable(table))) <= _PLAIN_TYPES:
            values = _as_array(table)
            yield from ((name, rows, values[:, column]) for column, name in enumerate(names))
            continue
        for column, name in enumerate(names):
            numeric = [_is_number(line[column]) for line in table]
            if any(numeric):
                yield name, rows[numeric], np.array([as_float(line[column]) for line in table])[numeric]


def _as_array(table: list[list[Any]]) -> np.ndarray:
    try:
        return np.array(table, np.float64)
    except OverflowError:  # an integer that no float can hold
        return np.array([[as_float(value) for value in line] for line in table])


def _concatenate(parts: Mapping[str, list[tuple[np.ndarray, np.ndarray]]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    shared: dict[bytes, np.ndarray] = {}  # most metrics are in the same records, so their row arrays are equal
    joined = {}
    for name, blocks in parts.items():
        rows, values = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        order = np.argsort(rows, kind="stable")
        rows, values = rows[order], values[order]
        joined[name] = shared.setdefault(rows.tobytes(), rows), np.where(np.abs(values) <= _MAX_ABS, values, np.nan)
    return joined


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _runs_of(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory. Name the directory of a run (run.dir), or one that holds runs.")
    if found := [path] if is_run(path) else list(_runs_below(path, _DIRECTORY_DEPTH)):
        return found
    raise ValueError(
        f"{path} holds no run, in it or up to {_DIRECTORY_DEPTH} levels below it: no {_CONFIG}, {_METRICS} or {_STATUS}. "
        "Name the directory of a run (run.dir), or one that holds runs."
    )


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if depth == 0:
        return
    for path in sorted(folder.glob("[!.]*")):
        if not _may_be_searched(path):
            continue
        if is_run(path):
            yield path  # folders below a run belong to that run
        else:
            yield from _runs_below(path, depth - 1)


def _may_be_searched(path: Path) -> bool:
    # Links are not followed: they may lead in a circle, or to the same runs again.
    try:
        return not path.is_symlink() and path.is_dir() and os.access(path, os.R_OK | os.X_OK)
    except OSError:  # a file server that does not answer, or /proc
        return False


def _labels(paths: Sequence[Path]) -> list[str]:
    """The shortest unique end of each path: ``run``, or ``a/run`` and ``b/run``."""
    labels: dict[Path, str] = {}
    for parts in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        ends = {path: "/".join(path.parts[-parts:]) for path in paths}
        count = Counter(ends.values())
        labels |= {path: end for path, end in ends.items() if path not in labels and count[end] == 1}
    return [labels[path] for path in paths]


def _metrics_size(path: Path) -> int:
    metrics = path / _METRICS
    return metrics.stat().st_size if metrics.is_file() else 0


def _read_status(run_dir: Path, gaps: list[str]) -> dict[str, Any]:
    if not may_be_read(run_dir / _STATUS, gaps, f"no {_STATUS}: the state of the run is unknown", _MAX_BYTES):
        return {}
    try:
        status = read_status(run_dir) or {}
    except (OSError, ValueError, RecursionError) as error:
        gaps.append(f"{_STATUS} cannot be read ({error})")
        return {}
    wrong = [name for name in NUMBERS if status.get(name) is not None and not as_float(status[name]) >= 0]
    if wrong:
        gaps.append(f"{_STATUS}: entries that are not numbers of at least 0 are left out: {', '.join(wrong)}")
    return {name: value for name, value in status.items() if name not in wrong}


def _read_yaml(path: Path, gaps: list[str]) -> dict[str, Any]:
    if not may_be_read(path, gaps, f"no {path.name}", _MAX_BYTES):
        return {}
    try:
        content = parse_yaml(path.read_bytes())
    except OSError as error:
        gaps.append(f"{path.name} cannot be read ({error})")
        return {}
    except ValueError as error:
        gaps.append(f"{path.name} {error}; it is left out")
        return {}
    if not isinstance(content, dict):
        gaps.append(f"{path.name} holds no mapping")
        return {}
    return content
