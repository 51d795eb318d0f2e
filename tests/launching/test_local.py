from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain import launch
from dtrain.config.errors import ConfigError
from dtrain.launching import local
from dtrain.launching.job import FAILED, STOPPED
from tests.launching.compose import single
from tests.launching.processes import rank_processes
from tests.refusals import refused
from tests.runs import metrics, status, train_on

LONG = ("train.max_epochs=300",)  # the tests stop it long before; bounded in case that fails
QUICK = ("experiment=digits", "tracker=none", "train.log_every=1")


def launch_run(run_dir: Path, *arguments: str) -> int:
    return launch.main([*QUICK, f"run.dir={run_dir}", *arguments])


def when_training(run_dir: Path, act: Callable[[], None]) -> None:
    """Calls ``act`` once the run has begun its steps."""

    def wait() -> None:
        while not (run_dir / "status.json").exists():
            time.sleep(0.05)
        act()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.slow
def test_a_launched_run_has_the_losses_of_a_run_under_torchrun(tmp_path: Path, digits: Path) -> None:
    assert launch_run(tmp_path / "a", "launch.processes_per_node=2", "train.max_steps=8") == 0
    assert status(tmp_path / "a")["state"] == "finished"
    assert (tmp_path / "a" / "logs" / "rank-00001.log").exists()
    train_on(2, tmp_path / "b", "train.max_steps=8")
    assert metrics(tmp_path / "a") == pytest.approx(metrics(tmp_path / "b"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_saves_and_stops(tmp_path: Path, digits: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    when_training(tmp_path, lambda: os.kill(os.getpid(), number))
    assert launch_run(tmp_path, *LONG) == STOPPED
    stopped = status(tmp_path)
    assert stopped["state"] == "stopped"
    assert (tmp_path / "checkpoints" / f"step-{stopped['step']:09d}").is_dir()
    assert not (tmp_path / "STOP").exists()
    assert signal.getsignal(number) is before


@pytest.mark.slow
def test_a_stop_file_stops_and_the_same_command_resumes(tmp_path: Path, digits: Path) -> None:
    when_training(tmp_path, (tmp_path / "STOP").touch)
    assert launch_run(tmp_path, *LONG) == STOPPED
    step = status(tmp_path)["step"]
    assert launch_run(tmp_path, *LONG, f"train.max_steps={step + 3}") == 0
    assert status(tmp_path)["step"] == step + 3


def test_a_failure_shows_the_ranks_own_traceback_first(
    tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_run(tmp_path, "model.width=wide") == FAILED
    error = capfd.readouterr().err
    assert "Traceback" in error
    assert "dtrain: rank 0 failed" in error
    assert f"Logs of the ranks: {tmp_path / 'logs'}" in error.splitlines()[-1]


@pytest.mark.slow
def test_a_killed_rank_is_a_failure(tmp_path: Path, digits: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def kill() -> None:
        os.kill(rank_processes(str(tmp_path))[0], signal.SIGKILL)

    when_training(tmp_path, kill)
    assert launch_run(tmp_path, "launch.processes_per_node=2", *LONG) == FAILED
    assert "dtrain: error:" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_sweep_runs_its_jobs_one_after_the_other(
    tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_run(tmp_path / "r", "train.max_steps=2", "--multirun", "run.seed=1,2") == 0
    assert [status(tmp_path / f"r-run.seed={seed}")["state"] for seed in (1, 2)] == ["finished", "finished"]
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        ["run.seed=1", "finished"],
        ["run.seed=2", "finished"],
    ]


@pytest.mark.slow
def test_a_stop_request_ends_a_sweep(tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    when_training(tmp_path / "r-run.seed=1", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert launch_run(tmp_path / "r", *LONG, "--multirun", "run.seed=1,2") == STOPPED
    assert not (tmp_path / "r-run.seed=2").exists()
    assert "not started" in capsys.readouterr().out


def test_omp_num_threads_is_kept_or_divides_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = single("experiment=digits", "launch.processes_per_node=5")
    assert local.describe([job]).startswith("OMP_NUM_THREADS=2 ")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert local.describe([job]).startswith("OMP_NUM_THREADS=7 ")


def test_there_is_one_process_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.processes(single("experiment=digits")) == 1
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert local.processes(single("experiment=digits")) == 4
    with refused(ConfigError, "5 processes", "4 GPUs"):
        local.check([single("experiment=digits", "launch.processes_per_node=5")])


def test_several_nodes_are_refused() -> None:
    with refused(ConfigError, "launch.nodes", "got 2", "launch=slurm"):
        local.check([single("experiment=digits", "launch.nodes=2")])


def test_only_one_digit_ranks_are_passed_to_tee() -> None:
    """torchrun parses one digit."""
    line = local.command(single("experiment=digits", "launch.processes_per_node=16"))
    assert "--tee=" + ",".join(f"{rank}:1" for rank in range(1, 10)) in line
