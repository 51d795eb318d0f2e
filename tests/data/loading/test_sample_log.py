"""The log of used and bad samples, and the budget of bad ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from dtrain.data import Limits
from dtrain.data.loading import sample_log
from dtrain.data.loading.sample_log import (
    BadSampleBudget,
    SampleLog,
    TooManyBadSamples,
    read_deadly,
    truncate_sample_logs,
)
from dtrain.errors import Explained
from tests.refusals import refused

BAD = {"key": "a.tar/\udcff\u00e9", "epoch": 0, "reason": "torn\nin two"}


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_rank_writes_the_keys_of_its_steps_and_its_bad_samples(tmp_path: Path) -> None:
    for rank in (0, 3):
        ledger = SampleLog(tmp_path, rank, record_keys=True)
        ledger.write(1, [f"a.tar/{rank}"], [])
        ledger.write(2, ["a.tar/\u00e9", "b.tar/\udcff"], [BAD])
        ledger.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{kind}-rank-{rank:05d}.jsonl" for kind in ("bad", "keys") for rank in (0, 3)
    ]
    assert read_lines(tmp_path / "keys-rank-00003.jsonl") == [
        {"step": 1, "keys": ["a.tar/3"]},
        {"step": 2, "keys": ["a.tar/\u00e9", "b.tar/\udcff"]},
    ]
    assert read_lines(tmp_path / "bad-rank-00000.jsonl") == [{"step": 2, **BAD}]


def test_a_run_without_bad_samples_that_records_no_keys_leaves_no_file(tmp_path: Path) -> None:
    ledger = SampleLog(tmp_path, 0, record_keys=False)
    ledger.write(1, ["a.tar/0"], [])
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_is_there_before_the_ledger_is_closed(tmp_path: Path) -> None:
    ledger = SampleLog(tmp_path, 0, record_keys=True)
    ledger.write(1, ["a.tar/0"], [BAD])
    assert (
        len(read_lines(tmp_path / "keys-rank-00000.jsonl")) == len(read_lines(tmp_path / "bad-rank-00000.jsonl")) == 1
    )
    ledger.close()


def test_what_was_written_after_a_checkpoint_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    for rank in (0, 1):
        ledger = SampleLog(tmp_path, rank, record_keys=True)
        for step in range(1, 6):
            ledger.write(step, [f"a.tar/{step}"], [BAD] * (step % 2))
        ledger.close()
    truncate_sample_logs(tmp_path, 3)
    ledger = SampleLog(tmp_path, 1, record_keys=True)
    ledger.write(4, ["again"], [])
    ledger.close()
    assert [line["step"] for line in read_lines(tmp_path / "keys-rank-00000.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in read_lines(tmp_path / "bad-rank-00000.jsonl")] == [1, 3]
    assert read_lines(tmp_path / "keys-rank-00001.jsonl")[3:] == [{"step": 4, "keys": ["again"]}]


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 2, "keys": ["a',
        b'{"step": 2, "keys": []}',
        b"\0\0\0\n",
        b'{"step": 2, "keys": ["\xc3',
        b"7\n",
        b"[]\n",
    ],
)
def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "keys-rank-00000.jsonl"
    path.write_bytes(b'{"step": 1, "keys": ["a"]}\n' + torn)
    truncate_sample_logs(tmp_path, 5)
    ledger = SampleLog(tmp_path, 0, record_keys=True)
    ledger.write(2, ["b"], [])
    ledger.close()
    assert read_lines(path) == [{"step": 1, "keys": ["a"]}, {"step": 2, "keys": ["b"]}]


def test_other_logs_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").write_text("hello")
    truncate_sample_logs(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.log"]
    assert (tmp_path / "rank-00000.log").read_text() == "hello"


def test_a_full_disk_takes_bad_samples_to_the_log_and_ends_a_run_that_records_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_log, "open_to_append", lambda path: io.FileIO("/dev/full", "a"))
    ledger = SampleLog(tmp_path, 0, record_keys=False)
    ledger.write(3, ["a.tar/0"], [BAD])
    ledger.close()
    assert "step 3" in caplog.text
    assert "No space left" in caplog.text
    assert "torn" in caplog.text
    with refused(Explained, "data.record_keys=true", "step 4"):
        SampleLog(tmp_path, 0, record_keys=True).write(4, ["a.tar/0"], [])


LAST = {"key": "a.tar/1", "reason": "torn"}


def test_the_budget_is_a_count_a_share_or_nothing_at_all() -> None:
    for bad, samples, most in (
        (0, 10, 0), (10, 20, 0.01), (50, 5000, 0.01), (3, 4, 3), (1, 1, 1), (3, 4, 3.0), (0, 10, "0%"), (25, 5000, "0.5%"),
        (5000, 5000, "100%"), (5000, 5000, " 100 % "),
    ):  # fmt: skip
        BadSampleBudget(Limits(most, None)).count(samples - bad, bad, LAST)
    for bad, samples, most in (
        (1, 10_000, 0), (11, 20, 0.01), (51, 5000, 0.01), (4, 4, 3), (2, 2, 1), (1, 10_000, "0%"), (26, 5000, "0.5%"),
    ):  # fmt: skip
        with refused(TooManyBadSamples, f"data.max_bad={most}", f"{bad} of {samples} samples", "", "a.tar/1: torn"):
            BadSampleBudget(Limits(most, None)).count(samples - bad, bad, LAST)


def test_counting_at_once_and_by_and_by_comes_to_the_same() -> None:
    budget = BadSampleBudget(Limits(0.1, None))
    for _ in range(300):
        budget.count(9, 1, LAST)
    assert (budget.bad, budget.samples) == (300, 3000)
    with pytest.raises(TooManyBadSamples, match="301 of 3001"):
        budget.count(0, 1, LAST)


def test_a_run_that_goes_on_has_used_up_what_it_had() -> None:
    with pytest.raises(TooManyBadSamples, match="51 of 5001"):
        BadSampleBudget(Limits(0.01, None), bad=50, samples=5000).count(0, 1, LAST)


def test_a_row_is_ended_by_one_good_sample_and_by_nothing_else() -> None:
    budget = BadSampleBudget(Limits(1e9, 5))
    for good, bad in ((0, 5), (1, 7), (0, 3), (0, 0), (0, 2)):
        budget.count(good, bad, LAST)
    with refused(TooManyBadSamples, "data.max_bad_consecutive=5", "6 samples in a row"):
        budget.count(0, 1, LAST)
    with pytest.raises(TooManyBadSamples, match="1 samples in a row"):
        BadSampleBudget(Limits(1e9, 0)).count(0, 1, LAST)
    BadSampleBudget(Limits(1e9, None)).count(0, 10**6, LAST)


def test_a_rank_whose_own_samples_are_good_ends_too_and_gives_no_example() -> None:
    with refused(TooManyBadSamples, "All are listed in"):
        BadSampleBudget(Limits(0, None)).count(3, 1, {})


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        ((-1, None), ["data.max_bad", "got -1", "0 or more"]),
        ((0, -2), ["data.max_bad_consecutive", "got -2"]),
        # 0.999 would allow nearly all samples to be bad, 1.0 as a count only one.
        ((1.0, None), ["data.max_bad", "got 1.0", "100%", "data.max_bad=1 "]),
        *(
            (bad, ["data.max_bad", repr(bad[0]), "0.5%"])
            for bad in (("101%", None), ("-1%", None), ("0.5", None), ("%", None))
        ),
        ((float("nan"), None), ["data.max_bad", "nan", "0 or more"]),
    ],
)
def test_impossible_limits_are_refused(limits: tuple[float | str, int | None], names: list[str]) -> None:
    with refused(ValueError, *names):
        Limits(*limits)


def test_samples_that_killed_workers_are_read_from_the_logs_of_all_ranks_with_the_lines_that_were_cut(
    tmp_path: Path,
) -> None:
    reason = "a loader worker was killed by SIGSEGV while reading it, twice"
    for rank in (0, 1):
        ledger = SampleLog(tmp_path, rank, record_keys=False)
        ledger.write(1, [], [BAD])
        ledger.write(2 + rank, [], [{"key": f"a.tar/{rank}", "epoch": 0, "reason": reason}])
        ledger.close()
    with (tmp_path / "bad-rank-00000.jsonl").open("a") as file:
        file.write('{"reason": "a loader worker was killed by\n[]\n{"step": 4, "key": "b", "reason": 7}\n')
    assert read_deadly(tmp_path) == {"a.tar/0": reason, "a.tar/1": reason}
    truncate_sample_logs(tmp_path, 2)
    assert read_deadly(tmp_path) == {"a.tar/0": reason, "a.tar/1": reason}
    assert read_deadly(tmp_path / "nowhere") == {}
