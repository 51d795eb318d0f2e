"""What trouble leaves in the logs is found again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dtrain.tracking.report.trouble import bad_samples, hangs, messages


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def test_bad_samples_of_all_ranks_are_counted_and_the_first_named(tmp_path: Path, logs: Path) -> None:
    for rank in range(3):
        lines = [{"step": 10 * i + rank, "key": f"a.tar/{rank}-{i}", "reason": f"no {i % 2}"} for i in range(20)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (logs / f"bad-rank-{rank:05d}.jsonl").write_text(text + '{"step": 7, "ke')
    bad = bad_samples(tmp_path, [], most=4)
    assert bad.count == 60
    assert bad.reasons == (("no 0", 30), ("no 1", 30))
    assert [key for _, key, _ in bad.first] == ["a.tar/0-0", "a.tar/1-0", "a.tar/2-0", "a.tar/0-1"]


def test_lines_of_a_ledger_that_are_nonsense_are_left_out(tmp_path: Path, logs: Path) -> None:
    lines = ["[1]", '{"step": Infinity}', "[" * 100_000, '{"key": "a"}', '{"step": 3}']
    (logs / "bad-rank-00000.jsonl").write_text("\n".join(lines))
    assert bad_samples(tmp_path, []).first == ((3, "?", ""),)


def test_hangs_are_read_from_what_each_rank_wrote(tmp_path: Path, logs: Path) -> None:
    for rank in (1, 0):
        (logs / f"hang-rank-{rank:05d}.txt").write_text(
            f"2026-11-21 06:35:5{rank} rank 1: nothing has moved for 4 s\nrank {rank}, step 110: in _strike (faults.py:193)\n"
            'last samples: ["a.tar/1"]\n\nThread 0x00007f1a392606c0 (most recent call first):\n  File "x.py", line 1 in wait\n'
        )
    assert [hang.place for hang in hangs(tmp_path, [])] == [
        "rank 0, step 110: in _strike (faults.py:193)",
        "rank 1, step 110: in _strike (faults.py:193)",
    ]
    assert {hang.why for hang in hangs(tmp_path, [])} == {"rank 1: nothing has moved for 4 s"}


def test_warnings_and_errors_come_with_the_end_of_their_traceback(tmp_path: Path, logs: Path) -> None:
    (logs / "rank-00003.log").write_text(
        "2026-11-21 06:35:16,960 WARNING look here\n"
        "2026-11-21 06:35:17,461 INFO step 23\n"
        "2026-11-21 06:35:22,671 ERROR failed after step 89\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in f\nValueError: no\n'
    )
    found = messages(tmp_path, [])
    assert [(one.rank, one.level, one.text) for one in found] == [
        (3, "WARNING", "look here"),
        (3, "ERROR", "failed after step 89 \N{EM DASH} ValueError: no"),
    ]


def test_of_a_long_log_the_end_is_read(tmp_path: Path, logs: Path) -> None:
    line = "2026-11-21 06:35:16,960 WARNING {:06d}\n"
    (logs / "rank-00000.log").write_text("".join(map(line.format, range(100_000))))
    found = messages(tmp_path, [])
    assert found[-1].text == "099999"
    assert len(found) < 10_000


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_nothing_is_read_through_a_link(tmp_path: Path, logs: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_text("2026-11-21 06:35:16,960 WARNING secret\n")
    (logs / "rank-00000.log").symlink_to(outside)
    assert messages(tmp_path, []) == []


def test_what_this_user_may_not_read_is_said(tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (logs / "rank-00000.log").write_text("2026-11-21 06:35:16,960 WARNING look here\n")
    # Root may read everything, so the answer is made up.
    monkeypatch.setattr(os, "access", lambda path, mode: path == logs)
    gaps: list[str] = []
    assert messages(tmp_path, gaps) == []
    assert gaps == ["logs/rank-00000.log may not be read by this user"]
