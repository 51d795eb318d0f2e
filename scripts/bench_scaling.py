"""Weak scaling: samples a second of each rank where every rank has as many rows, and what communication takes of a step.

    python scripts/bench_scaling.py [--ranks 1 2 4] [--rows 32] [--rounds 3] [--json FILE] [key=value ...]

The step is the trainer's own (autocast, backward, clipping, optimizer, vote), on one batch of noise that is held, in memory;
``key=value`` is config, such as ``model=resnet50 precision=bf16 train.compile=true data.train.size=224``. Every world is
started under torchrun anew in each round, since one process group cannot become another. Inside a start, steps with all
ranks take turns with the same steps of ranks that do not talk to each other, all of them at once. So an efficiency splits:

    efficiency = (a lone rank's step / a step without communication) * (1 - communication)

The first factor is what ranks take from each other by sharing memory, cores and power: with more ranks than cores it cannot
be better than cores / ranks. The slowest rank counts.

On several GPUs or machines one start measures one world; the table is made of several:

    torchrun --nproc-per-node=8 --nnodes=2 ... scripts/bench_scaling.py --json 16.json model=resnet50 precision=bf16
    srun --ntasks-per-node=8 --gpus-per-node=8 python scripts/bench_scaling.py --json 16.json model=resnet50 precision=bf16
    python scripts/bench_scaling.py --read 1.json 8.json 16.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from bench_common import command_line, finish, interleaved, spread, table

from dtrain.config import app
from dtrain.config.app import Composed
from dtrain.data.device_copies import DeviceCopies
from dtrain.diagnosis.machine import usable_cores
from dtrain.diagnosis.step_rate import Timed, seconds_per_step
from dtrain.diagnosis.subject import Subject
from dtrain.distributed.network import settle_network
from dtrain.distributed.orphan import end_with_torchrun
from dtrain.distributed.process_group import process_group
from dtrain.distributed.srun import join_srun
from dtrain.distributed.world import World

_WARM_UP = 3  # buckets are laid out anew after the first backward, and a compiler may look at the first two
#: What is trained if the command line names no model or experiment, and on what if it names no data.
MODEL = {"model": "resnet9", "model.width": "16", "optimizer": "sgd"}
DATA = {
    "data": "memory",
    "data.train._target_": "bench_synthetic.images",
    "data.train.number": "2048",
    "data.train.size": "32",
    "data.train.classes": "${model.classes}",
    "data.eval": "null",
}
RUN = {"data.num_workers": "0", "train.max_steps": "1", "tracker": "none"}


@dataclass(frozen=True)
class Measured:
    """One start of a world.

    Attributes:
        ranks: How many there were.
        rows: Of each of them, in a step.
        alone: Seconds of a step without communication, as the slowest rank sees it.
        step: The same with it.
    """

    ranks: int
    rows: int
    alone: float
    step: float

    @property
    def rate(self) -> float:
        """Samples a second of a rank."""
        return self.rows / self.step

    @property
    def communication(self) -> float:
        """What part of a step is gone with it."""
        return 1 - self.alone / self.step


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="worlds to start on this machine")
    parser.add_argument("--rows", type=int, default=32, help="of each rank in a step (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each world (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measure of a start (default %(default)s)")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="only show what other starts have written")
    # Taken out first: argparse would count those that follow --ranks as ranks.
    overrides = [argument for argument in sys.argv[1:] if "=" in argument and not argument.startswith("-")]
    arguments = parser.parse_args([argument for argument in sys.argv[1:] if argument not in overrides])
    if arguments.quick:
        arguments.ranks, arguments.rounds, arguments.seconds = [1, 2], 1, 0.1
    join_srun()
    if "RANK" in os.environ:
        one_world(arguments, overrides)
        return
    if arguments.read:
        found = [Measured(**one) for path in arguments.read for one in json.loads(path.read_text())["measured"]]
    else:
        found = all_worlds(arguments, overrides)
    show(found, usable_cores() if not torch.cuda.is_available() else None, " ".join(overrides))
    finish(arguments, {"measured": [asdict(one) for one in found]}, ("dtrain", "torch"))


def one_world(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """This rank's part of a start."""
    end_with_torchrun()
    settle_network()
    found: list[Measured] = []

    def measure(composed: Composed) -> None:
        with process_group(composed.cfg.parallel.timeout_start) as world:
            measured = steps(composed.cfg, world, arguments)
            if world.rank == 0:
                found.append(measured)

    rows = int(os.environ["WORLD_SIZE"]) * arguments.rows
    app.run(measure, [*completed(overrides), f"train.global_batch_size={rows}"])
    if found:
        show(found, None, " ".join(overrides))
        finish(arguments, {"measured": [asdict(one) for one in found]}, ("dtrain", "torch"))


def completed(overrides: Sequence[str]) -> list[str]:
    """The overrides with the defaults of what they leave open."""
    given = {override.partition("=")[0]: override.partition("=")[2] for override in overrides}
    model = {} if {"model", "experiment"} & given.keys() else MODEL
    data = {} if {"data", "data.train"} & given.keys() else DATA
    # "++" also adds a key that the preset does not have; a group is chosen without.
    return [f"{'++' * ('.' in key)}{key}={value}" for key, value in (model | data | RUN | given).items()]


def steps(cfg: Any, world: World, arguments: argparse.Namespace) -> Measured:
    """Collective. Times the trainer's step, with and without communication by turns."""
    subject, _ = Subject.build(cfg, world)
    with closing(subject.loader) as loader:
        window = list(islice(loader.epoch(0), loader.micro_batches_per_step))
    to_device = DeviceCopies(world.device)
    rivals = [
        Timed(step, lambda: map(to_device, window), len(window), _WARM_UP)
        for step in (subject.step_alone(), *((subject.step_with_others(),) if world.size > 1 else ()))
    ]
    taken = [max(seconds) for seconds in seconds_per_step(rivals, world, arguments.seconds)]
    return Measured(world.size, arguments.rows, taken[0], taken[-1])


def all_worlds(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[Measured]:
    """Starts each world once in every round."""
    found: list[Measured] = []

    def measure(ranks: str) -> float:
        found.append(_start(int(ranks), arguments, overrides))
        print(f"{ranks} rank{'s' * (found[-1].ranks > 1)}: {found[-1].step * 1e3:,.1f} ms a step", file=sys.stderr)
        return found[-1].step

    interleaved(arguments.rounds, map(str, arguments.ranks), measure)
    return found


def _start(ranks: int, arguments: argparse.Namespace, overrides: Sequence[str]) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        options = ["--rows", str(arguments.rows), "--seconds", str(arguments.seconds), "--json", str(out)]
        done = subprocess.run(
            [*torchrun, __file__, *options, *overrides],
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"a world of {ranks} failed:\n{done.stderr[-4000:]}")
        [measured] = json.loads(out.read_text())["measured"]
    return Measured(**measured)


def show(found: Sequence[Measured], cores: int | None, what: str) -> None:
    """Prints a row for each world; ratios to the one rank of the same round."""
    worlds: dict[int, list[Measured]] = {}
    for one in found:
        worlds.setdefault(one.ranks, []).append(one)
    base = worlds.get(1)
    rows = []
    for ranks, starts in sorted(worlds.items()):
        name = f"{ranks} rank{'s' * (ranks > 1)}"
        if cores is not None and ranks > cores:
            name += f" on {cores} cores"
        paired = list(zip(starts, base, strict=True)) if base is not None and len(base) == len(starts) else []
        rows.append(
            [
                name,
                spread([one.rate for one in starts]),
                _median([one.rate / first.rate for one, first in paired]),
                _median([first.alone / one.alone for one, first in paired]),
                f"{statistics.median(one.communication for one in starts):.1%}",
                spread([one.alone * 1e3 for one in starts], 1),
                spread([one.step * 1e3 for one in starts], 1),
            ]
        )
    columns = ["samples/s a rank", "efficiency", "without comm.", "communication", "ms without it", "ms a step"]
    print(table(f"{what or 'ResNet-9 of width 16, 32x32, fp32'}, {found[0].rows} rows a rank", columns, rows))
    print(
        f"{len(found) // len(worlds)} interleaved starts of each, median (min-max); ratios are medians over the rounds\n"
    )


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


if __name__ == "__main__":
    main()
