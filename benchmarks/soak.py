"""Trains a tiny network for many steps, with evaluations, checkpoints and kills, and checks that nothing grows.

    python -m benchmarks.soak [--steps 100000] [--ranks 2] [--kills 10] [--dir DIR]

The digits with a network of four channels, batches of 8, loader workers, 100 evaluations and 200 checkpoints. In the first
half, SIGKILL ends a rank, torchrun or the whole job at evenly spaced steps, and the same command resumes. The second half is
not disturbed. About every second the benchmark reads from /proc, for all ranks and their workers together, resident memory,
file descriptors and threads, and the size of the run's files.

*Flat* means: between the first and the last quarter of the undisturbed half, the medians of memory and of the size of the
checkpoints differ by less than 5 %, and those of descriptors, threads, processes and files in the run directory are equal.
The exit code is 1 if they are not. ``metrics.jsonl`` grows by design: by the same number of bytes per record.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.kill_soak import VICTIMS, Job

OVERRIDES = (
    "experiment=digits",
    "model.width=4",
    "train.global_batch_size=8",
    "train.max_epochs=null",
    "train.log_every=100",
    "data.num_workers=1",
    "checkpoint.best=null",
)
GROWTH = 0.05
EVERY = 1.0  # seconds between two samples


@dataclass(frozen=True)
class Sample:
    """What a running job uses, over all its ranks and their workers.

    Attributes:
        start: Number of the start, from 0.
        step: Last logged step.
        seconds: Since the first start.
        memory: Proportional resident memory in MiB: shared pages are counted once.
        descriptors: Open files, sockets and pipes.
        threads: Threads.
        processes: Ranks and workers.
        checkpoints: Size of the folder ``checkpoints`` in MiB.
        files: Files in the run directory, without those of checkpoints.
        record: Bytes of ``metrics.jsonl`` per record.
    """

    start: int
    step: int
    seconds: float
    memory: float
    descriptors: int
    threads: int
    processes: int
    checkpoints: float
    files: int
    record: float


#: Columns of the table: heading, value, decimals, and whether the value has to stay equal.
COLUMNS: dict[str, tuple[Callable[[Sample], float], int, bool]] = {
    "memory, MiB": (lambda sample: sample.memory, 1, False),
    "descriptors": (lambda sample: sample.descriptors, 0, True),
    "threads": (lambda sample: sample.threads, 0, True),
    "processes": (lambda sample: sample.processes, 0, True),
    "checkpoints, MiB": (lambda sample: sample.checkpoints, 3, False),
    "files": (lambda sample: sample.files, 0, True),
    "bytes a record": (lambda sample: sample.record, 0, False),
}


def observe(job: Job, start: int, began: float) -> Sample | None:
    """A sample of the job; None if it is starting or ending."""
    pids = job.ranks
    for pid in pids:
        pids = pids + sorted(harness.children(pid))
    step = job.step()
    if not step or len(pids) < 2 * job.size:  # each rank has a worker
        return None
    memory = descriptors = threads = 0
    with suppress(OSError):  # a process ended meanwhile
        for pid in pids:
            proc = Path(f"/proc/{pid}")
            rollup = (proc / "smaps_rollup").read_text().split()
            memory += int(rollup[rollup.index("Pss:") + 1])
            descriptors += len(list((proc / "fd").iterdir()))
            threads += len(list((proc / "task").iterdir()))
        run_dir = job.run.run_dir
        # Between two saves: a save writes into a temporary folder first.
        saved = [path.stat().st_size for path in (run_dir / "checkpoints").glob("step-*/*")]
        files = [path for path in run_dir.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
        content = (run_dir / "metrics.jsonl").read_bytes()
        return Sample(
            start,
            step,
            time.monotonic() - began,
            memory / 1024,
            descriptors,
            threads,
            len(pids),
            sum(saved) / 2**20,
            len(files),
            len(content) / max(1, content.count(b"\n")),
        )
    return None


def watch(job: Job, start: int, until: int, began: float) -> list[Sample]:
    """Samples of a job until it has logged the step ``until``, or ends."""
    samples = []
    while not job.ended and job.step() < until:
        if (sample := observe(job, start, began)) is not None:
            samples.append(sample)
        time.sleep(EVERY)
    return samples


def medians(samples: Sequence[Sample]) -> dict[str, float]:
    """The median of each column."""
    return {column: statistics.median(map(value, samples)) for column, (value, _, _) in COLUMNS.items()}


def grown(first: dict[str, float], last: dict[str, float]) -> list[str]:
    """Columns that are not flat between these medians."""
    return [
        f"{column} {first[column]:.1f} -> {last[column]:.1f}"
        for column, (_, _, equal) in COLUMNS.items()
        if (last[column] != first[column] if equal else abs(last[column] - first[column]) > GROWTH * first[column])
    ]


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="(default %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="at least 2 (default %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="in the first half (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the victims (default %(default)s)")
    parser.add_argument("--dir", type=Path, help="the run; default: a temporary folder, kept on failure")
    arguments = harness.parse(parser, steps=3000, kills=1)
    chance = random.Random(arguments.seed)
    folder = arguments.dir or Path(tempfile.mkdtemp(prefix="soak-"))
    every = max(10, arguments.steps // 200)
    overrides = [*OVERRIDES, f"train.max_steps={arguments.steps}", f"checkpoint.every_steps={every}"]
    overrides.append(f"train.eval_every={2 * every}")
    kills = [round(arguments.steps / 2 * (number + 1) / arguments.kills) for number in range(arguments.kills)]
    samples: list[Sample] = []
    began = time.monotonic()
    for start, until in enumerate([*kills, arguments.steps]):
        job = Job(folder, arguments.ranks, overrides)
        samples += watch(job, start, until, began)
        if until < arguments.steps:
            victim = chance.choice(VICTIMS)
            if not job.kill(victim, chance):
                raise SystemExit(f"the run ended before step {until}; see {folder}/output.log")
            print(f"step {job.step():,}: killed {victim}", flush=True)
        code = job.wait()
    if code or job.run.status["state"] != "finished":
        raise SystemExit(f"{folder} did not finish: exit code {code}, {job.run.status}; see {folder}/output.log")
    seconds = time.monotonic() - began
    undisturbed = [sample for sample in samples if sample.start == arguments.kills]
    quarter = max(1, len(undisturbed) // 4)
    if not undisturbed:
        raise SystemExit("the undisturbed half was shorter than a second: choose more --steps")
    quarters = [undisturbed[number * quarter : (number + 1) * quarter] or undisturbed[-1:] for number in range(4)]
    rows = {f"steps {part[0].step:,} to {part[-1].step:,}": medians(part) for part in quarters}
    killed = [sample for sample in samples if sample.start < arguments.kills]
    if killed:
        rows = {f"{arguments.kills} starts before": medians(killed)} | rows
    table = harness.Table(f"{arguments.steps:,} steps, {arguments.ranks} ranks", rows)
    for column, (_, decimals, _) in COLUMNS.items():
        table.text(column, {row: f"{values[column]:,.{decimals}f}" for row, values in rows.items()})
    table.show(f"medians of {len(samples):,} samples; {seconds:,.0f} s with {arguments.kills} kills")
    failures = grown(medians(quarters[0]), medians(quarters[-1]))
    harness.finish(arguments, {"samples": [asdict(sample) for sample in samples], "grown": failures})
    if failures and not arguments.quick:
        sys.exit(f"not flat: {'; '.join(failures)}. The run is in {folder}.")
    print("flat" if not failures else "too short to tell")
    if arguments.dir is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
