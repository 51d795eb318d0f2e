"""Seconds from the command to the first optimizer step: of a new run, with known shards, and of a run that was killed.

    python -m benchmarks.start [--ranks 1 2] [--rounds 5] [--json FILE]
    python -m benchmarks.start --compile --ranks 1 [--rounds 3]

Real processes, started like a user's: ``python -m`` for one rank, torchrun for more. The data are 30,000 generated 32x32
JPEGs in 64 shards, in the page cache; a small CNN, two loader workers a rank. The killed run died (SIGKILL) at step 15 with a
checkpoint of step 10 and resumes with step 11. ``bare`` is the least that can be done: it imports torch, makes a process
group, wraps the same network in DDP and takes one step on random numbers. Times are rank 0's wall time; the line under the
table splits the time of the indexed run.

With ``--compile`` the rows are runs with ``train.compile=true`` over indexed shards: ``nothing kept`` compiles everything;
``dtrain's cache`` has the artefacts of an earlier run and an empty ``TORCHINDUCTOR_CACHE_DIR``, as on a new machine that shares
``DTRAIN_CACHE``; ``torch's cache`` is a second start on the same machine.
"""

# The measured ranks run this file too, so it imports torch, dtrain and the harness in functions only.
from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NEW, INDEXED, KILLED, BARE = "new run", "new run, shards indexed before", "killed run", "bare"
COLD, CACHED, WARM = "compiled, nothing kept", "compiled, dtrain's cache", "compiled, torch's cache"
#: Parts of a start; each ends at a mark.
PARTS = ("python", "imports", "config, ranks", "data", "model", "first batch", "first step")
SAVED_AT, KILLED_AT = 10, 15
#: Environment of a measured rank: the file for its marks, and when the command was given, in Unix seconds.
MARKS, STARTED = "DTRAIN_BENCH_MARKS", "DTRAIN_BENCH_STARTED"


def main() -> None:
    """Command line."""
    from benchmarks import harness

    parser = harness.command_line(__doc__, rounds=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--compile", action="store_true", help="measure starts with train.compile=true")
    arguments = harness.parse(parser, rounds=1)
    number, shards = (300, 4) if arguments.quick else (30_000, 64)
    report = {}
    with harness.scratch() as folder:
        harness.jpeg_shards(folder / "shards", number=number, width=32, height=32, shards=shards)
        for ranks in arguments.ranks:
            starts = Starts(folder, ranks)
            if not arguments.compile:
                starts.kill_a_run()
            rows = (INDEXED, COLD, CACHED, WARM) if arguments.compile else (NEW, INDEXED, KILLED, BARE)
            marks = harness.interleaved(arguments.rounds, rows, starts.measure)
            seconds = harness.column(marks, "first step")
            times = [[0.0, *(one[part] for part in PARTS)] for one in marks[INDEXED]]
            parts = {part: statistics.median(one[at + 1] - one[at] for one in times) for at, part in enumerate(PARTS)}
            table = harness.Table(f"command to first step, {ranks} rank{'s' * (ranks > 1)}", seconds)
            table.medians("seconds", seconds, 2)
            split = ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
            table.show(f"{INDEXED}: {split}", harness.rounds_note(arguments.rounds))
            report[str(ranks)] = {"seconds": seconds, "parts": parts}
    harness.finish(arguments, report)


class Starts:
    """Starts of runs with so many ranks, over the shards in ``folder``."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self.ranks = ranks
        self._killed = folder / f"killed-{ranks}"

    def kill_a_run(self) -> None:
        """Leaves a killed run behind."""
        from benchmarks.fault_hook import faulty

        killed = [f"checkpoint.every_steps={SAVED_AT}", faulty(f"kill@step={KILLED_AT}")]
        self._start([*self._overrides(self._killed, 20), *killed], "cache")
        if json.loads((self._killed / "status.json").read_text())["state"] == "finished":
            raise SystemExit("the run that was to be killed has finished")

    def measure(self, row: str) -> dict[str, float]:
        """One start; seconds from the command to each mark."""
        if row == BARE:
            return self._start(["--bare"], "cache")
        run_dir = self.folder / "run"
        for old in (run_dir, self.folder / "empty-cache"):
            shutil.rmtree(old, ignore_errors=True)
        if row == KILLED:
            shutil.copytree(self._killed, run_dir)
        compiled = row in (COLD, CACHED, WARM)
        if row == COLD:
            shutil.rmtree(self.folder / "cache" / "compiled", ignore_errors=True)
        if row in (COLD, CACHED):
            shutil.rmtree(self.folder / "inductor", ignore_errors=True)
        steps = SAVED_AT + 2 if row == KILLED else 2
        overrides = [*self._overrides(run_dir, steps), *(["train.compile=true"] if compiled else [])]
        return self._start(overrides, "empty-cache" if row == NEW else "cache")

    def _overrides(self, run_dir: Path, steps: int) -> list[str]:
        data = ["data=shards", f"data.train={self.folder}/shards/*.tar", "data.image_size=32", "data.num_workers=2"]
        train = ["model=small_cnn", "train.global_batch_size=64", f"train.max_steps={steps}"]
        return [*data, *train, "tracker=none", f"run.dir={run_dir}"]

    def _start(self, arguments: Sequence[str], cache: str) -> dict[str, float]:
        from benchmarks import harness

        marks = self.folder / "marks.json"
        marks.unlink(missing_ok=True)
        environment = {MARKS: str(marks), STARTED: repr(time.time()), "DTRAIN_CACHE": str(self.folder / cache)}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")
        command = harness.python("-m", "benchmarks.start", *arguments, ranks=self.ranks)
        try:
            harness.run(command, **environment)
        except SystemExit:
            if "kill@" not in command[-1]:
                raise
        return dict(json.loads(marks.read_text()))


# -- a measured rank


def one_rank() -> None:
    """Runs the trainer, or the bare script, with a mark at the end of each part."""
    mark("python")
    if sys.argv[1:] == ["--bare"]:
        bare()
        return
    import torch

    import dtrain.train
    from dtrain.data.loading.batch import DeviceCopies
    from dtrain.training.loop import Loop
    from dtrain.training.step import TrainStep

    mark("imports")
    mark_first_call(torch.distributed, "init_process_group", "config, ranks", after=True)
    mark_first_call(torch.nn.Module, "__init__", "data")
    mark_first_call(Loop, "run", "model")
    mark_first_call(DeviceCopies, "__call__", "first batch")
    mark_first_call(TrainStep, "apply", "first step", after=True)
    dtrain.train.main()


def bare() -> None:
    """The least that a first step takes."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from dtrain.models.convnets import SmallCNN

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(SmallCNN(classes=10, width=32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(64 // dist.get_world_size(), 3, 32, 32)).square().mean().backward()
    optimizer.step()
    mark("first step")
    dist.destroy_process_group()


def mark(part: str) -> None:
    """Rank 0 notes that a part has ended, once."""
    if os.environ.get("RANK", "0") != "0":
        return
    path = Path(os.environ[MARKS])
    marks = json.loads(path.read_text()) if path.exists() else {}
    marks.setdefault(part, time.time() - float(os.environ[STARTED]))
    path.write_text(json.dumps(marks))


def mark_first_call(owner: Any, name: str, part: str, *, after: bool = False) -> None:
    """Marks the first call of a function, before or after it; later calls find the function as it was."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def marking(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, function)
        if not after:
            mark(part)
        result = function(*args, **kwargs)
        if after:
            mark(part)
        return result

    setattr(owner, name, marking)


if __name__ == "__main__":
    one_rank() if MARKS in os.environ else main()
