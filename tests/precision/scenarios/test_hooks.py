"""What communicates gradients in DDP's place: local SGD and hierarchies. S08 and S10h."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.precision.skips import (
    STEPS,
    Result,
    assert_right,
    average,
    counted,
    flat,
    loss_of,
    scales,
    with_both,
)
from tests.toys import Net

SKIP = 3


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# -- S08: local SGD

WARM_UP, PERIOD, LOCAL_STEPS = 2, 2, 8


def local_sgd(rank: int, scaler: Any) -> Result:
    """DDP averages gradients for two steps; then each rank is on its own, and weights are averaged now and then."""
    model = Net()
    ddp = DistributedDataParallel(model)
    only_me, _ = dist.new_subgroups(group_size=1)
    ddp.register_comm_hook(PostLocalSGDState(None, only_me, WARM_UP), post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=WARM_UP)
    optimizer = PostLocalSGDOptimizer(sgd(model.parameters()), averager)
    for step in range(LOCAL_STEPS):
        scaler.scale(loss_of(ddp, rank, step, bad=step == SKIP and rank == 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return Result(torch.zeros(0), scaler.get_scale(), [float(averager.step)], flat(model.parameters()))


def local_sgd_alone() -> list[Tensor]:
    models = [Net() for _ in range(2)]
    optimizers = [sgd(model.parameters()) for model in models]
    for applied, step in enumerate(step for step in range(LOCAL_STEPS) if step != SKIP):
        for rank, model in enumerate(models):
            loss_of(model, rank, step).backward()
        pairs = list(zip(*(model.parameters() for model in models), strict=True))
        if step < WARM_UP:
            for pair in pairs:
                average(pair)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if applied >= WARM_UP and (applied - WARM_UP) % PERIOD == 0:
            for pair in pairs:
                mean = torch.stack([parameter.data for parameter in pair]).mean(0)
                for parameter in pair:
                    parameter.data.copy_(mean)
    return [flat(model.parameters()) for model in models]


def test_s08_local_sgd_keeps_scale_and_averager_in_step() -> None:
    apart, together = with_both(2, local_sgd)
    assert_right(together, torch.zeros(0), {SKIP}, local_sgd_alone(), LOCAL_STEPS)
    assert apart[0].scale != apart[1].scale
    assert [result.counters for result in apart] == [[8.0], [7.0]]


# -- S10h: hierarchies


def hierarchical(rank: int, scaler: Any) -> Result:
    """Gradients are averaged in pairs of ranks; weights over all of them, at the end."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Net()
    ddp = DistributedDataParallel(model)

    def in_pairs(state, bucket):
        message = bucket.buffer() / 2
        future = dist.all_reduce(message, group=pairs[rank // 2], async_op=True).get_future()
        return future.then(lambda reduced: reduced.value()[0])

    ddp.register_comm_hook(None, in_pairs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    for step in range(STEPS):
        scaler.scale(loss_of(ddp, rank, step, bad=step == SKIP and rank == 3)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights = flat(model.parameters())
    dist.all_reduce(weights)
    return Result(weights / 4, scaler.get_scale(), counted(optimizer))


def test_s10h_pairs_of_ranks_skip_with_the_others() -> None:
    apart, together = with_both(4, hierarchical)
    models = [_pair_alone(first) for first in (0, 2)]
    assert_right(together, sum(models, torch.zeros(())) / 2, {SKIP})
    first, second, third, fourth = scales(apart)
    assert first == second != third == fourth


def _pair_alone(first: int) -> Tensor:
    models = [Net(), Net()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    for step in (step for step in range(STEPS) if step != SKIP):
        for number, model in enumerate(models):
            loss_of(model, first + number, step).backward()
        for pair in zip(*(model.parameters() for model in models), strict=True):
            average(pair)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return flat(models[0].parameters())
