"""The driver of all skip scenarios: data for the toy network, two scalers, a training loop and its reference.

A *scenario* is a function of (rank, scaler) that trains a few steps and returns a ``Result``. It runs with torch's scaler,
to show what goes wrong, and with dtrain's, to show that it does not. The ranks must agree, be finite, and equal one process
that skips the same steps: agreement alone is not enough, because all ranks may be wrong in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.precision import CrossRankGradScaler
from tests.ranks import run_ranks
from tests.toys import Net

STEPS = 6
SCALE = 1024.0
INTERVAL = 3


def ours(**options: Any) -> CrossRankGradScaler:
    return CrossRankGradScaler("cpu", init_scale=SCALE, growth_interval=INTERVAL, **options)


def stock(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=INTERVAL, **options)


# -- the data


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


def spoil(parameter: Any) -> None:
    """Writes an infinity into this rank's part of a gradient."""
    gradient = parameter.grad
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    gradient.view(-1)[0] = torch.inf


def counted(optimizer: torch.optim.Optimizer) -> list[float]:
    """The optimizer's own step counters."""
    return [float(state["step"]) for state in optimizer.state.values() if "step" in state]


def adamw(parameters: Any, fused: bool = False) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.05, fused=fused)


fused_adamw = partial(adamw, fused=True)


# -- results


@dataclass
class Result:
    """The state of a rank after training.

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
    return run_ranks(ranks, lambda rank: scenario(rank, stock(), *args), **options)


def scales(results: Sequence[Result]) -> list[float]:
    return [result.scale for result in results]


def scale_after(skips: Collection[int], steps: int = STEPS) -> float:
    """The scale by torch's schedule."""
    scale, clean = SCALE, 0
    for step in range(steps):
        clean = 0 if step in skips else clean + 1
        scale = scale / 2 if step in skips else scale * 2 if clean == INTERVAL else scale
        clean %= INTERVAL
    return scale


def assert_right(
    results: Sequence[Result], weights: Tensor, skips: Collection[int], own: Sequence[Tensor] = (), steps: int = STEPS
) -> None:
    """The ranks agree, are finite and equal ``weights`` (and ``own``) of one process that left out ``skips``."""
    for rank, result in enumerate(results):
        assert torch.equal(result.weights, results[0].weights)
        assert result.weights.isfinite().all()
        assert result.own.isfinite().all()
        torch.testing.assert_close(result.weights, weights, rtol=1e-4, atol=1e-5)
        if own:
            torch.testing.assert_close(result.own, own[rank], rtol=1e-4, atol=1e-5)
        assert result.scale == scale_after(skips, steps)
        assert set(result.counters) <= {steps - len(skips)}


# -- one loop for any optimizer


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD+momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
}

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class Case:
    """One way to train: DDP averages the trunk, the head is each rank's own and overflows there.

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

    def optimizers(self, model: Net) -> list[torch.optim.Optimizer]:
        make, options = OPTIMIZERS[self.optimizer], IMPLEMENTATIONS[self.implementation]
        parts = [model.trunk, model.head] if self.separate else [model]
        return [make(part.parameters(), **options) for part in parts]


def train(rank: int, scaler: Any, case: Case) -> Result:
    """Trains with ``scaler``, in DDP where there is a process group."""
    model = Net()
    optimizers = case.optimizers(model)
    forward: nn.Module = model
    if dist.is_initialized():
        ignored = [f"head.{name}" for name, _ in model.head.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        forward = DistributedDataParallel(model)
    for step in range(STEPS):
        scaler.scale(loss_of(forward, rank if case.own_data else 0, step)).backward()
        if rank in case.overflows.get(step, ()):
            spoil(model.head.weight)
        for optimizer in optimizers if case.clip else ():
            scaler.unscale_(optimizer)
            _clip(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return _result(model, scaler.get_scale(), optimizers)


def reference(case: Case, ranks: int = 1) -> list[Result]:
    """``train`` in one process without a scaler: the result of each rank."""
    skips = sorted(step for step, culprits in case.overflows.items() if culprits)
    # An optimizer whose gradients are finite on all ranks is not skipped, though the scale backs off.
    skips_of = [(), skips] if case.separate else [skips]
    models, optimizers = _alone(ranks, skips_of, case.optimizers, ("head",), case.own_data, case.clip)
    pairs = zip(models, optimizers, strict=True)
    return [_result(model, scale_after(skips), of_rank) for model, of_rank in pairs]


def assert_equals_reference(results: Sequence[Result], case: Case, exact: bool) -> None:
    """Every rank equals its reference; to the last bit if ``exact``."""
    tolerance = 0.0 if exact else 1e-6
    for result, expected in zip(results, reference(case, len(results)), strict=True):
        assert torch.equal(result.weights, results[0].weights), case
        for name in ("weights", "own"):
            got = getattr(result, name)
            assert got.isfinite().all(), case
            torch.testing.assert_close(got, getattr(expected, name), rtol=tolerance, atol=tolerance)
        assert (result.scale, result.counters) == (expected.scale, expected.counters), case


def alone(
    ranks: int,
    skips: Collection[int],
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    local: Sequence[str] = (),
) -> list[Net]:
    """The models of all ranks, trained in one process without a scaler and without the skipped steps.

    Gradients are averaged over the ranks, except those of parameters whose name starts with one of ``local``.
    """
    return _alone(ranks, [skips], lambda model: [make(model.parameters())], local)[0]


def average(parameters: Sequence[Tensor]) -> None:
    """Gives each of the parameters the mean of their gradients."""
    mean = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None]).mean(0)
    for parameter in parameters:
        parameter.grad = mean.clone()


def _alone(
    ranks: int,
    skips_of: Sequence[Collection[int]],
    optimizers_of: Callable[[Net], list[torch.optim.Optimizer]],
    local: Sequence[str],
    own_data: bool = True,
    clip: bool = False,
) -> tuple[list[Net], list[list[torch.optim.Optimizer]]]:
    models = [Net() for _ in range(ranks)]
    optimizers = [optimizers_of(model) for model in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            loss_of(model, rank if own_data else 0, step).backward()
        for name, _ in models[0].named_parameters():
            if not name.startswith(tuple(local)):
                average([model.get_parameter(name) for model in models])
        for of_rank in optimizers:
            for optimizer, skips in zip(of_rank, skips_of, strict=True):
                if step not in skips:
                    if clip:
                        _clip(optimizer)
                    optimizer.step()
                optimizer.zero_grad()
    return models, optimizers


def _result(model: Net, scale: float, optimizers: Sequence[torch.optim.Optimizer]) -> Result:
    counters = [steps for optimizer in optimizers for steps in counted(optimizer)]
    return Result(flat(model.trunk.parameters()), scale, counters, flat(model.head.parameters()))


def _clip(optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)
