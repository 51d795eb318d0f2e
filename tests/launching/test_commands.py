"""Commands on runs of this machine; those on jobs are in test_slurm.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dtrain import launch
from dtrain.launching.commands import COMMANDS, newest_log
from dtrain.tracking.status import write_status
from tests.launching.test_standing import make_run, trained
from tests.runs import status, train_on


def test_a_run_is_asked_to_stop_with_the_file_that_it_looks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a", "running", {})
    with trained(run):
        assert launch.main(["stop", str(run)]) == 0
    assert (run / "STOP").exists()
    assert "asked to save and stop" in capsys.readouterr().out


def test_a_run_that_nobody_trains_cannot_be_stopped_and_its_next_start_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a", "running", {})
    assert launch.main(["stop", str(run)]) == launch.FAILED
    assert f"{run}: nothing trains it" in capsys.readouterr().err
    assert not (run / "STOP").exists()


def test_the_status_of_runs_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", "finished", {}, {"step": 40, "train/loss": 0.5})
    assert launch.main(["status", str(run)]) == 0
    assert "40/40  0.5         finished" in capsys.readouterr().out


def test_a_report_beside_the_runs_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a", "finished", {}, {"step": 40, "train/loss": 0.5})
    (tmp_path / "report.html").touch()
    assert launch.main(["status", str(run), str(tmp_path / "report.html")]) == 0
    assert "40/40  0.5         finished" in capsys.readouterr().out


def test_a_misspelt_command_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["statu", "runs/1"]) == launch.FAILED
    assert "there is no command 'statu'. Did you mean 'status'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_directory_that_is_missing_or_not_given_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert launch.main([command]) == launch.FAILED
    assert "name the directory of a run" in capsys.readouterr().err
    assert launch.main([command, str(tmp_path / "nowhere")]) == launch.FAILED
    assert f"{tmp_path / 'nowhere'} is no directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_directory_that_holds_no_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert launch.main([command, str(tmp_path)]) == launch.FAILED
    assert str(tmp_path) in capsys.readouterr().err


def test_a_log_is_that_of_the_newest_job_or_else_of_rank_0(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-00000.log").touch()
    assert newest_log(tmp_path) == logs / "rank-00000.log"
    (logs / "slurm-12.out").touch()
    (logs / "slurm-9.out").touch()
    (tmp_path / ".job").write_text("12\n")
    assert newest_log(tmp_path) == logs / "slurm-12.out"


def test_a_log_is_followed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00000.log").write_text("first\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "dtrain.launch", "tail", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"==> {tmp_path / 'logs' / 'rank-00000.log'}\n"
        assert process.stdout.readline() == "first\n"
        with (tmp_path / "logs" / "rank-00000.log").open("a") as log:
            log.write("second\n")
        assert process.stdout.readline() == "second\n"
    finally:
        process.kill()
        process.wait()


def test_a_run_that_a_script_of_the_users_submitted_is_not_started_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "a", "stopped", {}, {"step": 3})
    (run / ".job").write_text("12\n")
    assert launch.main(["resume", str(run)]) == launch.FAILED
    assert f"RUN_DIR={run} sbatch slurm/..." in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_is_resumed_as_it_was_started(tmp_path: Path, digits: Path) -> None:
    run = tmp_path / "it's a run"
    quoted = str(run).replace("'", "\\'")
    train_on(1, Path(f"'{quoted}'"), "train.max_steps=4", "optimizer.lr=0.01")
    write_status(run, "stopped", 4)
    overrides = (run / "overrides.yaml").read_text()
    (run / "overrides.yaml").write_text(overrides.replace("train.max_steps=4", "train.max_steps=6"))
    assert launch.main(["resume", str(run)]) == 0
    assert status(run)["step"] == 6
    assert "lr: 0.01" in (run / "config.yaml").read_text()
