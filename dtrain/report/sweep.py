"""Compares several runs: settings that differ, ranking, and results over seeds.

* A *sweep* is a list of runs that were measured on the same data, so that their results can be compared and ranked.
* A *setting* is a config key that differs between runs. A group choice such as ``precision=bf16`` stands for all keys that it
  sets.
* The *goal* is the metric that ranks the runs, and whether larger is better.
* A *seed group* is a group of runs that differ only in keys that end in ``seed``.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dtrain.config.directions import direction
from dtrain.errors import printable
from dtrain.report.health import run_state
from dtrain.report.style import join_some, shorten
from dtrain.runs.history import ABSENT, History, as_float, differences

_MAX_SHOWN = 8  # runs that a chart can show
_USUAL_GOALS = ("eval/accuracy", "eval/loss", "train/loss")
_NOT_COMPARED = ("run.name", "run.dir", "launch", "tracker", "hydra")  # they do not change the result
_MAX_SETTINGS = 8  # columns that fit into a table
_MAX_TEXT, _HALF_TEXT = 32, 15  # characters of a value, and of each end of a longer one
_MAX_LABEL = 60  # characters
# Directories that dtrain names, such as ``digits-1a2b3c4d``.
_GENERATED_NAME = re.compile(r"-[0-9a-f]{8}$")


@dataclass(frozen=True, eq=False)
class Sweep:
    """Runs to compare.

    Attributes:
        runs: All runs, the best one first, those without a result last. In a sweep their labels are what was varied.
        names: Name of each run's directory, in the order of ``runs``.
        goal: Metric that ranks them; None if no run has logged a suitable one.
        settings: Settings of the table; their values are in the order of ``runs``.
        more_settings: Settings that do not fit into the table.
        shown: Runs with curves and details: all of them or a selection, in the order of ``runs``.
        selection: Sentence about this selection; ``""`` if all are shown.
    """

    runs: list[History]
    names: list[str]
    goal: Goal | None
    settings: list[Setting]
    more_settings: list[Setting]
    shown: list[History]
    selection: str

    @classmethod
    def from_runs(
        cls, runs: Sequence[History], labels: Mapping[Path, str] | None = None, most: int = _MAX_SHOWN
    ) -> Sweep:
        """Ranks at least one run.

        Args:
            runs: Runs with results that can be compared.
            labels: Run directory to the label; None: as ``labels_of`` makes them for these runs.
            most: Largest number of runs with curves and details.
        """
        goal = Goal.from_runs(runs)
        ranked = sorted(runs, key=lambda run: goal.cost(run) if goal else 0.0)
        settings, more = varied_settings(ranked)
        names = [run.label for run in ranked]
        labels = labels_of(ranked) if labels is None else labels
        ranked = [replace(run, label=labels[run.path]) for run in ranked]
        shown, which = _select(ranked, goal, most)
        selection = f"Curves and details are shown for {len(shown)} of {len(runs)} runs: {which}." if which else ""
        return cls(ranked, names, goal, settings, more, shown, selection)

    @property
    def is_ranked(self) -> bool:
        """Whether its first run is better than others."""
        return self.goal is not None and len(self.runs) > 1


@dataclass(frozen=True, eq=False)
class Comparison:
    """All runs of a report.

    Attributes:
        sweeps: Runs that were measured on the same data, the sweep with the most runs first; at least one.
        headings: What the data of each sweep are; ``""`` if there is only one.
    """

    sweeps: list[Sweep]
    headings: list[str]

    #: Said on the page and on the terminal if there are several sweeps.
    REASON: ClassVar[str] = (
        "These runs were measured on different data. Only results on the same data can be compared, so each group is ranked by "
        "itself."
    )

    @classmethod
    def from_runs(cls, runs: Sequence[History]) -> Comparison:
        """Groups at least one run by data, and ranks each group."""
        groups = runs_by_data(runs)
        labels = labels_of(runs)  # for all of them together, so that a chart with all runs has no label twice
        sweeps: list[Sweep] = []
        left = _MAX_SHOWN
        for place, (_, group) in reversed(list(enumerate(groups))):  # small groups leave room for the large ones
            sweeps.insert(0, Sweep.from_runs(group, labels, max(1, left // (place + 1))))
            left -= len(sweeps[0].shown)
        return cls(sweeps, [name if len(groups) > 1 else "" for name, _ in groups])

    @property
    def runs(self) -> list[History]:
        """All runs, sweep by sweep."""
        return [run for sweep in self.sweeps for run in sweep.runs]

    @property
    def shown(self) -> list[History]:
        """Runs with curves and details, sweep by sweep."""
        return [run for sweep in self.sweeps for run in sweep.shown]


@dataclass(frozen=True)
class Goal:
    """A metric to rank runs by.

    Attributes:
        metric: Its name.
        largest: Whether the largest value is the best.
    """

    metric: str
    largest: bool

    @classmethod
    def configured(cls, run: History) -> Goal | None:
        """The metric of the run's best checkpoint (``checkpoint.best``); None if it or its direction is not known."""
        metric = run.config.get("checkpoint.best")
        return cls.of(run, metric) if isinstance(metric, str) else None

    @classmethod
    def of(cls, run: History, metric: str) -> Goal | None:
        """A metric with its direction: ``checkpoint.best_mode`` for the best checkpoint's, else by name; None if unknown."""
        is_configured = metric == run.config.get("checkpoint.best")
        mode = (run.config.get("checkpoint.best_mode") if is_configured else None) or direction(metric)
        return cls(metric, mode == "max") if mode in ("max", "min") else None

    @classmethod
    def from_runs(cls, runs: Sequence[History]) -> Goal | None:
        """The configured goal if all runs agree, else the first usual metric that a run has; None if there is none."""
        configured = {goal for run in runs if (goal := cls.configured(run)) and goal.best(run)}
        if len(configured) == 1:
            return configured.pop()
        usual = (cls(metric, direction(metric) == "max") for metric in _USUAL_GOALS)
        return next((goal for goal in usual if any(goal.best(run) for run in runs)), None)

    @property
    def which(self) -> str:
        """``largest`` or ``smallest``: the value that is the best."""
        return "largest" if self.largest else "smallest"

    def best(self, run: History) -> tuple[float, float] | None:
        """The best value and its step, the latest of equal values as for the best checkpoint; None without a finite value."""
        steps, values = run.series(self.metric)
        if not np.isfinite(values).any():
            return None
        best = np.nanmax(values) if self.largest else np.nanmin(values)
        return float(best), float(steps[values == best].max())

    def cost(self, run: History) -> float:
        """The best value with the sign that makes smaller better; infinite without one."""
        best = self.best(run)
        return math.inf if best is None else (-best[0] if self.largest else best[0])


@dataclass(frozen=True, eq=False)
class Setting:
    """A key that differs between runs.

    Attributes:
        key: Dotted key.
        name: Shortest end of the key that no other setting shares.
        values: Value of each run; ``ABSENT`` where it has none.
    """

    key: str
    name: str
    values: tuple[Any, ...]

    @property
    def is_seed(self) -> bool:
        """Whether it only changes random numbers."""
        return self.key.rpartition(".")[2].endswith("seed")

    @property
    def numbers(self) -> list[float]:
        """The values as numbers; NaN for other values."""
        return [_as_number(value) for value in self.values]

    @property
    def texts(self) -> list[str]:
        """The values as texts; ``""`` for ``ABSENT``."""
        return ["" if value is ABSENT else value_text(value) for value in self.values]

    @property
    def short_texts(self) -> list[str]:
        """The texts, each cut in the middle if it is long; fractions with four significant digits."""
        texts = [
            f"{number:.4g}" if number % 1 > 0 else text for number, text in zip(self.numbers, self.texts, strict=True)
        ]
        return [
            text if len(text) <= _MAX_TEXT else f"{text[:_HALF_TEXT]}\N{HORIZONTAL ELLIPSIS}{text[-_HALF_TEXT:]}"
            for text in texts
        ]


@dataclass(frozen=True, eq=False)
class SeedGroup:
    """Runs that differ in their seeds only.

    Attributes:
        values: Their values of the settings of the table that are not seeds, as short texts.
        runs: Number of runs.
        best: Best result of each finished run, float64, shape ``[finished]``.
        last: Last result of each finished run, float64, shape ``[finished]``.
    """

    values: tuple[str, ...]
    runs: int
    best: np.ndarray
    last: np.ndarray


def runs_by_data(runs: Sequence[History]) -> list[tuple[str, list[History]]]:
    """Groups of runs that were measured on the same data, each with a name of the data; the largest group first.

    A run with evaluations is measured on the data of its evaluation, whatever it trains on; a run without, on its training
    data. Shards with equal fingerprints in status.json are the same data, wherever they lie. Runs whose data are not known,
    such as queued ones, are in the first group.
    """
    measured = [_measured_on(run) for run in runs]
    prints = {config: found for config, found in measured if found}  # also for runs that have not begun to train
    groups: dict[tuple[str, str], list[History]] = {}
    names: dict[tuple[str, str], str] = {}
    unknown = []
    for run, (config, found) in zip(runs, measured, strict=True):
        if not config and not found:
            unknown.append(run)
            continue
        found = found or prints.get(config, "")
        # The fingerprint of a dataset that code makes may not depend on the arguments.
        key = (found, config if not found or "_target_" in config else "")
        groups.setdefault(key, []).append(run)
        names.setdefault(key, _data_name(config))
    count = Counter(names.values())
    for key, name in names.items():
        if key[0] and (count[name] > 1 or not name):
            names[key] = f"{name} fingerprint {key[0]}".strip()
    ranked = sorted(groups, key=lambda key: -len(groups[key]))
    found_groups = [(names[key], groups[key]) for key in ranked] or [("", [])]
    found_groups[0][1].extend(unknown)
    return found_groups


def labels_of(runs: Sequence[History]) -> dict[Path, str]:
    """Run directory to label: of one that dtrain has named what was varied, if that is unique and short; else the name."""
    settings, _ = varied_settings(runs)
    texts = zip(*(setting.short_texts for setting in settings), strict=True)
    names = [setting.name for setting in settings]
    varied = [" ".join(f"{name}={text}" for name, text in zip(names, row, strict=True) if text) for row in texts]
    return {
        run.path: label
        if _GENERATED_NAME.search(run.label) and varied.count(label) == 1 and 0 < len(label) <= _MAX_LABEL
        else run.label
        for run, label in zip(runs, varied or [""] * len(runs), strict=True)
    }


def varied_settings(runs: Sequence[History]) -> tuple[list[Setting], list[Setting]]:
    """The keys in which command lines and configs differ: those that fit into a table, and the others."""
    overridden = _overridden(runs)
    # Keys of the configs, except those that a differing group choice sets.
    ignored = (*_NOT_COMPARED, *(f"{choice}." for choice in overridden))
    derived = {
        key: tuple(run.config.get(key, ABSENT) for run in runs)
        for key in differences([run for run in runs if run.config])
        if key not in overridden and not key.startswith(ignored)
    }
    differing = overridden | derived
    # All derived keys or none: some of the many keys that a different experiment sets would be arbitrary ones.
    keys = list(overridden if overridden and len(differing) > _MAX_SETTINGS else differing)[:_MAX_SETTINGS]
    names = short_names(keys)
    return (
        [Setting(key, names[key], differing[key]) for key in keys],
        [Setting(key, key, values) for key, values in differing.items() if key not in keys],
    )


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Each dotted key with its shortest end that no other key has; ``_target_`` and ``best`` are named with their parents."""
    keys = list(keys)
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1 + (parts[-1] in ("_target_", "best")), len(parts)))
        others = [f".{other}" for other in keys if other != key]
        names[key] = next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key)
    return names


def seed_groups(sweep: Sweep) -> list[SeedGroup]:
    """The groups of at least two runs that differ in their seeds only, the best mean first; empty without a goal.

    Runs that are not finished or have no finite result count in ``runs`` but not in the results.
    """
    settings = [*sweep.settings, *sweep.more_settings]
    others = [setting.texts for setting in settings if not setting.is_seed]
    if sweep.goal is None or len(others) == len(settings):
        return []
    places: dict[tuple[str, ...], list[int]] = {}
    for place, run in enumerate(sweep.runs):
        if run.config or run.overrides:  # without them its settings are unknown
            places.setdefault(tuple(texts[place] for texts in others), []).append(place)
    shown = [setting.short_texts for setting in sweep.settings if not setting.is_seed]
    found = []
    for group in (group for group in places.values() if len(group) > 1):
        finished = [run for run in (sweep.runs[place] for place in group) if run_state(run) == "finished"]
        results = [(best[0], run.last(sweep.goal.metric)) for run in finished if (best := sweep.goal.best(run))]
        table = np.array(results, np.float64).reshape(-1, 2)
        values = tuple(texts[group[0]] for texts in shown)
        found.append(SeedGroup(values, len(group), table[:, 0], table[:, 1]))
    sign = -1.0 if sweep.goal.largest else 1.0
    return sorted(found, key=lambda group: sign * float(group.best.mean()) if len(group.best) else math.inf)


def value_text(value: Any) -> str:
    """A config value on one line: numbers without trailing zeros, texts unchanged, everything else as JSON."""
    if math.isfinite(number := _as_number(value)):
        return f"{number:.15g}" if abs(number) < 1e15 else f"{number:g}"
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except TypeError:  # YAML allows mappings whose keys are dates
        text = str(value)
    return printable(text)


def _measured_on(run: History) -> tuple[str, str]:
    """The keys of a run's config that name the data of its results, as JSON, and their fingerprint; each ``""`` if unknown."""
    config = {key: value for key, value in run.config.items() if key.startswith("data.") and value is not None}
    split = "eval" if any(f"{key}.".startswith("data.eval.") for key in config) or run.names("eval/") else "train"
    of_split = ("data.eval.",) if split == "eval" else ("data.train.", "data.mixture.")
    config = {key: value for key, value in config.items() if f"{key}.".startswith(of_split) and value != {}}
    prints = run.status.get("data")
    found = prints.get(split) if isinstance(prints, dict) else None
    return json.dumps(config, default=str) if config else "", found if isinstance(found, str) else ""


def _data_name(config: str) -> str:
    """Such as ``digits/test-*.tar``: the ends of paths, and the names of classes and functions."""
    parts: list[str] = []
    for key, value in json.loads(config or "{}").items():
        if key.endswith("._target_"):
            parts.append(str(value).rpartition(".")[2])
        elif "_target_" not in config:
            parts += ["/".join(str(path).split("/")[-2:]) for path in (value if isinstance(value, list) else [value])]
    return shorten(join_some(list(dict.fromkeys(parts))), _MAX_LABEL)


def _select(ranked: list[History], goal: Goal | None, most: int) -> tuple[list[History], str]:
    """The runs to show in detail, at most so many, and a description of them; ``""`` for all."""
    if len(ranked) <= most:
        return ranked, ""
    results = [run for run in ranked if goal is not None and goal.best(run) is not None]
    best = most - 3
    if goal is None or best < 1 or len(results) <= best + 2:
        few = max(1, most - 1)
        return ranked[:few], "the first of the table" if few == 1 else f"the first {few} of the table"
    middle = results[(best + len(results)) // 2]
    which = f"the {best} best, the middle one and the last one by {goal.metric}"
    return [*results[:best], middle, results[-1]], which


def _overridden(runs: Sequence[History]) -> dict[str, tuple[Any, ...]]:
    """Keys of the command lines that differ, with the value of each run."""
    commands = [_overrides(run) for run in runs]
    rows = {
        # A run without a choice such as precision=bf16 has the default one, whose name is in its config.
        key: tuple(
            run.config.get(key, command.get(key, run.config.get(f"{key}.name", ABSENT)))
            for run, command in zip(runs, commands, strict=True)
        )
        for key in dict.fromkeys(key for command in commands for key in command)
    }
    return {key: values for key, values in rows.items() if _differ(values, runs)}


def _overrides(run: History) -> dict[str, str]:
    pairs = (override.lstrip("+~").partition("=") for override in run.overrides)
    return {key: value.strip("'\"") for key, _, value in pairs if not key.startswith(_NOT_COMPARED)}


def _differ(values: Sequence[Any], runs: Sequence[History]) -> bool:
    known = [value for value, run in zip(values, runs, strict=True) if run.config or run.overrides]
    # 1e-3 of a command line equals 0.001 of a config.
    comparable = [number if math.isfinite(number := _as_number(value)) else value for value in known]
    return any(value != comparable[0] for value in comparable)


def _as_number(value: Any) -> float:
    if isinstance(value, str):  # from the command line of a run without a config; YAML 1.1 reads 1e-4 as a text
        try:
            value = float(value)
        except ValueError:
            return math.nan
    return as_float(value)
