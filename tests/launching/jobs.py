"""Jobs on a real SLURM, for tests."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain import launch

_RUN = ("experiment=digits", "tracker=none", "train.log_every=1", "train.deterministic=true", "train.max_epochs=6")
TWO_NODES = ("launch.nodes=2", "launch.processes_per_node=1")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def digits_run(*overrides: str) -> list[str]:
    """The command line of a run of the digits: six epochs of 23 steps, unless ``overrides`` say otherwise."""
    given = {override.partition("=")[0] for override in overrides}
    return [*(override for override in _RUN if override.partition("=")[0] not in given), *overrides]


def pausing(*steps: int) -> str:
    """An override: the run waits before these steps, so that a test that acts then comes in time on any machine."""
    faults = ",".join(f'"slow@step={step},seconds=10"' for step in steps)
    return f"faults=[{faults}]"


def submit(run_dir: Path, *arguments: str, shape: tuple[str, ...] = TWO_NODES) -> str:
    """Submits a run of the digits with ``dtrain.launch``; returns the job id."""
    assert launch.main(["launch=slurm", *shape, *digits_run(*arguments), f"run.dir='{run_dir}'"]) == 0
    return str(json.loads((run_dir / "launch.json").read_text())["job"])


def slurm(*command: str) -> str:
    """What one of SLURM's commands prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def field(job: str, name: str) -> str:
    """A field of ``scontrol show job``, such as ``JobState``."""
    shown = slurm("scontrol", "-o", "show", "job", job)
    return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))


def wait(condition: Callable[[], bool], seconds: float = 180, told: Callable[[], str] = lambda: "") -> None:
    """Returns as soon as the condition holds; fails after ``seconds``, with what ``told`` gives."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {seconds} s in vain\n{told()}")
        time.sleep(0.2)


def ended(job: str, seconds: float = 180) -> str:
    """The state in which a job ended."""
    wait(lambda: field(job, "JobState") in ENDED, seconds, lambda: output(job))
    return field(job, "JobState")


def output(job: str) -> str:
    """What a job has printed so far."""
    path = Path(slurm("scontrol", "-o", "show", "job", job).partition(" StdOut=")[2].partition(" Power=")[0])
    return path.read_text() if path.exists() else f"(no {path})"


def paused(run_dir: Path, step: int) -> Callable[[], bool]:
    """Whether a run waits, or has waited, before this step; :func:`pausing` has made it."""
    return (run_dir / "faults" / f"slow-rank-0-step-{step}").exists


def restarted(job: str, times: int) -> Callable[[], bool]:
    """Whether a job runs in its so many-th allocation after the first."""
    return lambda: field(job, "Restarts") == str(times) and field(job, "JobState") == "RUNNING"
