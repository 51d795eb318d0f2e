import json
import os
import time

import pytest

from dtrain.tracking import read_status, write_status
from dtrain.tracking.status import is_trained


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
    with pytest.raises(ValueError, match=r"'done'.*running, finished, stopped, failed"):
        write_status(tmp_path, "done", 1)
    assert read_status(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "done"}'])
def test_a_file_that_is_no_status_is_an_error_that_names_it(tmp_path, text):
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(ValueError, match=r"status\.json"):
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
