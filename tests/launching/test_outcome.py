from __future__ import annotations

import io
from pathlib import Path

import pytest

from dtrain.config.errors import ConfigError
from dtrain.launching.outcome import FAILED, FINISHED, STOPPED, Outcome, Verdict, overall, print_table
from dtrain.tracking.status import write_status
from tests.launching.points import sweep


@pytest.mark.parametrize(
    ("state", "code"), [("finished", FINISHED), ("stopped", STOPPED), ("failed", FAILED), ("running", FAILED)]
)
def test_a_start_is_judged_by_what_it_wrote(tmp_path: Path, state: str, code: int) -> None:
    verdict = Verdict(tmp_path)
    write_status(tmp_path, state, 7, "because\nof this")
    outcome, why = verdict()
    assert outcome.code == code
    assert why == ("step 7: because" if code == FAILED else None)


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_status_of_an_earlier_start_does_not_count(tmp_path: Path, state: str) -> None:
    write_status(tmp_path, state, 7)
    assert Verdict(tmp_path)()[0].code == FAILED


def test_the_same_status_written_again_counts(tmp_path: Path) -> None:
    write_status(tmp_path, "finished", 7)
    verdict = Verdict(tmp_path)
    write_status(tmp_path, "finished", 7)
    assert verdict()[0].code == FINISHED


def test_a_run_that_wrote_nothing_has_failed(tmp_path: Path) -> None:
    assert Verdict(tmp_path / "not there")()[0].code == FAILED


def test_a_file_that_is_no_status_is_named(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("hello")
    with pytest.raises(ConfigError, match=r"status\.json is not JSON"):
        Verdict(tmp_path)


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 75], 75), ([75, 1, 0], 1), ([1], 1)], ids=["all", "stopped", "failed", "one"]
)
def test_a_sweep_is_as_good_as_its_worst_point(codes: list[int], code: int) -> None:
    assert overall([Outcome("", c) for c in codes]) == code


def test_a_sweep_ends_with_a_line_for_each_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stream = io.StringIO()
    points = sweep("experiment=digits", "run.seed=1,22", "run.dir=s")
    print_table(points, [Outcome("finished", 0), Outcome("job 12", 0)], stream)
    assert stream.getvalue().splitlines() == [
        f"run.seed=1   finished  {tmp_path}/s-run.seed=1",
        f"run.seed=22  job 12    {tmp_path}/s-run.seed=22",
    ]
