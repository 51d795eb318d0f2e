from __future__ import annotations

import math
from pathlib import Path

import pytest

from dtrain.config.schema import CheckpointConfig
from dtrain.diagnosis import saving
from dtrain.diagnosis.saving import Saving, between_saves
from tests.ranks import RanksFailed, run_ranks


@pytest.mark.parametrize(
    ("steps", "minutes", "seconds"),
    [(10, None, 20), (None, 1.0, 60), (10, 1.0, 20), (100, 1.0, 60), (None, None, math.inf), (None, 0.0, 2)],
)
def test_the_next_save_comes_by_steps_or_by_the_clock(steps: int | None, minutes: float | None, seconds: float) -> None:
    assert between_saves(CheckpointConfig(every_steps=steps, every_minutes=minutes), 2.0) == seconds


def test_checkpoints_are_tried_where_the_run_s_directory_will_be(tmp_path: Path) -> None:
    [found] = run_ranks(1, lambda rank: Saving.measure(tmp_path / "runs" / "new", 10, 0.1, seconds=1))
    assert found.folder == tmp_path
    assert found.write == 10 / found.rate
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_speed", full)
    with pytest.raises(RanksFailed, match=r"ConfigError: run.dir: .*No space left"):
        run_ranks(1, lambda rank: Saving.measure(tmp_path, 10, 0.1, seconds=1))
