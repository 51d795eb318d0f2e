"""What a step sends, compared with what torch's flight recorder sees of the collectives of real steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed.fsdp  # shard_model imports it, which takes seconds: here once, and not in every rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.sharding import shard_model
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.precision.reduce_dtype import REDUCE_DTYPES, reduce_in
from dtrain.precision.vote import payload_bytes
from dtrain.training.monitor.communication import Collective, Traffic, Unit, ddp_traffic, sharded_traffic, step_traffic
from tests.ranks import run_ranks
from tests.toys import CPU, Net, micro_batches, run_steps, train_step, world

_BYTES = {"Double": 8, "Float": 4, "BFloat16": 2, "Half": 2, "Long": 8, "Int": 4}


def collectives(step: Callable[[], object]) -> dict[str, int]:
    """The operations of ``step`` and the bytes of their tensors."""
    # Not by their number: the recorder, which a rank inherits from this process, may be full.
    last = max((entry["record_id"] for entry in _entries()), default=-1)
    step()
    found: Counter[str] = Counter()
    for entry in _entries():
        if entry["record_id"] <= last:
            continue
        operation = entry["profiling_name"].removeprefix("gloo:")
        # The whole tensor of an all-gather is its output.
        sizes, dtypes = (entry[f"output_{what}" if operation == "all_gather" else f"input_{what}"] for what in _WHAT)
        found[operation] += sum(prod(size) * _BYTES[dtype] for size, dtype in zip(sizes, dtypes, strict=True))
    return dict(found)


_WHAT = ("sizes", "dtypes")


def _entries() -> list[dict[str, Any]]:
    return json.loads(c10d._dump_fr_trace_json()).get("entries", [])


def predicted(traffic: Traffic) -> dict[str, int]:
    """The same of a prediction."""
    found: Counter[str] = Counter()
    for one in traffic.collectives:
        found[one.operation] += one.nbytes
    return dict(found)


# -- DDP


@pytest.mark.parametrize("looks_for_unused", [False, True])
def test_ddp_sends_gradients_in_the_reduce_dtype_and_buffers_once_a_step(looks_for_unused: bool) -> None:
    def rank(number: int) -> None:
        for name, dtype in REDUCE_DTYPES.items():
            model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2).bfloat16())
            model[0].bias.requires_grad_(False)
            model[1].register_forward_hook(lambda module, inputs, output: output.bfloat16())
            ddp = DistributedDataParallel(model, find_unused_parameters=looks_for_unused)
            reduce_in(ddp, dtype)

            def step(ddp: DistributedDataParallel = ddp) -> None:
                with ddp.no_sync():
                    ddp(torch.ones(4, 3)).sum().backward()
                ddp(torch.ones(4, 3)).sum().backward()

            step()
            step()  # rebuilds the buckets
            traffic = ddp_traffic(ddp, dtype)
            vote = {"all_reduce": payload_bytes(0)}  # which a bare DDP does not have
            assert Counter(collectives(step)) + Counter(vote) == Counter(predicted(traffic)), name
            gradients = (3 * 5 + 5 + 5) * 4 + (5 * 2 + 2) * 4 if name == "fp32" else (25 + 12) * 2
            buffers = 5 * 4 + 5 * 4 + 8
            assert traffic.nbytes == gradients + buffers + 5 * 4 * looks_for_unused + payload_bytes(0)

    run_ranks(2, rank)


# -- FSDP and HSDP


class Blocks(nn.Module):
    """Two blocks, buffers, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.kept = nn.Linear(7, 7)
        self.register_buffer("scale", torch.ones(7))
        self.head = nn.Linear(7, 1)
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, 1]``."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.kept(x) * self.scale)


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "ranks"), [("full", 3), ("hybrid", 4)])
def test_sharded_steps_send_what_is_predicted(shard: str, ranks: int) -> None:
    cases = [
        (1, {}, ()),
        (3, {"gather_dtype": "compute"}, ("kept",)),
        (2, {"gather_dtype": "compute", "reduce_dtype": "bf16", "reduce_after": "micro_batch"}, ()),
    ]

    def rank(number: int) -> None:
        here = World(number, ranks, number % 2, 2, CPU, "gloo", launched=True)
        for micro, options, kept in cases:
            model = Blocks()
            precision = Precision("bf16", keep_fp32=kept)
            parallel = ParallelConfig(shard=shard, shard_modules=["blocks.*"], **options)
            names = precision.wrap_keep_fp32(model)
            shard_model(model, parallel, here, compute_dtype=precision.compute_dtype, kept=names)
            each = parallel.reduce_after == "micro_batch"
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = train_step(model, optimizer, world=here, precision="bf16", reduce_each=each)
            window = micro_batches(0, 2 * micro * ranks, ranks=ranks, rank=number, rows=2)
            run_steps(step, [window])
            traffic = step_traffic(model, parallel, here, precision, micro, metrics=1)
            seen = collectives(lambda step=step, window=window: run_steps(step, [window]))  # type: ignore[misc]
            assert seen == predicted(traffic), (micro, options, kept)
            assert traffic.describe()

    run_ranks(ranks, rank)


# -- the numbers themselves


def test_an_all_reduce_sends_twice_what_an_all_gather_sends() -> None:
    assert Collective("all_gather", "x", 800, 4).sent == Collective("reduce_scatter", "x", 800, 4).sent == 600
    assert Collective("all_reduce", "x", 800, 4).sent == 1200
    assert Collective("all_reduce", "x", 800, 2).sent == Collective("all_gather", "x", 1600, 2).sent


def test_the_strategies_send_what_the_rule_of_thumb_says() -> None:
    """Of a large model of one kind of blocks, in multiples of one byte for each parameter, without padding."""
    parameters = [nn.Parameter(torch.empty(64, 4, device="meta")) for _ in range(100)]

    def sent(dtype: torch.dtype, ranks: int, copies: int, micro_batches: int) -> float:
        traffic = sharded_traffic(
            [*(Unit([parameter], dtype) for parameter in parameters), Unit([])],
            ParallelConfig(),
            ranks=ranks,
            world_size=ranks * copies,
            micro_batches=micro_batches,
        )
        return sum(one.sent for one in traffic.collectives if one.content != "the vote") / (100 * 64 * 4)

    ddp = 2 * 4 * 7 / 8
    assert sent(torch.bfloat16, 8, 1, 1) == ddp  # gathers twice 2 bytes, reduces 4: as much as DDP
    assert sent(torch.float32, 8, 1, 1) == 1.5 * ddp
    assert sent(torch.bfloat16, 8, 1, 4) == 2.5 * ddp  # half as much again for each further micro-batch
    assert sent(torch.bfloat16, 8, 2, 1) == ddp + 2 * 4 / 8 / 2


def test_one_rank_sends_nothing() -> None:
    traffic = step_traffic(Net(), ParallelConfig(), world(), Precision("fp32"), micro_batches=1)
    assert (traffic.collectives, traffic.nbytes, traffic.describe()) == ((), 0, "")


def test_a_traffic_is_described_in_one_line_and_as_a_table() -> None:
    traffic = Traffic(
        (
            Collective("all_gather", "parameters in bf16", 2**22, 4),
            Collective("reduce_scatter", "gradients in fp32", 2**22, 4),
            Collective("all_reduce", "the vote", 88, 8),
        )
    )
    assert traffic.describe() == (
        "each rank sends 6 MiB in a step: all-gather of parameters in bf16 over 4 ranks 4 MiB, reduce-scatter of gradients in "
        "fp32 over 4 ranks 4 MiB, the vote"
    )
    heading, *rows, total = traffic.table(milliseconds=2.0)
    assert [len(rows), "size" in heading, "3.15 GB/s" in total] == [3, True, True]
