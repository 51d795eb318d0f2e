from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.tracking.failure import failures_recorded
from dtrain.tracking.rank_log import close_rank_log, open_rank_log
from tests.runs import status


def test_a_failure_that_the_disk_refuses_to_record_is_still_the_one_that_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        with failures_recorded(tmp_path / "no folder", 0) as failure:
            failure.step = lambda: 7
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert "status.json could not be written" in capsys.readouterr().err


def test_the_log_of_a_rank_has_the_traceback_without_its_secrets(tmp_path: Path) -> None:
    def failing() -> None:
        with failures_recorded(tmp_path, 1) as failure:
            failure.step = lambda: 7
            raise OSError("no answer from https://me:hunter2@host/train.tar?token=hunter3")

    (tmp_path / "logs").mkdir()
    open_rank_log(tmp_path, 1)
    try:
        with pytest.raises(OSError, match="hunter2"):
            failing()
    finally:
        close_rank_log()
    log = (tmp_path / "logs" / "rank-00001.log").read_text()
    assert "failed after step 7\nTraceback" in log
    assert "OSError: no answer from https://<hidden>@host/train.tar?token=<hidden>" in log
    assert "hunter" not in log


def test_a_failure_is_told_without_the_secrets_of_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    def failing(rank: int) -> None:
        with failures_recorded(tmp_path, rank) as failure:
            failure.step = lambda: 7
            failure.tell = told.append
            raise OSError("no answer from https://me:hunter2@host/train.tar?token=hunter3\nnor later")

    for rank in (0, 1):
        with pytest.raises(OSError, match="no answer"):
            failing(rank)
    hidden = "rank 0 failed: OSError: no answer from https://<hidden>@host/train.tar?token=<hidden>"
    assert told == [f"{hidden}\nnor later"]
    assert status(tmp_path)["reason"] == told[0]
    assert capsys.readouterr().err == f"dtrain: failed at step 7 ({hidden}): {tmp_path}\n"
