"""Kills training runs again and again and checks that nothing is lost.

    python -m benchmarks.kill_soak [--rounds 50] [--ranks 3] [--seed 0] [--parallel fsdp]

A round is one kill (SIGKILL) at a random moment, starts and saves included: of one rank, of torchrun alone, or of the whole
job at once. The same command then resumes the run. After some kills a run is left to finish and compared with an
undisturbed one: parameters, optimizer and moving average bit for bit, the losses, and the samples of every step.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness

KILLS_A_RUN = 5
STEPS = 60
_LONGEST_RECORD = 1 << 16  # bytes
VICTIMS = ("one rank", "torchrun", "the job")


#: Config of the runs.
OVERRIDES = (
    "experiment=digits",
    "model.width=8",
    "train.deterministic=true",
    "train.ema_decay=0.9",
    f"train.max_steps={STEPS}",
    "train.log_every=1",
    "checkpoint.every_steps=2",
    "data.record_keys=true",
    "train.eval_every=20",
)


class Job:
    """One start of a run: torchrun, its ranks (at least two), and their loader workers."""

    def __init__(self, run_dir: Path, ranks: int, overrides: Sequence[str]) -> None:
        self.run = harness.Run(run_dir)
        self.size = ranks
        command = harness.python("-m", "dtrain.train", ranks=ranks)
        command += harness.train_overrides(run_dir, overrides)
        run_dir.mkdir(parents=True, exist_ok=True)
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        with (run_dir / "output.log").open("a") as output:
            self._torchrun = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, env=environ
            )

    @property
    def ended(self) -> bool:
        """Whether torchrun has ended."""
        return self._torchrun.poll() is not None

    @property
    def ranks(self) -> list[int]:
        """Process ids of the ranks that run."""
        return sorted(harness.children(self._torchrun.pid))

    def wait(self) -> int:
        """Waits for torchrun; its exit code."""
        return self._torchrun.wait()

    def kill(self, victim: str, chance: random.Random) -> bool:
        """Sends SIGKILL; False if the victim does not exist."""
        try:
            ranks = self.ranks
            pids = [chance.choice(ranks)] if victim == "one rank" else ranks if victim == "the job" else []
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            if victim != "one rank":
                self._torchrun.kill()
        except (IndexError, ProcessLookupError):
            return False
        return True

    def step(self) -> int:
        """The last logged step; 0 if there is none, or its record is being written."""
        try:
            with (self.run.run_dir / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_RECORD))
                return int(json.loads(file.readlines()[-1])["step"])
        except (OSError, IndexError, ValueError):
            return 0


def kill_once(job: Job, chance: random.Random) -> str | None:
    """Kills a victim at a random moment; returns victim and moment, None if the run ended before."""
    victim = chance.choice(VICTIMS)
    started, first = time.monotonic(), job.step()
    if chance.random() < 0.25:
        delay = chance.uniform(0.5, 6.0)
        when = f"{delay:.1f} s after the start"
        while not job.ended and time.monotonic() - started < delay:
            time.sleep(0.01)
    else:
        ahead = chance.randint(1, 12)
        when = f"about {ahead} steps after step {first}"
        while not job.ended and job.step() < first + ahead:
            time.sleep(0.005)
        # Metrics lag behind: a random part of a step or two later, so that saves are hit too.
        time.sleep(chance.uniform(0, 0.1))
    return f"{victim}, {when} (step {job.step()})" if not job.ended and job.kill(victim, chance) else None


def differences(run_dir: Path, reference: Path) -> list[str]:
    """Names of files and metrics in which a finished run differs from the undisturbed one."""
    files = (f"checkpoints/step-{STEPS:09d}/*.safetensors", "logs/keys-rank-*.jsonl")
    names = [str(path.relative_to(reference)) for pattern in files for path in sorted(reference.glob(pattern))]
    different = [name for name in names if (run_dir / name).read_bytes() != (reference / name).read_bytes()]
    return different + ["train/loss"] * (losses(run_dir) != losses(reference))


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Step and loss of each record that has one."""
    records = harness.Run(run_dir).records
    return [(record["step"], record["train/loss"]) for record in records if "train/loss" in record]


def finish(run_dir: Path, ranks: int, overrides: Sequence[str]) -> None:
    """Resumes a run and waits until it is finished.

    Raises:
        SystemExit: If it does not finish; shows the end of its output.
    """
    job = Job(run_dir, ranks, overrides)
    code, status = job.wait(), job.run.status
    if code or status["state"] != "finished":
        print("\n".join((run_dir / "output.log").read_text().splitlines()[-40:]), file=sys.stderr)
        raise SystemExit(f"{run_dir} did not finish: exit code {code}, {status}")


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=50)
    parser.add_argument("--ranks", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--parallel", default="ddp", help="ddp or fsdp (default %(default)s)")
    parser.add_argument("--seed", type=int, help="of moments and victims; default: a new one, printed")
    parser.add_argument("--dir", type=Path, help="where the runs go; default: a temporary folder, kept on failure")
    arguments = harness.parse(parser, rounds=2, ranks=2)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)
    folder = arguments.dir or Path(tempfile.mkdtemp(prefix="kill-soak-"))
    print(f"seed {seed}, {arguments.ranks} ranks, {STEPS} steps, in {folder}", flush=True)
    overrides = (*OVERRIDES, f"parallel={arguments.parallel}")
    finish(folder / "undisturbed", arguments.ranks, overrides)
    survived: collections.Counter[str] = collections.Counter()
    runs = 0
    while survived.total() < arguments.rounds:
        runs += 1
        run_dir = folder / f"killed-{runs}"
        for _ in range(min(KILLS_A_RUN, arguments.rounds - survived.total())):
            job = Job(run_dir, arguments.ranks, overrides)
            killed = kill_once(job, chance)
            job.wait()
            if killed is None:
                break
            survived[killed.partition(",")[0]] += 1
            print(f"round {survived.total()}: run {runs}, killed {killed}", flush=True)
        finish(run_dir, arguments.ranks, overrides)
        if different := differences(run_dir, folder / "undisturbed"):
            raise SystemExit(f"{run_dir} differs from the undisturbed run in {', '.join(different)}")
        print(f"run {runs}: equal to the undisturbed run, bit for bit", flush=True)
    kinds = ", ".join(f"{count} of {victim}" for victim, count in survived.items())
    print(f"survived {survived.total()} of {arguments.rounds} rounds ({kinds}) in {runs} runs\n", flush=True)
    harness.finish(arguments, {"seed": seed, "survived": survived, "runs": runs})
    if arguments.dir is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
