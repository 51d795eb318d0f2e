"""Where a sample is used. The oracle walks through the steps, one after the other, and looks for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.order.epoch_order import EpochOrder, Layout, choose_lanes
from dtrain.data.order.lines import Recipe
from dtrain.data.order.mixed_sources import MixedSources
from dtrain.data.order.mixture_order import Deal, MixtureOrder, Schedule
from dtrain.data.order.mixture_position import MixturePosition, Plan
from dtrain.data.order.position import Position, Uses
from dtrain.data.order.randomness import permute, unpermute
from dtrain.data.sources.datasets import SampleIndex
from tests.property_tests import examples

keys = st.integers(0, 2**64 - 1)
few = examples(15)
#: Sample, epoch, step and slot.
Used = tuple[int, int, int, int]


def as_set(uses: Uses) -> set[Used]:
    found = list(zip(*(column.tolist() for column in (uses.sample, uses.epoch, uses.step, uses.slot)), strict=True))
    assert len(set(found)) == len(found)
    return set(found)


def through_a_file(value: Any) -> Any:
    return json.loads(json.dumps(value))


# -- permutations


@given(size=st.integers(1, 100_000), key=keys)
def test_unpermute_is_the_inverse_of_permute(size: int, key: int) -> None:
    index = np.arange(size)
    assert (unpermute(permute(index, size, np.uint64(key)), size, np.uint64(key)) == index).all()


@given(size=st.integers(1, 2**52), key=keys, data=st.data())
def test_unpermute_is_the_inverse_in_huge_domains(size: int, key: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50)))
    assert (unpermute(permute(index, size, np.uint64(key)), size, np.uint64(key)) == index).all()
    assert (permute(unpermute(index, size, np.uint64(key)), size, np.uint64(key)) == index).all()


def test_unpermute_is_the_inverse_for_every_small_size_and_at_the_ends_of_the_largest() -> None:
    for size in [*range(1, 130), 2**52]:
        index = np.arange(size) if size < 2**52 else np.array([0, 1, 2**26 - 1, 2**26, 2**52 - 2, 2**52 - 1])
        assert (unpermute(permute(index, size, np.uint64(5)), size, np.uint64(5)) == index).all()


@given(data=st.data())
def test_each_place_has_a_size_and_a_key_of_its_own(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(1, 1000), keys, st.integers(0, 999)), min_size=1, max_size=30))
    size = np.array([row[0] for row in rows])
    key = np.array([row[1] for row in rows], np.uint64)
    index = np.array([row[2] % row[0] for row in rows])
    assert (unpermute(permute(index, size, key), size, key) == index).all()


# -- an epoch


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    shuffle, tail = draw(st.sampled_from(["window", "full", "none"])), draw(st.sampled_from(["pad", "drop"]))
    return Recipe(draw(st.integers(0, 3)), shuffle, draw(st.integers(1, 4)), tail)


@st.composite
def layouts(draw: st.DrawFn, shuffle: str) -> Layout:
    per_lane, lanes = draw(st.integers(1, 4)), 1 if shuffle == "full" else draw(st.integers(1, 6))
    return Layout(per_lane * lanes, lanes)


@settings(max_examples=100)  # by default too: one sample at the end of a layout makes the difference
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=10).filter(any),
    recipe=recipes(),
    epoch=st.integers(0, 5),
    data=st.data(),
)
def test_an_epoch_finds_each_sample_where_it_locates_it(
    counts: list[int], recipe: Recipe, epoch: int, data: st.DataObject
) -> None:
    sizes, cuts, walked, total = np.array(counts), [data.draw(layouts(recipe.shuffle))], {}, sum(counts)
    changes = data.draw(st.integers(0, 3))
    for change in range(changes + 1):
        order = EpochOrder(sizes, recipe, epoch, cuts)
        left = order.num_steps - order.first_step
        steps = left if change == changes else data.draw(st.integers(0, left))
        for step in range(order.first_step, order.first_step + steps):
            for slot in range(cuts[-1].global_batch_size):
                sample = int(order.locate(step, np.array([slot]))[0])
                if sample >= 0:
                    assert sample not in walked
                    walked[sample] = (step, slot)
        if change < changes:
            cuts[-1] = Layout(cuts[-1].global_batch_size, cuts[-1].lanes, steps)
            cuts.append(data.draw(layouts(recipe.shuffle)))
    found_step, found_slot = order.find(np.arange(total))
    found = dict(enumerate(zip(found_step.tolist(), found_slot.tolist(), strict=True)))
    assert found == {sample: walked.get(sample, (-1, -1)) for sample in range(total)}


def test_samples_are_found_in_the_order_in_which_they_were_asked_for() -> None:
    order = EpochOrder(np.array([3, 0, 4, 5]), Recipe(1), 2, [Layout(4, 2)])
    step, slot = order.find(np.arange(12))
    asked = np.array([7, 7, 0, 11])
    assert [each.tolist() for each in order.find(asked)] == [step[asked].tolist(), slot[asked].tolist()]
    assert [each.tolist() for each in order.find(np.zeros(0, np.int64))] == [[], []]


# -- the position of a run


SAMPLES = 47


def position(batch: int, recipe: Recipe, lanes: int | None = None, shard_size: int = 5) -> Position:
    layout = Layout(batch, choose_lanes(batch, lanes, recipe.shuffle))
    return Position(SampleIndex("numbers", SAMPLES, shard_size), recipe, layout)


def segment_of(at: Position | MixturePosition) -> dict[str, Any]:
    """As a loader writes it into a checkpoint."""
    content: dict[str, Any] = through_a_file({"settings": at.settings(), "state": at.state_dict()})
    return content


def walk(at: Position, steps: int) -> set[Used]:
    """Commits steps; the uses of all samples."""
    used = set()
    for step in range(steps):
        samples = at.order.locate(at.step, np.arange(at.order.layouts[-1].global_batch_size)).tolist()
        used |= {(sample, at.epoch, step, slot) for slot, sample in enumerate(samples) if sample >= 0}
        at.advance()
    return used


def check_segment(
    here: Position | MixturePosition, segment: dict[str, Any], walked: set[Used], steps: int, samples: int
) -> None:
    """Compares what a position on the same data finds in a segment with a walk through its steps."""
    asked = np.arange(samples)[::-1]
    found = as_set(here.at_segment(segment).find(asked, steps))
    assert {(int(asked[sample]), *rest) for sample, *rest in found} == walked
    rows = set()
    for step in range(steps):
        epochs, numbers = here.at_segment(segment).samples_of(step)
        rows |= {
            (number, epoch, step, slot)
            for slot, (epoch, number) in enumerate(zip(epochs.tolist(), numbers.tolist(), strict=True))
            if number >= 0
        }
    assert rows == walked


@pytest.mark.slow
@examples(40)
@given(
    recipe=recipes(),
    legs=st.lists(st.tuples(st.integers(1, 12) | st.integers(13, 60), st.integers(0, 20)), min_size=1, max_size=4),
    later=recipes(),
)
def test_each_segment_of_a_run_finds_the_uses_of_a_walk_through_it(
    recipe: Recipe, legs: list[tuple[int, int]], later: Recipe
) -> None:
    state: dict[str, Any] | None = None
    # A shuffle that is changed on resume applies from the next epoch on.
    recipes_of_legs = [recipe, *(Recipe(recipe.seed, later.shuffle, later.window, later.tail) for _ in legs)]
    for (batch, steps), current in zip(legs, recipes_of_legs, strict=False):
        if current.tail == "drop" and batch > SAMPLES:
            batch = SAMPLES
        at = position(batch, current)
        if state is not None:
            at.load_state_dict(state)
        segment = segment_of(at)
        walked = walk(at, steps)
        check_segment(position(7, Recipe(recipe.seed)), segment, walked, steps, SAMPLES)
        state = through_a_file(at.state_dict())


def test_a_segment_that_begins_in_mid_epoch_finds_nothing_of_the_steps_before() -> None:
    at = position(6, Recipe(0))
    before = walk(at, 3)
    segment = segment_of(at)
    after = {use[0] for use in as_set(position(6, Recipe(0)).at_segment(segment).find(np.arange(SAMPLES), 5))}
    assert after == set(range(SAMPLES)) - {use[0] for use in before}


def test_a_segment_of_no_steps_has_no_uses() -> None:
    at = position(6, Recipe(0))
    assert as_set(at.at_segment(segment_of(at)).find(np.arange(SAMPLES), 0)) == set()


@pytest.mark.parametrize("difference", ["data", "seed"])
def test_a_segment_of_different_data_or_of_a_different_seed_is_refused(difference: str) -> None:
    segment = segment_of(position(6, Recipe(0)))
    here = (
        position(6, Recipe(1))
        if difference == "seed"
        else Position(SampleIndex("numbers", SAMPLES + 1, 5), Recipe(0), Layout(6, 6))
    )
    with pytest.raises(ValueError, match="seed" if difference == "seed" else "dataset changed"):
        here.at_segment(segment)


# -- mixtures

weights = st.floats(1e-3, 1)
NAMES = ("a", "b", "c", "d")


@st.composite
def schedules(draw: st.DrawFn, sources: int) -> dict[str, Schedule]:
    """One constant weight, and for the others up to three points, jumps and zeros included."""
    made: dict[str, Schedule] = {"a": ((0, draw(weights)),)}
    for name in NAMES[1:sources]:
        points = draw(
            st.lists(st.tuples(st.integers(0, 40), st.just(0.0) | weights), min_size=1, max_size=3, unique=True)
        )
        made[name] = tuple(sorted(points))
    return made


class Sources:
    """A mixture: sources with sizes, that a start may list in a different order."""

    def __init__(self, sizes: dict[str, int], recipe: Recipe, lanes: int, shard_size: int) -> None:
        self.sizes, self.recipe, self.lanes, self.shard_size = sizes, recipe, lanes, shard_size

    def position(
        self, batch: int, schedule: dict[str, Schedule], order: Sequence[str], epoch_of: str = "a"
    ) -> MixturePosition:
        plan = Plan(batch, tuple(schedule[name] for name in order), list(order).index(epoch_of))
        indexes = [SampleIndex(name, self.sizes[name], self.shard_size) for name in order]
        seeds = [NAMES.index(name) for name in order]
        return MixturePosition(order, indexes, plan, self.recipe, seeds, lanes=self.lanes)

    def walk(self, at: MixturePosition, steps: int, order: Sequence[str]) -> set[Used]:
        """Commits steps; the uses of all samples, counted over the sources by name."""
        of_order = np.cumsum([0, *(self.sizes[name] for name in order)])
        by_name = dict(
            zip(sorted(self.sizes), np.cumsum([0, *(self.sizes[n] for n in sorted(self.sizes))]), strict=False)
        )
        used = set()
        for step in range(steps):
            located = at.order.locate(at.step, np.arange(at.layout.global_batch_size)).tolist()
            for slot, number in enumerate(located):
                epoch, sample = divmod(number, int(of_order[-1]))
                source = int(np.searchsorted(of_order, sample, side="right")) - 1
                own = int(by_name[order[source]]) + sample - int(of_order[source])
                used.add((own, epoch, step, slot))
            at.advance()
        return used


@pytest.mark.slow
@few
@given(
    data=st.data(),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    shuffle=st.sampled_from(["window", "full", "none"]),
    lanes=st.integers(1, 5),
)
def test_each_segment_of_a_mixture_finds_the_uses_of_a_walk_through_it(
    data: st.DataObject, sizes: list[int], shuffle: str, lanes: int
) -> None:
    names = NAMES[: len(sizes)]
    sources = Sources(
        dict(zip(names, sizes, strict=True)),
        Recipe(3, shuffle, data.draw(st.integers(1, 4))),
        1 if shuffle == "full" else lanes,
        data.draw(st.integers(1, 6)),
    )
    # The samples are counted over the sources as this start lists them: by name.
    here = sources.position(5, dict.fromkeys(names, ((0, 1.0),)), names)
    state: dict[str, Any] | None = None
    for _ in range(data.draw(st.integers(1, 3))):
        order = data.draw(st.permutations(names))
        at = sources.position(data.draw(st.integers(1, 24)), data.draw(schedules(len(sizes))), order)
        if state is not None:
            at.load_state_dict(state)
        steps = data.draw(st.integers(0, 30))
        segment = segment_of(at)
        walked = sources.walk(at, steps, order)
        check_segment(here, segment, walked, steps, sum(sizes))
        state = through_a_file(at.state_dict())


def test_a_source_that_is_smaller_than_its_part_of_a_step_is_found_in_several_epochs_of_one_step() -> None:
    sources = Sources({"a": 3, "b": 50}, Recipe(0), 2, 1)
    at = sources.position(16, {"a": ((0, 1.0),), "b": ((0, 1.0),)}, "ab")
    segment = segment_of(at)
    walked = sources.walk(at, 4, "ab")
    assert max(epoch for sample, epoch, step, _ in walked if sample < 3 and step == 0) >= 1
    check_segment(at, segment, walked, 4, 53)


def test_a_source_that_is_turned_off_is_not_found_while_it_is_off() -> None:
    sources = Sources({"a": 20, "b": 10}, Recipe(0), 2, 2)
    off: Schedule = ((0, 1.0), (5, 1.0), (5, 0.0))
    at = sources.position(8, {"a": ((0, 1.0),), "b": off}, "ab")
    segment = segment_of(at)
    found = as_set(at.at_segment(segment).find(np.arange(20, 30), 40))
    assert found
    assert max(step for _, _, step, _ in found) < 5
    check_segment(at, segment, sources.walk(at, 40, "ab"), 40, 30)


@few
@given(data=st.data(), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3), lanes=st.integers(1, 6))
def test_the_draws_of_a_source_count_the_samples_that_it_gave_before(
    data: st.DataObject, sizes: list[int], lanes: int
) -> None:
    counts = [np.array([1] * size) for size in sizes]
    mixed = MixedSources(counts, [Recipe(number) for number in range(len(sizes))], lanes)
    source = data.draw(st.integers(0, len(sizes) - 1))
    # One sample a step, all of one source: the step is the number of draws.
    alone = Deal([((0, float(number == source)),) for number in range(len(sizes))], 1)
    size = sizes[source]
    order = MixtureOrder(mixed, alone, 1, 0, 3 * size, 0)
    located = order.locate(np.arange(3 * size), np.zeros(3 * size, np.int64))
    for epoch in range(3):
        draws = mixed.draws(source, epoch, np.arange(size))
        wanted = epoch * sum(sizes) + sum(sizes[:source]) + np.arange(size)
        assert sorted(draws.tolist()) == list(range(epoch * size, (epoch + 1) * size))
        assert (located[draws] == wanted).all()


@few
@given(data=st.data(), sources=st.integers(1, 4), batch=st.integers(1, 20), begin=st.integers(0, 30))
def test_the_step_of_a_draw_is_the_one_that_a_walk_through_the_deal_finds(
    data: st.DataObject, sources: int, batch: int, begin: int
) -> None:
    schedule = data.draw(schedules(sources))
    deal = Deal([schedule[name] for name in NAMES[:sources]], batch, begin, [7 * n for n in range(sources)])
    end = begin + 40
    given_by_step = deal.at(np.arange(begin, end + 1))
    for source in range(sources):
        walked = [
            step
            for step, (low, high) in enumerate(
                zip(given_by_step[:-1, source].tolist(), given_by_step[1:, source].tolist(), strict=True), begin
            )
            for _ in range(high - low)
        ]
        draws = np.arange(given_by_step[0, source], given_by_step[-1, source])
        assert deal.steps_of(source, draws, end).tolist() == walked
