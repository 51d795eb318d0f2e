"""Microseconds of an optimizer step on the CPU: bare loops, torch's GradScaler, Fabric, Accelerate, Lightning and dtrain.

    pip install -e . --group bench
    python -m benchmarks.step [--ranks 1 2] [--rounds 51] [--cpu] [--contenders 'bare loop' ...]

Every row trains its own copy of the same model on the same batch in memory, with fused AdamW and the same task, in fp32, and
logs every 10 steps; only the work around the step differs. The ranks start once; in every round each row runs 100 steps.
With two ranks all rows use DDP over gloo, but for those that name FSDP2, which shard the model on one rank too. ``all-reduce``
is one of 8 floats, which a loop needs to agree on stopping; a single rank does none.

``dtrain, everything on`` is the whole training loop: the loader's part in this process, forward and backward with seeded
generators, gradient norm, check for non-finite values on all ranks, sums of loss and metric over the ranks, skip decision,
schedule, commit, records, console, status file and stop requests.

``--cpu`` counts the CPU time of the training thread instead of wall time. It leaves out waiting for the other rank and, on
a machine that is not idle, most of the influence of other processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import harness
from benchmarks.step_contenders import (
    BARE,
    BARE_FSDP,
    BARE_WITH_NORM,
    CONTENDERS,
    CPU,
    LOG_EVERY,
    NO_LOOPS,
    STEPS,
    Setting,
    Turn,
)
from dtrain.distributed.store import close_group_store, open_group_store
from dtrain.distributed.world import World


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=51)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), metavar="ROW")
    parser.add_argument("--cpu", action="store_true", help="CPU time of the training thread instead of wall time")
    arguments = harness.parse(parser, rounds=1)
    unit = "CPU us a step" if arguments.cpu else "us a step"
    report = {}
    for size in arguments.ranks:
        ranks = f"{size} rank{'s' * (size > 1)}"
        with mp.Manager() as manager, harness.scratch() as folder:
            results = manager.dict()
            mp.spawn(measure, (size, str(folder), arguments, results), nprocs=size, join=True)
            report[ranks] = dict(results)
        table = make_table(f"MLP 32-64-10, fp32, fused AdamW, {ranks}", unit, report[ranks])
        table.show(harness.rounds_note(arguments.rounds, "; differences and ratios are medians over the rounds"))
    harness.finish(arguments, {"microseconds": report}, ("torch", "lightning", "accelerate"))


def measure(rank: int, size: int, folder: str, arguments: argparse.Namespace, results: Any) -> None:
    """One rank: times every row in every round; rank 0 stores the microseconds of each row."""
    torch.set_num_threads(1)
    if size > 1:  # where Lightning and Accelerate look, as under torchrun
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in ranks.items()}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    world = World(rank, size, rank, size, CPU, "gloo", size > 1)
    open_group_store(
        dist.distributed_c10d._get_default_store(), world
    )  # where ranks report the files of sharded checkpoints
    times = time_rows(world, Path(folder, f"rank-{rank}"), arguments)
    if rank == 0:
        results.update(times)
    # All DDP wrappers are deleted by now: a rank that ends while the other still uses one would abort it.
    dist.barrier()
    close_group_store()
    dist.destroy_process_group()


def time_rows(world: World, folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Collective. Microseconds of a step by row; an empty list where its package is missing."""
    steps = LOG_EVERY if arguments.quick else STEPS
    clock = time.thread_time if arguments.cpu else time.perf_counter
    rows = [row for row in arguments.contenders if find_spec(CONTENDERS[row][1])]
    settings = {row: Setting(world, folder / str(number)) for number, row in enumerate(rows)}
    contenders = {row: CONTENDERS[row][0](setting) for row, setting in settings.items()}

    def microseconds(row: str) -> float:
        turn = Turn(settings[row].batch, steps, clock)
        dist.barrier()  # ranks start together
        contenders[row](turn)
        return turn.seconds / steps * 1e6

    for row in rows:
        microseconds(row)
    results = harness.interleaved(arguments.rounds, rows, microseconds)
    return {row: results.get(row, []) for row in arguments.contenders}


def make_table(title: str, unit: str, times: Mapping[str, Sequence[float]]) -> harness.Table[str]:
    """Medians, and the cost over the bare loops: medians of the differences and ratios of each round."""
    table = harness.Table(title, times)
    table.medians(unit, times)
    loops = {row: values for row, values in times.items() if values and row not in NO_LOOPS}
    bases = ((BARE, "over bare"), (BARE_WITH_NORM, "over bare+norm"), (BARE_FSDP, "over bare FSDP2+norm"))
    for base, heading in bases:
        if base in loops:
            over = {
                row: statistics.median(one - other for one, other in zip(values, loops[base], strict=True))
                for row, values in loops.items()
                if row != base
            }
            table.text(heading, {row: f"{difference:+,.0f}" for row, difference in over.items()})
    if BARE in loops:
        table.ratios("ratio", loops, loops[BARE])
    return table


if __name__ == "__main__":
    main()
