"""Copies of a model's tensors: averaged weights (EMA), and buffers that a skipped step restores.

Both work without a host sync: ``skip`` is a tensor on the device, which they select with instead of reading it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.distributed.sharding import local_part, reshard


class Ema:
    """Exponential moving average of the weights over applied steps: ``average = decay * average + (1 - decay) * weights``.

    Args:
        model: The bare model whose weights are averaged.
        decay: In [0, 1).

    Raises:
        ValueError: If the decay is out of range.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"train.ema_decay: got {decay}, want a number in [0, 1), such as 0.999.")
        self.decay = decay
        self._model = model
        # Of a sharded model, the parts of this rank.
        self._weights: list[Tensor] = [local_part(parameter.detach()) for parameter in model.parameters()]
        with torch.no_grad():  # the copy of a ScriptModule's parameter would otherwise be recorded for autograd
            self._averages: list[Tensor] = [weight.clone() for weight in self._weights]

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Moves the average one step, unless ``skip`` (bool, shape ``[]``, on the device) is true."""
        # A multiplication by 0 instead of a branch: reading `skip` would make the host wait for the device.
        amount = skip.logical_not().to(torch.float32) * (1 - self.decay)
        change = list(torch._foreach_sub(self._weights, self._averages))
        torch._foreach_mul_(change, amount)
        torch._foreach_add_(self._averages, change)

    @contextmanager
    def swapped_in(self) -> Iterator[nn.Module]:
        """The model, whose parameters are the averages inside the block: to evaluate them, to save them or to load them.

        They are exchanged in place, so that compiled code, tied weights and shards work as always. Buffers stay.
        """
        self._swap()
        try:
            yield self._model
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self._model)  # or the next forward would use parameters that were gathered before
        for weight, average in zip(self._weights, self._averages, strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)


class BufferGuard:
    """Restores the buffers of a model, such as BatchNorm's running statistics, after a skipped step.

    A forward that overflows writes infinities into them, which no later step removes (pytorch/pytorch#88474).

    Args:
        model: The bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        # References by name instead of the tensors themselves: a forward may assign a new tensor.
        self._places: dict[tuple[torch.dtype, torch.device], list[tuple[dict[str, Any], str]]] = defaultdict(list)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._places[buffer.dtype, buffer.device].append((module._buffers, name))
        self._saved: list[Tensor] = []

    def save(self) -> None:
        """Copies the buffers as they are now."""
        if self._places:
            with torch.no_grad():
                self._saved = [_flat(buffers) for buffers in self._buffers()]

    def restore(self, skip: Tensor) -> None:
        """Restores the saved values if ``skip`` (bool, shape ``[]``, on the device) is true."""
        if self._places:
            self._restore(skip)

    @torch.no_grad()
    def _restore(self, skip: Tensor) -> None:
        for buffers, saved in zip(self._buffers(), self._saved, strict=True):
            chosen = torch.where(skip, saved, _flat(buffers)).split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [part.view_as(b) for part, b in zip(chosen, buffers, strict=True)])

    def _buffers(self) -> list[list[Tensor]]:
        return [[buffers[name] for buffers, name in places] for places in self._places.values()]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
