"""The space of a search: the overrides of a command line that have several values, in Hydra's syntax of a sweep.

``a,b`` and ``choice(a,b)`` are choices, ``interval(1e-4,1e-1)`` and ``int(interval(1,9))`` are numbers in between,
``range(0,10,2)`` are steps; ``tag(log, ...)`` makes them logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from dtrain import command_line
from dtrain.errors import ConfigError
from dtrain.launch.job import Job

#: The key whose presence makes a launch a search.
TRIALS = "launch.search.trials"
_NOT_OF_A_TRIAL = ("run.dir", "run.name", "launch.max_running", "launch.dry_run")
EXAMPLE = "'optimizer.lr=tag(log,interval(1e-4,1e-1))'"


@dataclass(frozen=True)
class CommandLine:
    """A command line, divided into what is searched and what is the same in all trials.

    Attributes:
        options: Hydra's options, such as ``--config-dir``, with their values.
        fixed: The other overrides.
        space: Key, as typed (perhaps with ``+``), to its values.
        texts: Key without ``+`` to the values as typed.
    """

    options: list[str]
    fixed: list[str]
    space: dict[str, ChoiceSweep | IntervalSweep | RangeSweep]
    texts: dict[str, str]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> CommandLine:
        """Divides the arguments.

        Raises:
            ConfigError: If they cannot be parsed, or nothing is to be searched.
        """
        known, rest = get_args_parser().parse_known_args(arguments)
        words = [*known.overrides, *rest]
        options = [word for word in arguments if word not in words and word not in ("-m", "--multirun")]
        try:
            overrides: list[Override] = OverridesParser.create().parse_overrides(words)
        except HydraException as error:
            raise ConfigError(f"{' '.join(str(error).split())} Quote values with brackets: {EXAMPLE}.") from error
        space, texts = {}, {}
        for override in overrides:
            if override.is_sweep_override():
                space[override.get_key_element()] = _checked_sweep(override)
                texts[override.get_key_element().lstrip("+")] = (
                    str(override.input_line).partition("=")[2].replace(" ", "")
                )
        if not space:
            raise ConfigError(
                f"{TRIALS}: no key to search. Give one or more keys a range of values, such as {EXAMPLE}."
            )
        fixed = [word for word, override in zip(words, overrides, strict=True) if not override.is_sweep_override()]
        return cls(options, fixed, space, texts)

    def trial(self, values: Mapping[str, float | int | str]) -> Job:
        """The job with these values, its run in the default directory.

        Raises:
            ConfigError: If the config is refused.
            SystemExit: If Hydra refuses it; the message is printed.
        """
        job = self.compose(values, self.of_a_trial)
        assert job is not None
        return job

    @property
    def of_a_trial(self) -> list[str]:
        """``fixed`` without the keys of the search itself."""
        names = ((word, word.partition("=")[0].lstrip("+")) for word in self.fixed)
        return [word for word, name in names if name not in _NOT_OF_A_TRIAL and not name.startswith("launch.search.")]

    def require_possible(self, key: str, value: Any, folder: Path) -> None:
        """Refuses a value of a trial that was not searched: another user's journal can have any text there.

        The value becomes a part of a command line, which can run any code. A number cannot.

        Raises:
            ConfigError: Names the key and the value.
        """
        sweep = self.space[key]
        if not (value in _choices(sweep) if isinstance(sweep, ChoiceSweep) else isinstance(value, (int, float))):
            raise ConfigError(
                f"run.dir: the search in {folder} has a trial with {key}={value!r}, which is none of the values to search. Use "
                "a different run.dir."
            )

    def compose(self, values: Mapping[str, float | int | str], fixed: Sequence[str]) -> Job | None:
        """Composes and validates the config with these values; None if Hydra only printed something."""
        jobs: list[Job] = []
        command_line.run(
            lambda composed: jobs.append(Job.from_composed(composed)), [*self.options, *fixed, *assignments(values)]
        )
        return jobs[0] if jobs else None


def assignments(values: Mapping[str, float | int | str]) -> list[str]:
    """The values as overrides."""
    return [f"{key}={value}" for key, value in values.items()]


def _checked_sweep(override: Override) -> ChoiceSweep | IntervalSweep | RangeSweep:
    """The values of an override.

    Raises:
        ConfigError: If a search cannot use them.
    """
    sweep, typed = override.value(), override.input_line
    if not isinstance(sweep, (ChoiceSweep, IntervalSweep, RangeSweep)) or getattr(sweep, "shuffle", False):
        raise ConfigError(f"{typed}: a search has no glob and no shuffle. Write the values: choice(a,b,c).")
    if sweep.tags - {"log"}:
        raise ConfigError(f"{typed}: got the tag {', '.join(sorted(sweep.tags))}, want log or none.")
    if isinstance(sweep, ChoiceSweep):
        if len(set(_choices(sweep))) < len(sweep.list):
            raise ConfigError(f"{typed}: a value is there more than once. Remove it.")
        return sweep
    low, high = _limits(sweep)
    if not low < high:
        raise ConfigError(f"{typed}: got {low} to {high}, want a smaller and a larger number.")
    if "log" in sweep.tags and low <= 0:
        raise ConfigError(f"{typed}: got {low} as the smallest value of a logarithmic range, want more than 0.")
    if isinstance(sweep, RangeSweep) and "log" in sweep.tags and (sweep.step != 1 or not isinstance(sweep.start, int)):
        raise ConfigError(
            f"{typed}: a logarithmic range has integers and step 1. Use tag(log,interval(...)) for others."
        )
    return sweep


def _choices(sweep: ChoiceSweep) -> list[str]:
    # As text of the command line: Optuna has no lists or mappings as values.
    return [Override._get_value_element_as_str(value) for value in sweep.list]


def _limits(sweep: IntervalSweep | RangeSweep) -> tuple[float, float]:
    """Smallest and largest value; Hydra's ranges exclude their end."""
    if isinstance(sweep, IntervalSweep):
        assert sweep.start is not None
        assert sweep.end is not None
        return sweep.start, sweep.end
    start, stop, step = sweep.start, sweep.stop, sweep.step
    assert start is not None
    assert stop is not None
    if step <= 0:
        return start, start  # refused
    last = start + step * max(0, math.ceil((stop - start) / step - 1e-9) - 1)
    return start, last


def first_value(sweep: ChoiceSweep | IntervalSweep | RangeSweep) -> float | int | str:
    """The first choice, or the smallest number; the config is checked with it before the search starts."""
    return _choices(sweep)[0] if isinstance(sweep, ChoiceSweep) else _limits(sweep)[0]


def distribution(sweep: ChoiceSweep | IntervalSweep | RangeSweep) -> Any:
    """The values as a distribution of Optuna."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(sweep, ChoiceSweep):
        return CategoricalDistribution(_choices(sweep))
    (low, high), log = _limits(sweep), "log" in sweep.tags
    is_whole = isinstance(low, int) and isinstance(high, int)
    if isinstance(sweep, IntervalSweep) or log:
        return IntDistribution(int(low), int(high), log) if is_whole else FloatDistribution(low, high, log)
    step = sweep.step
    return IntDistribution(int(low), int(high), step=int(step)) if is_whole else FloatDistribution(low, high, step=step)
