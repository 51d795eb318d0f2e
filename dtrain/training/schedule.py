"""Learning-rate schedules: a factor for each number of applied steps, without a state of their own.

A schedule is any callable ``schedule(applied_steps) -> factor`` that is built with a ``horizon`` in steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupConstant:
    """Linear warm-up, then 1.

    Args:
        horizon: Steps of the run.
        warmup_fraction: Share of them that warms up.
    """

    horizon: int
    warmup_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.horizon < 1 or not 0 <= self.warmup_fraction <= 1:
            raise ValueError(
                f"schedule: got horizon {self.horizon} and warmup_fraction {self.warmup_fraction}; want at least one "
                "step and a share in [0, 1]."
            )

    def __call__(self, applied_steps: int) -> float:
        """The factor of the step that follows ``applied_steps`` applied ones."""
        warmup = round(self.horizon * self.warmup_fraction)
        return min(1.0, (applied_steps + 1) / warmup) if warmup else 1.0


@dataclass(frozen=True)
class WarmupCosine(WarmupConstant):
    """Linear warm-up, then half a cosine (Loshchilov and Hutter, "SGDR", 2017, without restarts).

    Args:
        horizon: Steps of the run, the warm-up included.
        warmup_fraction: Share of them that warms up.
        final_fraction: The factor at the horizon and beyond.
    """

    final_fraction: float = 0.0

    def __call__(self, applied_steps: int) -> float:
        """The factor of the step that follows ``applied_steps`` applied ones."""
        warmup = round(self.horizon * self.warmup_fraction)
        if applied_steps < warmup:
            return super().__call__(applied_steps)
        progress = min(1.0, (applied_steps - warmup) / max(1, self.horizon - warmup))
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))
