"""Restores a model's buffers after a skipped step, without a host sync: on a GPU ``skip`` is a tensor that is selected with."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.precision.skip_diagnosis import CHECKED


class BufferGuard:
    """Restores the buffers of a model, such as BatchNorm's running statistics, after a skipped step.

    A forward that overflows writes infinities into them, which no later step removes (pytorch/pytorch#88474).

    Args:
        model: The bare model.

    Raises:
        ConfigError: By ``not_finite`` and ``restore``, if a buffer's shape has changed since ``save``; names it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # References by name instead of the tensors themselves: a forward may assign a new tensor.
        self._places: dict[tuple[torch.dtype, torch.device], list[tuple[dict[str, Any], str]]] = defaultdict(list)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._places[buffer.dtype, buffer.device].append((module._buffers, name))
        self._saved: list[Tensor] = []
        self._shapes: list[list[torch.Size]] = []

    def save(self) -> None:
        """Copies the buffers as they are now."""
        if self._places:
            lists = self._buffers()
            self._shapes = _shapes(lists)
            with torch.no_grad():
                self._saved = [_flat(buffers) for buffers in lists]

    def not_finite(self) -> Tensor | None:
        """Whether a value that was finite in ``save`` is infinite or NaN now: bool, shape ``[]``, on the device.

        Values that were not finite before, such as in an attention mask, do not count. None: there is nothing to check.
        """
        if not self._places:  # the rest takes 3 us
            return None
        found, lists = None, self._checked_buffers()
        with torch.no_grad():
            for buffers, saved in zip(lists, self._saved, strict=True):
                if saved.dtype in CHECKED and saved.numel():
                    # x - x is 0 for a finite x, else NaN. The largest absolute value is not finite if any value is not.
                    changed = torch.where(saved - saved == 0, _flat(buffers), 0)
                    spoilt = torch.linalg.vector_norm(changed, torch.inf).isfinite().logical_not()
                    found = spoilt if found is None else found | spoilt
        return found

    def restore(self, skip: Tensor) -> None:
        """Restores the saved values if ``skip`` (bool, shape ``[]``, on the device) is true."""
        # On a CPU reading it costs nothing.
        if self._places and (skip.device.type != "cpu" or skip.item()):
            self._restore(skip)

    @torch.no_grad()
    def _restore(self, skip: Tensor) -> None:
        for buffers, saved in zip(self._checked_buffers(), self._saved, strict=True):
            chosen = torch.where(skip, saved, _flat(buffers)).split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view_as(b) for part, b in zip(chosen, buffers, strict=True)])

    def _checked_buffers(self) -> list[list[Tensor]]:
        """The buffers, which have the shapes that they had in ``save``."""
        lists = self._buffers()
        if _shapes(lists) != self._shapes:
            pairs = zip(chain(*lists), chain(*self._shapes), strict=True)
            buffer, before = next((buffer, before) for buffer, before in pairs if buffer.shape != before)
            name = next(name for name, other in self._model.named_buffers() if other is buffer)
            raise ConfigError(
                f"model: its buffer {name} had the shape {list(before)}, and has {list(buffer.shape)} after the forward. "
                "Skipped steps restore buffers, and checkpoints and DDP need equal shapes. Give it its final shape in "
                "__init__, or make it an ordinary attribute of the module, which is neither restored nor saved."
            )
        return lists

    def _buffers(self) -> list[list[Tensor]]:
        return [[buffers[name] for buffers, name in places] for places in self._places.values()]


def _shapes(lists: list[list[Tensor]]) -> list[list[torch.Size]]:
    return [[tensor.shape for tensor in tensors] for tensors in lists]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
