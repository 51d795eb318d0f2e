"""Ranks whose memory is exhausted at given places of a step: models with several buckets in DDP, a task, and hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.training.task import Output


class Layers(nn.Sequential):
    """Without BatchNorm; its gradients fill several of DDP's buckets of 1 MiB."""

    def __init__(self, classes: int = 10, width: int = 2048) -> None:
        hidden = nn.Linear(192, 256), nn.GELU(), nn.Linear(256, width), nn.GELU(), nn.Linear(width, 256), nn.GELU()
        super().__init__(nn.Flatten(), *hidden, nn.Linear(256, classes))


def _before(check: Callable[[Tensor], Tensor], module: nn.Module, grads: Any) -> None:
    check(grads[0])


class SpoiltOnce(Layers):
    """A buffer becomes NaN in the forward of one step."""

    def __init__(self, classes: int = 10, width: int = 2048, forward: int = 1) -> None:
        super().__init__(classes, width)
        self.register_buffer("seen", torch.zeros(2))
        self._left = forward

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self._left -= 1
            if self._left == 0:
                self.seen: Tensor = self.seen + torch.nan
        output = x
        for layer in self:
            output = layer(output)
        return output


class Counting(Layers):
    """Buffers count the forwards of the training, and their rows."""

    def __init__(self, classes: int = 10, width: int = 2048) -> None:
        super().__init__(classes, width)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
            self.rows += len(x)
        output = x
        for layer in self:
            output = layer(output)
        return output


def contrast(model: nn.Module, batch: Any) -> Output:
    """Each row is to be most similar to itself, among the rows of its micro-batch."""
    outputs = model(batch["image"])[batch.valid]
    losses = nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="sum")
    return Output(losses, batch.valid.sum())


class EndsEarly:
    """A hook that ends the run after a step."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_step(self, run: Any, outcome: Any) -> None:
        if outcome.step == self._after:
            run.end_early("enough")


class MemoryFaults:
    """A hook: raises ``MemoryError`` in windows of a run, each once.

    Args:
        at: ``step:rank:micro-batch:place`` each; a place is ``before`` or ``after`` the forward, or the number of the
            parameter whose gradient is being computed; or ``error`` for a ``ValueError`` instead.
    """

    def __init__(self, at: Sequence[str]) -> None:
        self._at = list(at)

    def on_start(self, run: Any) -> None:
        step, task, fails_at = run.step, run.step.task, [-1]
        place = [-1, -1]  # step, micro-batch
        in_ddp = run.step.model is not run.model

        def gradient(number: int) -> Callable[[Tensor], Tensor]:
            def check(grad: Tensor) -> Tensor:
                if fails_at[0] == number:
                    fails_at[0] = -1
                    raise MemoryError("injected")
                return grad

            return check

        if run.is_sharded:  # the gradients of its parameters are computed for gathered copies
            for number, module in enumerate(each for each in run.model.modules() if isinstance(each, nn.Linear)):
                module.register_full_backward_pre_hook(partial(_before, gradient(number)))
        else:
            for number, parameter in enumerate(run.model.parameters()):
                parameter.register_hook(gradient(number))

        def faulty(model: nn.Module, batch: Any) -> Any:
            if (model is run.model and in_ddp) or not (model.training and torch.is_grad_enabled()):
                return task(model, batch)  # a check, or an evaluation
            place[:] = [step.step, place[1] + 1 if place[0] == step.step else 0]
            now = f"{step.step + 1}:{run.world.rank}:{place[1]}:"
            fault = next((each for each in self._at if each.startswith(now)), None)
            if fault is None:
                return task(model, batch)
            self._at.remove(fault)
            where = fault.removeprefix(now)
            if where == "error":
                raise ValueError("injected")
            if where == "before":
                raise MemoryError("injected")
            output = task(model, batch)
            if where == "after":
                raise MemoryError("injected")
            fails_at[0] = int(where)
            return output

        step.task = faulty
