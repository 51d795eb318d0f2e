import json
import math
import os

import pytest

from dtrain.runs.records import JsonlSink, cut_after


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(path, numbers):
    sink = JsonlSink(path)
    for step in numbers:
        sink.log({"step": step, "time": 1.5, "train/loss": 0.25})
    sink.finish("finished")


def test_a_record_can_be_read_as_soon_as_it_is_logged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log({"step": 1, "time": 2.0, "train/loss": 0.1})
    sink.log({"step": 2, "time": 3.0, "train/loss": 1e-300})
    assert [json.loads(line) for line in path.read_text().split("\n")[:-1]] == [
        {"step": 1, "time": 2.0, "train/loss": 0.1},
        {"step": 2, "time": 3.0, "train/loss": 1e-300},
    ]
    sink.finish("finished")


def test_a_second_start_appends(tmp_path):
    write(tmp_path / "metrics.jsonl", [1, 2])
    write(tmp_path / "metrics.jsonl", [3])
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_nan_and_infinity_are_written_as_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log({"step": 1, "time": 2.0, "train/loss": math.nan, "train/grad_norm": math.inf, "eval/loss": -math.inf})
    sink.finish("failed")

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record == {"step": 1, "time": 2.0, "train/loss": None, "train/grad_norm": None, "eval/loss": None}


def test_cutting_keeps_the_checkpoints_step_and_drops_the_later_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [10, 20, 20, 30, 40])
    assert cut_after(path, (20, True)) == 2
    assert steps(path) == [10, 20, 20]
    assert steps(tmp_path / "cut-metrics.jsonl") == [30, 40]


def test_cutting_before_an_evaluation_keeps_its_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [10, 20])
    sink = JsonlSink(path)
    sink.log({"step": 20, "time": 1.5, "eval/loss": 0.5})
    assert cut_after(path, (20, True)) == 0
    assert cut_after(path, (20, False)) == 1
    assert [json.loads(line).get("eval/loss") for line in path.read_text().splitlines()] == [None, None]


def test_cutting_drops_a_torn_last_line_even_if_its_step_is_old_enough(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [10, 20])
    path.write_bytes(path.read_bytes()[:-1])  # the object is whole, its line is not: the next record would be glued on
    assert cut_after(path, (20, True)) == 1
    write(path, [20])
    assert steps(path) == [10, 20]


@pytest.mark.parametrize(
    "rubbish", [b"\0" * 100 + b"\n", b'{"step": 1\n', b"\xff\xfe\n", b"[1, 2]\n", b'{"loss": 1}\n']
)
def test_cutting_drops_what_a_power_cut_left(tmp_path, rubbish):
    path = tmp_path / "metrics.jsonl"
    write(path, [10])
    path.write_bytes(path.read_bytes() + rubbish)
    write(path, [20])
    assert cut_after(path, (20, True)) == 1
    assert steps(path) == [10, 20]


def test_cutting_nothing_leaves_the_file_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert cut_after(path, (5, True)) == 0
    assert not path.exists()
    write(path, [1, 2])
    before = path.stat()
    assert cut_after(path, (2, True)) == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_cut_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        cut_after(path, (1, True))
    monkeypatch.undo()
    assert steps(path) == [1, 2, 3]
    assert cut_after(path, (1, True)) == 2
    assert steps(path) == [1]
    assert set(steps(tmp_path / "cut-metrics.jsonl")) == {2, 3}
