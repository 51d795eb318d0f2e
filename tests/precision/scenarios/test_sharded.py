"""Optimizers and parameters in shards: ZeRO, FSDP, DTensor. S04 to S07."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.precision.skips import (
    SCALE,
    STEPS,
    Result,
    adamw,
    alone,
    assert_right,
    counted,
    flat,
    loss_of,
    rows,
    scales,
    spoil,
    with_both,
    with_ours,
    with_stock,
)
from tests.ranks import RanksFailed, run_ranks
from tests.toys import Net

SKIP = 2


# -- S04: ZeroRedundancyOptimizer


def zero(rank: int, scaler: Any, outside: bool) -> Result:
    """Each rank steps its part of the parameters and broadcasts it. ``outside``: DDP does not wrap the head."""
    model = Net()
    ddp = DistributedDataParallel(model.trunk if outside else model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    for step in range(STEPS):
        bad = step == SKIP and rank == 1
        if outside:
            # The same data for all: then it does not matter which rank's gradient of the head is the one that counts.
            loss = model.head(ddp(rows(0, step)).tanh()).square().mean()
        else:
            loss = loss_of(ddp, rank, step, bad)
        scaler.scale(loss).backward()
        if bad and outside:
            spoil(model.head.weight)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return Result(flat(model.parameters()), scaler.get_scale(), counted(optimizer.optim))


def test_s04_a_sharded_optimizer_behind_ddp_agrees_with_both_scalers() -> None:
    (model, _) = alone(2, {SKIP}, adamw)
    for results in with_both(2, zero, False):
        assert_right(results, flat(model.parameters()), {SKIP})


@pytest.mark.slow
def test_s04u_a_module_outside_ddp_hangs_torch_and_is_one_skip_here() -> None:
    (model,) = alone(1, {SKIP}, adamw)
    assert_right(with_ours(2, zero, True), flat(model.parameters()), {SKIP})
    with pytest.raises(RanksFailed, match=r"[Tt]imed out|Connection closed"):
        with_stock(2, zero, True, timeout=20, group_timeout=2.0)


# -- S05: gradients sharded after the backward, as ZeRO-2 does


def zero2(rank: int, scaler: Any, ranks: int) -> Result:
    """Every rank has the whole model, the mean gradient of one part of it, and an optimizer for that part."""
    model = Net()
    parameters = list(model.parameters())
    mine = parameters[rank::ranks]
    optimizer = adamw(mine)
    for step in range(STEPS):
        scaler.scale(loss_of(model, rank, step)).backward()
        for number, parameter in enumerate(parameters):
            assert parameter.grad is not None
            dist.reduce(parameter.grad, dst=number % ranks)
            parameter.grad.div_(ranks)
        if step == SKIP and rank == 1:
            spoil(mine[0])
        scaler.step(optimizer)
        scaler.update()
        for number, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, src=number % ranks)
            parameter.grad = None
    return Result(flat(parameters), scaler.get_scale(), counted(optimizer))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_s05_no_step_is_torn_into_shards_that_move_and_shards_that_do_not(ranks: int) -> None:
    apart, together = with_both(ranks, zero2, ranks)
    model, *_ = alone(ranks, {SKIP}, adamw)
    expected = flat(model.parameters())
    assert_right(together, expected, {SKIP})
    # torch: the ranks have equal weights, and they are wrong.
    assert len(set(scales(apart))) == 2
    assert torch.equal(apart[0].weights, apart[1].weights)
    assert (apart[0].weights - expected).abs().max() > 0.01


# -- S06: FSDP1


def fsdp1(rank: int, scaler: Any, fused: bool, unscale: bool) -> Result:
    model: Any = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=False)
    optimizer = adamw(model.parameters(), fused)
    for step in range(STEPS):
        scaler.scale(loss_of(model, rank, step)).backward()
        if step == SKIP and rank == 1:
            spoil(next(model.parameters()))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    steps = counted(optimizer)
    with FullyShardedDataParallel.summon_full_params(model):
        return Result(flat(model.parameters()), scaler.get_scale(), steps)


def sharded_scaler() -> Any:
    return ShardedGradScaler("cpu", init_scale=SCALE, growth_interval=3)


@pytest.mark.parametrize(("fused", "unscale"), [(False, False), (True, False), (True, True)])
def test_s06_fsdp1_skips_together(fused: bool, unscale: bool) -> None:
    model, *_ = alone(2, {SKIP}, adamw)
    assert_right(with_ours(2, fsdp1, fused, unscale), flat(model.parameters()), {SKIP})


def test_s06_torchs_scalers_diverge_or_crash_under_fsdp1() -> None:
    first, second = with_stock(2, fsdp1, False, False)
    assert first.scale != second.scale
    # S06f: its own scaler for FSDP asks the others in unscale_ only, which a fused step does not call.
    first, second = run_ranks(2, lambda rank: fsdp1(rank, sharded_scaler(), True, False))
    assert first.scale != second.scale
    assert first.counters != second.counters
    # S06u: and with unscale_ its flag has a dimension too many.
    with pytest.raises(RanksFailed, match="doesn't match the broadcast shape"):
        run_ranks(2, lambda rank: fsdp1(rank, sharded_scaler(), True, True))


# -- S07: DTensor


def fsdp2(rank: int, scaler: Any, fused: bool) -> Result:
    model: Any = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = adamw(model.parameters(), fused)
    for step in range(STEPS):
        scaler.scale(loss_of(model, rank, step)).backward()
        if step == SKIP and rank == 1:
            spoil(model.trunk.weight)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    return Result(flat(weights), scaler.get_scale(), counted(optimizer))


@pytest.mark.parametrize("fused", [False, True])
def test_s07_fsdp2_agrees_with_both_scalers(fused: bool) -> None:
    model, *_ = alone(2, {SKIP}, adamw)
    for results in with_both(2, fsdp2, fused):
        assert_right(results, flat(model.parameters()), {SKIP})


class Block(nn.Module):
    """A norm, and two layers that tensor parallelism cuts by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh())


def block_optimizer(block: Block, norm: bool) -> torch.optim.AdamW:
    """The usual two groups, the one without weight decay first: its first gradient is the norm's, else the bias's."""
    block.norm.requires_grad_(norm)
    vectors = [*block.norm.parameters(), block.down.bias] if norm else [block.down.bias]
    matrices = {"params": [block.up.weight, block.down.weight]}
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, matrices], lr=0.05, foreach=False)


def block_loss(block: nn.Module, step: int, part: slice = slice(None)) -> Tensor:
    """Squared error over sequences of six; ``part`` is what this rank feeds in, and all of it comes out."""
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(step))
    return (block(x[:, part]) - x).square().mean()


def tensor_parallel(rank: int, scaler: Any, norm: bool) -> Result:
    block = Block()
    plan = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(block, mesh, plan)
    parallelize_module(block.up, mesh, ColwiseParallel())
    optimizer = block_optimizer(block, norm)
    for step in range(STEPS):
        scaler.scale(block_loss(block, step, slice(3 * rank, 3 * rank + 3))).backward()
        if step == SKIP and rank == 1:
            spoil(block.up.weight)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights: list[Any] = list(block.parameters())
    local_bias: Any = block.down.bias
    whole = flat(weight.full_tensor() for weight in weights)
    return Result(torch.cat([whole, local_bias.to_local().detach()]), scaler.get_scale(), counted(optimizer))


def block_alone(norm: bool) -> Tensor:
    block = Block()
    optimizer = block_optimizer(block, norm)
    for step in range(STEPS):
        if step != SKIP:
            block_loss(block, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat([*block.parameters(), block.down.bias])


@pytest.mark.slow
def test_s07t_tensor_parallel_with_a_norm_first_agrees_with_both_scalers() -> None:
    for results in with_both(2, tensor_parallel, True):
        assert_right(results, block_alone(True), {SKIP})


def test_s07n_a_replicated_gradient_first_hides_the_others_from_torch_and_not_from_us() -> None:
    apart, together = with_both(2, tensor_parallel, False)
    assert_right(together, block_alone(False), {SKIP})
    assert apart[0].scale != apart[1].scale
    assert apart[0].counters != apart[1].counters
    # The bias that should be replicated is not.
    assert not torch.equal(apart[0].weights[-4:], apart[1].weights[-4:])
