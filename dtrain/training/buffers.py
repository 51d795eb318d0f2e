"""Buffers that a forward pass changes, such as BatchNorm's running statistics, across a step that is skipped.

A forward that overflows leaves infinities in them, which no later step takes out again (pytorch/pytorch#88474). They are
copied before each window and put back, on the device, if the step is skipped.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


class BufferGuard:
    """The buffers of a model.

    Args:
        model: The bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        # Where they are, and not what is there: a forward may put a new tensor in place of the old one.
        self._places: dict[tuple[torch.dtype, torch.device], list[tuple[dict[str, Any], str]]] = defaultdict(list)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._places[buffer.dtype, buffer.device].append((module._buffers, name))
        self._kept: list[Tensor] = []

    def keep(self) -> None:
        """Remembers the buffers as they are."""
        if self._places:
            with torch.no_grad():
                self._kept = [_flat(buffers) for buffers in self._buffers()]

    def restore(self, skip: Tensor) -> None:
        """Puts back what was kept, where ``skip`` (bool, shape ``[]``) is true; does not wait for the device."""
        if self._places:
            self._restore(skip)

    @torch.no_grad()
    def _restore(self, skip: Tensor) -> None:
        for buffers, kept in zip(self._buffers(), self._kept, strict=True):
            chosen = torch.where(skip, kept, _flat(buffers)).split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view_as(b) for part, b in zip(chosen, buffers, strict=True)])

    def _buffers(self) -> list[list[Tensor]]:
        return [[buffers[name] for buffers, name in places] for places in self._places.values()]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
