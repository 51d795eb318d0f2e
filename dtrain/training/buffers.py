"""Buffers that a forward pass changes, such as BatchNorm's running statistics, across a step that is skipped.

A forward that overflows leaves infinities in them, which no later step takes out again (pytorch/pytorch#88474). They are
copied before each window and put back, on the device, if the step is skipped.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


class BufferGuard:
    """The buffers of a model.

    Args:
        model: The bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for buffer in model.buffers():
            self._groups[buffer.dtype, buffer.device].append(buffer)
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Remembers the buffers as they are."""
        self._kept = [_flat(buffers) for buffers in self._groups.values()]

    @torch.no_grad()
    def restore(self, skip: Tensor) -> None:
        """Puts back what was kept, where ``skip`` (bool, shape ``[]``) is true; does not wait for the device."""
        for buffers, kept in zip(self._groups.values(), self._kept, strict=True):
            chosen = torch.where(skip, kept, _flat(buffers)).split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view_as(b) for part, b in zip(chosen, buffers, strict=True)])


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
