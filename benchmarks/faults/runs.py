"""A run of a contender: started by torchrun, killed at random steps, started again, and counted.

The *history* of a run is its last execution of every step: a start that begins with step n drops the steps from n on that
earlier starts have logged. *Lost* and *doubled* compare the history with what was asked for, each sample once an epoch.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.faults import protocol

#: What is killed: one rank, whose torchrun then ends the others, or all of them with torchrun, as when a machine stops.
VICTIMS = ("one rank", "all")
_LIMIT = 300  # seconds until a start has reached its kill, or ends
_SHOWN = 20_000  # characters of the output of a start that failed


@dataclass(frozen=True)
class Kill:
    """A kill.

    Attributes:
        step: It comes when rank 0 has logged this step.
        victim: One of ``VICTIMS``.
        delay: Seconds after the step was logged.
    """

    step: int
    victim: str
    delay: float


@dataclass(frozen=True)
class Result:
    """What a run did.

    Attributes:
        losses: Mean loss of each step of its history.
        lost: Samples that are missing in the history; one that is missing in two epochs counts twice.
        doubled: Samples that the history has too often.
        repeated: Steps that were computed again.
        seconds: From the first start to the end of the last one.
    """

    losses: dict[int, float]
    lost: int
    doubled: int
    repeated: int
    seconds: float

    def counts(self) -> dict[str, float]:
        """What can be written as JSON."""
        return {"lost": self.lost, "doubled": self.doubled, "repeated": self.repeated, "seconds": self.seconds}


def random_kills(number: int, seed: int) -> list[Kill]:
    """Kills at increasing random steps."""
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(protocol.STEPS // 20, protocol.STEPS * 19 // 20), number))
    return [Kill(step, chance.choice(VICTIMS), chance.uniform(0, 0.1)) for step in steps]


def run(contender: str, folder: Path, ranks: Sequence[int], kills: Sequence[Kill]) -> Result:
    """Runs a contender to its end.

    Args:
        contender: Name of its module.
        folder: Folder of the run; deleted before.
        ranks: Number of ranks of each start, in turn.
        kills: A start lives until its kill; the one after the last kill runs to the end.

    Raises:
        RuntimeError: If a start fails by itself; with the end of its output.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    start, left = 0, list(kills)
    process = _start(contender, folder, start, ranks[0])
    while left:
        kill = left.pop(0)
        _wait_for(process, folder, start, kill)
        if kill.victim == "one rank" and recovers(contender):
            os.kill(_ranks(process)[-1], signal.SIGKILL)
            continue
        _end(process, kill)
        start += 1
        process = _start(contender, folder, start, ranks[start % len(ranks)])
    try:
        code: int | None = process.wait(_LIMIT)
    except subprocess.TimeoutExpired:
        _end(process, Kill(0, "all", 0))
        code = None
    if code != 0:
        ended = f"did not end within {_LIMIT} s" if code is None else f"ended with code {code}"
        raise RuntimeError(f"start {start} {ended}:\n" + (folder / "output.log").read_text()[-_SHOWN:])
    return count(folder, time.monotonic() - began)


def recovers(contender: str) -> bool:
    """Whether the job of a contender goes on when a rank is killed."""
    return "\nRECOVERS = True" in _program(contender)


def _start(contender: str, folder: Path, start: int, ranks: int) -> subprocess.Popen[bytes]:
    command = harness.python("-m", f"benchmarks.faults.{contender}", ranks=1 if recovers(contender) else ranks)
    environ = {
        "OMP_NUM_THREADS": "1",
        "FAULTS_START": str(start),
        "FAULTS_FOLDER": str(folder),
        "FAULTS_RANKS": str(ranks),
    }
    with (folder / "output.log").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | environ, start_new_session=True)


def _wait_for(process: subprocess.Popen[bytes], folder: Path, start: int, kill: Kill) -> None:
    """Waits until rank 0 has logged the step of the kill."""
    deadline = time.monotonic() + _LIMIT
    while not any(_reached(log, kill.step) for log in folder.glob(f"start-{start}-rank-0-*.jsonl")):
        if process.poll() is not None or time.monotonic() > deadline:
            _end(process, kill)
            output = (folder / "output.log").read_text()[-_SHOWN:]
            raise RuntimeError(f"start {start} did not reach step {kill.step}:\n{output}")
        time.sleep(0.002)
    time.sleep(kill.delay)


def _end(process: subprocess.Popen[bytes], kill: Kill) -> None:
    """Kills one rank and waits for the end of the job, or kills all of it."""
    ranks, others = _ranks(process), _descendants(process.pid)
    if kill.victim == "one rank" and ranks:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(ranks[-1], signal.SIGKILL)
        process.wait(_LIMIT)
    else:
        process.kill()
    # All of the job, or what is left of it: workers of a loader outlive a rank that was killed.
    for pid in others:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _ranks(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes that a torchrun has started, by number; where there are several, of all of them."""
    children = sorted(harness.children(process.pid))
    torchruns = [pid for pid in children if b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [rank for pid in torchruns for rank in sorted(harness.children(pid))] if torchruns else children


def _reached(log: Path, step: int) -> bool:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        steps = re.findall(rb'"step": (\d+)', file.read())
    return bool(steps) and int(steps[-1]) >= step


def _descendants(pid: int) -> set[int]:
    found = harness.children(pid)
    return found.union(*map(_descendants, found))


def count(folder: Path, seconds: float) -> Result:
    """Reads the logs of a run that has ended."""
    history: dict[int, dict[int, tuple[list[int], float]]] = {}  # step, rank: samples and loss
    repeated = 0
    starts = sorted({int(path.name.split("-")[1]) for path in folder.glob("start-*-rank-*.jsonl")})
    for start in starts:
        logs = [
            (int(path.stem.split("-")[3]), _lines(path)) for path in sorted(folder.glob(f"start-{start}-rank-*.jsonl"))
        ]
        first = min((lines[0]["from"] for _, lines in logs if lines), default=protocol.STEPS)
        dropped = [step for step in history if step >= first]
        repeated += len(dropped)
        for step in dropped:
            del history[step]
        for rank, lines in logs:
            for line in lines[1:]:
                history.setdefault(line["step"], {})[rank] = line["samples"], line["loss"]
    losses, used = {}, Counter[int]()
    for step, of_ranks in history.items():
        sizes = [len(samples) for samples, _ in of_ranks.values()]
        losses[step] = sum(size * loss for size, (_, loss) in zip(sizes, of_ranks.values(), strict=True)) / sum(sizes)
        for samples, _ in of_ranks.values():
            used.update(samples)
    wanted = range(protocol.SAMPLES)
    lost = sum(max(0, protocol.EPOCHS - used[sample]) for sample in wanted)
    doubled = sum(max(0, used[sample] - protocol.EPOCHS) for sample in used)
    return Result(losses, lost, doubled, repeated, seconds)


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # the process was killed while it wrote
    return lines


def lines_for_resuming(contender: str) -> int:
    """Lines of a contender that exist only for saving and resuming."""
    return sum(line.rstrip().endswith("# resume") for line in _program(contender).splitlines())


def _program(contender: str) -> str:
    return Path(__file__).with_name(f"{contender}.py").read_text()
