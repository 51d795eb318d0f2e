"""Copies of a model's tensors: averaged weights (EMA), and buffers that a skipped step restores.

Both work without a host sync: on a GPU ``skip`` is a tensor on the device, which they select with instead of reading it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.distributed.sharding import local_part, reshard
from dtrain.errors import ConfigError
from dtrain.precision.skip_diagnosis import CHECKED

# Elements of the weights that an average is moved by at a time on a GPU: 64 MiB of temporary memory in fp32.
_CHUNK = 2**24


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
        self._weights: list[Tensor] = []
        self._find_weights()
        with torch.no_grad():  # the copy of a ScriptModule's parameter would otherwise be recorded for autograd
            self._averages: list[Tensor] = [weight.clone() for weight in self._weights]
        self._on_host = not any(weight.is_cuda for weight in self._weights)
        self._is_swapped_in = False

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Moves the average one step, unless ``skip`` (bool, shape ``[]``, on the device) is true."""
        if self._on_host:  # on a CPU, where reading `skip` costs nothing, or with parallel.offload
            if not skip.item():
                for averages, weights in self._chunks:
                    torch._foreach_lerp_(averages, weights, 1 - self.decay)
            return
        self._update_on_device(skip)

    @cached_property
    def _chunks(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        # Made by the first update, because FSDP2 of torch 2.9 moves the parts that it pads when the first forward begins.
        self._find_weights()
        return list(_chunks(self._averages, self._weights))

    def _find_weights(self) -> None:
        # Of a sharded model, the parts of this rank.
        self._weights = [local_part(parameter.detach()) for parameter in self._model.parameters()]

    def _update_on_device(self, skip: Tensor) -> None:
        # A multiplication by 0 instead of a branch: reading `skip` would make the host wait for the device. The differences
        # need memory of their own, in chunks much less than that of the model.
        amount = skip.logical_not().to(torch.float32) * (1 - self.decay)
        for averages, weights in self._chunks:
            change = torch._foreach_sub(weights, averages)
            torch._foreach_mul_(change, amount)
            torch._foreach_add_(averages, change)

    @contextmanager
    def swapped_in(self) -> Iterator[nn.Module]:
        """The model, whose parameters are the averages inside the block: to evaluate them, to save them or to load them.

        They are exchanged in place, so that compiled code, tied weights and shards work as always. Buffers stay. Inside
        another such block, as in a hook that is called during an evaluation, nothing is exchanged.
        """
        if self._is_swapped_in:
            yield self._model
            return
        self._swap()
        self._is_swapped_in = True
        try:
            yield self._model
        finally:
            self._is_swapped_in = False
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self._model)  # or the next forward would use parameters that were gathered before
        self._find_weights()
        for weight, average in zip(self._weights, self._averages, strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)


class BufferGuard:
    """Restores the buffers of a model, such as BatchNorm's running statistics, after a skipped step.

    A forward that overflows writes infinities into them, which no later step removes (pytorch/pytorch#88474).

    Args:
        model: The bare model.

    Raises:
        ConfigError: By ``not_finite`` and ``restore``, if a buffer has another shape than in ``save``; names it.
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

        Values that were not finite before, such as those of an attention mask, do not count. None: there is nothing to check.
        """
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


def _chunks(averages: list[Tensor], weights: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Cuts two lists of tensors alike, so that a part has at most ``_CHUNK`` elements; a larger tensor is a part of its own."""
    first, elements = 0, 0
    for number, average in enumerate(averages):
        if number > first and elements + average.numel() > _CHUNK:
            yield averages[first:number], weights[first:number]
            first, elements = number, 0
        elements += average.numel()
    if averages:
        yield averages[first:], weights[first:]
