"""A gradient scaler whose inf checks are all-reduced, so that every rank skips the same steps.

``torch.amp.GradScaler`` has no collective: as soon as a gradient is not averaged by DDP (parameters outside its
buckets, sharded gradients, several optimizers, local SGD), one rank skips a step that another takes, their scales drift
apart, and gradients of different scale are averaged. Here each optimizer's local 0/1 flag is summed over the process
group and every rank acts on ``sum > 0``. The methods and state keys are those of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class CrossRankGradScaler:
    """``torch.amp.GradScaler`` whose ranks decide together.

    Args:
        device: Device type of the loss, ``"cuda"`` or ``"cpu"``.
        init_scale: First scale.
        growth_factor: The scale is multiplied by this after ``growth_interval`` clean updates in a row.
        backoff_factor: The scale is multiplied by this after ``hysteresis`` overflowing updates.
        growth_interval: Clean updates between two growths.
        hysteresis: Overflowing updates until the scale backs off (Megatron-LM's meaning; 1 is torch's behaviour).
        min_scale: The scale never falls below; without a floor torch's scale decays to zero and then lets NaN through.
        max_scale: The scale never grows above.
        process_group: Every rank that shares the scale; None is the default group, or no group where none exists.
        enabled: False makes every method a pass-through, as in torch.

    Raises:
        ValueError: If a factor, interval or bound is impossible; names both values.

    ``step`` and ``load_state_dict`` are collective over ``process_group``.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        process_group: dist.ProcessGroup | None = None,
        enabled: bool = True,
    ) -> None:
        raise NotImplementedError

    def scale(self, outputs: Any) -> Any:
        """Multiplies a tensor, or every tensor of a nested tuple or list, by the scale."""
        raise NotImplementedError

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of ``optimizer`` by the scale in place and notes whether any is not finite.

        Raises:
            RuntimeError: If called twice for one optimizer since the last ``update``, or after its ``step``.
        """
        raise NotImplementedError

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Collective. Steps ``optimizer`` if no rank saw a non-finite gradient; unscales first if that was not done."""
        raise NotImplementedError

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapts the scale to what the steps since the last update found; ends the iteration."""
        raise NotImplementedError

    def get_scale(self) -> float:
        """The scale (1.0 when disabled). Synchronises with the device."""
        raise NotImplementedError

    def is_enabled(self) -> bool:
        """Whether gradients are scaled at all."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys: ``scale growth_factor backoff_factor growth_interval _growth_tracker``; ``{}`` if off."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Collective. Loads rank 0's state on every rank; the other ranks may pass None."""
        raise NotImplementedError
