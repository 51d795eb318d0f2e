"""Positions and their states. The oracle of an order is ``test_order``'s; here, samples are counted and crossed off."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.order.epoch_order import Layout, choose_lanes
from dtrain.data.order.lines import Recipe
from dtrain.data.order.position import Position
from dtrain.data.sources.datasets import SampleIndex
from tests.property_tests import examples
from tests.refusals import refused

SAMPLES = 47
INDEX = SampleIndex("numbers", SAMPLES, shard_size=5)


def make_position(batch: int = 6, lanes: int | None = None, **options: Any) -> Position:
    """As a loader makes it: what is not given is a default."""
    recipe = Recipe(0, **options)
    layout = Layout(batch, choose_lanes(batch, lanes, recipe.shuffle))
    return Position(INDEX, recipe, layout, default_window="window" not in options, default_lanes=lanes is None)


def resumed(state: dict[str, Any], batch: int = 6, lanes: int | None = None, **options: Any) -> Position:
    position = make_position(batch, lanes, **options)
    position.load_state_dict(state)
    return position


def kept(position: Position) -> dict[str, Any]:
    """Its state, after it went through a file."""
    state: dict[str, Any] = json.loads(json.dumps(position.state_dict()))
    return state


def next_step(position: Position) -> list[int]:
    """The samples of the next step, which is then committed."""
    order = position.order
    samples = order.locate(position.step, np.arange(order.layouts[-1].global_batch_size))
    taken: list[int] = samples[samples >= 0].tolist()
    assert position.advance() == len(taken)
    return taken


def remaining_steps(position: Position) -> list[list[int]]:
    """The steps that are left of the epoch, committed."""
    return [next_step(position) for _ in range(position.steps_left)]


def test_it_counts_samples_and_after_the_last_step_the_next_epoch_begins() -> None:
    position = make_position()
    counted = []
    for _ in range(9):
        counted.append((position.epoch, position.step, position.samples, position.steps_left))
        next_step(position)
    assert counted == [*((0, step, 6 * step, 8 - step) for step in range(8)), (1, 0, 0, 8)]


def test_an_epoch_can_be_begun_from_anywhere() -> None:
    position, straight = make_position(), make_position()
    for epoch in (0, 1):
        assert len(remaining_steps(straight)) == 8, epoch
    next_step(position)
    position.begin(2)
    assert (position.samples, remaining_steps(position)) == (0, remaining_steps(straight))


@examples(150)
@given(
    shuffle=st.sampled_from(["window", "full", "none"]),
    tail=st.sampled_from(["pad", "drop"]),
    legs=st.lists(st.tuples(st.integers(1, 12) | st.integers(13, 60), st.integers(0, 2)), min_size=2, max_size=8),
)
def test_at_any_batch_sizes_one_after_the_other_an_epoch_is_each_sample_once(
    shuffle: str, tail: str, legs: list[tuple[int, int]]
) -> None:
    state: dict[str, Any] | None = None
    used: list[int] = []
    for batch, steps in [*legs, (1, SAMPLES)]:
        position = make_position(batch, shuffle=shuffle, tail=tail)
        if state is not None:
            position.load_state_dict(state)
        if position.epoch == 1:
            break  # what was left is less than one of the new batches, and dropped
        assert position.samples == len(used)
        used += [sample for _ in range(min(steps, position.steps_left)) for sample in next_step(position)]
        state = kept(position)
        if position.epoch == 1:
            break
    assert len(set(used)) == len(used)
    assert tail == "drop" or sorted(used) == list(range(SAMPLES))


@pytest.mark.parametrize("step", range(8))
def test_from_a_state_the_same_steps_follow_also_in_the_next_epoch(step: int) -> None:
    whole = make_position()
    for _ in range(step):
        next_step(whole)
    again = resumed(kept(whole))
    assert kept(again) == kept(whole)
    assert [remaining_steps(again), remaining_steps(again)] == [remaining_steps(whole), remaining_steps(whole)]


def test_at_another_batch_size_the_rest_is_cut_as_the_shuffle_it_was_begun_with_does() -> None:
    old = make_position(shuffle="full")
    next_step(old)
    state, rest = kept(old), list(chain(*remaining_steps(old)))
    new = resumed(state, 12, 4)
    steps = remaining_steps(new)
    assert [len(step) for step in steps] == [12, 12, 12, 5]
    assert list(chain(*steps)) == rest  # the old line in larger steps
    assert new.order.recipe.shuffle == "window"  # from the next epoch on


def test_a_rest_that_fills_no_batch_of_the_new_size_is_dropped_at_once() -> None:
    old = make_position(tail="drop")
    for _ in range(6):
        next_step(old)
    new = resumed(kept(old), 12, tail="drop")
    assert (new.epoch, new.samples, new.steps_left) == (1, 0, 3)


def test_restarts_that_used_nothing_leave_no_trace_in_the_state() -> None:
    position = make_position()
    next_step(position)
    state = kept(position)
    for batch in (5, 9, 4, 6):
        flapping = resumed(state, batch)
        state = kept(flapping)
        assert len(state["layouts"]) == (1 if batch == 6 else 2)
    assert remaining_steps(flapping) == remaining_steps(position)


def test_defaults_stay_as_they_were_and_what_is_asked_for_begins_with_the_next_epoch() -> None:
    old = make_position(12, 3, window=1)
    next_step(old)
    state, rest, second = kept(old), remaining_steps(old), remaining_steps(old)
    default, asked = resumed(state, 12), resumed(state, 12, 6, window=2)
    assert kept(asked) == kept(default) == state
    assert [remaining_steps(default), remaining_steps(default)] == [rest, second]
    assert [remaining_steps(asked), (asked.order.recipe.window, asked.order.layouts)] == [rest, (2, (Layout(12, 6),))]


def test_in_an_epoch_of_which_nothing_was_used_begins_what_is_asked_for() -> None:
    old = make_position(12, 3, window=1)
    remaining_steps(old)
    state, begun = kept(old), make_position(6, 2, shuffle="window", window=2)
    begun.begin(1)
    assert remaining_steps(resumed(state, 6, 2, window=2)) == remaining_steps(begun)


def test_another_shuffle_has_defaults_of_its_own() -> None:
    old = make_position(shuffle="full", window=2)
    next_step(old)
    new = resumed(kept(old))
    remaining_steps(new)
    assert (new.order.recipe, new.order.layouts) == (Recipe(0), (Layout(6, 6),))


def test_a_state_is_a_few_numbers() -> None:
    position = make_position()
    next_step(position)
    assert kept(position) == {
        "version": 2, "data": INDEX.describe(), "seed": 0, "shuffle": "window", "window": 8, "tail": "pad",
        "epoch": 0, "position": 6, "layouts": [[6, 6, 1]],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"seed": 7}, ["seed", "7", "0", "seed=7", "new run"]),
        ({"version": 99}, ["version 99", "2", "missing keys: none"]),
        ({"layouts": None, "epoch": None}, ["missing keys: epoch, layouts"]),
        ({"data": SampleIndex("numbers", 48).describe()}, ["dataset changed", "samples 48 -> 47", "new run"]),
        ({"shuffle": "often"}, ["shuffle", "'often'", "window, full, none"]),
    ],
)
def test_what_is_no_state_of_these_data_is_refused_and_the_position_stays(
    change: dict[str, Any], parts: list[str]
) -> None:
    position = make_position(window=3)
    next_step(position)
    before = kept(position)
    state = {name: value for name, value in (kept(make_position()) | change).items() if value is not None}
    with refused(ValueError, *parts):
        position.load_state_dict(state)
    assert kept(position) == before
