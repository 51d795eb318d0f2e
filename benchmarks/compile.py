"""A model compiled by block and as a whole, under DDP: steps a second, and the share of communication that is hidden.

    python -m benchmarks.compile [--rounds 15] [--width 768 --depth 3 --bucket-mb 8] [--json FILE]
    torchrun --nproc-per-node=8 -m benchmarks.compile --width 1024 --depth 24 --rows 32 --length 512 --bucket-mb 25 \\
        --precision bf16

Without torchrun it starts two processes on this machine. A step is forward and backward of a byte-level GPT. Each row has
its own copy of the model; the slowest rank counts. DDP reduces gradients bucket by bucket while the backward still computes,
as soon as it gets them:

    hidden = 1 - (a step - the same step under no_sync) / the all-reduces of its buckets alone

One graph for the whole model would return all gradients at its end. Inside DDP torch therefore splits the graph at bucket
boundaries (``torch._dynamo.config.optimize_ddp``, on by default, in dtrain too); the row "not split" turns it off.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness
from dtrain.distributed.process_group import process_group
from dtrain.distributed.world import World
from dtrain.models import GPT
from dtrain.precision import Precision
from dtrain.training.setup.model import compile_in_place

#: By row: the modules that are compiled, and whether torch splits graphs at bucket boundaries.
ROWS: dict[str, tuple[bool | Sequence[str], bool]] = {
    "eager": (False, True),
    "whole": (True, True),
    "whole, not split": (True, False),
    "by block": (["blocks.*"], True),
}
FIRST_BUCKET_MB = 1  # as in DDP, so that the first all-reduce starts early
WARM_UP = 3  # steps: compiling, and DDP rebuilds its buckets after the first one


class Contender:
    """A copy of the model in DDP, compiled as its row says."""

    def __init__(self, row: str, model: nn.Module, tokens: Tensor, world: World, arguments: argparse.Namespace) -> None:
        compiled, self._split = ROWS[row]
        model = copy.deepcopy(model)
        compile_in_place(model, compiled)
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        self._ddp = DistributedDataParallel(
            model, device_ids=device_ids, bucket_cap_mb=arguments.bucket_mb, gradient_as_bucket_view=True
        )
        self._tokens = tokens
        self._autocast = Precision(arguments.precision).autocast(world.device.type)

    def steps(self, number: int, *, reduce: bool) -> None:
        """Forward and backward so many times, with or without the all-reduce of the gradients."""
        sync: Callable[[], AbstractContextManager[None]] = nullcontext if reduce else self._ddp.no_sync
        with torch._dynamo.config.patch(optimize_ddp=self._split):
            for _ in range(number):
                self._ddp.zero_grad(set_to_none=True)
                with sync():
                    with self._autocast:
                        loss = self._ddp(self._tokens).float().logsumexp(dim=-1).mean()
                    loss.backward()


def milliseconds(world: World, steps: int, function: Callable[[], object]) -> float:
    """Collective. Wall time of one of so many steps on the slowest rank."""

    def synchronize() -> None:
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    dist.barrier()
    synchronize()
    started = time.perf_counter()
    function()
    synchronize()
    seconds = torch.tensor(time.perf_counter() - started, device=world.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds) / steps * 1e3


def buckets(model: nn.Module, bucket_mb: int, world: World) -> list[Tensor]:
    """Tensors of the sizes of DDP's buckets for the model."""
    left = sum(parameter.numel() for parameter in model.parameters())
    sizes: list[int] = []
    while left:
        sizes.append(min(left, (bucket_mb if sizes else FIRST_BUCKET_MB) * 2**20 // 4))
        left -= sizes[-1]
    return [torch.zeros(size, device=world.device) for size in sizes]


def all_reduce(tensors: Sequence[Tensor], times: int) -> None:
    """Collective. Like DDP: starts the all-reduces of all buckets, then waits for them."""
    for _ in range(times):
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()


def measure(world: World, arguments: argparse.Namespace) -> None:
    """Collective. Measures every row in every round; rank 0 prints."""
    torch.manual_seed(0)
    Precision(arguments.precision).apply(world.device)
    model = GPT(width=arguments.width, depth=arguments.depth, heads=arguments.width // 64, context=arguments.length)
    model = model.to(world.device)
    tokens = torch.randint(257, (arguments.rows, arguments.length), device=world.device)
    contenders = {row: Contender(row, model, tokens, world, arguments) for row in ROWS}
    tensors = buckets(model, arguments.bucket_mb, world)
    for contender in contenders.values():
        contender.steps(WARM_UP, reduce=True)
        contender.steps(WARM_UP, reduce=False)
    all_reduce(tensors, WARM_UP)

    def measure_row(row: str) -> dict[str, float]:
        steps, contender = arguments.steps, contenders[row]
        return {
            "ms_all_reduce": milliseconds(world, steps, lambda: all_reduce(tensors, steps)),
            "ms_under_no_sync": milliseconds(world, steps, lambda: contender.steps(steps, reduce=False)),
            "ms": milliseconds(world, steps, lambda: contender.steps(steps, reduce=True)),
        }

    measured = harness.interleaved(arguments.rounds, ROWS, measure_row)
    if world.rank != 0:
        return
    results = {name: harness.column(measured, name) for name in ("ms", "ms_under_no_sync", "ms_all_reduce")}
    step, alone = results["ms"], results["ms_under_no_sync"]
    every = [value for values in results["ms_all_reduce"].values() for value in values]
    typical = statistics.median(every)
    hidden = {
        row: [100 * (1 - (one - without) / typical) for one, without in zip(step[row], alone[row], strict=True)]
        for row in ROWS
    }
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    sizes = f"{millions:.1f} M parameters, {tokens.numel()} tokens a rank"
    table = harness.Table(f"GPT, {sizes}, {arguments.precision}, {world.size} ranks", ROWS)
    table.text("steps/s", {row: f"{1e3 / statistics.median(values):.2f}" for row, values in step.items()})
    table.ratios("speed", dict.fromkeys(ROWS, step["eager"]), step)
    table.medians("ms a step", step, 1)
    table.medians("ms under no_sync", alone, 1)
    table.text("hidden", {row: f"{harness.spread(values)} %" for row, values in hidden.items()})
    table.show(
        f"all-reduce of {len(tensors)} buckets alone: {harness.spread(every, 1)} ms; {world.backend} on {world.device.type}",
        harness.rounds_note(arguments.rounds, f", {arguments.steps} steps each; speed: times eager"),
    )
    harness.finish(arguments, results)


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=15)
    parser.add_argument("--steps", type=int, default=2, help="of each measurement")
    parser.add_argument("--width", type=int, default=768, help="of the GPT, a multiple of 64")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--length", type=int, default=32, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="of each rank")
    parser.add_argument("--bucket-mb", type=int, default=8, help="size of DDP's buckets except the first")
    parser.add_argument("--precision", default="fp32")
    arguments = harness.parse(parser, rounds=1, steps=1, depth=1, width=64)
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, harness.python("-m", "benchmarks.compile", *sys.argv[1:], ranks=2))
    with process_group(600.0) as world:
        measure(world, arguments)


if __name__ == "__main__":
    main()
