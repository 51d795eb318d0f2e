"""A few steps of training with a gradient scaler, and the same without one: the oracle of the scaler's tests.

The model has a replicated trunk, which DDP averages over the ranks, and a head of each rank's own, which it ignores. An
overflow is an inf written into the head's gradient: only this rank's check can see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
INIT_SCALE = 1024.0

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
    "SGD+momentum": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=0.1, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=0.1, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.1, **o),
}

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        optimizer: Key of ``OPTIMIZERS``.
        implementation: Key of ``IMPLEMENTATIONS``.
        overflows: Step to the ranks that overflow in it.
        clip: Whether gradients are clipped after unscaling, those of each optimizer by their own norm.
        separate: Whether trunk and head have an optimizer each.
        own_data: Whether each rank has its own inputs; otherwise averaging over the ranks changes no bit.
    """

    optimizer: str = "AdamW"
    implementation: str = "plain"
    overflows: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    clip: bool = False
    separate: bool = False
    own_data: bool = False

    def optimizers(self, model: Model) -> list[torch.optim.Optimizer]:
        make, options = OPTIMIZERS[self.optimizer], IMPLEMENTATIONS[self.implementation]
        if self.separate:
            return [make(model.trunk.parameters(), **options), make(model.head.parameters(), **options)]
        return [make(model.parameters(), **options)]


@dataclass
class Result:
    """What a rank ended with; ``moved`` says for each step which of trunk and head changed."""

    trunk: Tensor
    head: Tensor
    moved: list[tuple[bool, bool]]
    scales: list[float]
    optimizer_steps: list[float]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).tanh())

    def weights(self) -> tuple[Tensor, Tensor]:
        trunk, head = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (self.trunk, self.head))
        return trunk, head


def train(rank: int, case: Case, scaler: Any) -> Result:
    """Trains with ``scaler``; joined by DDP where there is a process group."""
    model = Model()
    optimizers = case.optimizers(model)
    forward: nn.Module = model
    if dist.is_initialized():
        ignored = [f"head.{name}" for name, _ in model.head.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        forward = DistributedDataParallel(model)
    moved, scales = [], []
    for step in range(STEPS):
        before = model.weights()
        scaler.scale(_loss(forward, case, rank, step)).backward()
        if rank in case.overflows.get(step, ()):
            assert model.head.weight.grad is not None
            model.head.weight.grad[0, 0] = torch.inf
        if case.clip:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
                _clip(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        trunk, head = model.weights()
        moved.append((not trunk.equal(before[0]), not head.equal(before[1])))
        scales.append(scaler.get_scale())
    return Result(*model.weights(), moved, scales, _steps(optimizers))


def train_reference(case: Case, world_size: int = 1) -> list[Result]:
    """The same in one process without a scaler, with all ranks' heads side by side: the result of each rank.

    An optimizer of any rank that overflows is skipped on all ranks.
    """
    models = [Model() for _ in range(world_size)]
    optimizers = [case.optimizers(model) for model in models]
    scale, tracker, scales = INIT_SCALE, 0, []
    moved: list[list[tuple[bool, bool]]] = [[] for _ in models]
    for step in range(STEPS):
        before = [model.weights() for model in models]
        for rank, model in enumerate(models):
            _loss(model, case, rank, step).backward()
        for parameters in zip(*(model.trunk.parameters() for model in models), strict=True):
            mean = torch.stack([p.grad for p in parameters if p.grad is not None]).mean(0)
            for parameter in parameters:
                parameter.grad = mean.clone()
        overflow = bool(case.overflows.get(step))
        for of_rank in optimizers:
            for number, optimizer in enumerate(of_rank):
                if not overflow or (case.separate and number == 0):
                    if case.clip:
                        _clip(optimizer)
                    optimizer.step()
                optimizer.zero_grad()
        for rank, model in enumerate(models):
            trunk, head = model.weights()
            moved[rank].append((not trunk.equal(before[rank][0]), not head.equal(before[rank][1])))
        tracker = 0 if overflow else tracker + 1
        scale = scale / 2 if overflow else scale * 2 if tracker == 2 else scale
        tracker = tracker % 2
        scales.append(scale)
    return [
        Result(*model.weights(), moved[rank], scales, _steps(optimizers[rank])) for rank, model in enumerate(models)
    ]


def _loss(model: nn.Module, case: Case, rank: int, step: int) -> Tensor:
    seed = 100 * rank + step if case.own_data else step
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def _clip(optimizer: torch.optim.Optimizer) -> None:
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    torch.nn.utils.clip_grad_norm_(parameters, 0.05)


def _steps(optimizers: list[torch.optim.Optimizer]) -> list[float]:
    """The step counters of the optimizers that keep one."""
    return [float(state["step"]) for optimizer in optimizers for state in optimizer.state.values() if "step" in state]
