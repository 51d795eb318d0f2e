"""What the scenarios share: two scalers to drive, a small model, its data, and how results are compared.

A *scenario* is a function of (rank, scaler) that trains a few steps and returns a ``Result``. It runs with torch's scaler,
to show what goes wrong, and with dtrain's, to show that it does not. Ranks must agree, be finite, and equal one process
that skips the same steps: agreeing alone is not enough, for all ranks may be wrong alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.precision import CrossRankGradScaler
from tests.ranks import run_ranks

STEPS = 6
SCALE = 1024.0
INTERVAL = 3


def ours(**options: Any) -> CrossRankGradScaler:
    return CrossRankGradScaler("cpu", init_scale=SCALE, growth_interval=INTERVAL, **options)


def stock(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=INTERVAL, **options)


@dataclass
class Result:
    """What a rank ended with.

    Attributes:
        weights: What all ranks must have alike, flat.
        scale: The last loss scale.
        counters: Steps taken by optimizers, averagers and schedules.
        own: What only this rank has, flat.
    """

    weights: Tensor
    scale: float
    counters: list[float] = field(default_factory=list)
    own: Tensor = field(default_factory=lambda: torch.zeros(0))


def with_both(ranks: int, scenario: Callable[..., Result], *args: Any) -> tuple[list[Result], list[Result]]:
    """The results by rank with torch's scaler, and with dtrain's."""
    pairs = run_ranks(ranks, lambda rank: [scenario(rank, make(), *args) for make in (stock, ours)])
    return [first for first, _ in pairs], [second for _, second in pairs]


def with_ours(ranks: int, scenario: Callable[..., Result], *args: Any) -> list[Result]:
    return run_ranks(ranks, lambda rank: scenario(rank, ours(), *args))


def with_stock(ranks: int, scenario: Callable[..., Result], *args: Any, **options: Any) -> list[Result]:
    return run_ranks(ranks, partial(_with_stock, scenario), *args, **options)


def _with_stock(scenario: Callable[..., Result], rank: int, *args: Any) -> Result:
    return scenario(rank, stock(), *args)


def assert_right(
    results: Sequence[Result], weights: Tensor, skips: Collection[int], own: Sequence[Tensor] = (), steps: int = STEPS
) -> None:
    """The four criteria, given the weights of a single process that left out ``skips``."""
    first = results[0]
    for rank, result in enumerate(results):
        assert torch.equal(result.weights, first.weights)
        assert result.weights.isfinite().all()
        assert result.own.isfinite().all()
        torch.testing.assert_close(result.weights, weights, rtol=1e-4, atol=1e-5)
        if own:
            torch.testing.assert_close(result.own, own[rank], rtol=1e-4, atol=1e-5)
        assert result.scale == scale_after(skips, steps)
        assert set(result.counters) <= {steps - len(skips)}


def scale_after(skips: Collection[int], steps: int = STEPS) -> float:
    """What torch's schedule makes of the scale."""
    scale, clean = SCALE, 0
    for step in range(steps):
        clean = 0 if step in skips else clean + 1
        scale = scale / 2 if step in skips else scale * 2 if clean == INTERVAL else scale
        clean %= INTERVAL
    return scale


def scales(results: Sequence[Result]) -> list[float]:
    return [result.scale for result in results]


class Net(nn.Module):
    """Three numbers to two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).tanh())


def rows(rank: int, step: int, bad: bool = False) -> Tensor:
    """A rank's inputs, shape ``[4, 3]``. A bad one makes the gradient of ``Net.trunk`` NaN, and nothing else."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
    x[0, 0] = torch.inf if bad else x[0, 0]
    return x


def loss_of(model: nn.Module, rank: int, step: int, bad: bool = False) -> Tensor:
    return model(rows(rank, step, bad)).square().mean()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of tensors as one."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def counted(optimizer: torch.optim.Optimizer) -> list[float]:
    """The optimizer's own step counters."""
    return [float(state["step"]) for state in optimizer.state.values() if "step" in state]


def spoil(parameter: Any) -> None:
    """An infinity in this rank's part of a gradient."""
    gradient = parameter.grad
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    gradient.view(-1)[0] = torch.inf


def alone(
    ranks: int,
    skips: Collection[int],
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    local: Collection[str] = (),
    steps: int = STEPS,
) -> list[Net]:
    """The reference: the models of all ranks in one process, without a scaler, without the skipped steps.

    Gradients are averaged over the ranks, except those of parameters whose name starts with one of ``local``.
    """
    models = [Net() for _ in range(ranks)]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(steps):
        if step in skips:
            continue
        for rank, model in enumerate(models):
            loss_of(model, rank, step).backward()
        for name, _ in models[0].named_parameters():
            if not name.startswith(tuple(local)):
                average([model.get_parameter(name) for model in models])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return models


def average(parameters: Sequence[Tensor]) -> None:
    """Gives each of the parameters the mean of their gradients."""
    mean = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None]).mean(0)
    for parameter in parameters:
        parameter.grad = mean.clone()
