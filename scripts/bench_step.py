"""Microseconds an optimizer step: bare loops, torch's GradScaler, Fabric, Accelerate, Lightning and dtrain, on the CPU.

    pip install -e '.[bench]'
    python scripts/bench_step.py [--ranks 1 2] [--models mlp cnn] [--rounds 51] [--cpu] [--contenders 'bare loop' ...]

Every row trains its own copy of the same model on the same batch in memory, with fused AdamW and the same task, in fp32, and
logs every 10 steps, so that what differs is the step around it. The ranks are started once, and the contenders take turns of
100 (MLP) or 20 steps in every round. With two ranks all rows are in DDP over gloo; "all-reduce" is one of 8 floats, what a
loop must exchange to know when to stop. A world of one exchanges nothing.

``dtrain, everything on`` is its whole loop: what the loader does in the training process, forward and backward with counted
seeds, gradient norm, check for non-finite numbers on all ranks, sums of loss and metric over the ranks, skip decision,
schedule, commit, records, console, status file and stop requests.

``--cpu`` counts the time that the training thread spends on a CPU instead of the time that passes: waiting for the other
rank is not in it, nor, on a machine that is not idle, most of what others do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bench_step_dtrain as ours
import bench_step_rivals as rivals
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_common import command_line, finish, interleaved, ratio, spread, table
from bench_step_setting import CPU, LOG_EVERY, MODELS, Contender, Setting, Turn

from dtrain.distributed.world import World

#: What each is called, what makes it, and the package that it needs.
CONTENDERS: dict[str, tuple[Callable[[Setting], Contender], str]] = {
    "bare loop": (rivals.bare_without_exchange, "torch"),
    "bare loop, all-reduce": (rivals.bare, "torch"),
    "bare loop, all-reduce, norm, finite check": (rivals.bare_with_norm, "torch"),
    "torch GradScaler, all-reduce, norm": (rivals.grad_scaler, "torch"),
    "Fabric": (rivals.fabric, "lightning"),
    "Fabric, clipping": (rivals.fabric_clipping, "lightning"),
    "Accelerate": (rivals.accelerate, "accelerate"),
    "Accelerate, clipping": (rivals.accelerate_clipping, "accelerate"),
    "Lightning": (rivals.lightning, "lightning"),
    "Lightning, clipping": (rivals.lightning_clipping, "lightning"),
    "dtrain, the step alone": (ours.step, "torch"),
    "dtrain, the step alone, loss scale": (ours.step_scaled, "torch"),
    "dtrain, everything on": (ours.everything, "torch"),
    "an all-reduce of 8 floats": (ours.all_reduce, "torch"),
    "dtrain's vote": (ours.vote, "torch"),
}
#: Rows that others are compared with, and what the columns of the differences call them.
BASES = {"bare loop": "bare", "bare loop, all-reduce, norm, finite check": "bare+norm"}
#: Rows that are no loops.
ALONE = ("an all-reduce of 8 floats", "dtrain's vote")


def measure(rank: int, size: int, folder: str, arguments: argparse.Namespace, results: Any) -> None:
    """One rank: times every contender in every round; rank 0 leaves ``{model: {contender: [microseconds]}}``."""
    torch.set_num_threads(1)
    if size > 1:  # as torchrun would have it: this is where Lightning and Accelerate look
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in ranks.items()}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    world = World(rank, size, rank, size, CPU, "gloo", size > 1)
    for name in arguments.models:
        times = _times(name, world, Path(folder, f"rank-{rank}", name), arguments)
        if rank == 0:
            results[name] = times
    # All DDP wrappers are gone by now: a rank that ends while the other still talks to it aborts.
    dist.barrier()
    dist.destroy_process_group()


def _times(name: str, world: World, folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    steps = LOG_EVERY if arguments.quick else MODELS[name][2]
    clock = time.thread_time if arguments.cpu else time.perf_counter
    settings = {row: Setting(name, world, folder / str(number)) for number, row in enumerate(arguments.contenders)}
    contenders = {row: CONTENDERS[row][0](setting) for row, setting in settings.items()}

    def microseconds(row: str) -> float:
        turn = Turn(settings[row].batch, steps, clock)
        dist.barrier()  # ranks start together
        contenders[row](turn)
        return turn.seconds / steps * 1e6

    for row in contenders:
        microseconds(row)
    return interleaved(arguments.rounds, contenders, microseconds)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="ROW")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--cpu", action="store_true", help="CPU time of the training thread instead of wall time")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    missing = {row: package for row in arguments.contenders if not find_spec(package := CONTENDERS[row][1])}
    arguments.contenders = [row for row in arguments.contenders if row not in missing]
    # One thread a rank; and Lightning looks for a compiler's cache directory, among others, when it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    report = {}
    for size in arguments.ranks:
        with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
            results = manager.dict()
            mp.spawn(measure, (size, folder, arguments, results), nprocs=size, join=True)
            report[f"{size} rank{'s' if size > 1 else ''}"] = measured = dict(results)
        for name, times in measured.items():
            unit = "CPU us a step" if arguments.cpu else "us a step"
            title = f"{MODELS[name][0]}, fp32, fused AdamW, {size} rank{'s' if size > 1 else ''}"
            print(show(title, unit, times, missing), end="\n\n", flush=True)
    print(
        f"{arguments.rounds} interleaved rounds, median (min-max); differences and ratios are medians over the rounds"
    )
    finish(arguments, {"microseconds": report}, ("dtrain", "torch", "lightning", "accelerate"))


def show(title: str, unit: str, times: dict[str, list[float]], missing: Iterable[str]) -> str:
    """Rows of medians, and what each costs over the bare loops: the medians of the differences of each round."""
    bases = [row for row in BASES if row in times]
    rows = []
    for row, measured in times.items():
        over = [_over(measured, times[base]) if row not in (base, *ALONE) else "" for base in bases]
        share = f"{ratio(measured, times[bases[0]]):.2f}" if bases and row not in ALONE else ""
        rows.append([row, spread(measured), *over, share])
    rows += [[row, "not installed", *("" for _ in bases), ""] for row in missing]
    return table(title, [unit, *(f"over {BASES[base]}" for base in bases), "ratio"], rows)


def _over(measured: Sequence[float], base: Sequence[float]) -> str:
    return f"{statistics.median(a - b for a, b in zip(measured, base, strict=True)):+,.0f}"


if __name__ == "__main__":
    main()
