from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.tracking.failure import failures_recorded


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
