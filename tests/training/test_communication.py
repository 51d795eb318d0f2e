"""What a step sends, compared with what torch's flight recorder sees of the collectives of real steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group  # noqa: F401 - imported here once, and not in every rank
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.schema import ParallelConfig
from dtrain.precision.comm_hooks import REDUCE_DTYPES, reduce_in
from dtrain.precision.vote import payload_bytes
from dtrain.training.communication import Collective, Traffic, ddp_traffic, sharded_traffic, step_traffic
from tests.ranks import run_ranks
from tests.toys import Net, world

_BYTES = {"Double": 8, "Float": 4, "BFloat16": 2, "Half": 2, "Long": 8, "Int": 4}


@pytest.fixture(autouse=True)
def flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")


def collectives(step: Callable[[], object]) -> dict[str, int]:
    """The operations of ``step`` and the bytes of their tensors."""
    before = len(_entries())
    step()
    found: Counter[str] = Counter()
    for entry in _entries()[before:]:
        operation = entry["profiling_name"].removeprefix("gloo:")
        # The whole tensor of an all-gather is its output.
        sizes, dtypes = (entry[f"output_{what}" if operation == "all_gather" else f"input_{what}"] for what in _WHAT)
        found[operation] += sum(prod(size) * _BYTES[dtype] for size, dtype in zip(sizes, dtypes, strict=True))
    return dict(found)


_WHAT = ("sizes", "dtypes")


def _entries() -> list[dict[str, Any]]:
    return json.loads(c10d._dump_fr_trace_json()).get("entries", [])


def predicted(traffic: Traffic) -> dict[str, int]:
    """The same of a prediction, without the vote."""
    found: Counter[str] = Counter()
    for one in traffic.collectives:
        found[one.operation] += one.nbytes if one.content != "the vote" else 0
    return {operation: size for operation, size in found.items() if size}


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
            assert collectives(step) == predicted(traffic), name
            gradients = (3 * 5 + 5 + 5) * 4 + (5 * 2 + 2) * 4 if name == "fp32" else (25 + 12) * 2
            buffers = 5 * 4 + 5 * 4 + 8
            assert traffic.nbytes == gradients + buffers + 5 * 4 * looks_for_unused + payload_bytes(0)

    run_ranks(2, rank)


# -- FSDP and HSDP


class Blocks(nn.Module):
    """Two blocks, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 5)
        self.blocks[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Any sum."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)], ids=["fsdp", "hsdp"])
def test_sharded_steps_send_what_is_predicted(shape: tuple[int, int]) -> None:
    copies, ranks = shape

    def rank(number: int) -> None:
        for gather, reduce, micro_batches in ((None, "fp32", 1), ("bf16", "fp32", 3), ("bf16", "bf16", 2)):
            model = Blocks()
            units: list[Sequence[Tensor]] = [list(block.parameters()) for block in model.blocks]
            units.append([*model.first.parameters(), *model.head.parameters()])
            gather_dtype = REDUCE_DTYPES[gather] if gather else None
            traffic = sharded_traffic(
                units,
                ranks=ranks,
                copies=copies,
                gather_dtype=gather_dtype,
                reduce_dtype=REDUCE_DTYPES[reduce],
                micro_batches=micro_batches,
                backend="gloo",
            )
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            mesh = mesh if copies > 1 else mesh["shard"]
            policy = MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=REDUCE_DTYPES[reduce])
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            sharded = fully_shard(model, mesh=mesh, mp_policy=policy)
            assert isinstance(sharded, FSDPModule)

            def step(sharded: Any = sharded, micro_batches: int = micro_batches) -> None:
                for number in range(micro_batches):
                    sharded.set_requires_gradient_sync(number == micro_batches - 1)
                    sharded(torch.ones(4, 3)).sum().backward()

            step()
            assert collectives(step) == predicted(traffic), (gather, reduce, micro_batches)

    run_ranks(copies * ranks, rank)


# -- the numbers themselves


def test_an_all_reduce_sends_twice_what_an_all_gather_sends() -> None:
    assert Collective("all_gather", "x", 800, 4).sent == Collective("reduce_scatter", "x", 800, 4).sent == 600
    assert Collective("all_reduce", "x", 800, 4).sent == 1200
    assert Collective("all_reduce", "x", 800, 2).sent == Collective("all_gather", "x", 1600, 2).sent


def test_the_strategies_send_what_the_rule_of_thumb_says() -> None:
    """Of a large model of one kind of blocks, in multiples of one byte for each parameter, without padding."""
    units = [[nn.Parameter(torch.empty(64, 4, device="meta"))] for _ in range(100)]
    numbers = 100 * 64 * 4

    def sent(dtype: str, ranks: int, copies: int, micro_batches: int) -> float:
        traffic = sharded_traffic(
            [*units, []],
            ranks=ranks,
            copies=copies,
            gather_dtype=REDUCE_DTYPES[dtype],
            reduce_dtype=torch.float32,
            micro_batches=micro_batches,
        )
        return sum(one.sent for one in traffic.collectives if one.content != "the vote") / numbers

    ddp = 2 * 4 * 7 / 8
    assert sent("bf16", 8, 1, 1) == ddp  # gathers twice 2 bytes, reduces 4: as much as DDP
    assert sent("fp32", 8, 1, 1) == 1.5 * ddp
    assert sent("bf16", 8, 1, 4) == 2.5 * ddp  # half as much again for each further micro-batch
    assert sent("bf16", 8, 2, 1) == ddp + 2 * 4 / 8 / 2


def test_one_rank_sends_nothing() -> None:
    traffic = step_traffic(Net(), ParallelConfig(), world(), micro_batches=1)
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


def test_gradients_of_a_users_hook_are_not_counted() -> None:
    def rank(number: int) -> str:
        ddp = DistributedDataParallel(Net())
        return ddp_traffic(ddp, torch.float32, hook=True).describe()

    assert run_ranks(2, rank) == ["gradients as parallel.comm_hook sends them, the vote"] * 2
