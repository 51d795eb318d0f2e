from __future__ import annotations

import io
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dtrain.distributed.lock import RunLock
from dtrain.errors import ConfigError
from dtrain.runs import run_dir
from dtrain.runs.run_dir import (
    close_rank_log,
    failures_recorded,
    is_trained,
    move_records_aside,
    open_rank_log,
    read_status,
    write_status,
)
from tests.refusals import assert_refused, refused
from tests.whole_runs import status


def test_what_was_written_last_is_read(tmp_path):
    write_status(tmp_path, "running", 0)
    write_status(tmp_path, "stopped", 137, reason="SIGUSR1", restarts=2)
    status = read_status(tmp_path)
    assert time.time() - 60 < status.pop("time") <= time.time()
    assert status == {"state": "stopped", "step": 137, "reason": "SIGUSR1", "restarts": 2}
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_run_that_never_started_has_no_status(tmp_path):
    assert read_status(tmp_path) is None


def test_a_write_that_fails_leaves_the_old_status(tmp_path, monkeypatch):
    write_status(tmp_path, "running", 5)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_status(tmp_path, "finished", 10)
    assert read_status(tmp_path)["state"] == "running"
    assert os.listdir(tmp_path) == ["status.json"]


def test_an_unknown_state_is_refused_with_the_known_ones(tmp_path):
    with refused(ValueError, key="state", got="'done'", remedy="running, finished, stopped, failed"):
        write_status(tmp_path, "done", 1)
    assert read_status(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "done"}'])
def test_a_file_that_is_no_status_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    with refused(ValueError, "status.json"):
        read_status(tmp_path)


def test_a_reader_never_sees_half_a_status(tmp_path):
    write_status(tmp_path, "running", 0)
    before = (tmp_path / "status.json").open()
    write_status(tmp_path, "finished", 1)
    assert json.load(before)["state"] == "running"
    before.close()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_the_lock_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    assert not is_trained(tmp_path)


@pytest.mark.parametrize("name", ["status.json", ".status.json.staged"])
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_status_is_written_whatever_is_in_its_place_and_through_no_link(tmp_path, name, kind):
    (tmp_path / "other").write_text("untouched")
    if kind == "folder":
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").touch()
    else:
        (tmp_path / name).symlink_to("other")
    write_status(tmp_path, "running", 3)
    assert read_status(tmp_path)["step"] == 3
    assert (tmp_path / "other").read_text() == "untouched"
    assert len(list(tmp_path.glob("**/kept"))) == (kind == "folder")


def test_all_records_are_moved_aside_into_a_run_directory_and_what_the_job_needs_stays(tmp_path):
    records = ["config.yaml", "status.json", "metrics.jsonl", "cut-metrics.jsonl", "checkpoints/saved.json"]
    records += ["logs/rank-00000.log", "logs/keys-rank-00001.jsonl", "logs/cut-keys-rank-00000.jsonl", "wandb/run-id"]
    own = [".lock", ".job", "STOP", "launch.json", "logs/output.log", "logs/torchrun/0", "my-notes.txt"]
    for name in [*records, *own]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "media").symlink_to("elsewhere")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    folder = move_records_aside(tmp_path)
    assert folder.parent == tmp_path / "moved-aside"
    assert all((folder / name).read_text() == name and not (tmp_path / name).exists() for name in records)
    assert all((tmp_path / name).read_text() == name for name in own)
    assert (folder / "media").resolve() == tmp_path / "elsewhere"
    assert len(before) == len({path for path in tmp_path.rglob("*") if path.is_file()})
    (tmp_path / "metrics.jsonl").write_text("second")
    again = move_records_aside(tmp_path)  # in the same second
    assert again != folder
    assert (again / "metrics.jsonl").read_text() == "second"


# -- failures and logs of the ranks


def test_a_log_that_the_disk_refuses_is_one_line_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(run_dir, "open_to_append", lambda path: io.FileIO("/dev/full", "a"))
    open_rank_log(tmp_path, 0)
    try:
        for _ in range(3):
            logging.getLogger("dtrain").warning("a message")
    finally:
        close_rank_log()
    printed = capsys.readouterr().err
    assert_refused(printed, "rank-00000.log", "No space left")
    assert printed.count("\n") == 1


def test_no_log_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "other").write_text("untouched")
    (tmp_path / "logs" / "rank-00000.log").symlink_to(tmp_path / "other")
    with refused(ConfigError, "rank-00000.log", "a symbolic link", "Delete or replace it", "run.dir"):
        open_rank_log(tmp_path, 0)
    assert (tmp_path / "other").read_text() == "untouched"


def test_a_failure_that_the_disk_refuses_to_record_is_still_the_one_that_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        with failures_recorded(tmp_path / "no folder", 0) as failure:
            failure.run_started(0, lambda: 7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert "status.json could not be written" in capsys.readouterr().err


def fail_on_rank_1(run_dir: Path) -> None:
    with suppress(ZeroDivisionError), failures_recorded(run_dir, 1) as failure:
        failure.run_started(1, lambda: 7, lambda: {"restarts": 2})
        raise ZeroDivisionError


def test_a_killed_rank_0_is_recorded_by_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "_RANK_0_SECONDS", 0.0)
    lock = RunLock(tmp_path, print)
    lock.claim()
    write_status(tmp_path, "running", 3)
    fail_on_rank_1(tmp_path)
    assert read_status(tmp_path)["state"] == "running"  # rank 0 is alive
    lock.release()
    fail_on_rank_1(tmp_path)
    status = read_status(tmp_path)
    assert (status["state"], status["step"], status["restarts"]) == ("failed", 7, 2)
    assert "ZeroDivisionError" in status["reason"]


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_what_rank_0_has_recorded_stays(tmp_path: Path, state: str) -> None:
    RunLock(tmp_path, print).claim()  # and is gone
    write_status(tmp_path, state, 3, "mine")
    fail_on_rank_1(tmp_path)
    assert (read_status(tmp_path)["state"], read_status(tmp_path)["reason"]) == (state, "mine")


def test_the_log_of_a_rank_has_the_traceback_without_its_secrets(tmp_path: Path) -> None:
    def failing() -> None:
        with failures_recorded(tmp_path, 1) as failure:
            logging.getLogger("dtrain").info("before the start")
            assert os.listdir(tmp_path) == []
            (tmp_path / "logs").mkdir()
            failure.run_started(1, lambda: 7)
            open_rank_log(tmp_path, 1)
            raise OSError("no answer from https://me:hunter2@host/train.tar?token=hunter3")

    try:
        with pytest.raises(OSError, match="hunter2"):
            failing()
    finally:
        close_rank_log()
    log = (tmp_path / "logs" / "rank-00001.log").read_text()
    assert "INFO before the start\n" in log
    assert "failed after step 7\nTraceback" in log
    assert "OSError: no answer from https://<hidden>@host/train.tar?token=<hidden>" in log
    assert "hunter" not in log


def test_a_start_that_is_refused_logs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> None:
        with failures_recorded(tmp_path, 0):
            logging.getLogger("dtrain").warning("before the start")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr().err == ""


def test_a_failure_is_told_without_the_secrets_of_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    def failing(rank: int) -> None:
        with failures_recorded(tmp_path, rank) as failure:
            failure.run_started(rank, lambda: 7)
            failure.on_failure = told.append
            raise OSError("no answer from https://me:hunter2@host/train.tar?token=hunter3\nnor later")

    lines = []
    for rank in (0, 1):
        with pytest.raises(OSError, match="no answer") as error:
            failing(rank)
        lines.append(getattr(error.value, "last_line", None))
    hidden = "rank 0 failed: OSError: no answer from https://<hidden>@host/train.tar?token=<hidden>"
    assert told == [f"{hidden}\nnor later"]
    assert status(tmp_path)["reason"] == told[0]
    assert lines == [f"dtrain: failed at step 7 ({hidden}): {tmp_path}", None]  # whoever shows the error shows it last
    assert capsys.readouterr().err == ""
