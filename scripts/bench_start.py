"""Seconds from the command to the first optimizer step: of a new run, of one with known shards, of one that was killed.

    python scripts/bench_start.py [--ranks 1 2] [--rounds 5] [--json FILE]

Real processes, started as a user does: ``python -m`` for one rank, torchrun for more. 30,000 generated 32x32 JPEGs in 64
shards, a small CNN, two loader workers a rank. The killed run died (SIGKILL) at step 15 with a checkpoint of step 10, and goes
on with step 11. ``bare`` is a script that imports torch, makes a process group, wraps the same network in DDP and takes one
step on random numbers: less cannot be done. Times are those of rank 0, by the wall clock; the last row says where the time of
the indexed run goes. Files are in the page cache.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_common import command_line, finish, interleaved, spread, table
from bench_images import jpeg_shards
from bench_start_rank import BEGAN, MARKS

NEW, INDEXED, KILLED, BARE = "new run", "new run, shards indexed before", "killed run", "bare"
PARTS = ("python", "imports", "config, ranks", "data", "model", "first batch", "first step")
RANK = Path(__file__).with_name("bench_start_rank.py")
SAVED, KILL_AT = 10, 15


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    number, shards, rounds = (300, 4, 1) if arguments.quick else (30_000, 64, arguments.rounds)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = str(Path(jpeg_shards(folder / "shards", number=number, width=32, height=32, shards=shards)[0]).parent)
        for ranks in arguments.ranks:
            killed = _killed_run(folder, ranks, data)
            parts: list[dict[str, float]] = []
            measure = functools.partial(_seconds, folder, ranks, data, killed, parts)
            found = interleaved(rounds, (NEW, INDEXED, KILLED, BARE), measure)
            lines = [[who, spread(seconds, 2)] for who, seconds in found.items()]
            split = {part: statistics.median(one[part] for one in parts) for part in PARTS}
            print(table(f"command to first step, {ranks} rank{'s' * (ranks > 1)}", ["seconds"], lines))
            print(f"{INDEXED}: " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in split.items()))
            print(f"{rounds} interleaved rounds, median (min-max)\n")
            report[str(ranks)] = {"seconds": found, "parts": split}
    finish(arguments, report)


def _seconds(folder: Path, ranks: int, data: str, killed: Path, parts: list[dict[str, float]], who: str) -> float:
    """One start; that of an indexed run leaves its parts."""
    if who == BARE:
        marks = _start(folder, ranks, ["--bare"], folder / "cache")
        return marks["first step"]
    run_dir, cache = folder / "run", folder / ("cold" if who == NEW else "cache")
    for old in (run_dir, folder / "cold"):
        shutil.rmtree(old, ignore_errors=True)
    if who == KILLED:
        shutil.copytree(killed, run_dir)
    marks = _start(folder, ranks, _overrides(run_dir, data, SAVED + 2 if who == KILLED else 2), cache)
    if who == INDEXED:
        times = [0.0, *(marks[part] for part in PARTS)]
        parts.append({part: after - before for part, before, after in zip(PARTS, times, times[1:], strict=False)})
    return marks["first step"]


def _killed_run(folder: Path, ranks: int, data: str) -> Path:
    run_dir = folder / f"killed-{ranks}"
    overrides = _overrides(run_dir, data, 20)
    _start(
        folder,
        ranks,
        [*overrides, f"checkpoint.every_steps={SAVED}", f"faults=['kill@step={KILL_AT}']"],
        folder / "cache",
    )
    if json.loads((run_dir / "status.json").read_text())["state"] == "finished":
        raise SystemExit("the run that was to be killed has finished")
    return run_dir


def _overrides(run_dir: Path, data: str, steps: int) -> list[str]:
    return [
        "data=shards",
        f"data.train={data}/*.tar",
        "data.image_size=32",
        "data.num_workers=2",
        "model=small_cnn",
        "train.global_batch_size=64",
        f"train.max_steps={steps}",
        "tracker=none",
        f"run.dir={run_dir}",
    ]


def _start(folder: Path, ranks: int, arguments: Sequence[str], cache: Path) -> dict[str, float]:
    """Starts ``bench_start_rank`` in as many ranks and returns rank 0's marks, in seconds since the command."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    marks = folder / "marks.json"
    marks.unlink(missing_ok=True)
    environment = os.environ | {MARKS: str(marks), "DTRAIN_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, str(RANK), *arguments],
        env=environment | {BEGAN: repr(time.time())},
        capture_output=True,
        text=True,
        check=False,
    )
    reached = dict(json.loads(marks.read_text())) if marks.exists() else {}
    if "first step" not in reached:
        raise SystemExit(f"a start failed:\n{done.stderr[-4000:]}")
    return reached


if __name__ == "__main__":
    main()
