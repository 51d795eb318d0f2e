"""The Optuna searches of ``dtrain launch``: their trials as a table, and a chart of the objective.

A *search* is a directory with a ``search.json`` and the runs of its *trials* in it. ``dtrain launch`` replaces the file
whenever a trial changes its state, so that reading a search does not need Optuna. The file may come from another user: it is
read like all files of a run directory, and no content can raise an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtrain.errors import printable
from dtrain.report.charts import Chart, Line
from dtrain.report.page import Section
from dtrain.report.style import count_of, format_percent
from dtrain.report.sweep import short_names, value_text
from dtrain.report.tables import Column
from dtrain.runs.history import as_float
from dtrain.runs.run_dir import may_be_read

FILE = "search.json"
#: A stopped trial continues with its search. ``running`` may be the state of one whose search was killed.
STATES = ("finished", "pruned", "failed", "running", "stopped")
_MAX_BYTES = 20_000_000


@dataclass(frozen=True)
class Trial:
    """A trial of a search.

    Attributes:
        number: From 0 on.
        state: One of ``STATES``.
        value: The objective; of a pruned trial its last value. NaN without one.
        values: Key to the value that was tried: a number, or a text of the command line.
        run: Directory of its run, relative to the search's directory; ``""`` if it was refused.
        reason: Why it failed, or ``""``.
    """

    number: int
    state: str
    value: float
    values: dict[str, float | str]
    run: str
    reason: str


@dataclass(frozen=True, eq=False)
class SearchRecord:
    """A search.

    Attributes:
        path: Its directory.
        metric: The objective.
        largest: Whether the largest value is the best.
        space: Key to its range as on the command line, such as ``tag(log,interval(0.0001,0.1))``.
        trials: In the order of their numbers.
        importance: Key to the share of the variation of the objective that it explains; empty if unknown.
    """

    path: Path
    metric: str
    largest: bool
    space: dict[str, str]
    trials: list[Trial]
    importance: dict[str, float]

    @classmethod
    def read(cls, path: Path, gaps: list[str]) -> SearchRecord | None:
        """The search in a directory; None if there is none. Appends a sentence to ``gaps`` if its file is damaged."""
        if not (path / FILE).exists() or not may_be_read(path / FILE, gaps, "", _MAX_BYTES):
            return None
        try:
            content = json.loads((path / FILE).read_text(encoding="utf-8"))
            trials = [
                Trial(
                    int(trial["number"]),
                    str(trial["state"]),
                    as_float(trial["value"]),
                    {
                        str(key): value if as_float(value) == value else str(value)
                        for key, value in trial["values"].items()
                    },
                    str(trial["run"] or ""),
                    str(trial["reason"] or ""),
                )
                for trial in content["trials"]
            ]
            definition = content["definition"]
            return cls(
                path,
                str(definition["metric"]),
                definition["direction"] == "maximize",
                {str(key): str(text) for key, text in definition["space"].items()},
                sorted((trial for trial in trials if trial.state in STATES), key=lambda trial: trial.number),
                {str(key): share for key, value in content["importance"].items() if (share := as_float(value)) >= 0},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            gaps.append(f"{FILE} is damaged ({type(error).__name__}: {error}), so the search is not shown")
            return None

    @property
    def best(self) -> Trial | None:
        """The finished trial with the best objective; None without one."""
        done = [trial for trial in self.trials if trial.state == "finished" and not math.isnan(trial.value)]
        return min(done, key=self._cost, default=None)

    @property
    def title(self) -> str:
        """Such as ``Search of 12 trials, eval/accuracy maximized``."""
        goal = "maximized" if self.largest else "minimized"
        return f"Search of {count_of(len(self.trials), 'trial')}, {self.metric} {goal}"

    @property
    def summary(self) -> str:
        """How many trials have which state, the best one, and which keys matter."""
        counts = {state: sum(trial.state == state for trial in self.trials) for state in STATES}
        parts = [", ".join(f"{count} {state}" for state, count in counts.items() if count)]
        if (best := self.best) is not None:
            values = ", ".join(f"{key}={_text(value)}" for key, value in best.values.items())
            parts.append(f"Best: trial {best.number} with {self.metric} {best.value:.6g} at {values}")
        if self.importance:
            shares = ", ".join(f"{key} {format_percent(share)}" for key, share in self.importance.items())
            parts.append(f"Share of the variation that each key explains: {shares}")
        return ". ".join(parts)

    @property
    def columns(self) -> list[Column]:
        """The table of the trials."""
        names, best = short_names(self.space), self.best
        return [
            Column("trial", [f"{'best ' if trial is best else ''}{trial.number}" for trial in self.trials]),
            *(
                Column(name, [_text(trial.values.get(key, "")) for trial in self.trials], bool(self._is_number(key)))
                for key, name in names.items()
            ),
            Column(self.metric, ["" if math.isnan(trial.value) else f"{trial.value:.6g}" for trial in self.trials]),
            Column("state", [self._state(trial) for trial in self.trials], False),
            Column("run", [trial.run for trial in self.trials], False),
        ]

    @property
    def section(self) -> Section:
        """Its part of the page. The charts over settings, which the page has for all sweeps, show the space."""
        return Section(self.title, f"{self.summary}.", self.columns, [self._chart()])

    def _cost(self, trial: Trial) -> float:
        return -trial.value if self.largest else trial.value

    def _state(self, trial: Trial) -> str:
        reason = f": {printable(next(iter(trial.reason.splitlines()), ''))}" if trial.reason else ""
        return f"{trial.state}{reason}"

    def _is_number(self, key: str) -> bool:
        return all(not isinstance(trial.values.get(key, 0.0), str) for trial in self.trials)

    def _chart(self) -> Chart:
        """The objective of each trial, and the best so far."""

        def points(state: str) -> tuple[np.ndarray, np.ndarray]:
            trials = [trial for trial in self.trials if trial.state == state and not math.isnan(trial.value)]
            return np.array([float(trial.number) for trial in trials]), np.array([trial.value for trial in trials])

        numbers, values = points("finished")
        best = (np.maximum if self.largest else np.minimum).accumulate(values)
        lines = [
            Line("best so far", "soft", numbers, best, style="steps"),
            Line("finished", "ink", numbers, values, style="dots"),
            Line("pruned, last value", "warn", *points("pruned"), style="dots"),
        ]
        shown = tuple(line for line in lines if len(line.x))
        return Chart(
            "search", f"{self.metric} of each trial", "" if shown else "No trial has a result.", shown, x_label="trial"
        )


def read_searches(paths: Sequence[Path], gaps: list[str]) -> list[SearchRecord]:
    """The searches in these directories, or right below them."""
    folders: dict[Path, None] = {}  # a set that keeps the order
    for path in paths:
        folders |= dict.fromkeys([path, *(file.parent for file in sorted(path.glob(f"*/{FILE}")))])
    return [search for folder in folders if (search := SearchRecord.read(folder, gaps)) is not None]


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else value_text(float(f"{value:.4g}"))
