"""A moving average of the weights, for evaluation, export and the best checkpoint."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Ema:
    """Keeps ``average = decay * average + (1 - decay) * weights`` over applied steps, from the initial weights on.

    Args:
        model: The model whose weights are averaged; not wrapped.
        decay: In [0, 1).

    Attributes:
        module: A copy of the model that holds the averaged weights; its buffers are copied in ``averaged``.

    Raises:
        ValueError: If the decay is out of range.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"train.ema_decay: got {decay}, want a number in [0, 1), such as 0.999.")
        self.decay = decay
        with torch.no_grad():  # the copy of a ScriptModule would otherwise have a history
            self.module = copy.deepcopy(model)
        for parameter in self.module.parameters():  # and not the module's requires_grad_, which a ScriptModule lacks
            parameter.requires_grad_(False)
        self._model = model
        self._averages: list[Tensor] = list(self.module.parameters())
        self._weights: list[Tensor] = [parameter.detach() for parameter in model.parameters()]

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Moves the average one step, unless ``skip`` (bool, shape ``[]``); does not wait for the device."""
        amount = skip.logical_not().to(torch.float32) * (1 - self.decay)
        change = list(torch._foreach_sub(self._weights, self._averages))
        torch._foreach_mul_(change, amount)
        torch._foreach_add_(self._averages, change)

    @torch.no_grad()
    def averaged(self) -> nn.Module:
        """The averaged model with the present buffers, for evaluation."""
        for average, buffer in zip(self.module.buffers(), self._model.buffers(), strict=True):
            average.copy_(buffer)
        return self.module
