"""A model compiled by block against compiled as a whole, under DDP: steps a second, and how much communication is hidden.

    python scripts/bench_compile.py [--rounds 15] [--width 768 --depth 3 --bucket-mb 8] [--json FILE]
    torchrun --nproc-per-node=8 scripts/bench_compile.py --width 1024 --depth 24 --rows 32 --length 512 --bucket-mb 25 \
        --precision bf16

Without torchrun two processes are started on this machine. A step is forward and backward of a byte-level GPT; each row has a
copy of its own and takes its turn in every round, the slowest rank counts. DDP sums gradients bucket by bucket while the
backward still computes, if it is handed them early enough:

    hidden = 1 - (a step - the same step under no_sync) / the all-reduces of its buckets alone

One graph for the whole model would hand all of them over at its end. Inside DDP torch therefore splits it where buckets end
(``torch._dynamo.config.optimize_ddp``, on by default, and so in dtrain); the row "not split" shows what that is worth.
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
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from bench_common import command_line, finish, interleaved, ratio, spread, table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.distributed.process_group import process_group
from dtrain.distributed.world import World
from dtrain.models import GPT
from dtrain.precision import Precision
from dtrain.training.execution import compile_in_place

#: By row: what is compiled, and whether torch splits graphs where DDP's buckets end.
ROWS: dict[str, tuple[bool | Sequence[str], bool]] = {
    "eager": (False, True),
    "whole": (True, True),
    "whole, not split": (True, False),
    "by block": (["blocks.*"], True),
}
FIRST_BUCKET_MB = 1  # DDP's, so that the first all-reduce begins early
WARM_UP = 3  # steps: compiling, and DDP lays out its buckets after the first one


class Contender:
    """A copy of the model in DDP, compiled as its row says."""

    def __init__(self, row: str, model: nn.Module, tokens: Tensor, world: World, arguments: argparse.Namespace) -> None:
        what, self._split = ROWS[row]
        model = copy.deepcopy(model)
        compile_in_place(model, what)
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        self._ddp = DistributedDataParallel(
            model, device_ids=device_ids, bucket_cap_mb=arguments.bucket_mb, gradient_as_bucket_view=True
        )
        self._tokens = tokens
        self._autocast = Precision(arguments.precision).autocast(world.device.type)

    def steps(self, number: int, *, average: bool) -> None:
        """Forward and backward so many times, with or without the all-reduce of the gradients."""
        sync: Callable[[], AbstractContextManager[None]] = nullcontext if average else self._ddp.no_sync
        with torch._dynamo.config.patch(optimize_ddp=self._split):
            for _ in range(number):
                self._ddp.zero_grad(set_to_none=True)
                with sync():
                    with self._autocast:
                        loss = self._ddp(self._tokens).float().logsumexp(dim=-1).mean()
                    loss.backward()


def seconds(world: World, work: Callable[[], object]) -> float:
    """Collective. How long the slowest rank takes."""
    dist.barrier()
    wait(world)
    started = time.perf_counter()
    work()
    wait(world)
    taken = torch.tensor(time.perf_counter() - started, device=world.device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def wait(world: World) -> None:
    """Until the device has done what was asked of it."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def buckets(model: nn.Module, bucket_mb: int, world: World) -> list[Tensor]:
    """Tensors as large as DDP's buckets for the model."""
    left = sum(parameter.numel() for parameter in model.parameters())
    sizes: list[int] = []
    while left:
        sizes.append(min(left, (bucket_mb if sizes else FIRST_BUCKET_MB) * 2**20 // 4))
        left -= sizes[-1]
    return [torch.zeros(size, device=world.device) for size in sizes]


def all_reduce(tensors: Sequence[Tensor], times: int) -> None:
    """Collective. As DDP does it: all are under way, then all are waited for."""
    for _ in range(times):
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()


def measure(world: World, arguments: argparse.Namespace) -> None:
    """Collective. Times every row in every round; rank 0 prints."""
    torch.manual_seed(0)
    Precision(arguments.precision).apply(world.device)
    model = GPT(width=arguments.width, depth=arguments.depth, heads=arguments.width // 64, context=arguments.length)
    model = model.to(world.device)
    tokens = torch.randint(257, (arguments.rows, arguments.length), device=world.device)
    contenders = {row: Contender(row, model, tokens, world, arguments) for row in ROWS}
    sent = buckets(model, arguments.bucket_mb, world)
    for contender in contenders.values():
        contender.steps(WARM_UP, average=True)
        contender.steps(WARM_UP, average=False)
    all_reduce(sent, WARM_UP)
    alone: dict[str, list[float]] = {row: [] for row in ROWS}
    communication: dict[str, list[float]] = {row: [] for row in ROWS}

    def one(row: str) -> float:
        steps, contender = arguments.steps, contenders[row]
        communication[row].append(seconds(world, lambda: all_reduce(sent, steps)) / steps * 1e3)
        alone[row].append(seconds(world, lambda: contender.steps(steps, average=False)) / steps * 1e3)
        return seconds(world, lambda: contender.steps(steps, average=True)) / steps * 1e3

    taken = interleaved(arguments.rounds, ROWS, one)
    if world.rank != 0:
        return
    every = [value for values in communication.values() for value in values]
    typical = statistics.median(every)
    shown = []
    for row, values in taken.items():
        hidden = [1 - (step - without) / typical for step, without in zip(values, alone[row], strict=True)]
        times = ratio(taken["eager"], values)
        rate = f"{1e3 / statistics.median(values):.2f}"
        shown.append([row, rate, f"{times:.2f}", spread(values, 1), spread(alone[row], 1), percent(hidden)])
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    title = (
        f"GPT, {millions:.1f} M parameters, {tokens.numel()} tokens a rank, {arguments.precision}, {world.size} ranks"
    )
    print(table(title, ["steps/s", "speed", "ms a step", "ms under no_sync", "hidden"], shown))
    print(f"\nall-reduce of {len(sent)} buckets alone: {spread(every, 1)} ms; {world.backend} on {world.device.type}")
    print(f"{arguments.rounds} interleaved rounds of {arguments.steps} steps, median (min-max); speed: times eager")
    results = {"ms": taken, "ms_under_no_sync": alone, "ms_all_reduce": communication}
    finish(arguments, results, ("dtrain", "torch"))


def percent(shares: Sequence[float]) -> str:
    """``median (min-max)`` in percent."""
    return f"{spread([100 * share for share in shares])} %"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--width", type=int, default=768, help="of the GPT, a multiple of 64")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--length", type=int, default=32, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="of each rank")
    parser.add_argument("--bucket-mb", type=int, default=8, help="of DDP's buckets but the first")
    parser.add_argument("--precision", default="fp32")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = arguments.steps = arguments.depth = 1
        arguments.width = 64
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        os.execv(sys.executable, [sys.executable, *torchrun, str(Path(__file__)), *sys.argv[1:]])
    with process_group(600.0) as world:
        measure(world, arguments)


if __name__ == "__main__":
    main()
