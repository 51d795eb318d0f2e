"""Which samples of which source come when. The oracle deals single samples to plain lists."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.order import mixture_order
from dtrain.data.order.epoch_order import EpochOrder, Layout
from dtrain.data.order.lines import Recipe
from dtrain.data.order.mixture_order import Deal, Schedule
from dtrain.data.order.mixture_position import MixturePosition, Plan
from dtrain.data.sources.datasets import SampleIndex
from tests.property_tests import examples
from tests.refusals import refused

weights = st.floats(1e-4, 1)
few = examples(8)
many = examples(30)


def constant(*values: float) -> tuple[Schedule, ...]:
    return tuple(((0, value),) for value in values)


@st.composite
def schedules(draw: st.DrawFn, sources: int) -> tuple[Schedule, ...]:
    """One constant weight, and for the others up to three points, jumps included."""
    rest = [
        tuple(
            sorted(
                draw(st.lists(st.tuples(st.integers(0, 40), st.one_of(st.just(0.0), weights)), min_size=1, max_size=3))
            )
        )
        for _ in range(sources - 1)
    ]
    return (((0, draw(weights)),), *rest)


def position(
    sizes: Sequence[int], plan: Plan, recipe: Recipe | None = None, lanes: int | None = 4, shard_size: int = 3
) -> MixturePosition:
    names = [f"s{number}" for number in range(len(sizes))]
    indexes = [SampleIndex(name, size, shard_size) for name, size in zip(names, sizes, strict=True)]
    return MixturePosition(names, indexes, plan, recipe or Recipe(0), range(len(sizes)), lanes=lanes)


def take(at: MixturePosition, steps: int) -> list[list[tuple[int, int, int]]]:
    """Commits steps; (source, epoch, sample) of each slot of each."""
    sizes = [index.num_samples for index in at._indexes]
    firsts, taken = np.cumsum([0, *sizes]), []
    for _ in range(steps):
        numbers = at.order.locate(at.step, np.arange(at.layout.global_batch_size))
        epochs, samples = np.divmod(numbers, firsts[-1])
        sources = np.searchsorted(firsts, samples, side="right") - 1
        taken.append(list(zip(sources.tolist(), epochs.tolist(), (samples - firsts[sources]).tolist(), strict=True)))
        at.advance()
    return taken


def check_exactly_once(taken: list[tuple[int, int, int]], sizes: Sequence[int]) -> None:
    """Each sample once in every epoch that its source has ended, at most once in the epoch it is in."""
    assert len(set(taken)) == len(taken)
    for source, size in enumerate(sizes):
        count = sum(one == source for one, _, _ in taken)
        wanted = {(source, epoch, sample) for epoch in range(count // size) for sample in range(size)}
        assert wanted <= set(taken)
        assert {epoch for one, epoch, _ in taken if one == source} <= set(range(-(-count // size)))


# -- the deal


@few
@given(values=st.lists(weights, min_size=1, max_size=16), batch=st.integers(1, 40))
def test_a_deal_adds_up_never_decreases_and_stays_within_two_samples_of_the_shares(
    values: list[float], batch: int
) -> None:
    drawn = Deal(constant(*values), batch).at(np.arange(200))
    assert (drawn.sum(axis=1) == np.arange(200) * batch).all()
    assert (np.diff(drawn, axis=0) >= 0).all()
    exact = np.outer(np.arange(200) * batch, np.array(values) / sum(values))
    assert np.abs(drawn - exact).max() < 2


@few
@given(data=st.data(), sources=st.integers(2, 8), batch=st.integers(1, 40))
def test_the_deal_of_a_schedule_follows_the_sum_of_the_shares(data: st.DataObject, sources: int, batch: int) -> None:
    given_weights = data.draw(schedules(sources))
    drawn = Deal(given_weights, batch).at(np.arange(80))
    assert (drawn.sum(axis=1) == np.arange(80) * batch).all()
    assert (np.diff(drawn, axis=0) >= 0).all()
    # The shares of single steps, added up: linear between the steps at which a weight is given.
    knots = sorted({0, 80, *(step for points in given_weights for step, _ in points)})
    exact = np.zeros((81, sources))
    for begin, end in itertools.pairwise(knots):
        first, last = shares_beside(given_weights, begin, 1), shares_beside(given_weights, end, -1)
        for step in range(begin, min(end, 80)):
            middle = Fraction(2 * (step - begin) + 1, 2 * (end - begin))
            exact[step + 1] = exact[step] + batch * ((1 - float(middle)) * first + float(middle) * last)
    assert np.abs(drawn - exact[:80]).max() < 4 * len(knots)


def shares_beside(given_weights: Sequence[Schedule], step: int, side: int) -> np.ndarray:
    nearby = [np.interp(step + side * 1e-9, *spread(points)) for points in given_weights]
    return np.array(nearby) / sum(nearby)


def spread(points: Schedule) -> tuple[list[float], list[float]]:
    """Points whose steps ascend strictly: of several at one step, the first is just before it and the last just after it."""
    kept = [list(group) for _, group in itertools.groupby(points, key=lambda point: point[0])]
    pairs = [(step + move, value) for group in kept for (step, value), move in ((group[0], -1e-10), (group[-1], 1e-10))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def test_a_deal_is_exact_after_any_number_of_steps() -> None:
    # The shares 0.7, 0.2 and 0.1 of 10**15 samples: floats of the product would be off by some hundred.
    drawn = Deal(constant(4, 2, 2), 1000).at(np.array([10**12]))[0].tolist()
    assert drawn == [5 * 10**14, 25 * 10**13, 25 * 10**13]


def test_the_lightest_source_comes_some_day() -> None:
    assert 0 < Deal(constant(1, 1e-15, 0), 64).step_of(1, 3) < 10**9


def test_a_deal_never_changes() -> None:
    """A resumed run finds its deal again after an upgrade."""
    drawn = Deal((((0, 0.7),), ((0, 0.2), (10, 0.4)), ((0, 1e-3),)), 32).at(np.array([1, 7, 100, 10**6]))
    assert drawn.tolist() == [[25, 7, 0], [163, 61, 0], [2057, 1140, 3], [20345163, 11625773, 29064]]


# -- the order


def by_hand(
    sizes: Sequence[int], plan: Plan, recipe: Recipe, lanes: int, steps: int
) -> Iterator[list[tuple[int, int, int]]]:
    """The slots of each step. Only the numbers of the deal and the lanes of one source are those of the code."""
    streams = [one_by_one(number, size, recipe, lanes) for number, size in enumerate(sizes)]
    drawn = Deal(plan.weights, plan.global_batch_size).at(np.arange(steps + 1))
    for counts in np.diff(drawn, axis=0).tolist():
        taken = [
            (lane, source, epoch, sample)
            for source, count in enumerate(counts)
            for lane, epoch, sample in itertools.islice(streams[source], count)
        ]
        taken.sort(key=lambda one: one[:2])  # stable: the samples of a lane stay in their order
        yield [one[1:] for one in taken]


def one_by_one(number: int, size: int, recipe: Recipe, lanes: int) -> Iterator[tuple[int, int, int]]:
    """(lane, epoch, sample) of a source without end: one sample of each lane in turn, in bit-reversed order of the lanes."""
    bits = (lanes - 1).bit_length()
    turns = sorted(range(lanes), key=lambda lane: f"{lane:0{bits}b}"[::-1])
    counts = SampleIndex("", size, 3).counts
    of_source = Recipe(number, recipe.shuffle, recipe.window)
    for epoch in itertools.count():
        order = EpochOrder(counts, of_source, epoch, [Layout(lanes, lanes)])
        for step in range(order.num_steps):
            samples = order.locate(step, np.arange(lanes)).tolist()
            yield from ((lane, epoch, samples[lane]) for lane in turns if samples[lane] >= 0)


def check_plain_lists(data: st.DataObject, sizes: list[int], batch: int) -> None:
    shuffle = data.draw(st.sampled_from(["window", "full", "none"]))
    lanes = data.draw(st.integers(1, 7)) if shuffle == "window" else 1
    recipe, plan = Recipe(0, shuffle, 2), Plan(batch, data.draw(schedules(len(sizes))), 0)
    taken = take(position(sizes, plan, recipe, lanes), 8)
    assert taken == list(by_hand(sizes, plan, recipe, lanes, 8))
    check_exactly_once([one for step in taken for one in step], sizes)


@few
@given(data=st.data(), sizes=st.lists(st.integers(4, 40), min_size=1, max_size=4), batch=st.integers(1, 20))
def test_a_mixture_is_what_plain_lists_say(data: st.DataObject, sizes: list[int], batch: int) -> None:
    check_plain_lists(data, sizes, batch)


@pytest.mark.slow
@many
@given(data=st.data(), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=16), batch=st.integers(1, 40))
def test_many_mixtures_are_what_plain_lists_say(data: st.DataObject, sizes: list[int], batch: int) -> None:
    check_plain_lists(data, sizes, batch)


@few
@given(data=st.data(), sizes=st.lists(st.integers(4, 60), min_size=1, max_size=6))
def test_resuming_anywhere_with_any_batch_and_weights_keeps_each_sample_once(
    data: st.DataObject, sizes: list[int]
) -> None:
    check_resuming(data, sizes)


@pytest.mark.slow
@many
@given(data=st.data(), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=16))
def test_resuming_anywhere_many_times(data: st.DataObject, sizes: list[int]) -> None:
    check_resuming(data, sizes)


def check_resuming(data: st.DataObject, sizes: list[int]) -> None:
    taken: list[tuple[int, int, int]] = []
    state: dict[str, Any] | None = None
    for _ in range(3):
        plan = Plan(
            data.draw(st.integers(1, 30)),
            constant(*(data.draw(weights) for _ in sizes)),
            data.draw(st.integers(0, len(sizes) - 1)),
        )
        again = position(sizes, plan)
        if state is not None:
            again.load_state_dict(json.loads(json.dumps(state)))
        before, samples, epoch = Counter(source for source, _, _ in taken), again.samples, again.epoch
        steps = data.draw(st.integers(0, 5))
        new = [one for step in take(again, steps) for one in step]
        assert again.samples == samples + len(new) or again.epoch > epoch
        taken += new
        total = sum(points[0][1] for points in plan.weights)
        for source, count in Counter(source for source, _, _ in taken).items():
            share = plan.weights[source][0][1] / total
            assert abs(count - before[source] - len(new) * share) < max(2, plan.global_batch_size)
        assert again.drawn() == {f"s{n}": sum(one == n for one, _, _ in taken) for n in range(len(sizes))}
        state = again.state_dict()
    check_exactly_once(taken, sizes)


@few
@given(data=st.data(), sizes=st.lists(st.integers(4, 60), min_size=1, max_size=4), batch=st.integers(1, 20))
def test_a_resumed_run_continues_as_if_nothing_had_happened(data: st.DataObject, sizes: list[int], batch: int) -> None:
    plan = Plan(batch, data.draw(schedules(len(sizes))), 0)
    alone = position(sizes, plan)
    expected = take(alone, 7)
    first = position(sizes, plan)
    done = data.draw(st.integers(0, 7))
    assert take(first, done) == expected[:done]
    second = position(sizes, plan, Recipe(0, window=3), lanes=None)  # the default lanes are kept from the state
    second._default_window = True
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, 7 - done) == expected[done:]
    assert second.state_dict() == alone.state_dict()


@few
@given(data=st.data(), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5), batch=st.integers(1, 30))
def test_an_epoch_ends_with_the_step_in_which_the_source_of_epoch_of_ends_its_epochs(
    data: st.DataObject, sizes: list[int], batch: int
) -> None:
    epoch_of = data.draw(st.integers(0, len(sizes) - 1))
    at = position(sizes, Plan(batch, constant(*(data.draw(weights) for _ in sizes)), epoch_of))
    per_epoch = at._period // sizes[epoch_of]
    assert per_epoch == 1 or sizes[epoch_of] < batch + 4
    limits = [at.steps_in(epochs) for epochs in range(4)]
    assert at.steps_per_epoch == limits[1]
    steps = 0
    for epoch in range(3):
        assert (at.epoch, at.step, at.samples) == (epoch, 0, 0)
        assert at.steps_until(3) == limits[3] - steps
        assert at.steps_of(epoch) == limits[epoch + 1] - limits[epoch] > 0
        while at.epoch == epoch:
            drawn = at.drawn()[f"s{epoch_of}"]
            assert drawn < (epoch + 1) * per_epoch * sizes[epoch_of]
            assert at.advance() == batch
            steps += 1
        assert at.drawn()[f"s{epoch_of}"] >= (epoch + 1) * per_epoch * sizes[epoch_of]
        assert steps == limits[epoch + 1]
    at.begin(1)
    assert (at.epoch, at.step, at.steps_until(1), at.steps_until(0)) == (1, 0, 0, -limits[1])


def test_no_step_passes_two_ends_although_it_may_take_more_than_its_share() -> None:
    # A step takes 3.7 samples of the first source on average, and sometimes five.
    at = position([4, 50, 50, 50], Plan(10, constant(0.96, 0.52, 0.45, 0.64), 0))
    assert all(at.steps_of(epoch) > 0 for epoch in range(150))


def test_an_epoch_in_which_the_plan_changed_counts_all_its_samples_and_ends_with_its_source() -> None:
    first = position([20, 50], Plan(8, constant(1, 1), 0))
    take(first, 17)
    assert first.drawn() == {"s0": 68, "s1": 68}
    second = position([20, 50], Plan(8, constant(3, 1), 1))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    epoch = second.epoch
    assert second.samples == first.samples > 0
    take(second, 1)
    assert second.samples == first.samples + 8
    while second.epoch == epoch:
        second.advance()
    assert 100 <= second.drawn()["s1"] < 108


def test_beginning_the_epoch_in_which_weights_changed_begins_at_its_start() -> None:
    first = position([20, 20], Plan(8, constant(1, 1), 0))
    take(first, 7)
    assert (first.epoch, first.step) == (1, 2)
    second = position([20, 20], Plan(8, constant(3, 1), 0))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.begin(1)
    assert (second.samples, second.step, second.order.first_step) == (0, 0, 0)


def test_going_back_before_a_change_of_weights_starts_from_the_present_ones() -> None:
    first = position([20, 20], Plan(8, constant(1, 1), 0))
    take(first, 9)
    second = position([20, 20], Plan(8, constant(3, 1), 0))
    second.load_state_dict(first.state_dict())
    assert second.epoch == 1
    second.begin(0)
    assert take(second, 3) == take(position([20, 20], Plan(8, constant(3, 1), 0)), 3)


def test_partners_are_of_the_same_epoch_of_the_same_source() -> None:
    at = position([9, 30], Plan(12, constant(1, 1), 0))
    slots, total = np.arange(12), 39
    own, partners = at.order.locate(0, slots), at.order.partners(0, slots)
    assert (own // total == partners // total).all()
    assert ((own % total < 9) == (partners % total < 9)).all()
    lookup = dict(zip(own.tolist(), partners.tolist(), strict=True))
    pairs = [(one, other) for one, other in lookup.items() if other in lookup and one != other]
    assert pairs
    # Of a lane of odd length, the last sample has the one before it, which has another partner.
    assert sum(lookup[other] == one for one, other in pairs) >= len(pairs) - 1


def test_many_steps_are_located_in_parts_and_the_parts_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    order = position([90, 300], Plan(12, constant(1, 1), 0), lanes=4).order
    steps = np.arange(order.num_steps)[:, None]
    slots = np.array([3, -1, 7])  # -1 is a masked row
    whole = order.locate(steps, slots), order.partners(steps, slots)
    monkeypatch.setattr(mixture_order, "_LOCATED_TOGETHER", 20)
    assert (order.locate(steps, slots) == whole[0]).all()
    assert (order.partners(steps, slots) == whole[1]).all()


def test_shards_ahead_are_those_that_the_slots_read_next() -> None:
    counts = [300, 200]
    at = position(counts, Plan(20, constant(3, 1), 0), lanes=4)
    ahead = at.order.shards_ahead(0, np.arange(10, 20), 1000).tolist()
    read = set()
    for step in range(at.order.num_steps - 1):
        numbers = at.order.locate(step, np.arange(10, 20)) % 500
        read |= {int(n) // 3 if n < 300 else 100 + (int(n) - 300) // 3 for n in numbers.tolist()}
    # A few samples of a neighbouring lane come too, where the numbers of a step do not divide by the lanes.
    assert len(read - set(ahead)) < 0.1 * len(read)
    assert set(ahead) < set(range(100 + 67))
    assert at.order.shards_ahead(0, np.zeros(0, np.int64), 8).size == 0
    few_ahead = at.order.shards_ahead(0, np.arange(10, 20), 8).tolist()
    assert few_ahead == ahead[:8]
    assert {shard < 100 for shard in few_ahead} == {True, False}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_about_its_share_of_the_shards_of_each_source(ranks: int) -> None:
    sizes, batch = [4000, 1500, 600], 64
    at = position(sizes, Plan(batch, constant(0.6, 0.3, 0.1), 0), lanes=64, shard_size=10)
    taken = take(at, 40)
    shards: list[set[tuple[int, int, int]]] = [set() for _ in range(ranks)]
    for step in taken:
        for slot, (source, epoch, sample) in enumerate(step):
            shards[slot * ranks // batch].add((source, epoch, sample // 10))
    assert sum(map(len, shards)) < 1.25 * len(set().union(*shards))


# -- states


@pytest.mark.parametrize(
    ("change", "key", "got", "remedy"),
    [
        ({"sources": {"s0": {}, "s2": {}}}, "data.mixture", "s2 was removed, s1 is new", "Resume with s0, s2"),
        ({"seed": 1}, "seed", "1", "seed=1"),
        ({"shuffle": "full"}, "shuffle", "full", "shuffle=full"),
        ({"lanes": 8}, "lanes", "8", "lanes=8"),
        ({"window": 3}, "window", "3", "window=3"),
        ({"version": 0}, "not the state of a mixture", "0", "new run"),
    ],
)
def test_a_state_of_another_mixture_is_refused(change: dict[str, Any], key: str, got: str, remedy: str) -> None:
    at = position([10, 10], Plan(4, constant(1, 1), 0))
    take(at, 2)
    before = at.state_dict()
    with refused(ValueError, key, got, remedy):
        at.load_state_dict(before | change)
    assert at.state_dict() == before


def test_a_source_that_changed_is_named() -> None:
    at = position([10, 12], Plan(4, constant(1, 1), 0))
    with refused(ValueError, "data.mixture.s1", "11 -> 12", "new run"):
        at.load_state_dict(position([10, 11], Plan(4, constant(1, 1), 0)).state_dict())


def test_the_state_of_one_source_is_refused() -> None:
    with refused(ValueError, "mixture", "sources", "run.weights_from"):
        position([10], Plan(4, constant(1), 0)).load_state_dict({"version": 1, "data": {}, "layouts": []})


def test_lanes_below_one_are_refused() -> None:
    with refused(ValueError, "data.lanes", "0", "64"):
        position([10], Plan(4, constant(1), 0), lanes=0)
