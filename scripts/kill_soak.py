"""Kills training runs again and again, and shows that nothing was lost.

    python scripts/kill_soak.py [--rounds 50] [--ranks 3] [--seed 0]

A round is one kill (SIGKILL) at a random moment, starts and saves included: of one rank, of torchrun alone, or of the whole
job at once. The same command then continues the run. After some kills a run is left to its end, and compared with one that
nobody touched: parameters, optimizer and moving average bit for bit, losses, and the ledger of the samples of every step.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

KILLS_A_RUN = 5
STEPS = 60
VICTIMS = ("one rank", "torchrun", "the job")


class Job:
    """One start of a run: torchrun, its ranks, and their loader workers."""

    def __init__(self, run_dir: Path, ranks: int) -> None:
        self.run_dir = run_dir
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "dtrain.train", "experiment=digits", f"run.dir={run_dir}", "tracker=none"]
        command += ["train.deterministic=true", "train.ema_decay=0.9", f"train.max_steps={STEPS}", "train.log_every=1"]
        command += ["checkpoint.every_steps=2", "data.record_keys=true", "model.width=8", "train.eval_every=20"]
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / "output.log").open("a") as output:
            self._agent = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    @property
    def is_over(self) -> bool:
        """Whether torchrun has ended."""
        return self._agent.poll() is not None

    def end(self) -> int:
        """Waits for torchrun; its exit code."""
        return self._agent.wait()

    def kill(self, victim: str, chance: random.Random) -> bool:
        """Sends SIGKILL; False if there was nobody to send it to."""
        try:
            if victim == "the job":
                for rank in children(self._agent.pid):
                    os.kill(rank, signal.SIGKILL)
                self._agent.kill()
            elif victim == "torchrun":
                self._agent.kill()
            else:
                os.kill(chance.choice(children(self._agent.pid)), signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        return True

    def step(self) -> int:
        """The last one in its metrics."""
        try:
            return int(json.loads((self.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        except (OSError, IndexError, ValueError):  # not yet there, or its last line is being written
            return 0


def children(pid: int) -> list[int]:
    """Processes that a process has started (Linux: from /proc)."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def kill_once(job: Job, chance: random.Random) -> str | None:
    """Kills somebody at a random moment of a start; says what was done, None if the run was over before."""
    victim = chance.choice(VICTIMS)
    begun, first = time.monotonic(), job.step()
    if chance.random() < 0.25:
        delay = chance.uniform(0.5, 6.0)
        when = f"{delay:.1f} s after the start"
        while not job.is_over and time.monotonic() - begun < delay:
            time.sleep(0.01)
    else:
        # Not from the metrics alone, which lag behind: a random part of a step or two later, saves included.
        ahead = chance.randint(1, 12)
        when = f"about {ahead} steps on"
        while not job.is_over and job.step() < first + ahead:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
    return f"{victim}, {when} (step {job.step()})" if not job.is_over and job.kill(victim, chance) else None


def differences(run_dir: Path, reference: Path) -> list[str]:
    """What of a finished run is not as in the one that nobody touched."""
    last = f"checkpoints/step-{STEPS:09d}"
    compared = [f"{last}/{name}.safetensors" for name in ("model", "optimizer", "ema")]
    compared += [str(path.relative_to(reference)) for path in sorted(reference.glob("logs/keys-rank-*.jsonl"))]
    found = [name for name in compared if (run_dir / name).read_bytes() != (reference / name).read_bytes()]
    return found + ["train/loss"] * (losses(run_dir) != losses(reference))


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Step and loss of each record that has one."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["train/loss"]) for record in lines if "train/loss" in record]


def finish(run_dir: Path, ranks: int) -> None:
    """Lets a run come to its end.

    Raises:
        SystemExit: If it does not; shows the end of its output.
    """
    code = Job(run_dir, ranks).end()
    status = json.loads((run_dir / "status.json").read_text())
    if code or status["state"] != "finished":
        print("\n".join((run_dir / "output.log").read_text().splitlines()[-40:]), file=sys.stderr)
        raise SystemExit(f"{run_dir} did not finish: exit code {code}, {status}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="kills (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=3, help="(default %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the moments and victims; default: a new one, printed"
    )
    parser.add_argument("--dir", type=Path, help="where the runs go; default: a temporary folder, kept on failure")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)
    folder = arguments.dir or Path(tempfile.mkdtemp(prefix="kill-soak-"))
    print(f"seed {seed}, {arguments.ranks} ranks, {STEPS} steps, in {folder}", flush=True)
    finish(folder / "untouched", arguments.ranks)
    survived: collections.Counter[str] = collections.Counter()
    runs = 0
    while survived.total() < arguments.rounds:
        runs += 1
        run_dir = folder / f"killed-{runs}"
        for _ in range(min(KILLS_A_RUN, arguments.rounds - survived.total())):
            job = Job(run_dir, arguments.ranks)
            said = kill_once(job, chance)
            job.end()
            if said is None:
                break
            survived[said.partition(",")[0]] += 1
            print(f"round {survived.total()}: run {runs}, killed {said}", flush=True)
        finish(run_dir, arguments.ranks)
        if different := differences(run_dir, folder / "untouched"):
            raise SystemExit(f"{run_dir} differs from the run that nobody touched in {', '.join(different)}")
        print(f"run {runs}: as the one that nobody touched, bit for bit", flush=True)
    kinds = ", ".join(f"{count} of {victim}" for victim, count in survived.items())
    print(f"survived {survived.total()} of {arguments.rounds} rounds ({kinds}) in {runs} runs", flush=True)
    if arguments.dir is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
