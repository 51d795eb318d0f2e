from __future__ import annotations

from typing import Any

import pytest

from dtrain.training.parts import Progress

STATUS: dict[str, Any] = {
    "state": "running",
    "time": 1000.0,
    "restarts": 2,
    "lost_seconds": 5.0,
    "down_seconds": 10.0,
    "trained_seconds": 70.0,
}


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])
def test_an_interruption_costs_what_was_trained_and_not_saved_and_the_time_without_a_process(state: str) -> None:
    progress = Progress(seconds=60.0)  # as the checkpoint counts it
    progress.interrupted(STATUS | {"state": state}, now=1030.0)
    assert (progress.restarts, progress.lost_seconds, progress.down_seconds) == (3, 15.0, 40.0)
    assert progress.interruptions() == "3, with 15 s of training to be done again and 40 s between the starts"
    assert progress.times() == {"restarts": 3, "lost_seconds": 15.0, "down_seconds": 40.0, "trained_seconds": 60.0}


def test_a_new_run_and_one_that_goes_on_after_its_end_were_not_interrupted() -> None:
    new, longer = Progress(), Progress(seconds=70.0)
    new.interrupted(None)
    longer.interrupted(STATUS | {"state": "finished"}, now=9999.0)
    assert new == Progress()
    assert new.interruptions() == ""
    assert (longer.restarts, longer.lost_seconds, longer.down_seconds) == (2, 5.0, 10.0)


def test_a_checkpoint_of_a_version_whose_evaluations_ran_to_their_end_has_none_due() -> None:
    assert not Progress(**{"samples": 640, "evaluations": 2}).evaluation_due


def test_the_status_of_a_version_that_did_not_count_is_a_first_interruption() -> None:
    progress = Progress()
    progress.interrupted({"state": "failed", "time": 1000.0}, now=1001.0)
    assert (progress.restarts, progress.lost_seconds, progress.down_seconds) == (1, 0.0, 1.0)
