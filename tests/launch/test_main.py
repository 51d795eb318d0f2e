from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dtrain.launch import __main__ as launch
from dtrain.launch.job import Job
from dtrain.launch.slurm import code_version
from dtrain.runs.run_dir import save_run, write_status
from tests.launch.compose import single


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_message(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error message of a command that fails."""
    try:
        code = launch.main(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code not in (launch.FINISHED, 75)
    out, text = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_a_dry_run_prints_what_would_be_started_and_does_nothing(
    launcher: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [f"launch={launcher}", "experiment=digits", "launch.dry_run=true", "train.max_steps=3"]
    assert launch.main(command) == launch.FINISHED
    first = capsys.readouterr().out
    assert launch.main(command) == launch.FINISHED
    assert capsys.readouterr().out == first
    assert "train.max_steps=3" in first
    assert "launch.dry_run" not in first
    assert list(place.iterdir()) == []
    subprocess.run(["bash", "-n"], input=first, text=True, check=True)


def test_a_dry_run_of_a_sweep_shows_every_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["experiment=digits", "--multirun", "launch.dry_run=true", "optimizer.lr=0.1,0.2"]) == 0
    shown = capsys.readouterr().out
    assert "optimizer.lr=0.1" in shown
    assert "optimizer.lr=0.2" in shown


def test_a_dry_run_of_a_job_array_shows_its_script_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["launch=slurm", "experiment=digits", "--multirun", "launch.dry_run=true", "launch.max_running=3"]
    assert launch.main([*command, "optimizer.lr=0.1,0.2"]) == 0
    array, *runs = capsys.readouterr().out.split("#!/bin/bash\n")[1:]
    assert "#SBATCH --array=0-1%3\n" in array
    assert [f"optimizer.lr={lr}" in run for lr, run in zip((0.1, 0.2), runs, strict=True)] == [True, True]
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_a_wrong_job_refuses_the_whole_sweep_and_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_message(capsys, "experiment=digits", "--multirun", "run.seed=1,2", "train.log_every=10,-1")
    assert "run.seed=1 train.log_every=-1: " in error
    assert "train.log_every" in error.partition(": ")[2]
    assert "No run of the sweep was started" in error
    assert list(place.iterdir()) == []


def finished(*arguments: str) -> Job:
    """A run that an earlier command has finished."""
    job = single("experiment=digits", *arguments)
    save_run(job.spec)
    write_status(job.spec.dir, "finished", 276)
    return job


@pytest.mark.slow
def test_finished_runs_of_a_sweep_are_not_started_again(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [finished("optimizer.lr=0.1"), finished("optimizer.lr=0.2")]
    files = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    command = ["experiment=digits", "--multirun", "optimizer.lr=0.1,0.2", "tracker=none", "launch.max_running=2"]
    assert launch.main(command) == launch.FINISHED
    out, error = capsys.readouterr()
    assert [line.split()[1:] for line in out.splitlines()[1:]] == [
        ["already", "finished", str(job.spec.dir)] for job in before
    ]
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == files
    # A dry run shows those that would be started.
    assert launch.main([*command[:2], "optimizer.lr=0.2,0.3", "launch.dry_run=true"]) == launch.FINISHED
    out, error = capsys.readouterr()
    assert f"already finished: {before[1].spec.dir}" in error
    assert [f"optimizer.lr={lr}" in out for lr in (0.2, 0.3)] == [False, True]


@pytest.mark.slow
def test_a_finished_run_that_is_asked_for_more_is_started_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished("run.dir=r", "train.max_steps=5")
    command = ["run.dir=r", "launch.dry_run=true"]  # the other settings are those of the run
    assert launch.main([*command, "train.max_steps=5"]) == launch.FINISHED
    assert "train.max_steps" not in capsys.readouterr().out
    assert launch.main([*command, "train.max_steps=6"]) == launch.FINISHED
    assert "train.max_steps=6" in capsys.readouterr().out


def test_launch_slurm_without_sbatch_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    error = error_message(capsys, "launch=slurm", "experiment=digits")
    assert "launch=slurm: sbatch is not on the path" in error
    assert "module load slurm" in error
    assert list(place.iterdir()) == []


def test_a_secret_in_an_override_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "dtrain.launch.job.validate", lambda cfg: None
    )  # which knows that the model has no such argument
    arguments = ("launch=slurm", "experiment=digits", "launch.dry_run=true")
    error = error_message(capsys, *arguments, "+model.api_key=abc123")
    assert "model.api_key: " in error
    assert "model.api_key=${oc.env:NAME}" in error
    assert "abc123" not in error


def test_the_directory_of_another_run_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "config.yaml").write_text("run: {seed: 1}\n")
    assert "holds a different run" in error_message(capsys, "experiment=digits", f"run.dir={place}")


def test_an_empty_command_lists_the_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert "digits" in error_message(capsys)


def test_an_unknown_launcher_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Valid: local, slurm" in error_message(capsys, "launch=slrum", "experiment=digits")
    assert "want one of local, slurm" in error_message(capsys, "launch.name=ssh", "experiment=digits")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_code_version_names_checkout_commit_and_changes(place: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=place, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    expected = {"commit": git("rev-parse", "HEAD"), "modified": False}
    assert code_version()["git"][str(place)] == expected
    (place / "changed.py").touch()
    assert code_version()["git"][str(place)] == expected | {"modified": True}
