"""Which ranks agree, with which reduction, and on whose state: S13, S16, S19, S25."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtrain.precision import CrossRankGradScaler
from dtrain.precision.vote import Agreement
from tests.precision.skips import (
    SCALE,
    STEPS,
    Result,
    alone,
    assert_right,
    counted,
    flat,
    fused_adamw,
    loss_of,
    ours,
    rows,
    scales,
    with_both,
)
from tests.ranks import run_ranks
from tests.toys import Net

SKIP = 2


# -- S13: a state that only one rank has


def resumed(rank: int, scaler: Any) -> Result:
    """The checkpoint's scale is that of ``SCALE``; the scalers were made with another one."""
    state = scaler.state_dict()
    scaler.load_state_dict(state | {"scale": 8 * SCALE})
    if isinstance(scaler, CrossRankGradScaler):
        scaler.load_state_dict(state if rank == 0 else None)
    elif rank == 0:
        scaler.load_state_dict(state)
    model = Net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        scaler.scale(loss_of(ddp, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return Result(flat(model.parameters()), scaler.get_scale(), counted(optimizer))


def test_s13_a_scale_that_one_rank_loaded_is_that_of_all() -> None:
    apart, together = with_both(2, resumed)
    (model, _) = alone(2, (), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert_right(together, flat(model.parameters()), ())
    assert apart[0].scale != apart[1].scale
    # Gradients of two scales were averaged, and each rank divided them by its own.
    assert not torch.equal(apart[0].weights, apart[1].weights)


# -- S16: the reduction


class Reduced(torch.amp.GradScaler):
    """torch's scaler with an all-reduce of its flags: the obvious repair, with some reduction."""

    op: Any = dist.ReduceOp.SUM

    def _unscale_grads_(self, *args: Any) -> Any:
        found = super()._unscale_grads_(*args)
        for flag in found.values():
            dist.all_reduce(flag, op=self.op)
            if self.op == dist.ReduceOp.SUM and self.average:
                flag.div_(dist.get_world_size())
        return found

    average = False


def reduced(rank: int, op: str, bad: tuple[int, ...], fused: bool) -> Result:
    """Each rank has its own weight and gradient; some overflow in the second step."""
    scaler = Reduced("cpu", init_scale=SCALE, growth_interval=3)
    scaler.op = dist.ReduceOp.MIN if op == "min" else dist.ReduceOp.SUM
    scaler.average = op == "avg"
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.05, fused=fused)
    for step in range(3):
        scaler.scale(weight.square().sum()).backward()
        if step == 1 and rank in bad:
            assert weight.grad is not None
            weight.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return Result(weight.detach(), scaler.get_scale())


@pytest.mark.parametrize(
    ("op", "bad", "fused", "spoilt"),
    [
        ("sum", (0,), True, []),
        ("sum", (0, 1), False, []),
        ("sum", (0, 1), True, [0, 1]),
        ("avg", (0,), True, [0]),
        ("min", (0,), True, [0]),
    ],
)
def test_s16_the_obvious_reductions_of_torchs_flags_step_with_nan(
    op: str, bad: tuple[int, ...], fused: bool, spoilt: list[int]
) -> None:
    results = run_ranks(2, reduced, op, bad, fused)
    assert [rank for rank, result in enumerate(results) if not result.weights.isfinite().all()] == spoilt
    # The ranks agree all the same.
    assert len(set(scales(results))) == 1


# -- S19: a pipeline


def pipeline(rank: int, scaler: Any) -> Result:
    """Two stages of two ranks each; the gradients of the second stage overflow in one of its ranks."""
    stage, pair = rank // 2, rank % 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = Net()
    part = (net.trunk, net.head)[stage]
    optimizer = fused_adamw(part.parameters())
    for step in range(STEPS):
        if stage == 0:
            hidden = net.trunk(rows(pair, step)).tanh()
            dist.send(hidden.detach(), rank + 2)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, rank + 2)
            scaler.scale(torch.zeros(()))
            hidden.backward(gradient)
        else:
            hidden = torch.empty(4, 4)
            dist.recv(hidden, rank - 2)
            hidden.requires_grad_()
            scaler.scale(net.head(hidden).square().mean()).backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, rank - 2)
        for parameter in part.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=groups[stage])
            parameter.grad.div_(2)
            if step == SKIP and stage == 1:
                parameter.grad.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return Result(torch.zeros(0), scaler.get_scale(), counted(optimizer), flat(part.parameters()))


def test_s19_the_stages_of_a_pipeline_skip_together() -> None:
    apart, together = with_both(4, pipeline)
    model, *_ = alone(2, {SKIP}, fused_adamw)
    own = [flat(stage.parameters()) for stage in (model.trunk, model.head) for _ in range(2)]
    assert_right(together, torch.zeros(0), {SKIP}, own)
    first, second, third, fourth = scales(apart)
    assert first == second != third == fourth


def test_s19_voting_among_the_data_parallel_ranks_is_not_enough() -> None:
    def voting_in_stages(rank: int) -> Result:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return pipeline(rank, ours(process_group=groups[rank // 2]))

    first, second, third, fourth = scales(run_ranks(4, voting_in_stages))
    assert first == second != third == fourth


# -- S25: what a maximum does with NaN


def test_s25_a_maximum_loses_a_nan_and_a_sum_of_flags_does_not() -> None:
    def rank_of_two(rank: int) -> tuple[bool, float]:
        raw = torch.tensor([1.0, torch.nan][rank])
        dist.all_reduce(raw, op=dist.ReduceOp.MAX)
        flag = torch.tensor([0.0, 1.0][rank])
        Agreement().sum_payload(flag)
        return bool(raw.isnan()), flag.item()

    assert run_ranks(2, rank_of_two) == [(False, 1.0)] * 2
