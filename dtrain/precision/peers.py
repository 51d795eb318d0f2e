"""The ranks that share a loss scale, and the two things they agree on: whether to skip, and what was loaded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.precision.loss_scale import LossScaleState

_DIFFERENT_SCALES = (
    "CrossRankGradScaler: the ranks' loss scales differ, so gradients of different scale were averaged. Load the "
    "scaler's state through load_state_dict on every rank, and give update() the same new_scale everywhere"
)


class Peers:
    """A process group, looked up when it is needed, for a scaler may be made before the ranks are joined.

    Args:
        group: The ranks; None is the default group, or this process alone where none exists.
        device: Where a message between the ranks has to lie.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self.device = device

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None where there is none."""
        return self._group or dist.group.WORLD

    @property
    def count(self) -> int:
        """How many ranks there are; -1 if this one is not among them."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group)

    @property
    def is_first(self) -> bool:
        """Whether this is the group's rank 0."""
        return self.count == 1 or dist.get_rank(self._group) == 0

    def decide(self, flag: Tensor, scale: Tensor, on_device: bool) -> Tensor:
        """Collective. What the ranks make of their flags: one all-reduce.

        The scale and its square travel with the flag. By Cauchy-Schwarz ``ranks * sum(s^2) >= sum(s)^2``, and they are
        equal only if all scales are: every rank reads the same verdict from the same three numbers.

        Args:
            flag: This rank's finding, 0.0 or 1.0, fp32, shape ``[]``.
            scale: This rank's scale, fp32, shape ``[]``.
            on_device: Do not wait for the device. Different scales then end the process by an assertion there.

        Returns:
            1.0 if any flag was set, else 0.0, exactly: the fused kernels take 2.0, two ranks' overflows, for "step".

        Raises:
            RuntimeError: On every rank, if the ranks' scales differ.
        """
        if self.count == 1:
            return flag
        exact = scale.double()
        word = torch.stack([flag.double(), exact, exact.square()])
        dist.all_reduce(word, group=self._group)
        flags, total, squares = word.unbind()
        agree = self.count * squares <= total.square() * (1 + 1e-9)
        if on_device and agree.device.type != "cpu":
            torch._assert_async(agree, _DIFFERENT_SCALES)
        elif not agree.item():
            raise RuntimeError(_DIFFERENT_SCALES)
        return (flags > 0).float()

    def first_state(self, state: LossScaleState | None) -> LossScaleState | None:
        """Collective. Rank 0's state, on every rank; None if it has none.

        Raises:
            RuntimeError: If not every rank takes part.
        """
        words = torch.zeros(7, dtype=torch.float64, device=self.device)
        if self.is_first and state is not None:
            words.copy_(torch.tensor(_packed(state), dtype=torch.float64))
        try:
            # Summed and not broadcast: a broadcast lets rank 0 go on alone.
            dist.all_reduce(words, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"CrossRankGradScaler.load_state_dict is collective over {self.count} ranks and not all of them took "
                "part. Call it on every rank; all but rank 0 may pass None"
            ) from error
        return _unpacked(words.tolist())


def _packed(state: LossScaleState) -> list[float]:
    hysteresis = -1 if state.hysteresis_tracker is None else state.hysteresis_tracker
    factors = [state.growth_factor, state.backoff_factor, state.growth_interval]
    return [1, state.scale, *factors, state.growth_tracker, hysteresis]


def _unpacked(words: list[float]) -> LossScaleState | None:
    known, scale, growth, backoff, interval, tracker, hysteresis = words
    if not known:
        return None
    return LossScaleState(
        scale, growth, backoff, int(interval), int(tracker), int(hysteresis) if hysteresis >= 0 else None
    )
