from __future__ import annotations

import math
from typing import Any

import pytest

from dtrain.training.schedule import WarmupConstant, WarmupCosine


@pytest.mark.parametrize("kind", [WarmupConstant, WarmupCosine])
def test_the_warm_up_is_a_straight_line_that_ends_at_one(kind: Any) -> None:
    schedule = kind(horizon=100, warmup_fraction=0.1)
    assert [schedule(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert schedule(10) == pytest.approx(1.0)


def test_the_constant_one_stays_at_one_beyond_its_horizon() -> None:
    assert {WarmupConstant(10, 0.2)(step) for step in (2, 5, 10, 1000)} == {1.0}
    assert WarmupConstant(10)(0) == 1.0


def test_the_cosine_falls_from_one_to_its_final_fraction_and_stays_there() -> None:
    schedule = WarmupCosine(horizon=110, warmup_fraction=10 / 110, final_fraction=0.2)
    for progress in (0.0, 0.25, 0.5, 0.75, 1.0):
        want = 0.2 + 0.8 * (1 + math.cos(math.pi * progress)) / 2
        assert schedule(10 + round(100 * progress)) == pytest.approx(want)
    assert schedule(110) == schedule(111) == schedule(10_000) == pytest.approx(0.2)
    falling = [schedule(step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("kind", [WarmupConstant, WarmupCosine])
@pytest.mark.parametrize("warmup_fraction", [0.0, 0.5, 1.0])
def test_a_run_of_one_step_learns_at_the_full_rate(kind: Any, warmup_fraction: float) -> None:
    assert kind(1, warmup_fraction)(0) == 1.0


def test_a_warm_up_that_fills_the_run_ends_at_one() -> None:
    schedule = WarmupCosine(horizon=4, warmup_fraction=1.0)
    assert [schedule(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("kind", [WarmupConstant, WarmupCosine])
@pytest.mark.parametrize(("horizon", "warmup_fraction"), [(0, 0.1), (-5, 0.1), (10, -0.1), (10, 1.5)])
def test_an_impossible_schedule_is_refused_with_its_numbers(kind: Any, horizon: int, warmup_fraction: float) -> None:
    with pytest.raises(ValueError, match=f"got horizon {horizon} and warmup_fraction {warmup_fraction}"):
        kind(horizon, warmup_fraction)
