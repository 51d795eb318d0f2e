from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtrain.config.errors import Explained
from dtrain.data.ledger import Ledger, cut_ledgers

BAD = {"key": "a.tar/\udcff\u00e9", "epoch": 0, "reason": "torn\nin two"}


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_rank_writes_the_keys_of_its_steps_and_its_bad_samples(tmp_path: Path) -> None:
    for rank in (0, 3):
        ledger = Ledger(tmp_path, rank, record_keys=True)
        ledger.write(1, [f"a.tar/{rank}"], [])
        ledger.write(2, ["a.tar/\u00e9", "b.tar/\udcff"], [BAD])
        ledger.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{kind}-rank-{rank:05d}.jsonl" for kind in ("bad", "keys") for rank in (0, 3)
    ]
    assert lines_of(tmp_path / "keys-rank-00003.jsonl") == [
        {"step": 1, "keys": ["a.tar/3"]},
        {"step": 2, "keys": ["a.tar/\u00e9", "b.tar/\udcff"]},
    ]
    assert lines_of(tmp_path / "bad-rank-00000.jsonl") == [{"step": 2, **BAD}]


def test_a_run_without_bad_samples_that_records_no_keys_leaves_no_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0, record_keys=False)
    ledger.write(1, ["a.tar/0"], [])
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_is_there_before_the_ledger_is_closed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 0, record_keys=True)
    ledger.write(1, ["a.tar/0"], [BAD])
    assert len(lines_of(tmp_path / "keys-rank-00000.jsonl")) == len(lines_of(tmp_path / "bad-rank-00000.jsonl")) == 1
    ledger.close()


def test_what_was_written_after_a_checkpoint_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    for rank in (0, 1):
        ledger = Ledger(tmp_path, rank, record_keys=True)
        for step in range(1, 6):
            ledger.write(step, [f"a.tar/{step}"], [BAD] * (step % 2))
        ledger.close()
    cut_ledgers(tmp_path, 3)
    ledger = Ledger(tmp_path, 1, record_keys=True)
    ledger.write(4, ["again"], [])
    ledger.close()
    assert [line["step"] for line in lines_of(tmp_path / "keys-rank-00000.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in lines_of(tmp_path / "bad-rank-00000.jsonl")] == [1, 3]
    assert lines_of(tmp_path / "keys-rank-00001.jsonl")[3:] == [{"step": 4, "keys": ["again"]}]


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
    cut_ledgers(tmp_path, 5)
    ledger = Ledger(tmp_path, 0, record_keys=True)
    ledger.write(2, ["b"], [])
    ledger.close()
    assert lines_of(path) == [{"step": 1, "keys": ["a"]}, {"step": 2, "keys": ["b"]}]


def test_other_logs_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").write_text("hello")
    cut_ledgers(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.log"]
    assert (tmp_path / "rank-00000.log").read_text() == "hello"


def test_a_full_disk_takes_bad_samples_to_the_log_and_ends_a_run_that_records_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad-rank-00000.jsonl").symlink_to("/dev/full")
    ledger = Ledger(tmp_path, 0, record_keys=False)
    ledger.write(3, ["a.tar/0"], [BAD])
    ledger.close()
    assert "step 3: its bad samples could not be written down" in caplog.text
    assert "torn" in caplog.text
    (tmp_path / "keys-rank-00000.jsonl").symlink_to("/dev/full")
    with pytest.raises(Explained, match=r"data\.record_keys=true, but the keys of step 4 could not be written"):
        Ledger(tmp_path, 0, record_keys=True).write(4, ["a.tar/0"], [])
