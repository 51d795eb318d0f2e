"""Microseconds an optimizer step: a bare loop, torch's GradScaler, and dtrain's step, on the CPU, interleaved in one run.

    python scripts/bench_step.py [--ranks 1 2] [--models mlp cnn] [--rounds 101] [--cpu] [--json FILE]

Every row trains its own copy of the same model on the same batch in memory, with fused AdamW and the same task, in fp32,
so that what differs is the step around it. With two ranks all rows are in DDP over gloo, and the bare ones also do one
all-reduce of 8 floats: what a loop must exchange to know when to stop. ``dtrain`` accumulates, votes, decides, applies and
settles, with gradient norm, check for non-finite numbers, sums of loss and metric over the ranks, seeding and learning-rate
schedule.

``--cpu`` counts the time that the training thread spends on a CPU instead of the time that passes: waiting for the other
rank is not in it, nor, on a machine that is not idle, most of what others do.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch
from dtrain.distributed.world import World
from dtrain.models import SmallCNN
from dtrain.precision import Precision
from dtrain.precision.loss_scale import LossScale
from dtrain.tasks import Classification
from dtrain.training.schedule import WarmupCosine
from dtrain.training.step import TrainStep

CPU = torch.device("cpu")
ROWS = 64
INIT_SCALE = 1024.0

Step = Callable[[], None]


# -- what is trained


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """A model so small that the step around it is most of the time, and its inputs."""
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)), torch.randn(ROWS, 32)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    """The model of experiment=digits, and images of its size."""
    return SmallCNN(width=32), torch.randn(ROWS, 3, 8, 8).contiguous(memory_format=torch.channels_last)


MODELS = {"mlp": ("MLP 32-64-10", mlp, 25), "cnn": ("digits SmallCNN", cnn, 5)}


# -- the contenders: each builds its own copy and returns a function that does one step


class Setting:
    """A model in fp32 with fused AdamW, a batch and a task."""

    def __init__(self, name: str, world: World) -> None:
        torch.manual_seed(0)
        model, inputs = MODELS[name][1]()
        labels = torch.randint(10, (ROWS,))
        keys = [f"shard/{row}" for row in range(ROWS)]
        self.batch = Batch({"image": inputs, "label": labels}, keys, torch.ones(ROWS, dtype=torch.bool))
        self.world = world
        self.task = Classification()
        self.model = DistributedDataParallel(model) if world.size > 1 else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.parameters = list(model.parameters())
        self.word = torch.zeros(8)

    def loss(self) -> torch.Tensor:
        return self.task(self.model, self.batch).loss_sum / ROWS

    def exchange(self) -> None:
        if self.world.size > 1:
            dist.all_reduce(self.word)


def bare(setting: Setting) -> Step:
    """Forward, backward, step, zero_grad."""

    def step() -> None:
        setting.loss().backward()
        setting.exchange()
        setting.optimizer.step()
        setting.optimizer.zero_grad()

    return step


def bare_with_norm(setting: Setting) -> Step:
    """The same with the gradient's norm, and no step if it is not finite."""

    def step() -> None:
        setting.loss().backward()
        setting.exchange()
        norm = torch.nn.utils.get_total_norm([p.grad for p in setting.parameters if p.grad is not None])
        if norm.isfinite():
            setting.optimizer.step()
        setting.optimizer.zero_grad()

    return step


def grad_scaler(setting: Setting) -> Step:
    """torch.amp.GradScaler as its documentation has it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE)

    def step() -> None:
        scaler.scale(setting.loss()).backward()
        setting.exchange()
        scaler.step(setting.optimizer)
        scaler.update()
        setting.optimizer.zero_grad()

    return step


def grad_scaler_with_norm(setting: Setting) -> Step:
    """The same with the norm of unscaled gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE)

    def step() -> None:
        scaler.scale(setting.loss()).backward()
        setting.exchange()
        scaler.unscale_(setting.optimizer)
        torch.nn.utils.get_total_norm([p.grad for p in setting.parameters if p.grad is not None])
        scaler.step(setting.optimizer)
        scaler.update()
        setting.optimizer.zero_grad()

    return step


def dtrain(setting: Setting, scaled: bool = False) -> Step:
    """dtrain's step, outcome read in the step after, as in its loop."""
    train_step = TrainStep(
        setting.model,
        setting.task,
        setting.optimizer,
        world=setting.world,
        precision=Precision("fp32"),
        loss_scale=LossScale(CPU, init=INIT_SCALE) if scaled else None,
        nominal=ROWS * setting.world.size,
        schedule=WarmupCosine(horizon=1_000_000),
    )

    def step() -> None:
        train_step.accumulate([setting.batch], 1)
        train_step.settle()
        train_step.apply()

    return step


def dtrain_scaled(setting: Setting) -> Step:
    """The same with a loss scale."""
    return dtrain(setting, scaled=True)


CONTENDERS: dict[str, Callable[[Setting], Step]] = {
    "bare loop": bare,
    "bare loop, norm and finite check": bare_with_norm,
    "torch GradScaler": grad_scaler,
    "torch GradScaler, norm": grad_scaler_with_norm,
    "dtrain": dtrain,
    "dtrain, loss scale": dtrain_scaled,
}


# -- measuring


def measure(rank: int, size: int, store: str, models: list[str], rounds: int, cpu: bool, results: Any) -> None:
    """One rank: times every contender in every round; rank 0 leaves ``{model: {contender: [microseconds]}}``."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    world = World(rank, size, rank, size, CPU, "gloo", size > 1)
    clock = time.thread_time if cpu else time.perf_counter
    measured: dict[str, dict[str, list[float]]] = {}
    for name in models:
        steps = {contender: build(Setting(name, world)) for contender, build in CONTENDERS.items()}
        number = MODELS[name][2]
        for step in steps.values():
            timed(step, number, size, clock)
        times: dict[str, list[float]] = {contender: [] for contender in steps}
        for turn in range(rounds):
            order = list(steps)[turn % len(steps) :] + list(steps)[: turn % len(steps)]
            for contender in order:
                times[contender].append(timed(steps[contender], number, size, clock))
        measured[name] = times
    if rank == 0:
        results.update(measured)
    if size > 1:
        # DDP's last references first: a rank that ends while the other still talks to it aborts.
        del steps
        dist.barrier()
        dist.destroy_process_group()


def timed(step: Step, number: int, size: int, clock: Callable[[], float]) -> float:
    """Microseconds a step; ranks start together."""
    if size > 1:
        dist.barrier()
    started = clock()
    for _ in range(number):
        step()
    return (clock() - started) / number * 1e6


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--cpu", action="store_true", help="CPU time of the training thread instead of wall time")
    parser.add_argument("--json", type=Path, help="where to write the same numbers")
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    for size in arguments.ranks:
        with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
            results = manager.dict()
            settings = (size, f"{folder}/store", arguments.models, arguments.rounds, arguments.cpu, results)
            mp.spawn(measure, settings, nprocs=size, join=True)
            report[f"{size} rank" + ("s" if size > 1 else "")] = dict(results)
    for ranks, by_model in report.items():
        for name, times in by_model.items():
            title = f"step, {MODELS[name][0]}, fp32, fused AdamW, {ranks}{', CPU time' if arguments.cpu else ''}"
            print(table(title, times, arguments.rounds), end="\n\n")
    about = {
        "command": f"python scripts/bench_step.py {' '.join(sys.argv[1:])}".strip(),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "machine": f"{cpu_name()}, one thread a rank",
        "date": date.today().isoformat(),
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(about | {"microseconds": report}, indent=1))


def table(title: str, times: dict[str, list[float]], rounds: int) -> str:
    """Rows of medians, with what they cost over the two bare loops: the median of the differences of each round."""
    width = max(len(title), *map(len, times))
    lines = [f"{title:<{width}}  {'us a step':>22}  {'over bare':>9}  {'over bare+norm':>14}  ratio"]
    loops = list(times.values())[:2]
    for contender, measured in times.items():
        middle = f"{statistics.median(measured):,.0f} ({min(measured):,.0f}-{max(measured):,.0f})"
        over = [
            f"{statistics.median(a - b for a, b in zip(measured, loop, strict=True)):+,.0f}"
            if measured is not loop
            else ""
            for loop in loops
        ]
        ratio = statistics.median(measured) / statistics.median(loops[0])
        lines.append(f"{contender:<{width}}  {middle:>22}  {over[0]:>9}  {over[1]:>14}  {ratio:5.2f}")
    lines.append(f"{rounds} interleaved rounds, median (min-max); differences are medians over the rounds")
    return "\n".join(lines)


def cpu_name() -> str:
    """What the CPU calls itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
