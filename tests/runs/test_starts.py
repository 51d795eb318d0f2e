"""The record of starts and the votes of steps. The oracle of the votes is ``struct``."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from dtrain.runs.starts import (
    STARTS,
    STEPS,
    VOTE,
    Start,
    StepLog,
    read_starts,
    read_votes,
    record_start,
    segments_of,
    start_of,
)


def vote(step: int) -> tuple[float, ...]:
    """A vote of which every value is different."""
    return (float(step), 1.0, step + 0.25, 32.0, step + 0.5, 1e-3 / step, 1024.0 * step)


def write(run_dir: Path, steps: Sequence[int], after: int = 0) -> None:
    """A start that continues after a step and logs these steps."""
    log = StepLog(run_dir, after)
    for step in steps:
        log.add(*vote(step))
    log.write()
    log.close()


def stored(run_dir: Path) -> list[tuple[float, ...]]:
    """The whole records of the file."""
    content = (run_dir / STEPS).read_bytes()
    return list(struct.iter_unpack("<7d", content[: len(content) // 56 * 56]))


def read_steps(run_dir: Path, last: int | None = None) -> list[int]:
    return [int(step) for step in read_votes(run_dir, last)["step"]]


# -- votes


def test_votes_are_56_bytes_each_in_the_order_in_which_they_were_added(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    assert (tmp_path / STEPS).stat().st_size == 5 * 56 == 5 * VOTE.itemsize
    assert stored(tmp_path) == [vote(step) for step in range(1, 6)]
    assert read_votes(tmp_path).tolist() == stored(tmp_path)
    assert read_steps(tmp_path, last=3) == [1, 2, 3]


def test_a_run_without_the_file_has_no_votes(tmp_path: Path) -> None:
    assert read_votes(tmp_path).shape == (0,)
    assert read_votes(tmp_path).dtype == VOTE


@pytest.mark.parametrize("after", [0, 3, 5, 9])
def test_a_start_cuts_the_votes_of_the_steps_that_it_repeats(tmp_path: Path, after: int) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, [after + 1, after + 2], after=after)
    assert read_steps(tmp_path) == [*range(1, min(after, 5) + 1), after + 1, after + 2]


@pytest.mark.parametrize("length", [1, 8, 55])
def test_a_torn_last_record_is_ignored_and_written_over_by_the_next_start(tmp_path: Path, length: int) -> None:
    write(tmp_path, range(1, 4))
    with (tmp_path / STEPS).open("ab") as file:
        file.write(struct.pack("<7d", *vote(4))[:length])
    assert read_steps(tmp_path) == [1, 2, 3]
    write(tmp_path, [4, 5], after=3)
    assert stored(tmp_path) == [vote(step) for step in range(1, 6)]
    assert (tmp_path / STEPS).stat().st_size == 5 * 56


@pytest.mark.parametrize(
    "tail",
    [bytes(2 * 56), struct.pack("<7d", *vote(2)), struct.pack("<7d", float("nan"), *vote(4)[1:])],
    ids=["zeros", "an earlier step", "no number"],
)
def test_nothing_after_a_record_that_does_not_ascend_is_read(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path, range(1, 4))
    with (tmp_path / STEPS).open("ab") as file:
        file.write(tail + struct.pack("<7d", *vote(9)))
    assert read_steps(tmp_path) == [1, 2, 3]
    write(tmp_path, [4], after=3)
    assert read_steps(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("before_failure", [0, 20, 56, 130])
def test_a_failed_write_leaves_whole_votes_and_the_next_one_adds_the_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_failure: int
) -> None:
    log = StepLog(tmp_path, 0)
    log.add(*vote(1))
    log.write()
    for step in (2, 3, 4):
        log.add(*vote(step))
    write_bytes, left = os.write, [before_failure]

    def until_full(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: left[0]]
        left[0] -= len(part)
        return write_bytes(descriptor, part)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", until_full)
        with pytest.raises(OSError, match="space"):
            log.write()
    assert stored(tmp_path) == [vote(1)]
    assert (tmp_path / STEPS).stat().st_size == 56
    log.add(*vote(5))
    log.write()
    log.write()  # nothing is left
    log.close()
    assert stored(tmp_path) == [vote(step) for step in range(1, 6)]


# -- starts


def start(step: int, ranks: int = 1, **options: object) -> Start:
    made = Start(
        step=step,
        time=1e9 + step,
        overrides=["experiment=digits", f"train.max_steps={step + 10}"],
        config_dirs=[],
        config={"optimizer": {"lr": 0.1}},
        ranks=ranks,
        micro_batch=32,
        device="CPU",
        threads=1,
        versions={"torch": "2"},
        segment={"step": step, "ranks": ranks},
    )
    return replace(made, **options)  # type: ignore[arg-type]


def test_a_start_is_read_as_it_was_recorded_one_line_each(tmp_path: Path) -> None:
    starts = [start(0), start(10, ranks=2, code={"dtrain": "abc"})]
    for each in starts:
        record_start(tmp_path, each)
    assert read_starts(tmp_path) == starts
    assert [json.loads(line) for line in (tmp_path / STARTS).read_text().splitlines()] == [*map(asdict, starts)]


def test_a_run_without_the_file_has_no_starts(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []


@pytest.mark.parametrize(("step", "kept"), [(30, [0, 10, 20]), (20, [0, 10]), (15, [0, 10]), (10, [0]), (0, [])])
def test_a_start_replaces_those_whose_steps_it_repeats(tmp_path: Path, step: int, kept: list[int]) -> None:
    for earlier in (0, 10, 20):
        record_start(tmp_path, start(earlier))
    record_start(tmp_path, start(step, ranks=4))
    assert [(each.step, each.ranks) for each in read_starts(tmp_path)] == [*((one, 1) for one in kept), (step, 4)]


def test_a_fork_that_is_resumed_at_its_first_step_is_still_a_fork(tmp_path: Path) -> None:
    origin = {"dir": "/runs/trunk", "step": 10, "data": "keep"}
    record_start(tmp_path, start(10, fork=origin))
    record_start(tmp_path, start(10, ranks=2))
    record_start(tmp_path, start(15))
    record_start(tmp_path, start(10, ranks=3))
    assert [(each.step, each.ranks, each.fork) for each in read_starts(tmp_path)] == [(10, 3, origin)]


def test_later_starts_of_a_fork_are_no_forks(tmp_path: Path) -> None:
    origin = {"dir": "/runs/trunk", "step": 10, "data": "keep"}
    record_start(tmp_path, start(10, fork=origin))
    record_start(tmp_path, start(15))
    assert [each.fork for each in read_starts(tmp_path)] == [origin, {}]


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 5, "time": 1',
        b"[]",
        b"null",
        b"7",
        b"",
        b"\xff\xfe",
        b'{"step": 5}',
        json.dumps(asdict(start(5)) | {"step": "5"}).encode(),
        json.dumps(asdict(start(5)) | {"ranks": None}).encode(),
        b"[" * 100_000,
    ],
    ids=["torn", "list", "null", "number", "empty", "no text", "few keys", "step", "ranks", "deep"],
)
def test_a_damaged_line_is_left_out(tmp_path: Path, line: bytes) -> None:
    for step in (0, 10):
        record_start(tmp_path, start(step))
    first, second = (tmp_path / STARTS).read_bytes().splitlines()
    (tmp_path / STARTS).write_bytes(b"\n".join([first, line, second, line]) + b"\n")
    assert [each.step for each in read_starts(tmp_path)] == [0, 10]
    record_start(tmp_path, start(20))
    assert [each.step for each in read_starts(tmp_path)] == [0, 10, 20]


def test_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    (tmp_path / STARTS).write_text(json.dumps(asdict(start(0)) | {"cluster": "one"}) + "\n")
    assert read_starts(tmp_path) == [start(0)]


def test_a_write_failure_leaves_the_starts_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_start(tmp_path, start(0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="space"):
            record_start(tmp_path, start(10))
    assert read_starts(tmp_path) == [start(0)]


# -- what both are read for


def test_the_start_of_a_step_is_the_last_one_before_it() -> None:
    starts = [start(step, ranks) for ranks, step in enumerate((0, 7, 12), 1)]
    made = {step: 0 if step <= 7 else 1 if step <= 12 else 2 for step in range(1, 21)}
    assert {step: start_of(starts, step) for step in made} == made


def test_a_step_before_the_first_start_has_none() -> None:
    assert start_of([start(10)], 10) == -1
    assert start_of([], 1) == -1


def test_segments_are_those_of_the_checkpoint_up_to_the_first_start_and_those_of_the_starts() -> None:
    saved = [{"step": 0, "of": "trunk"}, {"step": 5, "of": "trunk"}, {"step": 10, "of": "trunk"}]
    starts = [start(10), start(20)]
    assert segments_of(starts, saved) == [*saved[:2], {"step": 10, "ranks": 1}, {"step": 20, "ranks": 1}]
    assert segments_of([replace(each, segment={}) for each in starts], saved) == saved
    assert segments_of([], []) == []


def test_votes_are_little_endian(tmp_path: Path) -> None:
    write(tmp_path, [1])
    assert np.fromfile(tmp_path / STEPS, ">f8")[0] != 1.0
    assert np.fromfile(tmp_path / STEPS, "<f8")[0] == 1.0
