"""The moving average of a model's weights, updated without a host sync: on a GPU, skipped steps are selected on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import compress

import torch
from torch import Tensor, nn

from dtrain.distributed.sharding import local_part, reshard

# Elements of the weights that an average is moved by at a time on a GPU: 64 MiB of temporary memory in fp32.
_CHUNK = 2**24


class Ema:
    """Exponential moving average of the weights over applied steps: ``average = decay * average + (1 - decay) * weights``.

    Args:
        model: The bare model whose weights are averaged.
        decay: In [0, 1).
        only_trained: Keep no averages of parameters that require no gradient; the model's own values are used for them.

    Raises:
        ValueError: If the decay is out of range.

    Example:
        >>> import torch
        >>> from dtrain.training.setup.ema import Ema
        >>> model = torch.nn.Linear(2, 1)
        >>> ema = Ema(model, decay=0.99)
        >>> ema.update(skip=torch.tensor(False))  # after each optimizer step
        >>> with ema.swapped_in() as averaged:
        ...     output = averaged(torch.ones(1, 2))
    """

    def __init__(self, model: nn.Module, decay: float, *, only_trained: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"train.ema_decay: got {decay}, want a number in [0, 1), such as 0.999.")
        self.decay = decay
        self._model = model
        # By number, because a hook may train other parameters later.
        self._averaged = [not only_trained or parameter.requires_grad for parameter in model.parameters()]
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
        parameters = compress(self._model.parameters(), self._averaged)
        self._weights = [local_part(parameter.detach()) for parameter in parameters]

    def _update_on_device(self, skip: Tensor) -> None:
        # A multiplication by 0 instead of a branch: reading `skip` would make the host wait for the device. Chunks keep the
        # temporary differences much smaller than the model.
        amount = skip.logical_not().to(torch.float32) * (1 - self.decay)
        for averages, weights in self._chunks:
            change = torch._foreach_sub(weights, averages)
            torch._foreach_mul_(change, amount)
            torch._foreach_add_(averages, change)

    @contextmanager
    def swapped_in(self) -> Iterator[nn.Module]:
        """Context manager in which the model's parameters are the averages, to evaluate, save or load them.

        They are exchanged in place, so compiled code, tied weights and shards keep working. Buffers do not change. A nested
        block, for example in a hook that is called during an evaluation, exchanges nothing.
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


def _chunks(averages: list[Tensor], weights: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Cuts two lists of tensors alike into parts of at most ``_CHUNK`` elements; a larger tensor is one part."""
    first, elements = 0, 0
    for number, average in enumerate(averages):
        if number > first and elements + average.numel() > _CHUNK:
            yield averages[first:number], weights[first:number]
            first, elements = number, 0
        elements += average.numel()
    if averages:
        yield averages[first:], weights[first:]
