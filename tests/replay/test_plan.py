"""Which parts of a run are recomputed from where. The oracle of a part is the list of its steps."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtrain.errors import ConfigError
from dtrain.replay.plan import OPTIONS, Part, Request, plan, ranks_of, saved_steps
from dtrain.replay.recorded import RecordedRun
from dtrain.runs.starts import STEPS, Start, record_start
from tests.refusals import refused


def start(step: int, ranks: int = 2, **options: object) -> Start:
    given = {"config": {"seed": 0}, "segment": {"step": step}, **options}
    return Start(
        step=step,
        time=0,
        overrides=[],
        config_dirs=[],
        ranks=ranks,
        micro_batch=8,
        device="CPU",
        threads=1,
        versions={},
        **given,  # type: ignore[arg-type]
    )


def make_run(folder: Path, starts: Sequence[Start], checkpoints: Sequence[int], done: int) -> RecordedRun:
    """A run with the votes of all its steps, and folders of checkpoints."""
    (folder / "overrides.yaml").write_text("overrides: []\nconfig_dirs: []\n")
    for each in starts:
        record_start(folder, each)
    for step in checkpoints:
        (folder / "checkpoints" / f"step-{step:09d}").mkdir(parents=True)
    first = starts[0].step + 1
    rows = [struct.pack("<7d", step, 1, 8, 4, 0.5, 0.1, 1) for step in range(first, done + 1)]
    (folder / STEPS).write_bytes(b"".join(rows))
    return RecordedRun.read(folder)


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    """45 steps: 30 on 2 ranks, then 15 on 3; checkpoints every 10 steps."""
    return make_run(tmp_path, [start(0), start(30, 3)], [10, 20, 30, 40], 45)


def request(**options: str) -> Request:
    return Request.parse({**OPTIONS, **{f"replay.{key}": value for key, value in options.items()}})


def steps_of(parts: Sequence[Part]) -> list[int]:
    """All steps that are recomputed."""
    return [step for part in parts for step in range(part.after + 1, part.last + 1)]


def compared(parts: Sequence[Part]) -> list[int]:
    return [step for part in parts for step in range(part.compared, part.last + 1)]


# -- the same conditions


@pytest.mark.parametrize(
    ("steps", "parts"),
    [
        ("[1,5]", [Part(0, 0, 5, 1)]),
        ("[10,10]", [Part(0, 0, 10, 10)]),
        ("[11,20]", [Part(0, 10, 20, 11)]),
        ("[15,28]", [Part(0, 10, 28, 15)]),
        ("[30,30]", [Part(0, 20, 30, 30)]),
        ("[31,45]", [Part(1, 30, 40, 31), Part(1, 40, 45, 41)]),
        ("[22,41]", [Part(0, 20, 30, 22), Part(1, 30, 41, 31, from_before=True)]),
        ("[1,45]", [Part(0, 0, 30, 1), Part(1, 30, 45, 31, from_before=True)]),
    ],
)
def test_a_range_begins_from_the_newest_checkpoint_before_it_and_has_a_part_for_each_start(
    run: RecordedRun, steps: str, parts: list[Part]
) -> None:
    if steps == "[31,45]":  # under the same conditions a checkpoint on the way is no cut
        parts = [Part(1, 30, 45, 31)]
    assert plan(run, request(steps=steps), same=True) == parts


def test_every_range_is_recomputed_without_gaps_and_compared_from_its_first_step(run: RecordedRun) -> None:
    saved = [0, 10, 20, 30, 40]
    for first in range(1, 46):
        for last in range(first, 46):
            begin = max(step for step in saved if step < first)
            for same in (True, False):
                parts = plan(run, request(steps=f"[{first},{last}]"), same=same)
                assert steps_of(parts) == list(range(begin + 1, last + 1))
                assert compared(parts) == list(range(first, last + 1))
                assert all(part.start == (0 if part.last <= 30 else 1) for part in parts)
                assert all(part.start == (0 if part.after < 30 else 1) for part in parts)


def test_a_start_between_two_checkpoints_continues_from_the_state_that_was_reached(tmp_path: Path) -> None:
    run = make_run(tmp_path, [start(0), start(15, 3), start(18)], [10, 20], 25)
    assert plan(run, request(steps="[12,25]"), same=True) == [
        Part(0, 10, 15, 12),
        Part(1, 15, 18, 16, from_before=True),
        Part(2, 18, 25, 19, from_before=True),
    ]


def test_one_step_is_a_range_of_one(run: RecordedRun) -> None:
    assert plan(run, request(step="25"), same=True) == plan(run, request(steps="[25,25]"), same=True)


# -- other conditions


def test_under_other_conditions_each_checkpoint_on_the_way_begins_a_part(run: RecordedRun) -> None:
    assert plan(run, request(steps="[15,45]"), same=False) == [
        Part(0, 10, 20, 15),
        Part(0, 20, 30, 21),
        Part(1, 30, 40, 31),
        Part(1, 40, 45, 41),
    ]


def test_a_start_without_a_checkpoint_continues_from_the_state_before_under_other_conditions_too(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, [start(0), start(15, 3)], [10, 20], 25)
    assert plan(run, request(steps="[11,25]"), same=False) == [
        Part(0, 10, 15, 11),
        Part(1, 15, 20, 16, from_before=True),
        Part(1, 20, 25, 21),
    ]


# -- windows


def nearest(saved: Sequence[int], done: int, number: int) -> list[int]:
    """The checkpoint before the last step that is nearest to each of the equal parts, by looking at each."""
    found = set()
    for part in range(number):
        aim, best = done * part // number, None
        for step in saved:
            if step < done and (best is None or abs(step - aim) < abs(best - aim)):
                best = step
        found.add(best)
    return sorted(step for step in found if step is not None)


@pytest.mark.parametrize("number", range(1, 12))
def test_windows_follow_the_checkpoints_nearest_to_equal_parts_of_the_run(run: RecordedRun, number: int) -> None:
    parts = plan(run, request(windows=str(number), window="4"), same=True)
    assert [part.after for part in parts] == nearest([0, 10, 20, 30, 40], 45, number)
    assert all(part.last == part.after + 4 and part.compared == part.after + 1 for part in parts)
    assert parts == plan(run, request(windows=str(number), window="4"), same=False)


def test_a_window_ends_with_its_start_and_with_the_run(run: RecordedRun) -> None:
    parts = plan(run, request(windows="5", window="25"), same=True)
    assert [(part.start, part.after, part.last) for part in parts] == [
        (0, 0, 25),
        (0, 10, 30),
        (0, 20, 30),
        (1, 30, 45),
        (1, 40, 45),
    ]


def test_windows_of_a_branch_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, [start(30, fork={"dir": "/runs/trunk", "step": 30, "data": "keep"})], [], 40)
    with refused(ConfigError, "replay.windows", "no checkpoint", 40):
        plan(run, request(windows="2"), same=True)


# -- checkpoints that are not there


def test_a_checkpoint_that_cannot_be_used_leads_to_the_one_before(run: RecordedRun) -> None:
    run.unusable.update({20, 10})
    assert saved_steps(run) == [0, 30, 40]
    assert plan(run, request(step="25"), same=True) == [Part(0, 0, 25, 25)]


@pytest.mark.parametrize(("limit", "accepted"), [("4", True), ("3", False), ("0", False)])
def test_steps_that_are_too_far_from_a_checkpoint_are_refused(run: RecordedRun, limit: str, accepted: bool) -> None:
    asked = request(steps="[15,20]", max_distance=limit)
    if accepted:
        assert plan(run, asked, same=True) == [Part(0, 10, 20, 15)]
        return
    with refused(ConfigError, "replay.max_distance", limit, "10, 20, 30, 40", "step 10", "4 steps"):
        plan(run, asked, same=True)


def test_steps_that_were_not_done_are_refused(run: RecordedRun) -> None:
    with refused(ConfigError, "replay.steps", 46, "45 steps"):
        plan(run, request(step="46"), same=True)


def test_steps_of_the_trunk_are_replayed_there(tmp_path: Path) -> None:
    run = make_run(tmp_path, [start(30, fork={"dir": "/runs/trunk", "step": 30, "data": "keep"})], [30, 40], 45)
    with refused(ConfigError, "replay.steps", 30, "run.dir=/runs/trunk"):
        plan(run, request(steps="[30,31]"), same=True)
    assert plan(run, request(step="31"), same=True) == [Part(0, 30, 31, 31)]


def test_steps_before_the_records_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, [start(20)], [10, 20, 30], 45)
    assert saved_steps(run) == [20, 30]
    with refused(ConfigError, "replay.steps", 15, "after step 20"):
        plan(run, request(step="15"), same=True)
    assert plan(run, request(step="21"), same=True) == [Part(0, 20, 21, 21)]


# -- numbers of ranks


def test_parts_that_follow_one_another_on_equal_ranks_are_one_group(tmp_path: Path) -> None:
    starts = [start(0), start(10), start(20, 3), start(30)]
    run = make_run(tmp_path, starts, [], 40)
    groups = ranks_of(plan(run, request(steps="[1,40]"), same=True), run.starts)
    assert [(ranks, [part.start for part in parts]) for ranks, parts in groups] == [(2, [0, 1]), (3, [2]), (2, [3])]


# -- the command line


@pytest.mark.parametrize("text", ["[3,9]", " [3, 9] ", "'[3,9]'", '"[3,9]"'])
def test_a_range_is_read_as_typed(text: str) -> None:
    asked = request(steps=text)
    assert (asked.first, asked.last, asked.windows, asked.tolerance) == (3, 9, 0, None)


@pytest.mark.parametrize(
    ("options", "key", "got"),
    [
        ({"steps": "[0,3]"}, "replay.steps", "[0,3]"),
        ({"steps": "[4,3]"}, "replay.steps", "[4,3]"),
        ({"steps": "3"}, "replay.steps", "3"),
        ({"steps": "[3]"}, "replay.steps", "[3]"),
        ({"steps": "[-1,3]"}, "replay.steps", "[-1,3]"),
        ({"step": "0"}, "replay.step", "0"),
        ({"step": "x"}, "replay.step", "x"),
        ({"windows": "0"}, "replay.windows", "0"),
        ({"windows": "2", "window": "0"}, "replay.window", "0"),
        ({"step": "1", "max_distance": "-1"}, "replay.max_distance", "-1"),
        ({"step": "1", "tolerance": "-1"}, "replay.tolerance", "-1"),
        ({"step": "1", "tolerance": "nan"}, "replay.tolerance", "nan"),
        ({"step": "1", "tolerance": "much"}, "replay.tolerance", "much"),
        ({"step": "1", "steps": "[1,2]"}, "replay.step", "replay.steps"),
        ({}, "replay.step", "no steps"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, str], key: str, got: str) -> None:
    with refused(ConfigError, key, got):
        request(**options)
