"""What communicates gradients in DDP's place: local SGD, compressors, hierarchies. S08 to S10."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from dtrain.precision.loss_scale import LossScale
from dtrain.precision.reduce_dtype import HookGuard
from tests.precision.skips import (
    SCALE,
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
from tests.ranks import run_ranks
from tests.toys import CPU, Net, micro_batches, run_steps, squared_error, train_step, world

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


# -- S09: error feedback

LONG = 14


def power_sgd(rank: int, guarded: bool, approximation_rank: int) -> tuple[list[bool], Tensor]:
    """Which of 14 steps were applied, and the weights; the fourth step overflows on rank 1."""
    model = Net()
    ddp = DistributedDataParallel(model)
    state = PowerSGDState(
        None, approximation_rank, start_powerSGD_iter=2, min_compression_rate=0.01, orthogonalization_epsilon=1e-8
    )
    windows = [micro_batches(step, 8, ranks=2, rank=rank) for step in range(LONG)]
    if rank == 1:
        windows[SKIP][0]["x"][0, 0] = torch.inf
    if guarded:
        guard = HookGuard(ddp, powerSGD_hook, state)
        scale = LossScale(CPU, init=SCALE)
        step = train_step(ddp, sgd(model.parameters()), world=world(rank, 2), nominal=8, guard=guard, loss_scale=scale)
        return [outcome.stats.applied for outcome in run_steps(step, windows)], flat(model.parameters())
    ddp.register_comm_hook(state, powerSGD_hook)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=SCALE), sgd(model.parameters())
    applied = []
    for (batch,) in windows:
        before = flat(model.parameters())
        scaler.scale(squared_error(ddp, batch).loss_sum / 4).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        applied.append(not torch.equal(before, flat(model.parameters())))
    return applied, flat(model.parameters())


def toy_alone(skips: set[int], steps: int, reduced: Callable[[Tensor], Tensor] = lambda gradient: gradient) -> Tensor:
    """The toy's weights after plain steps on both ranks' samples; ``reduced`` is what a rank sends of its gradients."""
    model = Net()
    optimizer = sgd(model.parameters())
    for step in (step for step in range(steps) if step not in skips):
        sent = []
        for rank in range(2):
            (batch,) = micro_batches(step, 8, ranks=2, rank=rank)
            loss = squared_error(model, batch).loss_sum / 4 * SCALE
            sent.append(reduced(flat(torch.autograd.grad(loss, list(model.parameters())))))
        mean = (sent[0] + sent[1]) / 2 / SCALE
        for parameter, part in zip(
            model.parameters(), mean.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
    return flat(model.parameters())


def test_s09_powersgd_drops_the_state_of_a_skipped_step_and_trains() -> None:
    first, second = run_ranks(2, power_sgd, False, 1)
    assert first[0] == second[0] == [True] * SKIP + [False] * (LONG - SKIP)
    first, second = run_ranks(2, power_sgd, True, 1)
    assert first[0] == second[0] == [step != SKIP for step in range(LONG)]
    assert first[1].isfinite().all()
    assert torch.equal(first[1], second[1])


def test_s09_powersgd_of_full_rank_equals_the_reference_that_skips_the_step() -> None:
    first, second = run_ranks(2, power_sgd, True, 4)
    assert torch.equal(first[1], second[1])
    torch.testing.assert_close(first[1], toy_alone({SKIP}, LONG), rtol=1e-3, atol=1e-4)


# -- S10: a hook that hides infinities


def int8(gradients: Tensor) -> Tensor:
    """What is left of gradients that were sent as int8 with one scale: nothing in it is infinite."""
    finite = gradients.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    step = finite.abs().max().clamp(min=1e-30) / 127
    return (finite / step).round().clamp(-127, 127) * step


# Hooks have no annotations here: DDP takes those that postponed evaluation leaves as text for wrong ones.
def int8_hook(state, bucket):
    message = int8(bucket.buffer()) / dist.get_world_size()
    return dist.all_reduce(message, async_op=True).get_future().then(lambda reduced: reduced.value()[0])


def hiding(rank: int, guarded: bool) -> tuple[list[int], Tensor]:
    """Ranks that overflowed in each step, and the weights. The hook is registered bare, or with its guard."""
    model = Net()
    ddp = DistributedDataParallel(model)
    guard = HookGuard(ddp, int8_hook) if guarded else ddp.register_comm_hook(None, int8_hook)
    windows = [micro_batches(step, 8, ranks=2, rank=rank) for step in range(STEPS)]

    def bad(gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, torch.tensor([0]), torch.inf) if rank == 1 and step.step == SKIP else gradient

    # In the gradient alone: a loss that is not finite would be seen without looking at gradients.
    model.trunk.weight.register_hook(bad)
    step = train_step(
        ddp,
        sgd(model.parameters()),
        world=world(rank, 2),
        nominal=8,
        guard=guard,
        loss_scale=LossScale(CPU, init=SCALE),
    )
    return [outcome.stats.overflow for outcome in run_steps(step, windows)], flat(model.parameters())


def test_s10_an_infinity_is_seen_before_a_hook_hides_it() -> None:
    expected = toy_alone({SKIP}, STEPS, int8)
    (seen, first), (_, second) = run_ranks(2, hiding, False)
    assert seen == [0] * STEPS
    assert torch.equal(first, second)
    assert not torch.allclose(first, expected, rtol=0.1)
    (seen, first), (also, second) = run_ranks(2, hiding, True)
    assert seen == also == [int(step == SKIP) for step in range(STEPS)]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


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
