"""A directory of a command line is a run, or stands for the runs below it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dtrain.tracking.report.directories import run_directories


def begun(run_dir: Path, trace: str = "config.yaml") -> Path:
    (run_dir / trace).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / trace).touch()
    return run_dir


def test_runs_are_found_at_any_depth_and_what_is_below_a_run_is_its_own(tmp_path: Path) -> None:
    runs = [begun(tmp_path / name) for name in ("a", "lr=1/seed=1", "lr=1/seed=2")]
    begun(tmp_path / "a" / "checkpoints" / "step-000000001")
    begun(tmp_path / ".trash" / "old")
    (tmp_path / "sweep-1a2b3c4d").mkdir()
    (tmp_path / "round").symlink_to(tmp_path)
    assert run_directories([tmp_path]) == runs


def test_runs_and_directories_of_runs_may_be_named_together(tmp_path: Path) -> None:
    alone, one, two = (begun(tmp_path / name) for name in ("alone", "sweep/1", "sweep/2"))
    assert run_directories([alone, tmp_path / "sweep"]) == [alone, one, two]


@pytest.mark.parametrize("trace", [".lock", ".job", "logs/torchrun/x", "metrics.jsonl", "status.json"])
def test_a_run_that_ended_before_its_first_step_or_waits_for_it_is_a_run(tmp_path: Path, trace: str) -> None:
    run = begun(tmp_path / "run", trace)
    assert run_directories([tmp_path]) == [run]


def test_a_directory_without_a_run_below_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "some" / "folder").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{tmp_path} holds no run"):
        run_directories([tmp_path])
    with pytest.raises(ValueError, match="is no directory"):
        run_directories([tmp_path / "missing"])


def test_a_directory_that_cannot_be_looked_at_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path / "run")
    (tmp_path / "lost").mkdir()
    is_dir = Path.is_dir

    def of_a_server_that_is_gone(path: Path) -> bool:
        if path.name == "lost":
            raise OSError(errno.ESTALE, "Stale file handle")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", of_a_server_that_is_gone)
    assert run_directories([tmp_path]) == [run]
