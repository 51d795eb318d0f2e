"""What a run directory tells, also one that somebody else has written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.tracking import history
from dtrain.tracking.history import History, read_all
from tests.tracking.report.runs_for_tests import run_of, steady


def test_aliases_of_aliases_in_a_config_are_refused_and_not_unfolded(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30))]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    run = History.read(tmp_path, "run")
    assert run.config == {}
    assert "config.yaml has YAML aliases, which dtrain does not write; it is left out" in run.gaps


@pytest.mark.parametrize(
    "text", ["[" * 5_000, "a: \x01", "a: 2026-02-31", "- 1", "{", "a: !!bool maybe", "a: !!int ''", "#" * 300_000]
)
def test_a_config_that_cannot_be_read_is_a_gap(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    run = History.read(tmp_path, "run")
    assert run.config == {}
    assert any(gap.startswith("config.yaml") for gap in run.gaps)


def test_a_status_that_cannot_be_read_is_a_gap(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_bytes(b"\xff\xfe")
    run = History.read(tmp_path, "run")
    assert run.status == {}
    assert any("status.json cannot be read" in gap for gap in run.gaps)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_a_link_or_a_giant_in_place_of_a_file_is_a_gap_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "secret.yaml").write_text("token: x")
    (run / "config.yaml").symlink_to(tmp_path / "secret.yaml")
    os.mkfifo(run / "status.json")
    with (run / "overrides.yaml").open("wb") as file:
        file.truncate(10**12)
    read = History.read(run, "run")
    assert (read.config, read.status, read.overrides) == ({}, {}, [])
    assert read.gaps[1:] == [
        "status.json is a link or no file, so it is not read",
        "config.yaml is a link or no file, so it is not read",
        "overrides.yaml is larger than 200,000 bytes, so it is not what its name says",
    ]


def test_restarts_lie_at_the_first_record_after_them(tmp_path: Path) -> None:
    records = [
        record | ({"time/restarts": record["step"] // 20} if record["step"] >= 20 else {}) for record in steady()
    ]
    assert run_of(tmp_path, records).restarts.tolist() == [20, 40]


def test_runs_read_by_several_processes_are_those_read_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        run_of(tmp_path / name, steady(10))
    alone = read_all([tmp_path / name for name in "abc"])
    monkeypatch.setattr(history, "_WORTH_PROCESSES", 0)
    monkeypatch.setattr(history.os, "cpu_count", lambda: 2)
    together = read_all([tmp_path / name for name in "abc"])
    assert [run.label for run in together] == ["a", "b", "c"]
    for one, other in zip(alone, together, strict=True):
        assert one.series("train/loss")[1].tolist() == other.series("train/loss")[1].tolist()
        assert one.gaps == other.gaps


def test_runs_of_one_name_are_told_apart_by_the_shortest_end_of_their_paths(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / name, []).path for name in ("a/lr=1/s=1", "b/lr=1/s=1", "b/lr=2/s=1", "b/lr=2/s=2")]
    assert [run.label for run in read_all(runs)] == ["a/lr=1/s=1", "b/lr=1/s=1", "lr=2/s=1", "s=2"]
