"""Reading metrics.jsonl: what is a record is read, what is not is counted, whatever else is in the file."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dtrain.tracking import columns
from dtrain.tracking.columns import number, read_columns


def test_columns_are_those_of_a_reader_that_goes_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_BLOCK", 7)
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
        np.testing.assert_array_equal(values, [number(value) for _, value in wanted])
    assert "c" not in found.values
    together = [row for row in rows if not isinstance(row["a"], bool) and "b" in row]
    assert found.together("step", "a", "b")[0].tolist() == [row["step"] for row in together]
    assert [len(values) for values in found.together("step", "nothing")] == [0, 0]


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"step": NaN}', '{"step": 1e999}', '{"step": true}', '{"a": 1}', "\0\0", '{"step": "1"}', "3"],
)
def test_a_line_that_is_no_record_is_left_out_and_counted(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    gaps: list[str] = []
    assert read_columns(path, gaps).steps.tolist() == [1, 2]
    assert gaps == ["metrics.jsonl: 1 lines are no records (the first is line 2); they are left out"]


def test_a_torn_last_line_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    path, gaps = tmp_path / "metrics.jsonl", []
    path.write_text('{"step": 1}\n{"step": 2, "tra')
    assert read_columns(path, gaps).steps.tolist() == [1]
    assert gaps == ["metrics.jsonl: the last line is torn, as after a crash; it is left out"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_the_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    gaps: list[str] = []
    assert not len(read_columns(tmp_path / "metrics.jsonl", gaps).steps)
    assert gaps == ["metrics.jsonl is a link or no file, so it is not read"]


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
    assert gaps == ["metrics.jsonl: the last line is torn, as after a crash; it is left out"]


def test_numbers_that_no_float_can_hold_are_not_numbers() -> None:
    assert number(3) == 3.0
    assert all(math.isnan(number(value)) for value in (10**400, math.inf, math.nan, True, None, "1", [1]))
