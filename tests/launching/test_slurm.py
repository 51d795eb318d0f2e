"""The launcher's jobs on a real SLURM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain import launch
from tests.launching.processes import rank_processes
from tests.runs import records, status, torchrun, weights

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm", "digits")]

SHAPE = ("launch.nodes=2", "launch.processes_per_node=1")
RUN = ("experiment=digits", "tracker=none", "train.log_every=1", "train.deterministic=true", "train.max_epochs=6")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def submit(run_dir: Path, *arguments: str) -> str:
    """Submits a run; returns the job id."""
    assert launch.main(["launch=slurm", *SHAPE, *RUN, f"run.dir='{run_dir}'", *arguments]) == 0
    return str(json.loads((run_dir / "launch.json").read_text())["job"])


def field(job: str, name: str) -> str:
    """A field of ``scontrol show job``, such as ``JobState``."""
    shown = subprocess.run(["scontrol", "-o", "show", "job", job], capture_output=True, text=True, check=True).stdout
    return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))


def wait(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Returns as soon as the condition holds; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {seconds} s in vain")
        time.sleep(0.2)


def ended(job: str) -> str:
    """The state in which a job ended."""
    wait(lambda: field(job, "JobState") in ENDED)
    return field(job, "JobState")


def trained(run_dir: Path, steps: int) -> Callable[[], bool]:
    """Whether a run has logged so many steps."""
    path = run_dir / "metrics.jsonl"
    return lambda: path.exists() and path.read_text().count("\n") >= steps


def log(run_dir: Path, job: str) -> str:
    return (run_dir / "logs" / f"slurm-{job}.out").read_text()


def test_a_signalled_job_requeues_itself_and_ends_with_the_parameters_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums depend on the number of threads
    run_dir = tmp_path / "a place"
    job = submit(run_dir)
    for stops in (1, 2):
        wait(trained(run_dir, 20 * stops))
        subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
        wait(lambda stops=stops: field(job, "Restarts") == str(stops) and field(job, "JobState") == "RUNNING")  # type: ignore[misc]
    assert ended(job) == "COMPLETED"
    assert status(run_dir)["state"] == "finished"
    assert not (run_dir / "STOP").exists()
    said = log(run_dir, job)
    assert said.count("state stopped") == 2
    assert "restart 2, on" in said
    assert "ranks         2 on" in said
    steps = [record["step"] for record in records(run_dir) if "train/loss" in record]
    assert steps == list(range(1, status(run_dir)["step"] + 1))
    assert torchrun(2, *RUN, f"run.dir={tmp_path / 'undisturbed'}").returncode == 0
    expected = weights(tmp_path / "undisturbed", steps[-1])
    assert all(tensor.equal(expected[name]) for name, tensor in weights(run_dir, steps[-1]).items())


def test_a_cancelled_job_stays_cancelled(tmp_path: Path) -> None:
    job = submit(tmp_path)
    wait(trained(tmp_path, 5))
    subprocess.run(["scancel", job], check=True)
    assert ended(job) == "CANCELLED"
    assert field(job, "Restarts") == "0"


def test_a_run_that_a_person_stops_is_not_requeued(tmp_path: Path) -> None:
    job = submit(tmp_path)
    wait(trained(tmp_path, 5))
    (tmp_path / "STOP").touch()
    assert ended(job) == "COMPLETED"
    assert field(job, "Restarts") == "0"
    assert status(tmp_path)["state"] == "stopped"


def test_a_killed_rank_is_replaced_by_a_requeue(tmp_path: Path) -> None:
    job = submit(tmp_path, "checkpoint.every_steps=10")
    wait(trained(tmp_path, 25))
    os.kill(rank_processes(str(tmp_path))[1], signal.SIGKILL)
    assert ended(job) == "COMPLETED"
    assert field(job, "Restarts") == "1"
    assert status(tmp_path)["state"] == "finished"


def test_a_run_that_always_fails_is_not_requeued(tmp_path: Path) -> None:
    job = submit(tmp_path, "task.input=nothing")
    assert ended(job) == "FAILED"
    assert field(job, "Restarts") == "0"
    said = log(tmp_path, job)
    assert said.index("dtrain: rank ") < said.index("ChildFailedError")
    assert "not requeued" in said


def test_a_second_job_for_the_same_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = submit(tmp_path, 'launch.extra=["--hold"]')
    try:
        assert launch.main(["launch=slurm", *SHAPE, *RUN, f"run.dir={tmp_path}"]) == 1
        assert f"job {job} (PENDING) trains" in capsys.readouterr().err
    finally:
        subprocess.run(["scancel", job], check=True)


@pytest.mark.parametrize(
    "wrong",
    ["launch.partition=nowhere", "launch.nodes=99", "launch.time=later", "launch.processes_per_node=64"],
)
def test_what_slurm_refuses_is_told_in_its_words_and_leaves_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    assert launch.main(["launch=slurm", *RUN, f"run.dir={tmp_path}", "--multirun", "run.seed=1,2", wrong]) == 1
    said = capsys.readouterr().err
    assert "sbatch: error: " in said
    assert "sinfo -o" in said
    assert subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout == ""


def test_a_sweep_is_a_job_for_each_point_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["launch=slurm", *RUN, f"run.dir={tmp_path / 'r'}", 'launch.extra=["--hold"]', "--multirun"]
    assert launch.main([*command, "launch.time=10,later"]) == 1
    queue = ["squeue", "-h", "-o", "%j"]
    wait(lambda: not subprocess.run(queue, capture_output=True, text=True, check=True).stdout)
    capsys.readouterr()
    assert launch.main([*command, "run.seed=1,2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["run.seed=1", "run.seed=2"]
    jobs = [row[2] for row in rows]
    try:
        assert [field(job, "JobState") for job in jobs] == ["PENDING", "PENDING"]
        assert [json.loads((Path(row[3]) / "launch.json").read_text())["job"] for row in rows] == jobs
    finally:
        subprocess.run(["scancel", *jobs], check=True)
