from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.launching.standing import table
from dtrain.tracking.status import is_trained, write_status


def make_run(run_dir: Path, state: str | None, config: dict[str, Any], *records: dict[str, float]) -> Path:
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    if state:
        write_status(run_dir, state, int(records[-1]["step"]) if records else 0, "SIGTERM", last_step=40)
    return run_dir


@contextmanager
def trained(run_dir: Path) -> Iterator[None]:
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_runs_stand_side_by_side_with_what_sets_them_apart(tmp_path: Path) -> None:
    first = make_run(
        tmp_path / "a",
        "finished",
        {"optimizer": {"lr": 0.1}, "launch": {"time": "1"}},
        {"step": 10, "train/loss": 2.0},
        {"step": 40, "train/loss": 0.123456, "eval/accuracy": 0.5},
    )
    second = make_run(
        tmp_path / "bcd", "stopped", {"optimizer": {"lr": 0.3}, "launch": {"time": "2"}}, {"step": 10, "train/loss": 3}
    )
    assert table([first, second]).splitlines() == [
        "run  step   lr   train/loss  eval/accuracy  state",
        "a    40/40  0.1  0.1235      0.5            finished",
        "bcd  10/40  0.3  3           -              stopped (SIGTERM)",
    ]


def test_runs_of_other_experiments_and_long_reasons_leave_the_table_readable(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, "stopped", {"data": {f"key{number}": f"{name}{number}" for number in range(50)}})
        for name in "ab"
    ]
    for run in runs:
        write_status(run, "failed", 0, "long " * 100)
    assert max(map(len, table(runs).splitlines())) < 220


def test_a_directory_of_runs_stands_for_them(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    for name in "ab":
        make_run(tmp_path / "sweep" / name, "finished", {}, {"step": 40})
    assert [line.split()[0] for line in table([tmp_path]).splitlines()] == ["run", "a", "b"]


def test_a_run_that_has_not_begun_is_shown_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", None, {"run": {"seed": 1}})
    assert table([run]).splitlines()[1].split() == ["a", "-", "-", "not", "begun"]


def test_a_run_that_was_killed_is_told_from_one_that_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "running", {}, {"step": 3, "train/loss": 1.0})
    assert not is_trained(run)
    assert "killed" in table([run])
    with trained(run):
        assert is_trained(run)
        assert "running" in table([run])
    assert not is_trained(run)


def test_the_newest_logged_step_counts_while_a_run_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "running", {}, {"step": 3})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7}\n')
    assert "7/40" in table([run])


def test_what_a_foreign_run_says_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    bell, red = "\a", "\x1b[31m"
    runs = [
        make_run(tmp_path / f"{name}{red}", None, {f"task{red}": f"{name}{bell}"}, {"step": 1, f"eval/a{bell}": 1.0})
        for name in "ab"
    ]
    for run in runs:
        write_status(run, "failed", 1, f"{red}all of it\rgone")
    text = table(runs)
    assert all(line.isprintable() for line in text.splitlines())
    assert "failed (?[31mall of it)" in text
    assert len(text.splitlines()) == 3


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        table([tmp_path])
