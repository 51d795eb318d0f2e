"""Jobs of the launcher on a real SLURM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.fault_hook import faulty
from dtrain.distributed.world import first_host
from dtrain.launch import __main__ as launch
from tests.launch.processes import rank_processes
from tests.launch.slurm_jobs import (
    TWO_NODES,
    digits_run,
    ended,
    field,
    output,
    paused,
    pausing,
    restarted,
    slurm,
    submit,
    wait,
)
from tests.whole_runs import metrics, records, status, torchrun, weights

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm", "digits")]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums depend on the number of threads


def ledger(run_dir: Path) -> dict[int, list[str]]:
    """The samples of every step over all ranks, sorted."""
    keys: dict[int, list[str]] = {}
    for path in (run_dir / "logs").glob("keys-rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            keys.setdefault(line["step"], []).extend(line["keys"])
    return {step: sorted(found) for step, found in keys.items()}


def test_a_run_in_three_allocations_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    run_dir, options = tmp_path / "a place", ("data.record_keys=true", "tracker=wandb")
    job = submit(run_dir, *options, pausing(21, 41))
    for stops, step in enumerate((21, 41), start=1):
        wait(paused(run_dir, step), details=lambda: output(job))
        slurm("scancel", "--signal=USR1", "--batch", job)
        wait(restarted(job, stops), details=lambda: output(job))
    assert ended(job) == "COMPLETED"
    assert status(run_dir)["state"] == "finished"
    assert not (run_dir / "STOP").exists()
    printed = output(job)
    assert printed.count("state stopped") == 2
    assert "restart 2, on" in printed
    # wandb has one run: three offline folders with one id.
    ids = {path.name.rpartition("-")[2] for path in (run_dir / "wandb").glob("offline-run-*")}
    assert ids == {(run_dir / "wandb" / "run-id").read_text().strip()}
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 3
    steps = [record["step"] for record in records(run_dir) if "train/loss" in record]
    assert steps == list(range(1, status(run_dir)["step"] + 1))

    undisturbed = tmp_path / "undisturbed"
    assert torchrun(2, *digits_run(options[0]), f"run.dir={undisturbed}").returncode == 0
    expected = weights(undisturbed, steps[-1])
    assert all(tensor.equal(expected[name]) for name, tensor in weights(run_dir, steps[-1]).items())
    assert ledger(run_dir) == ledger(undisturbed)
    assert set(Counter(key for keys in ledger(run_dir).values() for key in keys).values()) == {6}


def test_a_run_stops_before_its_time_limit(tmp_path: Path) -> None:
    """The steps take more than a minute, the allocation has one minute, and the run knows its time limit."""
    shape = ("launch.processes_per_node=1", "launch.time=1", "launch.stop_seconds=1")
    job = submit(tmp_path, pausing(*range(2, 11)), "train.max_steps=12", shape=shape)
    assert ended(job, 300) == "COMPLETED"
    assert int(field(job, "Restarts")) > 0
    assert status(tmp_path)["state"] == "finished"
    assert "state stopped" in output(job)
    assert "DUE TO TIME LIMIT" not in output(job)
    steps = [record["step"] for record in records(tmp_path) if "train/loss" in record]
    assert steps == list(range(1, 13))


def test_two_nodes_with_two_processes_each_train_one_model(tmp_path: Path) -> None:
    shape = ("launch.nodes=2", "launch.processes_per_node=2")
    job = submit(tmp_path, "train.max_epochs=2", shape=shape)
    assert ended(job) == "COMPLETED"
    assert field(job, "ExitCode") == "0:0"
    assert re.search(r"ranks +4 on", output(job))
    assert "network of n1: " in output(job)
    losses = metrics(tmp_path)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_a_cancelled_job_stays_cancelled(tmp_path: Path) -> None:
    job = submit(tmp_path, pausing(6))
    wait(paused(tmp_path, 6))
    subprocess.run(["scancel", job], check=True)
    assert ended(job) == "CANCELLED"
    assert field(job, "Restarts") == "0"


def test_a_run_with_a_stop_file_of_the_user_is_not_requeued(tmp_path: Path) -> None:
    job = submit(tmp_path, pausing(6))
    wait(paused(tmp_path, 6))
    (tmp_path / "STOP").touch()
    assert ended(job) == "COMPLETED"
    assert field(job, "Restarts") == "0"
    assert status(tmp_path)["state"] == "stopped"


def test_a_killed_rank_requeues_the_job(tmp_path: Path) -> None:
    job = submit(tmp_path, "checkpoint.every_steps=10", pausing(26))
    wait(paused(tmp_path, 26))
    os.kill(rank_processes(str(tmp_path))[1], signal.SIGKILL)
    wait(restarted(job, 1), details=lambda: output(job))
    assert ended(job) == "COMPLETED"
    assert status(tmp_path)["state"] == "finished"


def test_a_cancelled_step_requeues_the_job(tmp_path: Path) -> None:
    job = submit(tmp_path, "checkpoint.every_steps=10", pausing(16))
    wait(paused(tmp_path, 16))
    slurm("scancel", f"{job}.1")  # step 0 checked the run directory
    wait(restarted(job, 1), details=lambda: output(job))
    assert ended(job) == "COMPLETED"
    steps = [record["step"] for record in records(tmp_path) if "train/loss" in record]
    assert steps == list(range(1, status(tmp_path)["step"] + 1))


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_to_the_step_saves_and_requeues(tmp_path: Path, name: str) -> None:
    """Preemption sends TERM. Every torchrun gets the signal, and the first one that exits must not end the others."""
    job = submit(tmp_path, "checkpoint.every_steps=null", "checkpoint.every_minutes=null", pausing(11))
    wait(paused(tmp_path, 11))
    slurm("scancel", f"--signal={name}", job)
    wait(restarted(job, 1), details=lambda: output(job))
    assert ended(job) == "COMPLETED"
    printed = output(job)
    assert "restart 0: state stopped" in printed
    assert "starts        after step" in printed
    assert "trained again" not in printed


@pytest.mark.parametrize("fewer", [False, True], ids=["another node replaces it", "fewer nodes continue"])
def test_a_run_survives_the_failure_of_a_node(tmp_path: Path, bed: Path, fewer: bool) -> None:
    shape = ("launch.nodes=3", "launch.min_nodes=2") if fewer else ("launch.nodes=2",)
    job = submit(tmp_path, "checkpoint.every_steps=10", pausing(16), shape=shape)
    wait(paused(tmp_path, 16), details=lambda: output(job))
    try:
        subprocess.run(["bash", str(bed / "crash-node.sh"), "n2"], check=True)
        wait(restarted(job, 1), details=lambda: output(job))
        assert ended(job) == "COMPLETED"
    finally:
        subprocess.run([Path(os.environ["SLURM_BED_DIR"]) / "start-node.sh", "n2"], check=True)
        wait(lambda: "n2" in slurm("sinfo", "-h", "-N", "-t", "idle", "-o", "%N"))
    printed = output(job)
    assert f"restart 0, on {'n[1-3]' if fewer else 'n[1-2]'}: " in printed
    assert "restart 1, on n[1,3]: 2 x 1 processes" in printed
    steps = [record["step"] for record in records(tmp_path) if "train/loss" in record]
    assert steps == list(range(1, status(tmp_path)["step"] + 1))


def test_without_requeue_a_killed_rank_fails_the_job(tmp_path: Path) -> None:
    job = submit(tmp_path, "launch.requeue=false", "checkpoint.every_steps=10", pausing(26))
    wait(paused(tmp_path, 26))
    os.kill(rank_processes(str(tmp_path))[1], signal.SIGKILL)
    assert ended(job) == "FAILED"
    printed = output(job)
    assert "exitcode  : -9" in printed or "Signal 9 (SIGKILL)" in printed
    assert "no new allocation, because requeue is off" in printed


def test_where_requeue_is_forbidden_a_new_job_continues(tmp_path: Path) -> None:
    job = submit(tmp_path, 'launch.extra=["--no-requeue"]', pausing(11))
    wait(paused(tmp_path, 11))
    slurm("scancel", "--signal=USR1", "--batch", job)
    assert ended(job) == "COMPLETED"
    following = (tmp_path / ".job").read_text().split()[0]
    assert following != job
    assert ended(following) == "COMPLETED"
    assert f"requeue is refused here: job {following} continues the run" in output(job)
    assert "restart 1, on" in output(following)
    assert status(tmp_path)["state"] == "finished"


def test_a_run_directory_missing_on_one_node_is_an_error(tmp_path: Path, bed: Path) -> None:
    place = Path(os.environ["SLURM_BED_DIR"])
    if (place / "ns").read_text().strip() == "no":
        pytest.skip("the nodes of this cluster have no file systems of their own")
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    node = ["nsenter", f"--target={(place / 'n2.pid').read_text().strip()}", "--mount"]
    subprocess.run([*node, "mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    try:
        job = submit(run_dir)
        assert ended(job) == "FAILED"
    finally:
        subprocess.run([*node, "umount", str(tmp_path)], check=True)
    assert f"error: {run_dir} does not exist on every node of n[1-2]" in output(job)
    assert "Traceback" not in output(job)


def test_srun_without_torchrun_has_the_same_losses(tmp_path: Path) -> None:
    arguments = digits_run("train.max_steps=8")
    command = ["srun", "-N2", "--ntasks-per-node=2", sys.executable, "-m", "dtrain.train", *arguments]
    done = subprocess.run([*command, f"run.dir={tmp_path / 'srun'}"], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert re.search(r"ranks +4 on", done.stdout)
    assert "network of n2: GLOO_SOCKET_IFNAME=lo (yours)" in done.stdout
    assert torchrun(4, *arguments, f"run.dir={tmp_path / 'torchrun'}").returncode == 0
    assert metrics(tmp_path / "srun") == metrics(tmp_path / "torchrun")


def test_a_run_that_always_fails_is_not_requeued(tmp_path: Path) -> None:
    job = submit(tmp_path, faulty("crash@rank=1,step=3"))
    assert ended(job) == "FAILED"
    assert field(job, "Restarts") == "0"
    printed = output(job)
    assert "dtrain: rank " in printed
    assert "no new allocation" in printed


@pytest.mark.parametrize("nodelist", ["n1", "n[2-3],n1", "gpu[007-009,12],login", "rack[2,4]n[10-11]"])
def test_the_first_host_of_a_list_is_that_of_scontrol(nodelist: str) -> None:
    assert first_host(nodelist) == slurm("scontrol", "show", "hostnames", nodelist).split()[0]


def test_a_second_job_for_the_same_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = submit(tmp_path, 'launch.extra=["--hold"]')
    try:
        assert launch.main(["launch=slurm", *TWO_NODES, *digits_run(), f"run.dir={tmp_path}"]) == 1
        assert f"run.dir: {tmp_path} already has job {job} PENDING (JobHeldUser)" in capsys.readouterr().err
    finally:
        subprocess.run(["scancel", job], check=True)


@pytest.mark.parametrize(
    "wrong",
    [
        "launch.partition=nowhere",
        "launch.nodes=99",
        "launch.partition=small",
        "launch.processes_per_node=64",
    ],
)
def test_an_error_of_sbatch_is_printed_and_no_job_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    assert launch.main(["launch=slurm", *digits_run(), f"run.dir={tmp_path}", "--multirun", "run.seed=1,2", wrong]) == 1
    printed = capsys.readouterr().err
    assert "sbatch: error: " in printed
    assert "sinfo -o" in printed
    assert subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout == ""


def test_all_jobs_of_a_sweep_are_submitted_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["launch=slurm", *digits_run(), f"run.dir={tmp_path / 'r'}", 'launch.extra=["--hold"]', "--multirun"]
    assert launch.main([*command, "launch.partition=main,small"]) == 1
    wait(lambda: not slurm("squeue", "-h"))
    capsys.readouterr()
    assert launch.main([*command, "run.seed=1,2"]) == 0
    _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["run.seed=1", "run.seed=2"]
    jobs = [row[2] for row in rows]
    try:
        assert [field(job, "JobState") for job in jobs] == ["PENDING", "PENDING"]
        assert [json.loads((Path(row[3]) / "launch.json").read_text())["job"] for row in rows] == jobs
        assert launch.main(["status", *(row[3] for row in rows)]) == 0
        table, notes = capsys.readouterr().out.split("\n\n")
        assert "seed" in table.splitlines()[0].split()
        assert [f"queued, job {job} PENDING" in line for line, job in zip(notes.splitlines(), jobs, strict=True)] == [
            True
        ] * 2
    finally:
        slurm("scancel", *jobs)


def test_an_array_of_four_runs_trains_two_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("launch.max_running=2", "train.max_epochs=2", "launch.cpus_per_process=1", "launch.gpus_per_node=0")
    varied = ("optimizer.lr=1e-3,3e-3", "precision=fp32,bf16")
    command = ["--multirun", "launch=slurm", *digits_run(*options), *varied, f"run.dir={tmp_path / 'r'}"]
    assert launch.main(command) == 0
    _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    jobs, directories = [row[3] for row in rows], [Path(row[4]) for row in rows]
    most = 0

    def over() -> bool:
        nonlocal most
        states = [field(job, "JobState") for job in jobs]
        most = max(most, states.count("RUNNING"))
        return all(state in ("COMPLETED", "FAILED") for state in states)

    wait(over, 300)
    assert most <= 2
    assert [field(job, "JobState") for job in jobs] == ["COMPLETED"] * 4
    assert all(
        "state finished" in (path / "logs" / f"slurm-{job}.out").read_text()
        for path, job in zip(directories, jobs, strict=True)
    )
    assert launch.main(["status", *map(str, directories)]) == 0
    header, *shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["state", "step", "age", "run", "lr", "precision", "train/loss", "eval/loss", "eval/accuracy"]
    assert [(*row[:2], *row[5:7]) for row in shown] == [
        ("finished", "46/46", lr, name) for lr in ("0.001", "0.003") for name in ("fp32", "bf16")
    ]


def test_an_array_element_is_requeued_alone(tmp_path: Path) -> None:
    command = [
        "--multirun",
        "launch=slurm",
        *digits_run(pausing(11)),
        "launch.max_running=2",
        "run.seed=1,2",
        f"run.dir={tmp_path / 'r'}",
    ]
    assert launch.main(command) == 0
    runs = [tmp_path / f"r-run.seed={seed}" for seed in (1, 2)]
    jobs = [(run / ".job").read_text().split()[0] for run in runs]
    wait(lambda: all(paused(run, 11)() for run in runs))
    slurm("scancel", "--signal=USR1", "--batch", jobs[1])
    assert [ended(job, 300) for job in jobs] == ["COMPLETED", "COMPLETED"]
    assert [field(job, "Restarts") for job in jobs] == ["0", "1"]
    assert [status(run)["state"] for run in runs] == ["finished", "finished"]


def test_a_search_submits_its_trials_and_continues_those_that_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr("dtrain.launch.slurm.SECONDS_BETWEEN_SQUEUE", 1.0)
    folder = tmp_path / "s"
    settings = ("launch.search.trials=3", "launch.search.metric=eval/accuracy", "launch.max_running=2")
    shape = ("launch=slurm", "launch.gpus_per_node=0", "launch.cpus_per_process=1")
    training = digits_run("train.max_steps=8", "train.eval_every=4", pausing(3))
    command = [*shape, *training, *settings, "optimizer.lr=interval(1e-3,1e-2)", f"run.dir={folder}"]

    def interrupt() -> None:
        wait(lambda: len(list(folder.glob("*/faults/slow-rank-0-step-3"))) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert launch.main(command) == 75
    assert slurm("squeue", "-h") == ""
    assert launch.main(command) == 0
    trials = json.loads((folder / "search.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["finished"] * 3
    for trial in trials:
        steps = [record["step"] for record in records(folder / trial["run"]) if "train/loss" in record]
        assert steps == list(range(1, 9))


def test_stop_and_resume_by_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = submit(tmp_path, pausing(6), shape=("launch.processes_per_node=1",))
    wait(paused(tmp_path, 6))
    capsys.readouterr()
    assert launch.main(["status", str(tmp_path)]) == 0
    assert f"running, job {job} RUNNING (n" in capsys.readouterr().out
    assert launch.main(["stop", str(tmp_path)]) == 0
    assert ended(job) == "COMPLETED"
    assert status(tmp_path)["state"] == "stopped"
    assert launch.main(["stop", str(tmp_path)]) == 1
    assert "no process trains this run" in capsys.readouterr().err

    assert launch.main(["resume", str(tmp_path)]) == 0
    following = (tmp_path / ".job").read_text().split()[0]
    assert following != job
    assert ended(following) == "COMPLETED"
    assert status(tmp_path)["state"] == "finished"


def test_stop_cancels_a_waiting_job(tmp_path: Path) -> None:
    job = submit(tmp_path, 'launch.extra=["--hold"]')
    assert launch.main(["stop", str(tmp_path)]) == 0
    assert ended(job) == "CANCELLED"
    assert not (tmp_path / "STOP").exists()
