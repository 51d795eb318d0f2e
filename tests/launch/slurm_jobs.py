"""Helpers for tests that submit jobs to a real SLURM."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fault_hook import faulty
from dtrain.launch import __main__ as launch

_RUN = ("experiment=digits", "tracker=none", "train.log_every=1", "train.deterministic=true", "train.max_epochs=6")
TWO_NODES = ("launch.nodes=2", "launch.processes_per_node=1")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def digits_run(*overrides: str) -> list[str]:
    """Overrides of a run of the digits: six epochs of 23 steps, changed by ``overrides``."""
    keys = {override.partition("=")[0] for override in overrides}
    return [*(override for override in _RUN if override.partition("=")[0] not in keys), *overrides]


def pausing(*steps: int) -> str:
    """An override that pauses the run before these steps, so that a test can act at that step on any machine."""
    return faulty(*(f"slow@step={step},seconds=10" for step in steps))


def submit(run_dir: Path, *arguments: str, shape: tuple[str, ...] = TWO_NODES) -> str:
    """Submits a run of the digits with ``dtrain.launch``; returns the job id."""
    assert launch.main(["launch=slurm", *shape, *digits_run(*arguments), f"run.dir='{run_dir}'"]) == 0
    return str(json.loads((run_dir / "launch.json").read_text())["job"])


def slurm(*command: str) -> str:
    """Standard output of a SLURM command."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def field(job: str, name: str) -> str:
    """A field of ``scontrol show job``, such as ``JobState``."""
    shown = slurm("scontrol", "-o", "show", "job", job)
    return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))


def wait(condition: Callable[[], bool], seconds: float = 180, details: Callable[[], str] = lambda: "") -> None:
    """Waits until the condition holds; fails after ``seconds`` with the text of ``details``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"the condition did not hold within {seconds} s\n{details()}")
        time.sleep(0.2)


def ended(job: str, seconds: float = 180) -> str:
    """Waits until a job ends; returns its state."""
    wait(lambda: field(job, "JobState") in ENDED, seconds, lambda: output(job))
    return field(job, "JobState")


def output(job: str) -> str:
    """Output of a job so far."""
    path = Path(slurm("scontrol", "-o", "show", "job", job).partition(" StdOut=")[2].partition(" Power=")[0])
    return path.read_text() if path.exists() else f"(no {path})"


def paused(run_dir: Path, step: int) -> Callable[[], bool]:
    """Condition: the run has reached the pause before this step; see :func:`pausing`."""
    return (run_dir / "faults" / f"slow-rank-0-step-{step}").exists


def restarted(job: str, times: int) -> Callable[[], bool]:
    """Condition: the job runs after so many restarts."""
    return lambda: field(job, "Restarts") == str(times) and field(job, "JobState") == "RUNNING"
