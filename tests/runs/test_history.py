"""Run directories are read whole, and what is missing or damaged becomes a gap, also if somebody else wrote them."""

from __future__ import annotations

import errno
import json
import math
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dtrain.runs import history
from dtrain.runs.history import History, as_float, differences, read_all, read_columns, run_directories
from tests.refusals import refused
from tests.report.runs_for_tests import run_of, steady


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
        "status.json is a link or not a regular file, so it is not read",
        "config.yaml is a link or not a regular file, so it is not read",
        "overrides.yaml is larger than 200,000 bytes, so dtrain did not write it, and it is not read",
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
    monkeypatch.setattr(history, "_PARALLEL_BYTES", 0)
    monkeypatch.setattr(history.os, "cpu_count", lambda: 2)
    together = read_all([tmp_path / name for name in "abc"])
    assert [run.label for run in together] == ["a", "b", "c"]
    for one, other in zip(alone, together, strict=True):
        assert one.series("train/loss")[1].tolist() == other.series("train/loss")[1].tolist()
        assert one.gaps == other.gaps


def test_runs_of_one_name_are_told_apart_by_the_shortest_end_of_their_paths(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / name, []).path for name in ("a/lr=1/s=1", "b/lr=1/s=1", "b/lr=2/s=1", "b/lr=2/s=2")]
    assert [run.label for run in read_all(runs)] == ["a/lr=1/s=1", "b/lr=1/s=1", "lr=2/s=1", "s=2"]


def test_columns_are_those_of_a_reader_that_goes_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_BLOCK", 7)
    rows = [
        {"step": i, "a": i / 3} | ({"b": None if i % 4 else i} if i % 3 else {"c": "text", "a": True})
        for i in range(50)
    ]
    rows[20]["b"] = 10**400
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gaps: list[str] = []
    found = read_columns(path, gaps)
    assert gaps == []
    for name in ("step", "a", "b"):
        wanted = [(row["step"], row[name]) for row in rows if name in row and not isinstance(row[name], (str, bool))]
        steps, values = found.series(name)
        assert steps.tolist() == [step for step, _ in wanted]
        np.testing.assert_array_equal(values, [as_float(value) for _, value in wanted])
    assert "c" not in found.values
    together = [row for row in rows if not isinstance(row["a"], bool) and "b" in row]
    assert found.in_common("step", "a", "b")[0].tolist() == [row["step"] for row in together]
    assert [len(values) for values in found.in_common("step", "nothing")] == [0, 0]


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"step": NaN}', '{"step": 1e999}', '{"step": true}', '{"a": 1}', "\0\0", '{"step": "1"}', "3"],
)
def test_a_line_that_is_no_record_is_left_out_and_counted(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    gaps: list[str] = []
    assert read_columns(path, gaps).steps.tolist() == [1, 2]
    assert gaps == ["metrics.jsonl: lines that are not records are left out: 1, the first is line 2"]


def test_a_torn_last_line_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    path, gaps = tmp_path / "metrics.jsonl", []
    path.write_text('{"step": 1}\n{"step": 2, "tra')
    assert read_columns(path, gaps).steps.tolist() == [1]
    assert gaps == ["metrics.jsonl: the last line is incomplete, as after a crash; it is left out"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_the_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    gaps: list[str] = []
    assert not len(read_columns(tmp_path / "metrics.jsonl", gaps).steps)
    assert gaps == ["metrics.jsonl is a link or not a regular file, so it is not read"]


def test_a_line_without_an_end_takes_no_more_memory_than_one_of_a_mebibyte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(b'{"step": 1}\n')
        file.truncate(100 * 2**20)  # a hole of zeros
    gaps: list[str] = []
    tracemalloc.start()
    assert read_columns(path, gaps).steps.tolist() == [1]
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()
    assert gaps == ["metrics.jsonl: the last line is incomplete, as after a crash; it is left out"]


def test_numbers_that_no_float_can_hold_are_not_numbers() -> None:
    assert as_float(3) == 3.0
    assert all(math.isnan(as_float(value)) for value in (10**400, math.inf, math.nan, True, None, "1", [1]))


def begun(run_dir: Path, trace: str = "config.yaml") -> Path:
    (run_dir / trace).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / trace).touch()
    return run_dir


def test_runs_are_found_at_any_depth_and_what_is_below_a_run_is_its_own(tmp_path: Path) -> None:
    runs = [begun(tmp_path / name) for name in ("a", "lr=1/seed=1", "lr=1/seed=2")]
    begun(tmp_path / "a" / "checkpoints" / "step-000000001")
    begun(tmp_path / ".trash" / "old")
    (tmp_path / "sweep-1a2b3c4d").mkdir()
    (tmp_path / "round").symlink_to(tmp_path)
    assert run_directories([tmp_path]) == runs


def test_runs_and_directories_of_runs_may_be_named_together(tmp_path: Path) -> None:
    alone, one, two = (begun(tmp_path / name) for name in ("alone", "sweep/1", "sweep/2"))
    assert run_directories([alone, tmp_path / "sweep"]) == [alone, one, two]


@pytest.mark.parametrize("trace", [".lock", ".job", "logs/torchrun/x", "metrics.jsonl", "status.json"])
def test_a_run_that_ended_before_its_first_step_or_waits_for_it_is_a_run(tmp_path: Path, trace: str) -> None:
    run = begun(tmp_path / "run", trace)
    assert run_directories([tmp_path]) == [run]


def test_a_directory_without_a_run_below_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "some" / "folder").mkdir(parents=True)
    with refused(ValueError, tmp_path, "no run"):
        run_directories([tmp_path])
    with pytest.raises(ValueError, match="is not a directory"):
        run_directories([tmp_path / "missing"])


def test_a_directory_that_cannot_be_looked_at_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path / "run")
    (tmp_path / "lost").mkdir()
    is_dir = Path.is_dir

    def of_a_server_that_is_gone(path: Path) -> bool:
        if path.name == "lost":
            raise OSError(errno.ESTALE, "Stale file handle")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", of_a_server_that_is_gone)
    assert run_directories([tmp_path]) == [run]


def test_a_run_of_another_version_does_not_differ_by_new_empty_keys(tmp_path):
    configs = {
        "old": "{data: {transfer: fp32}, train: {log_every: 10}}",
        "new": "{data: {transfer: fp32}, train: {log_every: 10, hooks: []}}",
        "other": "{data: {transfer: auto}, train: {log_every: 10, hooks: []}}",
    }
    runs = []
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
        runs.append(History.read(tmp_path / name, name))
    old, new, other = runs
    assert differences([old, new]) == {}
    assert differences([old, other]) == {"data.transfer": ["fp32", "auto"]}
