from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain.config.schema import TrainConfig
from dtrain.data import ShardLoader
from dtrain.errors import ConfigError
from dtrain.training.schedule import (
    Lengths,
    WarmupConstant,
    WarmupCosine,
    WarmupSteps,
    WarmupTrapezoid,
    cut_short,
    last_step,
    schedule_horizon,
)
from tests.refusals import refused
from tests.shards import VECTOR_FIELDS, write_vectors

# -- schedule


KINDS = [WarmupConstant, WarmupCosine, WarmupTrapezoid, WarmupSteps]


@pytest.mark.parametrize("kind", KINDS)
def test_the_warm_up_is_a_straight_line_that_ends_at_one(kind: Any) -> None:
    schedule = kind(horizon=100, warmup=10)
    assert [schedule(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert schedule(10) == pytest.approx(1.0)


def test_the_constant_one_stays_at_one_beyond_its_horizon() -> None:
    assert {WarmupConstant(10, 2)(step) for step in (2, 5, 10, 1000)} == {1.0}
    assert WarmupConstant(10)(0) == 1.0


def test_the_cosine_falls_from_one_to_its_final_fraction_and_stays_there() -> None:
    schedule = WarmupCosine(horizon=110, warmup=10, final_fraction=0.2)
    for progress in (0.0, 0.25, 0.5, 0.75, 1.0):
        want = 0.2 + 0.8 * (1 + math.cos(math.pi * progress)) / 2
        assert schedule(10 + round(100 * progress)) == pytest.approx(want)
    assert schedule(110) == schedule(111) == schedule(10_000) == pytest.approx(0.2)
    falling = [schedule(step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_run_of_one_step_learns_at_the_full_rate(kind: Any, warmup: int) -> None:
    assert kind(1, warmup)(0) == 1.0


def test_a_warm_up_that_fills_the_run_ends_at_one() -> None:
    schedule = WarmupCosine(horizon=4, warmup=4)
    assert [schedule(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_the_trapezoid_cools_down_in_a_straight_line_to_its_final_fraction() -> None:
    schedule = WarmupTrapezoid(horizon=100, warmup=10, cooldown=20, final_fraction=0.5)
    assert {schedule(step) for step in range(10, 81)} == {1.0}
    assert [schedule(step) for step in range(80, 101)] == pytest.approx([1 - 0.5 * n / 20 for n in range(21)])
    assert schedule(1000) == 0.5


def test_a_warm_up_and_a_cool_down_that_overlap_make_a_triangle() -> None:
    schedule = WarmupTrapezoid(horizon=10, warmup=6, cooldown=6)
    assert [schedule(step) for step in range(11)] == pytest.approx([n / 6 for n in (1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0)])


def test_the_step_schedule_falls_by_its_factor_at_each_milestone() -> None:
    schedule = WarmupSteps(horizon=90, warmup=5, milestones=[30, 60], factor=0.1)
    assert [schedule(step) for step in (4, 29, 30, 59, 60, 89)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    with refused(ValueError, "milestones", "[60, 30]", "ascend"):
        WarmupSteps(horizon=90, milestones=[60, 30])


def test_durations_are_found_in_lists_and_mappings_and_other_text_stays() -> None:
    lengths = Lengths(horizon=200, steps_per_epoch=25, global_batch_size=10)
    node = {
        "a": ["1 epoch", "0.5 epochs", "1e3 samples", "1_000 samples"],
        "b": {"c": "2.5 %"},
        "d": "cosine",
        "e": 0.5,
    }
    # An exact half goes to the even number, as in Python.
    assert lengths.in_steps(node) == {"a": [25, 12, 100, 100], "b": {"c": 5}, "d": "cosine", "e": 0.5}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("horizon", "warmup"), [(0, 1), (-5, 0), (10, -1), (10, 15)])
def test_an_impossible_schedule_is_refused_with_its_numbers(kind: Any, horizon: int, warmup: int) -> None:
    with refused(ValueError, "horizon", horizon, "", f"warmup {warmup}"):
        kind(horizon, warmup)


# -- plan


SAMPLES = 50


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vectors(tmp_path_factory.mktemp("shards"), SAMPLES)


def loader(shards: str, batch: int = 8, tail: str = "pad") -> ShardLoader:
    return ShardLoader(shards, VECTOR_FIELDS, global_batch_size=batch, num_workers=0, tail=tail)


def run_out(loader: ShardLoader, train: TrainConfig, step: int) -> int:
    """The reference: takes step after step until an epoch or the number of steps says stop."""
    while not (
        (train.max_steps is not None and step >= train.max_steps)
        or (train.max_epochs is not None and loader.position[0] >= train.max_epochs)
    ):
        for _ in zip(range(loader.micro_batches_per_step), iter(loader), strict=False):
            pass
        loader.commit()
        step += 1
    return step


@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize(
    ("max_steps", "max_epochs"), [(5, None), (None, 1), (None, 3), (10, 3), (100, 3), (21, 3), (19, 3)], ids=str
)
@pytest.mark.parametrize("done", [0, 4, 6, 7, 9])
def test_the_last_step_is_where_a_loop_that_counts_would_end(
    shards: str, tail: str, max_steps: int | None, max_epochs: int | None, done: int
) -> None:
    train = TrainConfig(max_steps=max_steps, max_epochs=max_epochs)
    at = loader(shards, tail=tail)
    step = run_out(at, TrainConfig(max_steps=done), 0)
    planned = last_step(train, at, step)
    reached = run_out(at, train, step)
    assert planned == reached or planned < step == reached


def test_an_epoch_that_goes_on_with_another_global_batch_ends_where_its_samples_do(shards: str) -> None:
    before = loader(shards)
    step = run_out(before, TrainConfig(max_steps=3), 0)
    after = loader(shards, batch=5)
    after.load_state_dict(before.state_dict())
    # 24 of 50 samples are used: 26 more are 6 steps of 5, and each further epoch has 10.
    assert last_step(TrainConfig(max_epochs=3), after, step) == 3 + 6 + 2 * 10
    assert run_out(after, TrainConfig(max_epochs=3), step) == 29


def test_the_horizon_is_that_of_all_epochs_even_if_max_steps_cuts_the_run_short(shards: str) -> None:
    assert schedule_horizon(TrainConfig(max_epochs=3), loader(shards)) == 21
    assert schedule_horizon(TrainConfig(max_epochs=3, max_steps=5), loader(shards)) == 21
    assert schedule_horizon(TrainConfig(max_steps=5), loader(shards)) == 5
    assert schedule_horizon(TrainConfig(max_epochs=3), loader(shards, tail="drop")) == 18


@pytest.mark.parametrize("key", ["max_steps", "max_epochs"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_run_without_a_step_is_refused(shards: str, key: str, value: int) -> None:
    with refused(ConfigError, f"train.{key}", f"got {value}", "at least 1"):
        schedule_horizon(TrainConfig(**{key: value}), loader(shards))  # type: ignore[arg-type]


def test_a_run_without_an_end_is_refused(shards: str) -> None:
    with refused(ConfigError, "train.max_steps", "null", "train.max_epochs"):
        schedule_horizon(TrainConfig(), loader(shards))


@pytest.mark.parametrize(
    ("schedule", "limits", "last_step", "expected"),
    [
        (
            WarmupCosine(horizon=100, warmup=5),
            {"max_steps": 60, "max_epochs": 10},
            60,
            "cut short by train.max_steps=60",
        ),
        (WarmupCosine(horizon=100), {"max_steps": 100, "max_epochs": 10}, 100, ""),
        (WarmupCosine(horizon=200), {"max_epochs": 10}, 100, "cut short by train.max_epochs=10"),
        (WarmupConstant(horizon=100, warmup=5), {"max_steps": 60, "max_epochs": 10}, 60, ""),  # is where it ends
        (
            WarmupConstant(horizon=100, warmup=80),
            {"max_steps": 60, "max_epochs": 10},
            60,
            "cut short by train.max_steps=60",
        ),
        (lambda step: 1 - step / 100, {"max_steps": 60, "max_epochs": 10}, 60, "cut short by train.max_steps=60"),
    ],
)
def test_a_run_that_ends_before_its_learning_rate_has_come_down_is_cut_short(
    schedule: Any, limits: dict[str, int], last_step: int, expected: str
) -> None:
    loader: Any = SimpleNamespace(steps_in=lambda epochs: 10 * epochs)
    assert cut_short(schedule, TrainConfig(**limits), loader, last_step) == expected
