"""What was varied over the runs of a sweep: the keys in which their command lines and configs differ, by short names.

A choice such as ``precision=bf16`` stands for all the keys below ``precision``, which differ with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.tracking.columns import number
from dtrain.tracking.history import ABSENT, History, differences, printable

# Where a run is, how it is started and watched: not what one compares.
_NOT_COMPARED = ("run.name", "run.dir", "launch", "tracker", "hydra")
_MOST = 8  # keys that fit into a table
_LONGEST, _HALF = 60, 29  # characters of a value, and of each end of a longer one


@dataclass(frozen=True, eq=False)
class Setting:
    """A key that differs between runs.

    Attributes:
        key: Dotted.
        name: Its last part, or as many as tell it from the others.
        values: Of each run; ``ABSENT`` where it has none.
    """

    key: str
    name: str
    values: tuple[Any, ...]

    @property
    def is_seed(self) -> bool:
        """Whether it only draws other random numbers."""
        return self.key.rpartition(".")[2].endswith("seed")

    @property
    def numbers(self) -> list[float]:
        """The values as numbers; NaN where one is none."""
        return [_number(value) for value in self.values]

    @property
    def texts(self) -> list[str]:
        """The values as a person reads them; ``""`` where there is none."""
        return [_text(value) for value in self.values]

    @property
    def brief(self) -> list[str]:
        """The texts, of long ones the beginning and the end."""
        return [
            text if len(text) <= _LONGEST else f"{text[:_HALF]}\N{HORIZONTAL ELLIPSIS}{text[-_HALF:]}"
            for text in self.texts
        ]


def varied(runs: Sequence[History]) -> tuple[list[Setting], list[Setting]]:
    """What was varied, and the keys that differ, too, but are more than one reads."""
    rows = _typed(runs)
    derived = {key: tuple(run.config.get(key, ABSENT) for run in runs) for key in _derived(runs, rows)}
    # All of them or none: a few of the many keys that another experiment sets tell nothing.
    shown = (rows | derived) if not rows or len(rows) + len(derived) <= _MOST else rows
    keys = list(shown)[:_MOST]
    names = short_names(keys)
    return (
        [Setting(key, names[key], shown[key]) for key in keys],
        [Setting(key, key, values) for key, values in (rows | derived).items() if key not in keys],
    )


def _typed(runs: Sequence[History]) -> dict[str, tuple[Any, ...]]:
    """Keys of the command lines that differ, with the value of each run."""
    given = [_given(run) for run in runs]
    rows = {
        key: tuple(run.config.get(key, overrides.get(key, ABSENT)) for run, overrides in zip(runs, given, strict=True))
        for key in dict.fromkeys(key for overrides in given for key in overrides)
    }
    return {key: values for key, values in rows.items() if _differ(values, runs)}


def _derived(runs: Sequence[History], typed: Collection[str]) -> list[str]:
    """Keys of the configs that differ, and not because one of ``typed`` does."""
    explained = (*_NOT_COMPARED, *(f"{choice}." for choice in typed))
    keys = differences([run for run in runs if run.config])
    return [key for key in keys if key not in typed and not key.startswith(explained)]


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Key to its last part, or to as many of its last parts as no other key ends with."""
    keys = list(keys)
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
        names[key] = next((end for end in ends if not any(_ends_so(other, end) for other in keys if other != key)), key)
    return names


def _ends_so(key: str, end: str) -> bool:
    return key == end or key.endswith(f".{end}")


def _given(run: History) -> dict[str, str]:
    """The overrides as key to text."""
    pairs = (override.lstrip("+~").partition("=") for override in run.overrides)
    return {key: value.strip("'\"") for key, _, value in pairs if not key.startswith(_NOT_COMPARED)}


def _differ(values: Sequence[Any], runs: Sequence[History]) -> bool:
    known = [value for value, run in zip(values, runs, strict=True) if run.config or run.overrides]
    # 1e-3 of a command line is 0.001 of a config.
    alike = [as_number if math.isfinite(as_number := _number(value)) else value for value in known]
    return any(value != alike[0] for value in alike)


def _number(value: Any) -> float:
    if isinstance(value, str):  # of a run that has not written its config yet; YAML 1.1 also takes 1e-4 as a text
        try:
            value = float(value)
        except ValueError:
            return math.nan
    return number(value)


def _text(value: Any) -> str:
    if value is ABSENT:
        return ""
    if math.isfinite(as_number := _number(value)):
        return f"{as_number:.15g}" if abs(as_number) < 1e15 else f"{as_number:g}"
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except TypeError:  # YAML knows mappings whose keys are dates
        text = str(value)
    return printable(text)
