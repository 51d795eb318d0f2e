"""The loss scale: what it is, when it grows and when it backs off, all of it on the device.

* The *scale* multiplies the loss, so that small gradients do not vanish in fp16.
* An *overflow* is an optimizer step in which some rank found a gradient that is not finite.
* The *growth tracker* counts the clean steps since the last growth or overflow, as in torch; the *hysteresis tracker*
  the overflows that are still tolerated before the scale backs off, as in Megatron-LM.

Nothing here talks to other ranks: equal states that see equal overflows stay equal.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtrain.config.errors import ConfigError
from dtrain.precision import kernels

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True)
class LossScaleState:
    """A loss scale as plain numbers, checked.

    Args:
        scale: The scale, finite and above 0.
        growth_factor: Above 1.
        backoff_factor: Between 0 and 1.
        growth_interval: Clean steps until the scale grows, at least 1.
        growth_tracker: Clean steps so far, at least 0.
        hysteresis_tracker: Overflows until the scale backs off, at least 0; None where the writer kept none, as torch.

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
        _require(math.isfinite(self.scale) and self.scale > 0, "scale", self.scale, "a finite number above 0")
        _require(
            math.isfinite(self.growth_factor) and self.growth_factor > 1, "growth_factor", self.growth_factor, "> 1"
        )
        _require(0 < self.backoff_factor < 1, "backoff_factor", self.backoff_factor, "between 0 and 1")
        _require(self.growth_interval >= 1, "growth_interval", self.growth_interval, ">= 1")
        _require(self.growth_tracker >= 0, "_growth_tracker", self.growth_tracker, ">= 0")
        if self.hysteresis_tracker is not None:
            _require(self.hysteresis_tracker >= 0, "_hysteresis_tracker", self.hysteresis_tracker, ">= 0")

    @classmethod
    def from_dict(cls, state: Mapping[str, Any] | None) -> LossScaleState:
        """Reads the state of a ``torch.amp.GradScaler`` or of dtrain's own.

        Raises:
            ConfigError: If ``state`` is not one; says what is missing or wrong.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"gradient scaler state: got {type(state).__name__}, want the dict of a scaler's state_dict()"
            )
        if not state:
            raise ConfigError(
                "gradient scaler state: got an empty dict, which is what a disabled scaler saves. The checkpoint is of "
                "a run without gradient scaling: start the scaler afresh instead of loading it"
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

    def to_dict(self) -> dict[str, Any]:
        """torch's five keys, and ``_hysteresis_tracker``, which torch ignores, where there is one."""
        state: dict[str, Any] = {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.growth_tracker,
        }
        if self.hysteresis_tracker is not None:
            state["_hysteresis_tracker"] = self.hysteresis_tracker
        return state


class LossScale:
    """A dynamic loss scale on a device.

    Args:
        device: Where the scale lives; all tensors of an update must be there.
        init: First scale.
        growth_factor: The scale is multiplied by this after ``growth_interval`` clean steps in a row.
        backoff_factor: The scale is multiplied by this on an overflow once the hysteresis is used up.
        growth_interval: Clean steps between two growths.
        hysteresis: Overflows until the scale backs off. Only a growth restores it, as in Megatron-LM's
            ``DynamicGradScaler``: until then every further overflow backs off. 1 is torch's behaviour.
        min_scale: The scale never falls below.
        max_scale: The scale never grows above.

    Attributes:
        scale: fp32, shape ``[]``; updated in place; the same tensor until ``to``.
        growth_tracker: int32, shape ``[]``.
        hysteresis_tracker: int32, shape ``[]``.

    Raises:
        ConfigError: If a factor, interval or bound is impossible; names the values.
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
                f"loss scale: got init={init}, min={min_scale}, max={max_scale}; want 0 < min <= init <= max < inf"
            )
        self.hysteresis = hysteresis
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.scale = torch.full((), init, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.hysteresis_tracker = torch.full((), hysteresis, dtype=torch.int32, device=device)
        self.configure()

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Adapts the scale to one optimizer step, without waiting for the device.

        Args:
            found_inf: Shape ``[]``, on the scale's device; anything but 0 (or false) is an overflow.
        """
        if self.hysteresis == 1 and kernels.self_test(self.scale.device.type).update_scale:
            # One kernel instead of sixteen.
            factors = (self.growth_factor, self.backoff_factor, self.growth_interval)
            torch._amp_update_scale_(self.scale, self.growth_tracker, found_inf.float(), *factors)
            self.scale.clamp_(self.min_scale, self.max_scale)
            return
        # In-place operations with Python numbers: those travel as arguments of kernels, and nothing is copied.
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

    @torch.no_grad()
    def set(self, scale: float | Tensor) -> None:
        """Replaces the scale; a tensor (one element, any device) without waiting for it. Clamped as on loading."""
        if isinstance(scale, Tensor):
            self.scale.copy_(scale.reshape(())).clamp_(self.min_scale, self.max_scale)
        else:
            _require(math.isfinite(scale) and scale > 0, "scale", scale, "a finite number above 0")
            self.scale.fill_(self._clamped(scale))

    def configure(
        self,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
    ) -> None:
        """Changes the given factors from the next update on.

        Raises:
            ConfigError: If one is impossible; names it.
        """
        checked = LossScaleState(
            1.0,
            self.growth_factor if growth_factor is None else growth_factor,
            self.backoff_factor if backoff_factor is None else backoff_factor,
            self.growth_interval if growth_interval is None else growth_interval,
        )
        self.growth_factor = checked.growth_factor
        self.backoff_factor = checked.backoff_factor
        self.growth_interval = checked.growth_interval
        # torch's kernel waits for the tracker to equal the interval: one already beyond a shortened one never would.
        self.growth_tracker.clamp_(max=self.growth_interval - 1)

    def to(self, device: torch.device) -> None:
        """Moves the state to ``device``; the tensors are new ones then."""
        self.scale = self.scale.to(device)
        self.growth_tracker = self.growth_tracker.to(device)
        self.hysteresis_tracker = self.hysteresis_tracker.to(device)

    def load(self, state: LossScaleState) -> None:
        """Takes over ``state``; a scale outside ``[min_scale, max_scale]`` is clamped with a warning."""
        self.scale.fill_(self._clamped(state.scale))
        self.growth_tracker.fill_(state.growth_tracker)
        tracker = self.hysteresis if state.hysteresis_tracker is None else state.hysteresis_tracker
        self.hysteresis_tracker.fill_(min(tracker, self.hysteresis))
        self.configure(state.growth_factor, state.backoff_factor, state.growth_interval)

    def state(self) -> LossScaleState:
        """The present state as numbers. Synchronises with the device."""
        return LossScaleState(
            float(self.scale.item()),
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
            int(self.growth_tracker.item()),
            # With a hysteresis of 1 the state is torch's own, key for key.
            int(self.hysteresis_tracker.item()) if self.hysteresis > 1 else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys, and ``_hysteresis_tracker`` where there is a hysteresis. Synchronises with the device."""
        return self.state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads ``state_dict()`` or that of a ``torch.amp.GradScaler``. Not collective.

        Raises:
            ConfigError: If ``state`` is not a scaler's state; says why.
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
        raise ConfigError(f"loss scale: got {name}={got}; want {want}")
