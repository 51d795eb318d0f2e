"""What a run directory holds beside metrics is read, and files that cannot be read are reported."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image

from dtrain.report.run_logs import read_bad_samples, read_evaluations, read_hangs, read_media, read_messages
from dtrain.runs.evaluation_results import CheckpointEvaluation, write_evaluation
from dtrain.tracking.sinks import write_media


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
    bad = read_bad_samples(tmp_path, [])
    assert bad.count == 60
    assert bad.reasons == (("no 0", 30), ("no 1", 30))
    assert [key for _, key in bad.first][:4] == ["a.tar/0-0", "a.tar/1-0", "a.tar/2-0", "a.tar/0-1"]
    assert len(bad.first) == 10


def test_lines_that_are_no_bad_samples_are_left_out(tmp_path: Path, logs: Path) -> None:
    lines = ["[1]", '{"step": Infinity}', "[" * 100_000, '{"key": "a"}', '{"step": 3}']
    (logs / "bad-rank-00000.jsonl").write_text("\n".join(lines))
    assert read_bad_samples(tmp_path, []).first == ((3, "?"),)


def test_hangs_are_read_from_what_each_rank_wrote(tmp_path: Path, logs: Path) -> None:
    for rank in (1, 0):
        (logs / f"hang-rank-{rank:05d}.txt").write_text(
            f"2026-11-21 06:35:5{rank} rank 1: nothing has moved for 4 s\nrank {rank}, step 110: in forward (model.py:12)\n"
            'last samples: ["a.tar/1"]\n\nThread 0x00007f1a392606c0 (most recent call first):\n  File "x.py", line 1 in wait\n'
        )
    (logs / "hang-rank-00002.txt").write_text((logs / "hang-rank-00000.txt").read_text().replace("rank 0,", "rank 2,"))
    first, second = read_hangs(tmp_path, [])
    assert first.reason == second.reason == "rank 1: nothing has moved for 4 s"
    assert first.places == tuple(f"rank {rank}, step 110: in forward (model.py:12)" for rank in (0, 2))
    assert second.places == ("rank 1, step 110: in forward (model.py:12)",)


def test_warnings_and_errors_come_with_the_end_of_their_traceback(tmp_path: Path, logs: Path) -> None:
    (logs / "rank-00003.log").write_text(
        "2026-11-21 06:35:16,960 WARNING look here\n"
        "2026-11-21 06:35:17,461 INFO step 23\n"
        "2026-11-21 06:35:22,671 ERROR failed after step 89\nTraceback (most recent call last):\n"
        '  File "x.py", line 1, in f\nValueError: no\n'
    )
    found = read_messages(tmp_path, [])
    assert [(one.ranks, one.level, one.text) for one in found] == [
        ((3,), "warning", "look here"),
        ((3,), "error", "failed after step 89 \N{EM DASH} ValueError: no"),
    ]


def test_of_a_long_log_the_end_is_read(tmp_path: Path, logs: Path) -> None:
    line = "2026-11-21 06:35:16,960 WARNING {:06d}\n"
    (logs / "rank-00000.log").write_text("".join(map(line.format, range(100_000))))
    found = read_messages(tmp_path, [])
    assert found[-1].text == "099999"
    assert len(found) < 10_000


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_nothing_is_read_through_a_link(tmp_path: Path, logs: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_text("2026-11-21 06:35:16,960 WARNING secret\n")
    (logs / "rank-00000.log").symlink_to(outside)
    assert read_messages(tmp_path, []) == []


def test_a_file_without_read_permission_is_a_gap(tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (logs / "rank-00000.log").write_text("2026-11-21 06:35:16,960 WARNING look here\n")
    # Root may read everything, so the answer is made up.
    monkeypatch.setattr(os, "access", lambda path, mode: path == logs)
    gaps: list[str] = []
    assert read_messages(tmp_path, gaps) == []
    assert gaps == ["logs/rank-00000.log may not be read by this user"]


def png(shade: int = 0) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (8, 8), shade).save(stream, "PNG")
    return stream.getvalue()


def test_the_newest_of_each_name_are_read_as_the_trainer_wrote_them(tmp_path: Path) -> None:
    for step in (50, 1000, 100, 2_000_000_000):
        write_media(tmp_path / "media", step, "confusion", png(step % 200))
    write_media(tmp_path / "media", 7, "samples", "Once upon")
    found = read_media(tmp_path, [])
    assert [(one.name, one.step) for one in found] == [
        ("confusion", 100),
        ("confusion", 1000),
        ("confusion", 2_000_000_000),
        ("samples", 7),
    ]
    assert found[1].png == png(0)
    assert found[3].text == "Once upon"


def bomb() -> bytes:
    """A PNG of 65,000 x 65,000 pixels in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 65_000, 65_000, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"<svg onload='alert(1)'/>", "not a readable PNG"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "not a readable PNG"),
        (png()[:-20], "not a readable PNG"),
        (bomb(), ""),
        (png() + b"\0" * 3_000_000, "3,000,0"),
    ],
)
def test_what_is_no_picture_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "media" / "x" / "step-000000001.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (found,) = read_media(tmp_path, [])
    assert found.png is None
    assert why in found.refused
    assert found.refused


def test_of_very_many_names_the_first_are_shown(tmp_path: Path) -> None:
    for number in range(120):
        write_media(tmp_path / "media", 1, f"name-{number:03d}", "text")
    gaps: list[str] = []
    assert [one.name for one in read_media(tmp_path, gaps)] == [f"name-{number:03d}" for number in range(100)]
    assert len(gaps) == 1
    assert "first 100 names" in gaps[0]


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    folder = tmp_path / "run" / "media" / "x"
    folder.mkdir(parents=True)
    (folder / "step-000000001.txt").symlink_to(secret)
    (folder.parent / "y").symlink_to(folder)
    assert read_media(tmp_path / "run", []) == []


def test_a_result_is_read_as_evaluate_writes_it(tmp_path: Path) -> None:
    confusion = torch.tensor([[8, 2, 0], [0, 9, 1], [5, 0, 5]])
    one = CheckpointEvaluation(
        checkpoint=tmp_path / "checkpoints" / "step-000000276",
        weights="ema",
        precision="bf16",
        data={"eval": "val-*.tar", "fingerprint": "1c4f09abcdef"},
        config={"model": {"width": 8}},
        ranks=2,
        metrics={"loss": 0.25, "accuracy": 22 / 30, "samples": 30},
        tables={"confusion": confusion},
        seconds=1.5,
        memory={"memory/max_resident_gib": 0.5},
    )
    write_evaluation(tmp_path / "evaluations", one, ["ant", "bee", "cat"])
    gaps: list[str] = []
    (found,) = read_evaluations(tmp_path, gaps)
    assert gaps == []
    assert found.name.startswith("step-000000276-ema-bf16")
    assert found.facts["metrics.eval/accuracy"] == "0.7333"
    assert found.facts["precision"] == "bf16"
    assert "model.width" not in " ".join(found.facts)
    names = found.heading.index("name"), found.heading.index("recall")
    assert [tuple(row[i] for i in names) for row in found.classes] == [("cat", "0.5"), ("ant", "0.8"), ("bee", "0.9")]
    assert [picture.refused for picture in found.pictures] == [""]


def test_what_is_damaged_is_a_gap_and_what_is_new_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations"
    folder.mkdir()
    (folder / "torn.json").write_text('{"loss": 0.')
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "list.json").write_text("[1]")
    (folder / "new.json").write_text(
        json.dumps({"metrics": {"loss": float("nan"), "f1": 10**400}, "a": [1], "b": None})
    )
    gaps: list[str] = []
    (found,) = read_evaluations(tmp_path, gaps)
    assert found.facts == {"metrics.loss": "not finite", "metrics.f1": "not finite", "b": "\N{EN DASH}"}
    assert len(gaps) == 3
