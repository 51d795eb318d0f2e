"""Weak scaling: samples a second of each rank at equal rows a rank, and the share of a step that communication takes.

    python -m benchmarks.scaling [--ranks 1 2 4] [--rows 32] [--rounds 3] [--json FILE] [KEY=VALUE ...]

``KEY=VALUE`` is config, such as ``model=resnet50 precision=bf16 train.compile=true data.train.size=224``. Each start is
``dtrain.doctor``, which times the trainer's step (autocast, backward, clipping, optimizer, vote) on one batch of noise in
memory; steps of all ranks take turns with steps of the same ranks, at the same time, without communication. So an efficiency
has two factors:

    efficiency = (step of a lone rank / step without communication) * (1 - communication)

The first is below 1 because ranks share memory, cores and power: at most cores / ranks where ranks outnumber cores. The
slowest rank counts. Each round starts every world anew under torchrun, as a process group cannot change its size.

On several GPUs or machines one start measures one world, and ``--read`` makes the table:

    torchrun --nproc-per-node=8 --nnodes=2 ... -m benchmarks.scaling --json 16.json model=resnet50 precision=bf16
    srun --ntasks-per-node=8 --gpus-per-node=8 python -m benchmarks.scaling --json 16.json model=resnet50 precision=bf16
    python -m benchmarks.scaling --read 1.json 8.json 16.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import harness
from dtrain.distributed.world import join_srun, process_cpu_count
from dtrain.doctor import __main__ as doctor

#: Defaults where the command line names no model or experiment, and where it names no data.
MODEL = {"model": "resnet9", "model.width": "16", "optimizer": "sgd"}
DATA = {
    "data": "memory",
    "data.train._target_": "benchmarks.harness.noise_images",
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
        ranks: Number of ranks.
        rows: Rows of each rank in a step.
        alone: Seconds of a step without communication on the slowest rank.
        step: The same with communication.
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
        """Share of a step that communication takes."""
        return 1 - self.alone / self.step


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=3, overrides=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="worlds to start on this machine")
    parser.add_argument("--rows", type=int, default=32, help="of each rank in a step (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measure of a start (default %(default)s)")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="show the results of other starts")
    arguments = harness.parse(parser, ranks=[1, 2], rounds=1, seconds=0.1)
    join_srun()
    if "RANK" in os.environ:
        starts = one_world(arguments)
    elif arguments.read:
        starts = [Measured(**one) for path in arguments.read for one in json.loads(path.read_text())["measured"]]
    else:
        starts = all_worlds(arguments)
    if starts:
        show(starts, " ".join(arguments.overrides))
        harness.finish(arguments, {"measured": [asdict(one) for one in starts]})


def one_world(arguments: argparse.Namespace) -> list[Measured]:
    """Collective. Measures this world; rank 0 returns the result."""
    ranks = int(os.environ["WORLD_SIZE"])
    config = [*with_defaults(arguments.overrides), f"train.global_batch_size={ranks * arguments.rows}"]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        out = Path(folder, "doctor.json")
        doctor.main(["--seconds", str(arguments.seconds), "--json", str(out), *config])
        if not out.exists():  # rank 0 alone writes it
            return []
        times = json.loads(out.read_text())["run"]["facts"]["times"]
    return [Measured(ranks, arguments.rows, times["compute"], times["step"])]


def with_defaults(overrides: Sequence[str]) -> list[str]:
    """The overrides, with defaults for settings that they do not choose."""
    given = {override.partition("=")[0]: override.partition("=")[2] for override in overrides}
    model = {} if {"model", "experiment"} & given.keys() else MODEL
    data = {} if {"data", "data.train"} & given.keys() else DATA
    # "++" also adds a key that the preset does not have; a group is chosen without.
    return [f"{'++' * ('.' in key)}{key}={value}" for key, value in (model | data | RUN | given).items()]


def all_worlds(arguments: argparse.Namespace) -> list[Measured]:
    """Starts each world once in every round."""

    def start(ranks: int) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "out.json")
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            options = ["--rows", str(arguments.rows), "--seconds", str(arguments.seconds), "--json", str(out)]
            harness.run(harness.python(*torchrun, "-m", "benchmarks.scaling", *arguments.overrides, *options))
            [measured] = json.loads(out.read_text())["measured"]
        return Measured(**measured)

    results = harness.interleaved(arguments.rounds, arguments.ranks, start)
    return [one for starts in results.values() for one in starts]


def show(starts: Sequence[Measured], config: str) -> None:
    """Prints a row for each world; ratios to the lone rank of the same round."""
    cores = process_cpu_count() if not torch.cuda.is_available() else None
    worlds: dict[str, list[Measured]] = {}
    for one in sorted(starts, key=lambda one: one.ranks):
        crowded = f" on {cores} cores" if cores is not None and one.ranks > cores else ""
        worlds.setdefault(f"{one.ranks} rank{'s' * (one.ranks > 1)}{crowded}", []).append(one)
    lone = worlds.get("1 rank", [])

    def relative(value: Callable[[Measured, Measured], float]) -> dict[str, str]:
        return {
            world: f"{statistics.median(map(value, of_world, lone)):.2f}" if len(of_world) == len(lone) else "-"
            for world, of_world in worlds.items()
        }

    def values(value: Callable[[Measured], float]) -> dict[str, list[float]]:
        return {world: list(map(value, of_world)) for world, of_world in worlds.items()}

    communication = values(lambda one: one.communication)
    table = harness.Table(f"{config or 'ResNet-9 of width 16, 32x32, fp32'}, {starts[0].rows} rows a rank", worlds)
    table.medians("samples/s a rank", values(lambda one: one.rate))
    table.text("efficiency", relative(lambda one, first: one.rate / first.rate))
    table.text("without comm.", relative(lambda one, first: first.alone / one.alone))
    table.text("communication", {world: f"{statistics.median(share):.1%}" for world, share in communication.items()})
    table.medians("ms without it", values(lambda one: one.alone * 1e3), 1)
    table.medians("ms a step", values(lambda one: one.step * 1e3), 1)
    table.show(harness.rounds_note(len(starts) // len(worlds)))


if __name__ == "__main__":
    main()
