"""The memory of a rank by strategy, compared with what the tensors of a rank really have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # shard_model imports it, which takes seconds: here once, and not in every rank

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.sharding import local_part, shard_model
from dtrain.distributed.world import World
from dtrain.training.build import build_model
from dtrain.training.memory_usage import Strategy, Usage, usage
from dtrain.training.step_memory import StepMemory
from tests.ranks import run_ranks
from tests.toys import CPU
from tests.training.test_step_memory import config, measured, tokens


@pytest.fixture(scope="module")
def gpt() -> StepMemory:
    """The GPT in fp32."""
    return measured(config(), tokens())


@pytest.fixture(scope="module")
def gpt_in_bf16() -> StepMemory:
    """The GPT in bf16, with averaged weights."""
    return measured(config(ema_decay=0.9), tokens(), "bf16")


def strategy(ranks: int, **options: Any) -> Strategy:
    return Strategy.from_config(ParallelConfig(**options), ranks, ranks_per_node=2)


@pytest.mark.slow
def test_bytes_of_parts_are_those_that_a_rank_really_has(gpt: StepMemory) -> None:
    def rank(number: int) -> tuple[int, int, int]:
        model = build_model(config().model, CPU)
        shard_model(model, ParallelConfig(shard="full"), World(number, 3, number, 3, CPU, "gloo", launched=True))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(tokens()["tokens"][:, 1:]).sum().backward()
        gradients = sum(local_part(p.grad).nbytes for p in model.parameters() if p.grad is not None)
        optimizer.step()
        state = [value for of_one in optimizer.state.values() for value in of_one.values()]
        parameters = sum(local_part(parameter).nbytes for parameter in model.parameters())
        return parameters, gradients, sum(local_part(value).nbytes for value in state)

    want = usage(gpt, strategy(3, shard="full"), micro_batches=1)
    # The first rank has the largest parts.
    assert run_ranks(3, rank)[0] == (want.parameters - 2 * gpt.buffers, want.gradients, want.optimizer)
    hybrid = usage(gpt, strategy(6, shard="hybrid", shard_size=3), micro_batches=1)
    assert (hybrid.parameters, hybrid.gradients, hybrid.optimizer) == (want.parameters, want.gradients, want.optimizer)


@pytest.mark.slow
def test_ddp_needs_buckets_and_gradients_besides_where_they_are_no_views(gpt: StepMemory) -> None:
    need = gpt
    whole = sum(parameter.tensor.nbytes for parameter in need.parameters)
    one, two = (usage(need, strategy(2), micro_batches=number) for number in (1, 2))
    assert one.gradients == two.gradients == whole
    for options in ({"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": False}):
        assert usage(need, strategy(2, **options), micro_batches=2).gradients == 2 * whole
    assert usage(need, strategy(2, static_graph=True), micro_batches=1).gradients == whole
    assert one.optimizer == 2 * whole + 4 * len(need.parameters)
    assert usage(need, strategy(2, reduce_dtype="bf16"), 1).working == whole // 2
    alone = usage(need, strategy(1), 1)
    assert one.total - whole < alone.total < one.total  # gradients come while activations go


@pytest.mark.slow
def test_a_sharded_model_needs_less_with_more_ranks_and_its_options_do_what_they_say(gpt_in_bf16: StepMemory) -> None:
    need = gpt_in_bf16
    two, four = (usage(need, strategy(ranks, shard="full"), 1) for ranks in (2, 4))
    for name in ("parameters", "gradients", "optimizer", "average", "update"):
        assert getattr(four, name) < 0.6 * getattr(two, name) + 2 * need.buffers, name
    assert four.activations == two.activations
    low = usage(need, strategy(4, shard="full", gather_dtype="compute"), 1)
    assert low.activations - 2 * need.batch == need.activations_sharded
    assert low.working < four.working
    assert low.sent < four.sent
    window, each = (
        usage(need, strategy(4, shard="full", reduce_after=after), micro_batches=3)
        for after in ("window", "micro_batch")
    )
    assert window.gradients > 4 * each.gradients
    assert window.sent < each.sent
    offloaded = usage(need, strategy(4, shard="full", offload=True), 1)
    assert (offloaded.gradients, offloaded.optimizer, offloaded.average) == (0, 0, 0)


def test_a_total_is_the_larger_of_backward_and_update() -> None:
    need = Usage(parameters=1, gradients=2, optimizer=4, average=8, activations=16, working=32, update=100, sent=7)
    assert need.total == 115
    assert Usage(1, 2, 4, 8, 16, 32, 10, 7).total == 63
