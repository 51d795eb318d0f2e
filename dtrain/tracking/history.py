"""What a run directory tells about its run, finished or not, whole or damaged: for reading, never for resuming.

What is missing or cannot be read is a *gap*: a sentence for the reader instead of an error. The directory may be somebody
else's, so nothing in it can make reading fail, or take for ever.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dtrain.tracking.columns import Columns, read_columns
from dtrain.tracking.run_files import may_be_read
from dtrain.tracking.status import read_status

_METRICS, _CONFIG, _OVERRIDES, _STATUS = "metrics.jsonl", "config.yaml", "overrides.yaml", "status.json"
#: What a run may leave that ends, or waits, before it has written anything else.
_BEGUN = (".lock", ".job", "logs/torchrun")
_LARGEST, _DEEPEST_YAML = 200_000, 50  # bytes, levels; a config has a few thousand, and five
_WORTH_PROCESSES = 50_000_000  # bytes of metrics, which one process reads in half a second


@dataclass(frozen=True, eq=False)
class History:
    """One run.

    Attributes:
        path: Its directory.
        label: What to call it among the others.
        columns: Its metrics.
        status: status.json; empty without one.
        config: Dotted key to value.
        overrides: The command line that it was started with.
        gaps: What is missing or damaged.
    """

    path: Path
    label: str
    columns: Columns
    status: dict[str, Any]
    config: dict[str, Any]
    overrides: list[str]
    gaps: list[str]

    @classmethod
    def read(cls, path: Path, label: str) -> History:
        """Reads a run directory.

        Raises:
            ValueError: If there is no such directory, or nothing of a run in it.
        """
        if not path.is_dir():
            raise ValueError(f"{path} is no directory. Name the directory of a run (run.dir).")
        if not is_run(path):
            raise ValueError(f"{path} holds no run: none of {_METRICS}, {_CONFIG}, {_STATUS} is there.")
        gaps: list[str] = []
        columns = read_columns(path / _METRICS, gaps)
        status = _status(path, gaps)
        config = _mapping(path / _CONFIG, gaps)
        source = _mapping(path / _OVERRIDES, gaps).get("overrides")
        overrides = [str(item) for item in source] if isinstance(source, list) else []
        return cls(path, label, columns, status, dict(_flat(config)), overrides, gaps)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, float64, shape ``[n]`` each; empty where the run does not have it."""
        return (self.columns.steps, self.columns.steps) if name == "step" else self.columns.series(name)

    def has(self, name: str) -> bool:
        """Whether any record has the metric."""
        return name in self.columns.values

    def names(self, prefix: str) -> list[str]:
        """Metrics whose names begin so, in order of appearance."""
        return [name for name in self.columns.values if name.startswith(prefix)]

    @property
    def restarts(self) -> np.ndarray:
        """Steps of the first records after a restart, float64, shape ``[restarts that have a record]``."""
        steps, count = self.series("time/restarts")
        return steps[np.diff(count, prepend=0.0) > 0]


def is_run(path: Path) -> bool:
    """Whether a directory is that of a run, even of one that ended before its first step or waits in a queue."""
    return any((path / name).exists() for name in (_METRICS, _CONFIG, _STATUS, *_BEGUN))


def read_all(paths: Sequence[Path]) -> list[History]:
    """The runs in these directories, each once, with labels that tell them apart; long ones in several processes.

    Raises:
        ValueError: If one is no run directory.
    """
    unique = list({path.resolve(): path for path in paths}.values())
    labels = list(map(printable, _labels([path.resolve() for path in unique])))
    processes = min(len(unique), os.cpu_count() or 1)
    if processes > 1 and sum(map(_metrics_size, unique)) > _WORTH_PROCESSES:
        with ProcessPoolExecutor(processes) as pool:
            return list(pool.map(History.read, unique, labels))
    return list(map(History.read, unique, labels))


def printable(text: str) -> str:
    """A text on one line that does nothing to a terminal or a font: question marks for what is no visible sign."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


#: Stands in ``differences`` where a run does not have the key.
ABSENT = object()


def differences(runs: Sequence[History]) -> dict[str, list[Any]]:
    """Config keys that are not equal in all runs, sorted, with each run's value or ``ABSENT``; ``run.dir`` is left out."""
    keys = sorted({key for run in runs for key in run.config} - {"run.dir"})
    values = {key: [run.config.get(key, ABSENT) for run in runs] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _labels(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart: ``run``, or ``a/run`` and ``b/run``."""
    labels: dict[Path, str] = {}
    for parts in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        ends = {path: "/".join(path.parts[-parts:]) for path in paths}
        count = Counter(ends.values())
        labels |= {path: end for path, end in ends.items() if path not in labels and count[end] == 1}
    return [labels[path] for path in paths]


def _metrics_size(path: Path) -> int:
    metrics = path / _METRICS
    return metrics.stat().st_size if metrics.is_file() else 0


def _status(run_dir: Path, gaps: list[str]) -> dict[str, Any]:
    if not may_be_read(run_dir / _STATUS, gaps, f"no {_STATUS}: how the run ended is not known", _LARGEST):
        return {}
    try:
        return read_status(run_dir) or {}
    except (OSError, ValueError, RecursionError) as error:
        gaps.append(f"{_STATUS} cannot be read ({error})")
        return {}


def _mapping(path: Path, gaps: list[str]) -> dict[str, Any]:
    if not may_be_read(path, gaps, f"no {path.name}", _LARGEST):
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        if refused := _refused(text):
            gaps.append(f"{path.name} {refused}, which dtrain does not write; it is left out")
            return {}
        content = yaml.safe_load(text)
    except OSError as error:
        gaps.append(f"{path.name} cannot be read ({error})")
        return {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also not UTF-8, or the 31st of February
        gaps.append(f"{path.name} is no YAML ({next(iter(str(error).splitlines()), '')})")
        return {}
    if not isinstance(content, dict):
        gaps.append(f"{path.name} holds no mapping")
        return {}
    return content


def _refused(text: str) -> str:
    """What in this YAML would keep its reader for ever, or break it; ``""`` if nothing does."""
    depth = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent):  # a few lines of aliases of aliases are a billion values
            return "has YAML aliases"
        if getattr(event, "tag", None) is not None:  # `!!bool maybe` is a KeyError, `!!int ""` an IndexError
            return "has YAML tags"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML:
            return f"is nested more than {_DEEPEST_YAML} levels deep"
    return ""


def _flat(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
