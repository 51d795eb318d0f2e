"""Kills ranks at random moments: seconds lost with ``parallel.recover=true`` and with a restart, and lost samples.

    python -m benchmarks.recovery [--rounds 50] [--ranks 4] [--seed 0] [--mode continue|restart]

A round is one SIGKILL of one rank at a random moment of the training, evaluations and saves included. With ``continue`` the
other ranks go on; a run loses up to ``--kills`` ranks. With ``restart`` the others end, and all ranks are started again. Every
run then finishes and is compared with an undisturbed run of one process: the number of samples, the losses of all steps, and
the weights. The model has no BatchNorm and no dropout, so they are equal up to the rounding of fp32.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from benchmarks import harness

STEPS = 80
TOLERANCE = 1e-4  # of weights up to 1; a sample that is lost or doubled changes them by 1e-3 or more


class Job:
    """The ranks of one start, without torchrun, which would end the others when one ends."""

    def __init__(self, run_dir: Path, ranks: int, recover: bool, *overrides: str) -> None:
        self.run = harness.Run(run_dir)
        command = [sys.executable, "-m", "dtrain.train", "experiment=digits", f"run.dir={run_dir}", "tracker=none"]
        command += [f"train.max_steps={STEPS}", "train.log_every=1", "train.eval_every=10", "data.num_workers=0"]
        command += ["checkpoint.every_steps=5", f"parallel.recover={str(recover).lower()}", *overrides]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        run_dir.mkdir(parents=True, exist_ok=True)
        self.ranks = []
        for rank in range(ranks):
            names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            environment = os.environ | address | {name: str(value) for name, value in names.items()}
            with (run_dir / f"output-{rank}.log").open("a") as output:
                self.ranks.append(
                    subprocess.Popen(command, stdout=output, stderr=output, env=environment | {"OMP_NUM_THREADS": "1"})
                )

    def step(self) -> int:
        """The last logged step; 0 if there is none, or its record is being written."""
        try:
            return int(harness.Run(self.run.run_dir).records[-1]["step"])
        except (OSError, IndexError, ValueError):
            return 0

    def wait_for(self, step: int, limit: float = 120.0) -> bool:
        """Waits until a step is logged; False if the ranks end before."""
        deadline = time.monotonic() + limit
        while self.step() < step:
            if all(rank.poll() is not None for rank in self.ranks) or time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def kill_one(self, chance: random.Random) -> int:
        """Kills a random rank; returns its number."""
        alive = [number for number, rank in enumerate(self.ranks) if rank.poll() is None]
        number = chance.choice(alive)
        self.ranks[number].send_signal(signal.SIGKILL)
        self.ranks[number].wait()
        return number

    def end(self, limit: float = 180.0) -> None:
        """Waits for all ranks."""
        for rank in self.ranks:
            rank.wait(limit)


def difference(run_dir: Path, reference: Path) -> float:
    """The largest difference of weights and losses between two finished runs.

    Raises:
        SystemExit: If the run did not finish, or used another number of samples.
    """
    runs = [harness.Run(folder) for folder in (run_dir, reference)]
    if runs[0].status["state"] != "finished":
        raise SystemExit(f"{run_dir} did not finish: {runs[0].status}. See its output-*.log.")
    samples = [run.records[-1]["samples"] for run in runs]
    if samples[0] != samples[1]:
        raise SystemExit(f"{run_dir} used {samples[0]} samples, the undisturbed run {samples[1]}.")
    losses = [{r["step"]: r["train/loss"] for r in run.records if "train/loss" in r} for run in runs]
    weights = [load_file(folder / f"checkpoints/step-{STEPS:09d}/model.safetensors") for folder in (run_dir, reference)]
    return max(
        *(abs(loss - losses[1][step]) for step, loss in losses[0].items()),
        *((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[1]),
    )


def disturbed_run(
    run_dir: Path, arguments: argparse.Namespace, kills: int, chance: random.Random
) -> list[dict[str, float]]:
    """Trains a run and kills ranks of it; returns for each kill the seconds until the next new step, and the steps repeated."""
    recover = arguments.mode == "continue"
    job, measured = Job(run_dir, arguments.ranks, recover), []
    for _ in range(kills):
        if not job.wait_for(job.step() + chance.randint(3, 12)):
            break
        time.sleep(
            chance.uniform(0, 0.1)
        )  # metrics lag behind: a random part of a step later, so that saves are hit too
        step, began = job.step(), time.monotonic()
        if step > STEPS - 5:
            break
        victim = job.kill_one(chance)
        if not recover:
            job.end()
            job = Job(run_dir, arguments.ranks, recover)
        if not job.wait_for(step + 2):
            raise SystemExit(f"{run_dir} did not continue after rank {victim} was killed at step {step}.")
        measured.append({"seconds": time.monotonic() - began})
        print(f"rank {victim} killed at step {step}: {measured[-1]['seconds']:.1f} s", flush=True)
    job.end()
    return measured


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=50)
    parser.add_argument("--ranks", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--kills", type=int, default=2, help="of one run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims (default %(default)s)")
    parser.add_argument("--mode", choices=("continue", "restart"), default="continue", help="(default %(default)s)")
    arguments = harness.parse(parser, rounds=2, ranks=3)
    chance = random.Random(arguments.seed)
    measured: list[dict[str, float]] = []
    differences: list[float] = []
    with harness.scratch() as folder:
        Job(folder / "undisturbed", 1, False).end()
        while len(measured) < arguments.rounds:
            run_dir = folder / f"run-{len(differences)}"
            measured += disturbed_run(
                run_dir, arguments, min(arguments.kills, arguments.rounds - len(measured)), chance
            )
            differences.append(difference(run_dir, folder / "undisturbed"))
            if differences[-1] > TOLERANCE:
                raise SystemExit(f"{run_dir} differs from the undisturbed run by {differences[-1]:.2g}.")
    seconds = [one["seconds"] for one in measured]
    print(
        f"{arguments.mode}: {len(measured)} kills in {len(differences)} runs of {arguments.ranks} ranks; seconds "
        f"from a kill to the second new step {harness.spread(seconds, 1)}; largest difference from an undisturbed run "
        f"{max(differences):.2g}"
    )
    harness.finish(arguments, {"seconds": seconds, "differences": differences})


if __name__ == "__main__":
    main()
