"""Where every sample of an epoch lies. The oracle lays out lines and lanes as plain lists."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.order.epoch_order import EpochOrder, Layout, choose_lanes
from dtrain.data.order.lines import Recipe
from dtrain.data.order.randomness import hash64, permute
from tests.refusals import refused

counts_of_shards = st.lists(st.integers(0, 12), min_size=1, max_size=10).filter(any)
seeds = st.integers(0, 3)


@st.composite
def layouts(draw: st.DrawFn, shuffle: str = "window") -> Layout:
    per_lane, lanes = draw(st.integers(1, 4)), 1 if shuffle == "full" else draw(st.integers(1, 6))
    return Layout(per_lane * lanes, lanes)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    shuffle, tail = draw(st.sampled_from(["window", "full", "none"])), draw(st.sampled_from(["pad", "drop"]))
    return Recipe(draw(seeds), shuffle, draw(st.integers(1, 4)), tail)


def make_order(counts: Sequence[int], recipe: Recipe, epoch: int, cuts: Sequence[Layout]) -> EpochOrder:
    return EpochOrder(np.array(counts, np.int64), recipe, epoch, cuts)


def all_steps(order: EpochOrder) -> list[list[int]]:
    slots = np.arange(order.layouts[-1].global_batch_size)
    return [order.locate(step, slots).tolist() for step in range(order.first_step, order.num_steps)]


def split_lanes(line: list[int], lanes: int) -> list[list[int]]:
    return [line[len(line) * k // lanes : len(line) * (k + 1) // lanes] for k in range(lanes)]


def by_hand(counts: Sequence[int], recipe: Recipe, epoch: int, cuts: Sequence[Layout]) -> list[list[int]]:
    """The steps of the last layout; -1 where a slot is masked. Only permutations and keys are those of the code."""
    total = sum(counts)
    shards = list(range(len(counts)))
    if recipe.shuffle == "window":
        to = permute(np.arange(len(counts)), len(counts), hash64(recipe.seed, epoch, 1)).tolist()
        shards = [to[place] for place in shards]
    owner = [shard for shard in shards for _ in range(counts[shard])]
    line = [sum(counts[:shard]) + record for shard in shards for record in range(counts[shard])]
    if recipe.shuffle == "full":
        to = permute(np.arange(total), total, hash64(recipe.seed, epoch, 3)).tolist()
        line = [line[to[place]] for place in range(total)]
    if recipe.shuffle == "window":
        shuffled: list[int] = []
        for lane in split_lanes(list(range(total)), cuts[0].lanes):
            windows: dict[int, list[int]] = {}
            for place in lane:
                since = shards.index(owner[place]) - shards.index(owner[lane[0]])
                windows.setdefault(since // recipe.window, []).append(place)
            for window in windows.values():
                key = hash64(hash64(recipe.seed, epoch, 2).astype(np.int64), window[0])
                to = permute(np.arange(len(window)), len(window), key).tolist()
                shuffled += [line[window[place]] for place in to]
        line = shuffled
    for cut in cuts[:-1]:
        per_lane = cut.global_batch_size // cut.lanes
        line = [sample for lane in split_lanes(line, cut.lanes) for sample in lane[cut.steps * per_lane :]]
    batch, per_lane = cuts[-1].global_batch_size, cuts[-1].global_batch_size // cuts[-1].lanes
    steps = []
    for step in range(len(line) // batch if recipe.tail == "drop" else -(-len(line) // batch)):
        taken = [lane[step * per_lane :][:per_lane] for lane in split_lanes(line, cuts[-1].lanes)]
        steps.append([sample for lane in taken for sample in lane + [-1] * (per_lane - len(lane))])
    return steps


@given(counts=counts_of_shards, recipe=recipes(), epoch=st.integers(0, 2), data=st.data())
def test_an_epoch_is_what_plain_lists_say(counts: list[int], recipe: Recipe, epoch: int, data: st.DataObject) -> None:
    cuts = [data.draw(layouts(recipe.shuffle))]
    for _ in range(data.draw(st.integers(0, 2))):
        num_steps = len(by_hand(counts, recipe, epoch, cuts))
        cuts[-1] = Layout(cuts[-1].global_batch_size, cuts[-1].lanes, data.draw(st.integers(0, num_steps)))
        cuts.append(data.draw(layouts(recipe.shuffle)))
    assert all_steps(make_order(counts, recipe, epoch, cuts)) == by_hand(counts, recipe, epoch, cuts)


@given(counts=counts_of_shards, recipe=recipes(), epoch=st.integers(0, 5), data=st.data())
def test_each_sample_comes_exactly_once_and_masks_only_in_the_last_step(
    counts: list[int], recipe: Recipe, epoch: int, data: st.DataObject
) -> None:
    order = make_order(counts, recipe, epoch, [data.draw(layouts(recipe.shuffle))])
    steps = all_steps(order)
    used = [sample for step in steps for sample in step if sample >= 0]
    total, batch = sum(counts), order.layouts[0].global_batch_size
    assert len(set(used)) == len(used)
    if recipe.tail == "pad":
        assert sorted(used) == list(range(total))
        assert order.num_steps == -(-total // batch)
    else:
        assert len(used) == total // batch * batch
        assert order.num_steps == total // batch
    assert all(-1 not in step for step in steps[:-1])
    assert recipe.tail == "pad" or all(-1 not in step for step in steps)


@given(counts=counts_of_shards, tail=st.sampled_from(["pad", "drop"]), batch=st.integers(1, 9))
def test_no_shuffle_is_the_stored_order(counts: list[int], tail: str, batch: int) -> None:
    order = make_order(counts, Recipe(1, "none", tail=tail), 3, [Layout(batch, 1)])
    used = [sample for step in all_steps(order) for sample in step if sample >= 0]
    assert used == list(range(sum(counts) if tail == "pad" else sum(counts) // batch * batch))


@given(counts=counts_of_shards, recipe=recipes(), data=st.data())
def test_the_position_counts_the_samples_of_the_steps_before(
    counts: list[int], recipe: Recipe, data: st.DataObject
) -> None:
    cuts = [data.draw(layouts(recipe.shuffle))]
    order, before = make_order(counts, recipe, 0, cuts), 0
    for _ in range(3):
        for step, samples in enumerate(all_steps(order), order.first_step):
            assert order.position(step) == before
            before += sum(sample >= 0 for sample in samples)
        assert order.position(order.num_steps) == before
        done = data.draw(st.integers(0, order.num_steps - order.first_step))
        before = order.position(order.first_step + done)
        cuts[-1] = Layout(cuts[-1].global_batch_size, cuts[-1].lanes, done)
        cuts.append(data.draw(layouts(recipe.shuffle)))
        order = make_order(counts, recipe, 0, cuts)


@given(counts=counts_of_shards, recipe=recipes(), epoch=st.integers(0, 3), data=st.data())
def test_cut_anew_any_number_of_times_the_rest_is_exactly_the_rest(
    counts: list[int], recipe: Recipe, epoch: int, data: st.DataObject
) -> None:
    used: list[int] = []
    cuts = [data.draw(layouts(recipe.shuffle))]
    order = make_order(counts, recipe, epoch, cuts)
    for _ in range(data.draw(st.integers(1, 4))):
        done = data.draw(st.integers(0, order.num_steps - order.first_step))
        used += [sample for step in all_steps(order)[:done] for sample in step if sample >= 0]
        cuts[-1] = Layout(cuts[-1].global_batch_size, cuts[-1].lanes, done)
        cuts.append(data.draw(layouts(recipe.shuffle)))
        order = make_order(counts, recipe, epoch, cuts)
    used += [sample for step in all_steps(order) for sample in step if sample >= 0]
    assert len(set(used)) == len(used)
    left = sum(counts) - len(used)
    assert left == 0 if recipe.tail == "pad" else left < cuts[-1].global_batch_size


def test_epochs_and_seeds_differ_and_repeat_themselves() -> None:
    counts, cuts = [40] * 10, [Layout(16, 4)]
    for shuffle in ("window", "full"):
        orders = [
            all_steps(make_order(counts, Recipe(seed, shuffle), epoch, cuts)) for seed in (0, 1) for epoch in (0, 1)
        ]
        for place, order in enumerate(orders):
            for other in orders[:place]:
                same = np.mean(np.array(order) == np.array(other))
                assert same < 0.02  # one in four hundred by chance
        assert orders[3] == all_steps(make_order(counts, Recipe(1, shuffle), 1, cuts))


def test_a_run_finds_its_epoch_again_after_an_upgrade() -> None:
    # These numbers may never change: checkpoints of all runs stand on them.
    counts, cuts = [3, 0, 5, 2, 4], [Layout(4, 2, 1), Layout(3, 3)]
    begun = [[9, 6, 13, 12], [7, 5, 0, 1], [8, 4, 11, 10], [3, -1, 2, -1]]
    assert all_steps(make_order(counts, Recipe(7, window=2), 1, cuts[:1])) == begun
    rest = [[7, 4, 1], [5, 3, 11], [8, 0, 10], [-1, -1, 2]]
    assert all_steps(make_order(counts, Recipe(7, window=2), 1, cuts)) == rest
    full = [[10, 11, 5, 9, 3], [1, 8, 13, 0, 12], [7, 4, 6, 2, -1]]
    assert all_steps(make_order(counts, Recipe(7, "full"), 1, [Layout(5, 1)])) == full


@given(
    counts=st.lists(st.integers(0, 8), min_size=5, max_size=25).filter(any),
    window=st.integers(1, 4),
    layout=layouts(),
    epoch=st.integers(0, 3),
)
def test_a_lane_keeps_no_more_shards_open_than_its_window(
    counts: list[int], window: int, layout: Layout, epoch: int
) -> None:
    order = make_order(counts, Recipe(0, window=window), epoch, [layout])
    shard_of = np.repeat(np.arange(len(counts)), counts)
    steps = np.array(all_steps(order)).reshape(-1, layout.lanes, layout.global_batch_size // layout.lanes)
    for lane in range(layout.lanes):
        samples = steps[:, lane].ravel()
        shards = shard_of[samples[samples >= 0]].tolist()
        first, last = (np.array([of(shards, shard) for shard in set(shards)]) for of in (list.index, last_index))
        for place in range(len(shards)):
            assert np.count_nonzero((first <= place) & (place <= last)) <= window


def last_index(values: list[int], value: int) -> int:
    return len(values) - 1 - values[::-1].index(value)


@given(counts=counts_of_shards, recipe=recipes(), layout=layouts(), data=st.data())
def test_shards_ahead_are_those_that_slots_read_from_a_step_on(
    counts: list[int], recipe: Recipe, layout: Layout, data: st.DataObject
) -> None:
    layout = layout if recipe.shuffle == "window" else Layout(layout.global_batch_size, 1)
    order = make_order(counts, recipe, 0, [layout])
    if not order.num_steps:
        return
    step = data.draw(st.integers(0, order.num_steps - 1))
    slots = np.array(sorted(data.draw(st.sets(st.integers(0, layout.global_batch_size - 1), min_size=1))))
    owner = np.repeat(np.arange(len(counts)), counts)
    read = [order.locate(later, slots) for later in range(step, order.num_steps)]
    ahead = order.shards_ahead(step, slots, len(counts)).tolist()
    assert len(set(ahead)) == len(ahead)
    assert {int(owner[sample]) for samples in read for sample in samples if sample >= 0} <= set(ahead)
    assert order.shards_ahead(step, slots, 2).tolist() == ahead[:2]


def test_shards_of_the_windows_that_are_read_come_first() -> None:
    order = make_order([10] * 40, Recipe(0, window=2), 0, [Layout(4, 2)])
    slots = np.arange(4)
    nearest = set(order.shards_ahead(3, slots, 4).tolist())
    assert nearest == {sample // 10 for step in range(10) for sample in order.locate(step, slots).tolist()}


def test_shards_ahead_follow_a_batch_that_was_cut_anew() -> None:
    cuts = [Layout(4, 2, 7), Layout(6, 3)]
    order = make_order([10] * 8, Recipe(0, window=2), 0, cuts)
    slots = np.arange(6)
    for step in range(order.first_step, order.num_steps):
        samples = order.locate(step, slots)
        assert set((samples[samples >= 0] // 10).tolist()) <= set(order.shards_ahead(step, slots, 8).tolist())


def test_an_order_needs_memory_for_shards_but_not_for_samples() -> None:
    counts = np.full(10_000, 1_000_000_000)
    tracemalloc.start()
    try:
        order = EpochOrder(counts, Recipe(0), 0, [Layout(1024, 64, 5), Layout(96, 48)])
        order.locate(order.num_steps - 2, np.arange(96))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 500 * len(counts)


def test_many_places_are_located_as_each_alone() -> None:
    order = make_order([40, 3, 0, 22], Recipe(0), 0, [Layout(8, 4)])
    steps, slots = np.array([[0], [3], [order.num_steps - 1]]), np.array([[7, 0, -1], [1, 2, 3], [4, -1, 5]])
    alone = [
        [int(order.locate(int(step), np.array([slot]))[0]) for slot in row]
        for (step,), row in zip(steps, slots, strict=True)
    ]
    assert order.locate(steps, slots).tolist() == alone
    assert alone[0][2] == -1


@pytest.mark.parametrize(("step", "slot"), [(-1, 0), (9, 0), (0, 8), (0, -2)])
def test_a_place_outside_the_epoch_is_an_error(step: int, slot: int) -> None:
    order = make_order([65], Recipe(0), 0, [Layout(8, 4)])
    with pytest.raises(IndexError, match=r"(step|slot) -?\d+ is outside"):
        order.locate(step, np.array([slot]))


def test_default_lanes_are_the_largest_divisor_up_to_64_or_the_ranks_and_only_windows_have_them() -> None:
    assert [choose_lanes(batch, None, "window") for batch in (1, 7, 64, 96, 127, 128, 1000)] == [
        1,
        7,
        64,
        48,
        1,
        64,
        50,
    ]
    assert choose_lanes(12, 3, "window") == choose_lanes(12, 3, "none") == 3
    assert choose_lanes(12, 3, "full") == choose_lanes(12, None, "none") == 1
    for ranks, lanes in ((1, 64), (64, 64), (65, 64), (96, 64), (128, 128), (512, 512), (4096, 512)):
        assert choose_lanes(512, None, "window", ranks) == lanes
    assert choose_lanes(512, None, "none", 128) == choose_lanes(512, None, "full", 128) == 1
    for shuffle, lanes in itertools.product(("window", "none"), (0, -1, 5, 24)):
        with refused(ValueError, "data.lanes", lanes, "global batch size 12", "null"):
            choose_lanes(12, lanes, shuffle)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"shuffle": "yes"}, ["shuffle", "got 'yes'", "window, full, none"]),
        ({"tail": "repeat"}, ["tail", "got 'repeat'", "pad, drop"]),
        ({"window": 0}, ["window", "got 0"]),
        ({"seed": 2**64}, ["seed", "got 18446744073709551616", "integer of 64 bits"]),
    ],
)
def test_an_impossible_recipe_is_refused_with_what_is_possible(options: dict[str, object], names: list[str]) -> None:
    with refused(ValueError, *names):
        Recipe(**{"seed": 0, **options})  # type: ignore[arg-type]
