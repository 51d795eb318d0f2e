"""Learning-rate schedules, and the length of a run in attempted steps.

* A *schedule* is any callable ``schedule(applied_steps) -> factor`` that is built with a ``horizon`` in steps. It has no
  state, and only applied steps advance it.
* A *duration* in its config node is a number of steps, or text: ``500 steps``, ``5 epochs``, ``50_000 samples`` or ``5 %`` of
  the horizon (after big_vision, where every duration takes such units).
* The *horizon* is the number of steps that the schedule is laid out for; the *last step* is where the run ends. Both are
  equal on all ranks and known before the first step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.config.schema import TrainConfig
from dtrain.data import ShardLoader
from dtrain.errors import ConfigError

_DURATION = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE]\d+)?)\s*(steps?|epochs?|samples?|%)\s*")

_DURATIONS = "a number of steps, or text such as '500 steps', '5 epochs', '50_000 samples', '5 %'"


@dataclass(frozen=True)
class Lengths:
    """The lengths that are needed to convert durations to steps.

    Args:
        horizon: Steps of the run.
        steps_per_epoch: Steps of an epoch.
        global_batch_size: Samples of a step.

    Example:
        >>> from dtrain.training.schedule import Lengths
        >>> Lengths(horizon=1000, steps_per_epoch=100, global_batch_size=64).in_steps({"warmup": "5 %", "cooldown": "2 epochs"})
        {'warmup': 50, 'cooldown': 200}
    """

    horizon: int
    steps_per_epoch: int
    global_batch_size: int

    def in_steps(self, value: Any) -> Any:
        """``value`` with every duration in it, also in lists and mappings, replaced by a whole number of steps.

        Raises:
            ValueError: If a text begins with a number but is not a duration.
        """
        if isinstance(value, str) and (found := _DURATION.fullmatch(value)):
            amount = float(found[1].replace("_", ""))
            steps = {
                "step": amount,
                "epoch": amount * self.steps_per_epoch,
                "sample": amount / self.global_batch_size,
                "%": amount * self.horizon / 100,
            }
            return round(steps[found[2].removesuffix("s")])
        if isinstance(value, str) and value.strip()[:1].isdigit():
            raise ValueError(f"got {value!r}, want {_DURATIONS}.")
        if isinstance(value, Mapping):
            return {key: self.in_steps(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.in_steps(item) for item in value]
        return value


def schedule_horizon(train: TrainConfig, loader: ShardLoader) -> int:
    """Steps that the learning-rate schedule is laid out for: ``max_epochs`` in steps, else ``max_steps``.

    ``max_epochs`` has priority, so that a run that ``max_steps`` cuts short follows the curve of the whole run.

    Raises:
        ConfigError: If neither is set, or one is below 1.
    """
    check_length(train)
    return train.max_steps if train.max_epochs is None else loader.steps_in(train.max_epochs)  # type: ignore[return-value]


def check_length(train: TrainConfig) -> None:
    """Checks ``train.max_steps`` and ``train.max_epochs``.

    Raises:
        ConfigError: If neither is set, or one is below 1.
    """
    for key in ("max_steps", "max_epochs"):
        value = getattr(train, key)
        if value is not None and value < 1:
            raise ConfigError(f"train.{key}: got {value}, want at least 1, or null for no such limit.")
    if train.max_steps is None and train.max_epochs is None:
        raise ConfigError("train.max_steps and train.max_epochs are both null. Set at least one: it ends the run.")


def step_limits(train: TrainConfig, loader: ShardLoader, step: int) -> dict[str, int]:
    """The attempted step after which each limit ends the run, such as ``{"train.max_epochs": 276}``.

    It is below ``step`` if the run is already past the limit. ``loader`` is at the committed position, after ``step`` attempted
    steps.
    """
    limits = {"train.max_steps": train.max_steps} if train.max_steps is not None else {}
    if train.max_epochs is not None:
        limits["train.max_epochs"] = step + loader.steps_until(train.max_epochs)
    return limits


def last_step(train: TrainConfig, loader: ShardLoader, step: int) -> int:
    """The attempted step after which the run is finished: the lowest of ``step_limits``, which has the same arguments."""
    return min(step_limits(train, loader, step).values())


def cut_short(schedule: Callable[[int], float], train: TrainConfig, loader: ShardLoader, last_step: int) -> str:
    """Why a run ends before the end of its learning-rate schedule; ``""`` if it does not.

    Args:
        schedule: The schedule; a user's schedule may have no ``horizon``.
        train: The config section with the limits of the run.
        loader: The run's training loader.
        last_step: Attempted step after which the run is finished.

    Returns:
        For example ``cut short by train.max_steps=60``.
    """
    horizon = getattr(schedule, "horizon", None) or schedule_horizon(train, loader)
    if last_step >= horizon or schedule(last_step) == schedule(horizon):
        return ""
    key = "max_steps" if train.max_steps == last_step else "max_epochs"
    return f"cut short by train.{key}={getattr(train, key)}"


@dataclass(frozen=True)
class WarmupConstant:
    """Linear warm-up, then 1.

    Args:
        horizon: Steps of the run.
        warmup: Steps of the warm-up; the first has the factor ``1 / warmup``.

    Raises:
        ValueError: If ``horizon`` is below 1, or the warm-up is longer than the run.

    Example:
        >>> from dtrain.training.schedule import WarmupConstant
        >>> schedule = WarmupConstant(horizon=100, warmup=4)
        >>> [schedule(applied_steps) for applied_steps in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    horizon: int
    warmup: int = 0

    def __post_init__(self) -> None:
        _require_steps(self.horizon, warmup=self.warmup)

    def __call__(self, applied_steps: int) -> float:
        """The factor of the step that follows ``applied_steps`` applied ones."""
        return min(1.0, (applied_steps + 1) / self.warmup) if self.warmup else 1.0


@dataclass(frozen=True)
class WarmupCosine(WarmupConstant):
    """Linear warm-up, then half a cosine (Loshchilov and Hutter, "SGDR", 2017, without restarts).

    Args:
        horizon: Steps of the run, including the warm-up.
        warmup: Steps of the warm-up.
        final_fraction: The factor at the horizon and beyond.

    Example:
        >>> from dtrain.training.schedule import WarmupCosine
        >>> WarmupCosine(horizon=100, final_fraction=0.1)(100)
        0.1
    """

    final_fraction: float = 0.0

    def __call__(self, applied_steps: int) -> float:
        """The factor of the step that follows ``applied_steps`` applied ones."""
        if applied_steps < self.warmup:
            return super().__call__(applied_steps)
        progress = min(1.0, (applied_steps - self.warmup) / max(1, self.horizon - self.warmup))
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WarmupTrapezoid(WarmupConstant):
    """Linear warm-up, constant factor 1, and linear cool-down over the last steps (Hägele et al. 2024).

    If warm-up and cool-down fill the run, the schedule is a triangle. If they overlap, the smaller factor applies.

    Args:
        horizon: Steps of the run.
        warmup: Steps of the warm-up.
        cooldown: Steps of the cool-down.
        final_fraction: The factor at the horizon and beyond.

    Example:
        >>> from dtrain.training.schedule import WarmupTrapezoid
        >>> schedule = WarmupTrapezoid(horizon=100, warmup=10, cooldown=20)
        >>> schedule(50), schedule(90)
        (1.0, 0.5)
    """

    cooldown: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_steps(self.horizon, cooldown=self.cooldown)

    def __call__(self, applied_steps: int) -> float:
        """The factor of the step that follows ``applied_steps`` applied ones."""
        left = max(0, self.horizon - applied_steps)
        share = min(1.0, left / self.cooldown) if self.cooldown else 1.0
        return min(super().__call__(applied_steps), self.final_fraction + (1 - self.final_fraction) * share)


@dataclass(frozen=True)
class WarmupSteps(WarmupConstant):
    """Linear warm-up, then multiplied by ``factor`` at each milestone (He et al. 2016 and Goyal et al. 2017).

    Args:
        horizon: Steps of the run.
        warmup: Steps of the warm-up.
        milestones: Steps after which the learning rate falls, in ascending order.
        factor: The learning rate is multiplied by this at each milestone.

    Raises:
        ValueError: If the milestones are not in ascending order.

    Example:
        >>> from dtrain.training.schedule import WarmupSteps
        >>> schedule = WarmupSteps(horizon=90, milestones=[30, 60], factor=0.5)
        >>> schedule(0), schedule(30), schedule(60)
        (1.0, 0.5, 0.25)
    """

    milestones: Sequence[int] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=1) < 1:
            raise ValueError(
                f"got milestones {list(self.milestones)}, want steps that ascend. Durations such as '30 epochs' "
                "are rounded to steps: in a short run they may fall together."
            )

    def __call__(self, applied_steps: int) -> float:
        """The factor of the step that follows ``applied_steps`` applied ones."""
        passed = sum(milestone <= applied_steps for milestone in self.milestones)
        return super().__call__(applied_steps) * self.factor**passed


def _require_steps(horizon: int, **part: int) -> None:
    ((name, steps),) = part.items()
    if horizon < 1 or not 0 <= steps <= horizon:
        raise ValueError(
            f"got horizon {horizon} and {name} {steps}; want a horizon of at least 1, and 0 <= {name} <= horizon. Durations "
            f"are {_DURATIONS}."
        )
