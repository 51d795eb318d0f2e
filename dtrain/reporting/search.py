"""The Optuna searches of ``dtrain.launch``: their trials as a table, and charts of the objective.

A *search* is a directory with a ``search.json`` and the runs of its *trials* in it. ``dtrain.launch`` replaces the file
whenever a trial changes its state, so that reading a search does not need Optuna. The file may come from somebody else: it is
read like all files of a run directory, and no content can raise an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dtrain.reporting.charts import Chart
from dtrain.reporting.style import BAD, GRID, INK, RUN_COLOURS, count_of, format_percent
from dtrain.reporting.sweep import short_names, value_text
from dtrain.reporting.tables import Column
from dtrain.tracking.history import as_float, printable
from dtrain.tracking.run_dir import may_be_read

FILE = "search.json"
#: A stopped trial continues with its search. ``running`` may be the state of one whose search was killed.
STATES = ("finished", "pruned", "failed", "running", "stopped")
_MAX_BYTES = 20_000_000
_MAX_AXES = 8  # of the parallel coordinates
_SIZE = 4.8, 2.7  # inches, as the other charts
_BEST_SHARE = 0.25  # of the finished trials that are highlighted


@dataclass(frozen=True)
class Trial:
    """A trial of a search.

    Attributes:
        number: From 0 on.
        state: One of :data:`STATES`.
        value: The objective; of a pruned trial its last value. NaN without one.
        values: Key to the value that was tried: a number, or a text of the command line.
        run: Directory of its run, relative to that of the search; ``""`` if it was refused.
        reason: Why it failed, or ``""``.
    """

    number: int
    state: str
    value: float
    values: dict[str, float | str]
    run: str
    reason: str


@dataclass(frozen=True, eq=False)
class Search:
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
    def read(cls, path: Path, gaps: list[str]) -> Search | None:
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
            parts.append(f"best: trial {best.number} with {self.metric} {best.value:.6g} at {values}")
        if self.importance:
            shares = ", ".join(f"{key} {format_percent(share)}" for key, share in self.importance.items())
            parts.append(f"share of the variation that each key explains: {shares}")
        return ". ".join(parts)

    @property
    def columns(self) -> list[Column]:
        """The table of the trials."""
        names = short_names(self.space)
        return [
            Column("trial", [str(trial.number) for trial in self.trials]),
            *(
                Column(name, [_text(trial.values.get(key, "")) for trial in self.trials], bool(self._is_number(key)))
                for key, name in names.items()
            ),
            Column(self.metric, ["" if math.isnan(trial.value) else f"{trial.value:.6g}" for trial in self.trials]),
            Column("state", [self._state(trial) for trial in self.trials], False),
            Column("run", [trial.run for trial in self.trials], False),
        ]

    @property
    def charts(self) -> list[Chart]:
        """The objective over the trials, and the values of the trials as parallel coordinates."""
        good = "the best so far: line; pruned: crosses; failed: marks below"
        return [
            Chart("search-objective", f"{self.metric} of each trial", self._drawn(self._draw_trials), good),
            Chart(
                "search-values",
                "Values of the trials",
                self._drawn(self._draw_values),
                f"One line for each finished trial; coloured: the best quarter by {self.metric}.",
            ),
        ]

    def _drawn(self, draw: Callable[[], Figure]) -> Callable[[], Figure] | None:
        return draw if self.best is not None else None

    def _cost(self, trial: Trial) -> float:
        return -trial.value if self.largest else trial.value

    def _state(self, trial: Trial) -> str:
        best = self.best
        mark = ", best" if best is not None and trial.number == best.number else ""
        reason = f": {printable(next(iter(trial.reason.splitlines()), ''))}" if trial.reason else ""
        return f"{trial.state}{mark}{reason}"

    def _is_number(self, key: str) -> bool:
        return all(not isinstance(trial.values.get(key, 0.0), str) for trial in self.trials)

    def _finished(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.state == "finished" and not math.isnan(trial.value)]

    def _draw_trials(self) -> Figure:
        figure = Figure(_SIZE, layout="constrained")
        axes = figure.subplots()
        finished = self._finished()
        numbers, values = [trial.number for trial in finished], [trial.value for trial in finished]
        so_far = (np.maximum if self.largest else np.minimum).accumulate(values)
        axes.plot(numbers, so_far, color=RUN_COLOURS[0], drawstyle="steps-post", linewidth=1.2)
        axes.plot(numbers, values, "o", color=RUN_COLOURS[0], markersize=4)
        pruned = [trial for trial in self.trials if trial.state == "pruned" and not math.isnan(trial.value)]
        axes.plot([t.number for t in pruned], [t.value for t in pruned], "x", color=RUN_COLOURS[1], markersize=5)
        failed = [trial.number for trial in self.trials if trial.state == "failed"]
        # Failed trials have no value; they are marked at the lower edge.
        edge = axes.get_xaxis_transform()
        axes.plot(failed, [0.0] * len(failed), "v", color=BAD, markersize=4, transform=edge, clip_on=False)
        axes.set_xlabel("trial")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color=GRID, alpha=0.5, linewidth=0.5)
        return figure

    def _draw_values(self) -> Figure:
        figure = Figure(_SIZE, layout="constrained")
        axes = figure.subplots()
        trials = sorted(self._finished(), key=self._cost, reverse=True)  # the best lines are drawn last, on top
        keys = list(self.space)[:_MAX_AXES]
        names = short_names(self.space)
        scales = [_Scale.of([trial.values.get(key, "") for trial in trials], "log" in self.space[key]) for key in keys]
        scales.append(_Scale.of([trial.value for trial in trials], False))
        best = max(1, round(_BEST_SHARE * len(trials)))
        for place, trial in enumerate(trials):
            is_best = place >= len(trials) - best
            values = [*(trial.values.get(key, "") for key in keys), trial.value]
            heights = [scale.height(value) for scale, value in zip(scales, values, strict=True)]
            colour = RUN_COLOURS[0] if is_best else GRID
            axes.plot(range(len(heights)), heights, color=colour, linewidth=1.4 if is_best else 0.8)
        for place, scale in enumerate(scales):
            axes.axvline(place, color=INK, linewidth=0.6)
            for height, text in scale.ticks:
                axes.text(place + 0.03, height, printable(text), fontsize=7, va="bottom" if height < 0.5 else "top")
        axes.set_xticks(range(len(scales)), [printable(text) for text in [*(names[key] for key in keys), self.metric]])
        axes.set_yticks([])
        axes.set_xlim(-0.1, len(scales) - 0.6)
        axes.spines["left"].set_visible(False)
        return figure


def read_searches(paths: Sequence[Path], gaps: list[str]) -> list[Search]:
    """The searches in these directories, or right below them."""
    below = [folder for path in paths for folder in [path, *sorted(path.glob(f"*/{FILE}"))]]
    folders = dict.fromkeys(folder.parent if folder.name == FILE else folder for folder in below)
    return [search for folder in folders if (search := Search.read(folder, gaps)) is not None]


@dataclass(frozen=True)
class _Scale:
    """One axis of the parallel coordinates: where values lie between 0 and 1, and the texts beside it."""

    height: Callable[[Any], float]
    ticks: list[tuple[float, str]]

    @classmethod
    def of(cls, values: Sequence[float | str], log: bool) -> _Scale:
        if any(isinstance(value, str) for value in values):
            texts = sorted({_text(value) for value in values})
            step = 1 / max(1, len(texts) - 1)
            places = {text: number * step for number, text in enumerate(texts)}
            return cls(lambda value: places[_text(value)], [(height, text) for text, height in places.items()])
        numbers = [float(value) for value in values]
        low, high = min(numbers), max(numbers)
        scale = math.log if log and low > 0 else float
        span = scale(high) - scale(low) or 1.0
        return cls(lambda value: (scale(value) - scale(low)) / span, [(0.0, f"{low:.3g}"), (1.0, f"{high:.3g}")])


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else value_text(float(f"{value:.4g}"))
