"""The dynamic loss scale of fp16; it grows and backs off on the device.

* The *scale* multiplies the loss, so that small gradients do not become zero in fp16.
* An *overflow* is an optimizer step in which some rank found a gradient that is not finite; a *clean* step has none.
* The *growth tracker* counts clean steps since the last growth or overflow, as in torch.
* The *hysteresis tracker* counts the overflows that are still tolerated before the scale backs off, as in Megatron-LM.

Nothing here communicates: if all ranks begin with the same state and see the same overflows, their states stay the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.errors import ConfigError

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True)
class LossScaleState:
    """The state of a loss scale as plain, checked numbers.

    Args:
        scale: Finite, above 0.
        growth_factor: Above 1.
        backoff_factor: Between 0 and 1.
        growth_interval: Clean steps until the scale grows, at least 1.
        growth_tracker: Clean steps so far, at least 0.
        hysteresis_tracker: Overflows until the scale backs off, at least 0; None if the state has none, as with torch's scaler.

    Raises:
        ConfigError: If a number is out of its range; names it.
    """

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int = 0
    hysteresis_tracker: int | None = None

    def __post_init__(self) -> None:
        _require(0 < self.scale < math.inf, "scale", self.scale, "a finite number above 0")
        _require(1 < self.growth_factor < math.inf, "growth_factor", self.growth_factor, "> 1")
        _require(0 < self.backoff_factor < 1, "backoff_factor", self.backoff_factor, "between 0 and 1")
        _require(self.growth_interval >= 1, "growth_interval", self.growth_interval, ">= 1")
        _require(self.growth_tracker >= 0, "_growth_tracker", self.growth_tracker, ">= 0")
        if self.hysteresis_tracker is not None:
            _require(self.hysteresis_tracker >= 0, "_hysteresis_tracker", self.hysteresis_tracker, ">= 0")

    @classmethod
    def from_dict(cls, state: Mapping[str, Any] | None) -> LossScaleState:
        """Reads the ``state_dict()`` of a ``torch.amp.GradScaler`` or of dtrain's scalers.

        Raises:
            ConfigError: If it is not one; names what is missing or wrong.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"gradient scaler state: got {type(state).__name__}, want the dict of a scaler's state_dict()"
            )
        if not state:
            raise ConfigError(
                "gradient scaler state: got an empty dict, which is what a disabled scaler saves. The checkpoint is of "
                "a run without gradient scaling: start with a new scaler instead of loading this state"
            )
        missing = [key for key in _TORCH_KEYS if key not in state]
        if missing:
            raise ConfigError(
                f"gradient scaler state: lacks {', '.join(missing)}; got the keys {', '.join(map(str, state))}"
            )
        try:
            scale, growth_factor, backoff_factor = (float(state[key]) for key in _TORCH_KEYS[:3])
            growth_interval, growth_tracker = (int(state[key]) for key in _TORCH_KEYS[3:])
            tracker = state.get("_hysteresis_tracker")
            hysteresis_tracker = None if tracker is None else int(tracker)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"gradient scaler state: a value is not a number ({error}); got {dict(state)}") from error
        return cls(scale, growth_factor, backoff_factor, growth_interval, growth_tracker, hysteresis_tracker)


class LossScale:
    """A dynamic loss scale on a device.

    Args:
        device: Device of the scale, and of the tensors passed to ``update``.
        init: First scale.
        growth_factor: The scale is multiplied by this after ``growth_interval`` clean steps in a row.
        backoff_factor: The scale is multiplied by this on an overflow once the hysteresis is used up.
        growth_interval: Clean steps between two growths.
        hysteresis: Overflows until the scale backs off. Every further overflow backs off too, until a growth restores the
            hysteresis, as in Megatron-LM's ``DynamicGradScaler``. 1 is torch's behaviour.
        min_scale: Lower bound of the scale.
        max_scale: Upper bound of the scale.

    Attributes:
        scale: fp32, shape ``[]``; updated in place, so it stays the same tensor until ``to()``.
        growth_tracker: int32, shape ``[]``.
        hysteresis_tracker: int32, shape ``[]``.

    Raises:
        ConfigError: If a factor, interval or bound is impossible; names the values.

    Example:
        >>> import torch
        >>> from dtrain.precision.loss_scale import LossScale
        >>> loss_scale = LossScale(torch.device("cpu"), init=1024.0)
        >>> loss_scale.update(found_inf=torch.tensor(True))
        >>> loss_scale.scale
        tensor(512.)
    """

    def __init__(
        self,
        device: torch.device,
        init: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
    ) -> None:
        _require(hysteresis >= 1, "hysteresis", hysteresis, ">= 1")
        if not 0 < min_scale <= init <= max_scale < math.inf:
            raise ConfigError(
                f"precision.loss_scale: got init={init}, min={min_scale}, max={max_scale}; want 0 < min <= init <= max < inf"
            )
        self.hysteresis = hysteresis
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.scale = torch.full((), init, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.hysteresis_tracker = torch.full((), hysteresis, dtype=torch.int32, device=device)
        self._before: list[Tensor] = []  # the last update
        self.configure(growth_factor, backoff_factor, growth_interval)

    @torch.no_grad()
    def update(self, found_inf: Tensor, unchanged: Tensor | None = None) -> None:
        """Adapts the scale to one optimizer step, without waiting for the device.

        Args:
            found_inf: Shape ``[]``, on the scale's device; anything but 0 (or false) is an overflow.
            unchanged: bool, shape ``[]``: true if this step must not change the scale or its trackers; None: false.
        """
        self._before = [tensor.clone() for tensor in self._tensors()]
        self._adapt(found_inf)
        if unchanged is not None:
            for tensor, old in zip(self._tensors(), self._before, strict=True):
                tensor.copy_(torch.where(unchanged, old, tensor))

    def _adapt(self, found_inf: Tensor) -> None:
        if self.hysteresis == 1:
            # One kernel instead of sixteen, but without hysteresis.
            factors = (self.growth_factor, self.backoff_factor, self.growth_interval)
            torch._amp_update_scale_(self.scale, self.growth_tracker, found_inf.float(), *factors)
            self.scale.clamp_(self.min_scale, self.max_scale)
            return
        # In-place operations with Python numbers: those are passed as kernel arguments, so nothing is copied to the device.
        overflow = found_inf != 0
        self.growth_tracker.add_(1).masked_fill_(overflow, 0)
        grow = self.growth_tracker >= self.growth_interval
        self.growth_tracker.masked_fill_(grow, 0)
        self.hysteresis_tracker.sub_(overflow.int()).clamp_(min=0)
        back_off = overflow & (self.hysteresis_tracker == 0)
        self.hysteresis_tracker.masked_fill_(grow, self.hysteresis)
        factor = torch.ones_like(self.scale).masked_fill_(grow, self.growth_factor)
        factor.masked_fill_(back_off, self.backoff_factor)
        self.scale.mul_(factor).clamp_(self.min_scale, self.max_scale)

    def uncount(self) -> None:
        """Undoes the last ``update``, for a step that is repeated, without waiting for the device."""
        for tensor, old in zip(self._tensors(), self._before, strict=True):
            tensor.copy_(old)

    def _tensors(self) -> list[Tensor]:
        # With a hysteresis of 1 its tracker is not used.
        used = [self.scale, self.growth_tracker]
        return used if self.hysteresis == 1 else [*used, self.hysteresis_tracker]

    @torch.no_grad()
    def set(self, scale: float | Tensor) -> None:
        """Replaces the scale, clamped to the bounds; a tensor (one element, any device) without waiting for it."""
        if isinstance(scale, Tensor):
            self.scale.copy_(scale.reshape(())).clamp_(self.min_scale, self.max_scale)
        else:
            _require(0 < scale < math.inf, "scale", scale, "a finite number above 0")
            self.scale.fill_(self._clamped(scale))

    def configure(self, growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
        """Sets the factors and the interval, from the next update on.

        Raises:
            ConfigError: If one is impossible; names it.
        """
        LossScaleState(1.0, growth_factor, backoff_factor, growth_interval)  # checks them
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        # torch's kernel grows when the tracker equals the interval; a tracker beyond a shortened interval never would.
        self.growth_tracker.clamp_(max=self.growth_interval - 1)

    def to(self, device: torch.device) -> None:
        """Moves the state to ``device``; ``scale`` and the trackers may be new tensors afterwards."""
        self.scale = self.scale.to(device)
        self.growth_tracker = self.growth_tracker.to(device)
        self.hysteresis_tracker = self.hysteresis_tracker.to(device)

    def load(self, state: LossScaleState) -> None:
        """Loads ``state``; a scale outside ``[min_scale, max_scale]`` is clamped with a warning."""
        self.scale.fill_(self._clamped(state.scale))
        self.growth_tracker.fill_(state.growth_tracker)
        tracker = self.hysteresis if state.hysteresis_tracker is None else state.hysteresis_tracker
        self.hysteresis_tracker.fill_(min(tracker, self.hysteresis))
        self.configure(state.growth_factor, state.backoff_factor, state.growth_interval)

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys, and ``_hysteresis_tracker`` if the hysteresis is above 1. Waits for the device."""
        state: dict[str, Any] = {
            "scale": float(self.scale.item()),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.growth_tracker.item()),
        }
        if self.hysteresis > 1:
            state["_hysteresis_tracker"] = int(self.hysteresis_tracker.item())
        return state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads a ``state_dict()`` of this class or of ``torch.amp.GradScaler``. Not collective.

        Raises:
            ConfigError: If ``state`` is not a scaler's state; names what is missing or wrong.
        """
        self.load(LossScaleState.from_dict(state))

    def _clamped(self, scale: float) -> float:
        clamped = min(max(scale, self.min_scale), self.max_scale)
        if clamped != scale:
            bounds = f"[{self.min_scale:g}, {self.max_scale:g}]"
            warnings.warn(f"loss scale: {scale:g} is outside {bounds}; continuing with {clamped:g}", stacklevel=4)
        return clamped


def _require(ok: bool, name: str, got: object, want: str) -> None:
    if not ok:
        raise ConfigError(f"precision.loss_scale: got {name}={got}; want {want}")
