"""What a run directory tells about its run, finished or not, whole or damaged: for reading, never for resuming.

What is missing or cannot be read is a *gap*: a sentence for the reader instead of an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dtrain.tracking.status import read_status

_METRICS, _CONFIG, _OVERRIDES, _STATUS = "metrics.jsonl", "config.yaml", "overrides.yaml", "status.json"


@dataclass(frozen=True, eq=False)
class History:
    """One run.

    Attributes:
        path: Its directory.
        label: What to call it among the others.
        columns: Metric to its steps and values, float64, shape ``[n]`` each; NaN where a value was not finite. The steps of
            all records are the values of ``step``.
        status: status.json; empty without one.
        config: Dotted key to value.
        overrides: The command line that it was started with.
        gaps: What is missing or damaged.
    """

    path: Path
    label: str
    columns: dict[str, tuple[np.ndarray, np.ndarray]]
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
        if not any((path / name).exists() for name in (_METRICS, _CONFIG, _STATUS)):
            raise ValueError(f"{path} holds no run: none of {_METRICS}, {_CONFIG}, {_STATUS} is there.")
        gaps: list[str] = []
        columns = _columns(path / _METRICS, gaps)
        try:
            status = read_status(path)
        except (OSError, ValueError) as error:
            status = {}
            gaps.append(str(error))
        if status is None:
            gaps.append(f"no {_STATUS}: how the run ended is not known")
        config = _mapping(path / _CONFIG, gaps)
        source = _mapping(path / _OVERRIDES, gaps)
        overrides = [str(item) for item in source.get("overrides") or []]
        return cls(path, label, columns, status or {}, _flat(config), overrides, gaps)

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric; empty where the run does not have it."""
        return self.columns.get(name, (np.empty(0), np.empty(0)))

    def names(self, prefix: str) -> list[str]:
        """Metrics whose names begin so, in order of appearance."""
        return [name for name in self.columns if name.startswith(prefix)]


def read_all(paths: Sequence[Path]) -> list[History]:
    """The runs in these directories, each once, with labels that tell them apart.

    Raises:
        ValueError: If one is no run directory.
    """
    unique = list({path.resolve(): path for path in paths}.values())
    names = [path.resolve().name for path in unique]
    return [
        History.read(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(unique, names, strict=True)
    ]


#: Stands in ``differences`` where a run does not have the key.
ABSENT = object()


def differences(runs: Sequence[History]) -> dict[str, list[Any]]:
    """Config keys that are not equal in all runs, sorted, with each run's value or ``ABSENT``; ``run.dir`` is left out."""
    keys = sorted({key for run in runs for key in run.config} - {"run.dir"})
    values = {key: [run.config.get(key, ABSENT) for run in runs] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _columns(path: Path, gaps: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        gaps.append(f"no {_METRICS}: nothing was logged yet")
        return {}
    columns: dict[str, tuple[list[float], list[float]]] = {}
    bad = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not _is_number(record.get("step")):
            bad.append(number)
            continue
        for name, value in record.items():
            if value is None or _is_number(value):
                steps, values = columns.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(math.nan if value is None else value)
    if bad == [len(lines)]:  # a whole file ends with a newline, after which there is nothing
        gaps.append(f"{_METRICS}: the last line is torn, as after a crash; it is left out")
    elif bad:
        gaps.append(f"{_METRICS}: {len(bad)} lines are no records (the first is line {bad[0]}); they are left out")
    elif not columns:
        gaps.append(f"{_METRICS} is empty: nothing was logged yet")
    return {
        name: (np.array(steps, np.float64), np.array(values, np.float64)) for name, (steps, values) in columns.items()
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mapping(path: Path, gaps: list[str]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        gaps.append(f"no {path.name}")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        gaps.append(f"{path.name} is no YAML ({str(error).splitlines()[0]})")
        return {}
    if not isinstance(content, dict):
        gaps.append(f"{path.name} holds no mapping")
        return {}
    return content


def _flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
