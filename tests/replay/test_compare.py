"""Differences, verdicts, exit codes and what is shown and written of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.replay.compare import (
    Comparison,
    StepComparison,
    compare_steps,
    differences,
    reasons_for_tolerance,
)
from dtrain.replay.recorded import RecordedRun
from dtrain.runs.starts import STEPS, VOTE, Start

Numbers = tuple[float | None, float | None, float | None]
SAME: Numbers = (2.0, 1.0, 0.1)


def step(number: int, then: Numbers | None = SAME, now: Numbers = SAME) -> StepComparison:
    """A comparison of loss, gradient norm and learning rate."""
    names = ("loss", "grad_norm", "lr")
    recorded = None if then is None else dict(zip(names, then, strict=True))
    return StepComparison(number, recorded, dict(zip(names, now, strict=True)))


def result(
    steps: Sequence[StepComparison], tolerance: float = 0.0, reasons: Sequence[str] = (), **options: Any
) -> Comparison:
    return Comparison(steps, options.pop("checkpoints", {}), tolerance, reasons, **options)


def equal_steps(count: int) -> list[StepComparison]:
    return [step(number) for number in range(1, count + 1)]


# -- differences


@pytest.mark.parametrize(
    ("then", "now", "difference"),
    [
        (SAME, SAME, 0.0),
        ((2.0, 1.0, 0.1), (1.0, 1.0, 0.1), 0.5),
        ((1.0, 1.0, 0.1), (2.0, 1.0, 0.1), 0.5),
        ((2.0, 4.0, 0.1), (2.0, 3.0, 0.1), 0.25),
        ((2.0, 1.0, 0.1), (2.0, 1.0, 0.0), 1.0),
        ((-1.0, 1.0, 0.1), (1.0, 1.0, 0.1), 2.0),
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 0.0),
        ((0.0, 0.0, 0.0), (-0.0, 0.0, 0.0), 0.0),
        ((None, 1.0, 0.1), (None, 1.0, 0.1), 0.0),
        ((None, None, None), (None, None, None), 0.0),
        ((None, 2.0, 0.1), (None, 1.0, 0.1), 0.5),
        ((None, 1.0, 0.1), (2.0, 1.0, 0.1), None),
        ((2.0, 1.0, 0.1), (2.0, None, 0.1), None),
    ],
)
def test_the_difference_is_the_largest_relative_one_and_none_between_a_number_and_what_is_none(
    then: Numbers, now: Numbers, difference: float | None
) -> None:
    compared = step(1, then, now)
    assert compared.difference == difference
    assert compared.equal == (difference == 0)


def test_the_smallest_change_of_a_number_is_no_equality() -> None:
    assert not step(1, now=(math.nextafter(2.0, 3), 1.0, 0.1)).equal


def votes(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(list(rows), VOTE)


def run_with(folder: Path, recorded: np.ndarray) -> RecordedRun:
    (folder / "overrides.yaml").write_text("overrides: []\nconfig_dirs: []\n")
    (folder / STEPS).write_bytes(recorded.tobytes())
    return RecordedRun.read(folder)


def test_votes_that_are_not_finite_or_have_no_samples_are_none_on_both_sides(tmp_path: Path) -> None:
    both = votes((1, 1, 8.0, 4, 0.5, 0.1, 1), (2, 0, math.nan, 4, math.inf, 0.1, 1), (3, 0, 0.0, 0, math.nan, 0.1, 1))
    compared = list(compare_steps(run_with(tmp_path, both), both, 1))
    assert [it.difference for it in compared] == [0, 0, 0]
    assert compared[0].recomputed == {"loss": 2.0, "grad_norm": 0.5, "lr": 0.1}
    assert compared[1].recorded == {"loss": None, "grad_norm": None, "lr": 0.1}
    assert compared[2].recorded == {"loss": None, "grad_norm": None, "lr": 0.1}


def test_a_step_that_was_skipped_in_the_run_only_is_beyond_any_tolerance(tmp_path: Path) -> None:
    then, now = votes((1, 0, 8.0, 4, math.inf, 0.1, 1)), votes((1, 1, 8.0, 4, 0.5, 0.1, 1))
    compared = list(compare_steps(run_with(tmp_path, then), now, 1))
    assert [it.difference for it in compared] == [None]
    assert result(compared, tolerance=1e9, reasons=["why"]).exit_code == 1


def test_steps_before_the_first_are_left_out_and_those_without_a_record_have_no_difference(tmp_path: Path) -> None:
    then = votes(*((number, 1, 8.0, 4, 0.5, 0.1, 1) for number in (1, 2, 3)))
    now = votes(*((number, 1, 8.0, 4, 0.5, 0.1, 1) for number in (1, 2, 3, 4)))
    compared = list(compare_steps(run_with(tmp_path, then), now, 2))
    assert [(it.step, it.recorded is None, it.difference) for it in compared] == [
        (2, False, 0),
        (3, False, 0),
        (4, True, None),
    ]


def test_a_run_without_votes_is_compared_by_the_windows_of_its_metrics(tmp_path: Path) -> None:
    records = [
        {"step": 2, "train/loss": 1.5, "train/grad_norm": 0.5, "train/lr": 0.2},
        {"step": 4, "train/loss": 3.0, "train/grad_norm": 3.0, "train/lr": 0.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    # Loss by samples, the norm by steps, the rate of the last one; the skipped fourth step does not count.
    now = votes(
        (1, 1, 4.0, 4, 0.25, 0.1, 1),
        (2, 1, 8.0, 4, 0.75, 0.2, 1),
        (3, 1, 12.0, 4, 3.0, 0.3, 1),
        (4, 0, math.inf, 4, math.inf, 0.4, 1),
    )
    run = run_with(tmp_path, votes())
    assert [(it.step, it.difference) for it in compare_steps(run, now, 1)] == [(2, 0), (4, 0)]
    assert [it.step for it in compare_steps(run, now, 2)] == [4]  # the first window is not whole
    assert [it.step for it in compare_steps(run, now[:3], 1)] == [2]


# -- verdicts


def within(tolerance: float, *changes: float, **options: Any) -> Comparison:
    steps = [step(number, now=(2.0 * (1 - change), 1.0, 0.1)) for number, change in enumerate(changes, 1)]
    return result(steps, tolerance, ["ranks: 2 -> 1"] if tolerance else [], **options)


@pytest.mark.parametrize(
    ("comparison", "code"),
    [
        (result(equal_steps(20)), 0),
        (within(0.0, 0.0, 1e-9), 1),
        (within(1e-4, 0.0, 1e-9), 0),
        (within(1e-4, 0.0, 1e-3), 1),
        (result([step(1, (None, 1.0, 0.1))], 1e-4, ["r"]), 1),
        (result([*equal_steps(1), step(2, None)]), 0),
        (result([step(1, None), step(2, None)]), 2),
        (result([]), 2),
        (result([], checkpoints={10: []}), 0),
        (result([], checkpoints={10: ["model/weight"]}), 1),
        (result(equal_steps(2), checkpoints={10: ["model/weight"]}), 1),
        (within(1e-4, 1e-9, checkpoints={10: ["model/weight"]}), 0),
        (result(equal_steps(2), ended="TooManySkips"), 1),
    ],
)
def test_the_exit_code_is_0_within_the_tolerance_1_beyond_it_and_2_if_nothing_was_compared(
    comparison: Comparison, code: int
) -> None:
    assert comparison.exit_code == code


def test_the_last_line_says_how_many_steps_are_equal() -> None:
    assert result(equal_steps(20)).last_line() == "replay: 20 of 20 steps equal"
    assert result([*equal_steps(19), step(20, None)]).last_line() == "replay: 19 of 19 steps equal, 1 without a record"


def test_the_last_line_says_within_which_difference_and_why_bits_may_differ() -> None:
    line = within(1e-4, 0.0, 8.9e-7).last_line()
    assert line == "replay: 2 of 2 steps within 8.9e-07 (tolerance 0.0001: ranks: 2 -> 1)"


def test_the_last_line_names_the_first_step_beyond_the_tolerance() -> None:
    line = within(0.0, 0.0, 0.0, 1e-3, 1e-2).last_line()
    assert line == "replay: 2 of 4 steps equal, largest difference 1.0e-02, first in step 3"
    line = within(1e-4, 1e-6, 1e-3).last_line()
    assert line.startswith("replay: 1 of 2 steps within the tolerance, largest difference 1.0e-03, first in step 2")


def test_the_last_line_says_that_nothing_could_be_compared() -> None:
    assert "none of 2 steps has a record" in result([step(1, None), step(2, None)]).last_line()


def test_checkpoints_and_an_early_end_have_lines_of_their_own() -> None:
    different = result(equal_steps(3), checkpoints={10: [], 20: ["a", "b", "c", "d", "e"]}, ended="no memory")
    lines = different.last_line().splitlines()
    assert lines[0] == "checkpoints: 1 of 2 equal; in that of step 20, a, b, c and 2 more differ"
    assert "no memory" in lines[1]
    assert lines[2].startswith("replay: 3 of 3 steps")
    assert len(lines) == 3


def test_the_table_has_a_line_for_each_step_and_of_a_long_replay_those_that_differ_most() -> None:
    lines = (
        result([step(1), step(2, None), step(3, (None, 1.0, 0.1)), step(4, now=(1.0, 1.0, 0.1))]).table().splitlines()
    )
    assert [line.split()[0] for line in lines] == ["step", "1", "2", "3", "4"]
    for line, verdict in zip(lines[1:], ("equal", "no record", "not finite", "0.5"), strict=True):
        assert line.endswith(verdict)
    many = equal_steps(100)
    many[49] = step(50, now=(1.0, 1.0, 0.1))
    many[59] = step(60, (None, 1.0, 0.1))
    shown = result(many).table().splitlines()
    numbers = [int(line.split()[0]) for line in shown[1:-1]]
    assert {*range(1, 11), 50, 60, *range(91, 101)} <= set(numbers)
    assert numbers == sorted(numbers)
    assert f"{100 - len(numbers)} more steps" in shown[-1]


def test_the_json_file_has_no_nan() -> None:
    steps = [
        step(1),
        step(2, None, (None, None, 0.1)),
        step(3, (None, None, 0.1), (None, None, 0.1)),
        step(4, (None, 1.0, 0.1)),
        step(5, now=(1.0, 1.0, 0.1)),
    ]
    comparison = result(steps, 1e-4, ["ranks: 2 -> 1"], checkpoints={10: [], 20: ["model/weight"]}, ended="end")
    content = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert content["largest_difference"] is None  # of step 4 there is none
    assert content["equal"] is False
    assert [it["difference"] for it in content["steps"]] == [0, None, 0, None, 0.5]
    assert content["steps"][1]["recorded"] is None
    assert content["checkpoints"] == [
        {"step": 10, "equal": True, "different": []},
        {"step": 20, "equal": False, "different": ["model/weight"]},
    ]


def test_votes_that_are_not_finite_are_written_as_null(tmp_path: Path) -> None:
    both = votes((1, 0, math.nan, 4, math.inf, 0.1, math.nan))
    content = json.dumps(result(list(compare_steps(run_with(tmp_path, both), both, 1))).to_json(), allow_nan=False)
    assert json.loads(content)["steps"][0]["recorded"] == {"loss": None, "grad_norm": None, "lr": 0.1}


# -- conditions


def start(**options: Any) -> Start:
    given = {"ranks": 2, "device": "CPU", "threads": 1, "versions": {"torch": "2.1", "dtrain": "1"}, **options}
    return Start(step=0, time=0, overrides=[], config_dirs=[], config={}, micro_batch=8, **given)


def test_conditions_that_differ_are_named_with_both_values() -> None:
    now = start(ranks=1, device="GPU", threads=4, versions={"torch": "2.2"})
    assert differences(start(), now, ["precision.name: fp32 -> bf16"]) == [
        "ranks: 2 -> 1",
        "device: CPU -> GPU",
        "threads: 1 -> 4",
        "torch: 2.1 -> 2.2",
        "precision.name: fp32 -> bf16",
    ]
    assert differences(start(), start(versions={"torch": "2.1", "dtrain": "2"}), []) == []


def test_what_a_run_of_an_earlier_version_has_not_recorded_is_no_difference() -> None:
    assert differences(start(device="", threads=0, versions={}), start(), []) == []


def test_bits_must_be_equal_on_cpus_with_deterministic_algorithms_only() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert reasons_for_tolerance([], cpu, deterministic=True) == []
    assert reasons_for_tolerance(["ranks: 2 -> 1"], cpu, deterministic=True) == ["ranks: 2 -> 1"]
    assert reasons_for_tolerance([], cpu, deterministic=False) == ["train.deterministic=false"]
    assert len(reasons_for_tolerance([], gpu, deterministic=True)) == 1
    assert len(reasons_for_tolerance([], gpu, deterministic=False)) == 1
