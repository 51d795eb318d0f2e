"""Spikes of the gradient norm: steps whose norm is far above those of the last steps.

In plain arithmetic, with the norms of the last ``window`` finite steps::

    median    = median(norms)
    deviation = max(median(abs(norm - median) for norm in norms), 0.01 * median)
    is_spike  = norm > median + factor * deviation

* Only unusually large norms are spikes, and none is found until the window is full.
* Every finite norm enters the window, including spikes, so a lasting rise is accepted after at most half a window.
* The norm is the one of the gradient of the mean loss before clipping. It is equal on all ranks, so they all decide the same.

The rule is a robust form of the one in OLMo's trainer, which uses mean and standard deviation. ``SpikeRule`` works with tensors
and never waits for the device; ``HostSpikeRule`` does the same with Python floats, to the same bits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.errors import ConfigError, nearest

_LEAST_DEVIATION = 0.01  # of the median
_MOST_NORMS = 10_000  # they are in every checkpoint


@dataclass(frozen=True)
class SpikeOptions:
    """The settings of ``train.spike``.

    Args:
        factor: A norm is a spike if it is more than this number of deviations above the median.
        window: Number of previous steps with a finite norm that a norm is compared with.
        action: ``warn``, or ``skip``: the step is skipped on all ranks.

    Raises:
        ConfigError: If a value is impossible; names it.
    """

    factor: float = 6.0
    window: int = 128
    action: str = "warn"

    def __post_init__(self) -> None:
        is_number = isinstance(self.factor, (int, float)) and not isinstance(self.factor, bool)
        if not (is_number and 0 < self.factor < math.inf):
            raise ConfigError(f"train.spike.factor: got {self.factor!r}, want a number above 0.")
        is_whole = isinstance(self.window, int) and not isinstance(self.window, bool)
        if not (is_whole and 8 <= self.window <= _MOST_NORMS):
            raise ConfigError(
                f"train.spike.window: got {self.window!r}, want a number of steps of at least 8, at most 10,000."
            )
        if self.action not in ("warn", "skip"):
            raise ConfigError(f"train.spike.action: got {self.action!r}, want warn or skip.")

    @classmethod
    def parse(cls, node: Any) -> SpikeOptions | None:
        """The options of a config node; None without one.

        Raises:
            ConfigError: If it is no mapping of these options.
        """
        if node is None:
            return None
        names = ("factor", "window", "action")
        if not isinstance(node, Mapping):
            raise ConfigError(f"train.spike: got {node!r}, want null or a mapping such as {{factor: 6, action: skip}}.")
        for name in node:
            if name not in names:
                raise ConfigError(f"train.spike: there is no key {str(name)!r}. {nearest(str(name), names)}")
        return cls(**node)

    @property
    def skips(self) -> bool:
        """Whether a spike is skipped."""
        return self.action == "skip"


class SpikeRule:
    """The rule with its window on a device.

    Args:
        options: The settings.
        device: The device.
    """

    def __init__(self, options: SpikeOptions, device: torch.device) -> None:
        self.options = options
        self._norms = torch.zeros(options.window, dtype=torch.float64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)  # finite steps so far

    def is_spike(self, norm: Tensor, finite: Tensor) -> Tensor:
        """Whether a norm is a spike, bool, shape ``[]``; then adds it to the window if it is finite.

        Args:
            norm: float64, shape ``[]``.
            finite: bool, shape ``[]``: false for a step that is skipped anyway.
        """
        window, middle = self.options.window, self.options.window // 2
        median = self._norms.sort().values[middle]
        deviation = torch.maximum((self._norms - median).abs().sort().values[middle], _LEAST_DEVIATION * median)
        spike = finite & (self._count[0] >= window) & (norm > median + self.options.factor * deviation)
        place = self._count % window
        self._norms.scatter_(0, place, torch.where(finite, norm, self._norms.gather(0, place)[0]).reshape(1))
        self._count += finite
        return spike

    def state_dict(self) -> list[float]:
        """The norms in the window, oldest first."""
        count, norms = int(self._count), self._norms.tolist()
        first = count % len(norms)
        return norms[first:] + norms[:first] if count >= len(norms) else norms[:count]

    def load_state_dict(self, norms: Sequence[float]) -> None:
        """Fills the window with the last of these norms."""
        kept = torch.tensor(list(norms)[-self.options.window :], dtype=torch.float64)
        self._norms[: len(kept)] = kept.to(self._norms.device)
        self._count.fill_(len(kept))


class HostSpikeRule:
    """``SpikeRule`` in Python floats."""

    def __init__(self, options: SpikeOptions) -> None:
        self.options = options
        self._norms: deque[float] = deque(maxlen=options.window)
        self._sorted: list[float] = []

    def is_spike(self, norm: float, finite: bool) -> bool:
        """As ``SpikeRule.is_spike``."""
        if not finite:
            return False
        window, factor = self.options.window, self.options.factor
        spike = False
        if len(self._norms) == window:
            median = self._sorted[window // 2]
            # Sorting takes 15 us, and most norms are below this.
            if norm > median + factor * (_LEAST_DEVIATION * median):
                deviations = sorted([abs(each - median) for each in self._sorted])
                spike = norm > median + factor * max(deviations[window // 2], _LEAST_DEVIATION * median)
            oldest = self._norms[0]
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._norms.append(norm)
        insort(self._sorted, norm)
        return spike

    def state_dict(self) -> list[float]:
        """As ``SpikeRule.state_dict``."""
        return list(self._norms)

    def load_state_dict(self, norms: Sequence[float]) -> None:
        """As ``SpikeRule.load_state_dict``."""
        self._norms.clear()
        self._norms.extend(norms)
        self._sorted = sorted(self._norms)
