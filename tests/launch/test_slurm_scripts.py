"""The scripts in slurm/ on a real SLURM, changed by sbatch options and environment variables only."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.processes import launcher_process
from tests.launch.slurm_jobs import digits_run, ended, field, output, paused, pausing, restarted, slurm, wait
from tests.whole_runs import metrics, records, status

ROOT = Path(__file__).resolve().parents[2]
CPUS = ("--gpus-per-node=0", "--cpus-per-task=2")

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm", "digits")]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, with dtrain and a Python environment."""
    (tmp_path / "dtrain").symlink_to(ROOT / "dtrain")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VENV", str(tmp_path / "venv"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def sbatch(script: str, *arguments: str, options: tuple[str, ...] = CPUS) -> str:
    return slurm("sbatch", "--parsable", *options, str(ROOT / "slurm" / script), *arguments)


def test_a_signalled_job_on_one_node_is_requeued_and_finishes(place: Path) -> None:
    job = sbatch("one_node.sbatch", *digits_run(pausing(11)))
    run_dir = place / "runs" / f"digits-{job}"
    wait(paused(run_dir, 11), details=lambda: output(job))
    slurm("scancel", "--signal=USR1", "--batch", job)
    wait(restarted(job, 1), details=lambda: output(job))
    assert ended(job) == "COMPLETED"
    steps = [record["step"] for record in records(run_dir) if "train/loss" in record]
    assert steps == list(range(1, status(run_dir)["step"] + 1))
    assert not (run_dir / "STOP").exists()


def test_two_nodes_with_two_processes_each_train_one_model(place: Path) -> None:
    job = sbatch("several_nodes.sbatch", *digits_run("train.max_epochs=2"))
    assert ended(job) == "COMPLETED"
    assert field(job, "ExitCode") == "0:0"
    assert re.search(r"ranks +4 on", output(job))
    losses = metrics(place / "runs" / f"digits-{job}")
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_a_sweep_has_one_run_for_each_line(place: Path) -> None:
    job = sbatch("sweep.sbatch", *digits_run("train.max_steps=3"))
    elements = [f"{job}_{number}" for number in range(4)]
    assert [ended(element, 300) for element in elements] == ["COMPLETED"] * 4
    runs = [place / "runs" / f"sweep-{job}-{number}" for number in range(4)]
    assert [status(run)["state"] for run in runs] == ["finished"] * 4
    rates = [next(line for line in (run / "overrides.yaml").read_text().splitlines() if "lr=" in line) for run in runs]
    assert [rate.split("=")[1] for rate in rates] == ["1e-3", "1e-3", "3e-3", "3e-3"]


def test_where_requeue_is_forbidden_an_element_continues_in_a_new_job(place: Path) -> None:
    job = sbatch("sweep.sbatch", *digits_run(pausing(11)), options=(*CPUS, "--no-requeue", "--array=3"))
    run_dir = place / "runs" / f"sweep-{job}-3"
    wait(paused(run_dir, 11), details=lambda: output(f"{job}_3"))
    slurm("scancel", "--signal=USR1", "--batch", f"{job}_3")
    assert ended(f"{job}_3") == "COMPLETED"
    following = (run_dir / ".job").read_text().split()[0]
    assert following != f"{job}_3"
    assert following.endswith("_3")
    assert ended(following) == "COMPLETED"
    assert status(run_dir)["state"] == "finished"


def interactive(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts slurm/interactive.sh without its option for GPUs and without a terminal."""
    script = (ROOT / "slurm" / "interactive.sh").read_text()
    edited = "".join(line for line in script.splitlines(keepends=True) if "--gpus-per-node" not in line)
    Path("interactive.sh").write_text(edited)
    return subprocess.Popen(
        ["bash", "interactive.sh", *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_an_interactive_run_saves_and_stops_on_ctrl_c(place: Path) -> None:
    run_dir = place / "r"
    process = interactive(*digits_run(pausing(6)), f"run.dir={run_dir}")
    wait(paused(run_dir, 6))
    os.kill(launcher_process(str(run_dir)), signal.SIGINT)  # Ctrl-C in the terminal sends this signal on the node
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert re.search(r"ranks +2 on", printed)
    assert status(run_dir)["state"] == "stopped"


def test_an_ended_allocation_is_an_error() -> None:
    job = slurm("sbatch", "--parsable", "--wrap", "true")
    assert ended(job) == "COMPLETED"
    process = interactive(SLURM_JOB_ID=job)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"allocation {job} has ended. Leave its shell" in printed
