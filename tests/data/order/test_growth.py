"""Data that grow and shrink between starts. The oracle keeps, as a plain list, what each epoch still owes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.order import cut
from dtrain.data.order.epoch_order import EpochOrder, Layout, choose_lanes
from dtrain.data.order.growth import Growth, ShardList
from dtrain.data.order.lines import Recipe
from dtrain.data.order.position import Position
from tests.data.order.growing import Promise, Sample, Shards, more_files, through_a_file
from tests.property_tests import examples
from tests.refusals import refused


def start(
    files: Mapping[str, int], state: dict[str, Any] | None, growth: Growth, batch: int = 6, **options: Any
) -> tuple[Position, Shards]:
    """A position on these files, restored."""
    recipe = Recipe(0, **options)
    index = Shards.of(files, state, growth)
    layout = Layout(batch, choose_lanes(batch, None, recipe.shuffle))
    position = Position(index, recipe, layout, default_lanes=True, growth=growth)
    if state is not None:
        position.load_state_dict(state)
    return position, index


def next_step(position: Position, index: Shards) -> list[Sample]:
    numbers = position.order.locate(position.step, np.arange(position.order.layouts[-1].global_batch_size))
    position.advance()
    return [index.sample(number) for number in numbers.tolist() if number >= 0]


@pytest.mark.parametrize("cases", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_every_sample_comes_as_often_as_promised_however_data_change(cases: int) -> None:
    for case in range(cases):
        rng = random.Random(case)
        shuffle, tail = rng.choice(["window", "window", "full", "none"]), rng.choice(["pad", "pad", "drop"])
        files = {"b-010.tar": rng.randint(12, 20), "b-011.tar": rng.randint(0, 9)} | more_files(rng, {}, 4)
        ever, state, promise = set(files), None, Promise(tail)
        segments = []
        for _ in range(rng.randint(2, 6)):
            when = rng.choice(["next_epoch", "now"])
            growth, batch = Growth(when, allow_removed=True), rng.randint(1, 12)
            if state is not None:
                for name in rng.sample(sorted(files), rng.randint(0, len(files) // 2)) * rng.choice([0, 0, 1]):
                    del files[name]
                new = {name: size for name, size in more_files(rng, files, 4).items() if name not in ever}
                files |= new if sum(files.values()) >= 12 else {**new, f"z-{len(ever)}.tar": 12}
                ever |= set(files)
            position, index = start(files, state, growth, batch, shuffle=shuffle, tail=tail, window=rng.randint(1, 3))
            promise.start(files, now=when == "now")
            segment = through_a_file({"settings": position.settings(), "state": position.state_dict()})
            walked = []
            for step in range(rng.choice([0, 1, rng.randint(0, 12), rng.randint(0, 60)])):
                epoch = position.epoch
                promise.take(epoch, taken := next_step(position, index), position.epoch > epoch)
                walked += [(epoch, step, sample) for sample in taken]
            segments.append((segment, step + 1 if walked else 0, walked))
            state = through_a_file(position.state_dict())
        # The last position finds the uses of all segments.
        position, index = start(files, state, Growth("next_epoch", allow_removed=True))
        asked = np.arange(index.num_samples)
        for segment, steps, walked in segments:
            there = position.at_segment(segment)
            known = int(there._index.num_samples)
            found = there.find(asked, steps)
            uses = zip(found.epoch.tolist(), found.step.tolist(), asked[found.sample].tolist(), strict=True)
            assert sorted((epoch, step, index.sample(number)) for epoch, step, number in uses) == sorted(walked)
            for step in range(0, steps, 5):
                epochs, numbers = there.samples_of(step)
                assert numbers.max() < known
                drawn = [
                    (e, step, index.sample(n)) for e, n in zip(epochs.tolist(), numbers.tolist(), strict=True) if n >= 0
                ]
                assert sorted(drawn) == sorted(use for use in walked if use[1] == step), (case, step)


names = st.lists(st.from_regex(r"[a{}é]{0,2}[0-9]{0,3}(-[0-9]{1,2})?\.tar", fullmatch=True), unique=True, max_size=30)
counted = st.builds(
    lambda start, number, width: [f"s-{n:0{width}}.tar" for n in range(start, start + number)],
    st.integers(0, 120),
    st.integers(0, 30),
    st.integers(1, 4),
)


@given(lists=st.lists(names | counted, max_size=3), data=st.data())
def test_a_list_of_shards_survives_a_file(lists: list[list[str]], data: st.DataObject) -> None:
    every = tuple(dict.fromkeys(name for part in lists for name in part))
    counts = np.array([data.draw(st.integers(0, 2)) for _ in every], np.int64)
    known = ShardList(every, counts, np.arange(len(every), dtype=np.uint32) * 2654435761)
    again = ShardList.from_state(through_a_file(known.state_dict()))
    assert again.names == known.names
    assert again.counts.tolist() == known.counts.tolist()
    assert again.checks.tolist() == known.checks.tolist()


def test_names_that_count_up_are_stored_as_a_range() -> None:
    every = (
        *(f"train-{n:05}-of-01024.tar" for n in range(1024)),
        "extra.tar",
        *(f"more-{n}.tar" for n in range(98, 102)),
    )
    state = ShardList(every, np.full(len(every), 7), np.zeros(len(every), np.uint32)).state_dict()
    assert state["names"] == [
        ["train-", "00000", "01023", "-of-01024.tar"],
        "extra.tar",
        ["more-", "98", "99", ".tar"],
        ["more-", "100", "101", ".tar"],
    ]
    assert state["counts"] == [[7, len(every)]]


def test_known_shards_keep_their_numbers_wherever_new_ones_sort() -> None:
    old = {"b.tar": 5, "d.tar": 4}
    first, _ = start(old, None, Growth())
    state = through_a_file(first.state_dict())
    _, index = start(old | {"a.tar": 3, "c.tar": 2}, state, Growth("next_epoch"))
    assert [index.sample(number) for number in (0, 8, 9, 13)] == [
        ("b.tar", 0),
        ("d.tar", 3),
        ("a.tar", 0),
        ("c.tar", 1),
    ]
    _, index = start({"a.tar": 3, "c.tar": 2, "d.tar": 4}, state, Growth("now", allow_removed=True))
    assert [index.sample(number) for number in (5, 9, 13)] == [("d.tar", 0), ("a.tar", 0), ("c.tar", 1)]


def grown(steps: int, when: str, batch: int = 4, old: int = 24, new: int = 12) -> tuple[Position, Shards]:
    files = {"b.tar": old}
    position, index = start(files, None, Growth(), batch)
    for _ in range(steps):
        next_step(position, index)
    return start(files | {"a.tar": new}, through_a_file(position.state_dict()), Growth(when), batch)


def test_new_samples_are_drawn_in_proportion_to_what_is_left() -> None:
    position, index = grown(3, "now")  # 12 old ones are left, and 12 new ones
    for _ in range(6):
        assert sum(name == "a.tar" for name, _ in next_step(position, index)) == 2
    assert (position.epoch, position.step) == (1, 0)


@examples(40)
@given(
    batch=st.sampled_from([(8, 8), (64, 64), (60, 20), (64, 1), (48, 16)]),
    counts=st.lists(st.integers(30, 90), min_size=4, max_size=40),
    data=st.data(),
)
def test_every_step_has_its_share_of_new_samples(
    batch: tuple[int, int], counts: list[int], data: st.DataObject
) -> None:
    size, lanes = batch
    old = data.draw(st.integers(2, len(counts) - 1))
    before = data.draw(st.integers(0, sum(counts[:old]) // size))
    order = EpochOrder(np.array(counts), Recipe(0), 0, [Layout(size, lanes, before, old), Layout(size, lanes)])
    share = sum(counts[old:]) / (sum(counts) - min(before * size, sum(counts[:old])))
    drawn = 0
    for step in range(before, order.num_steps - 2):
        drawn += int(np.count_nonzero(order.locate(step, np.arange(size)) >= sum(counts[:old])))
        assert abs(drawn - (step + 1 - before) * size * share) < 4


def test_with_next_epoch_the_current_one_ends_as_if_nothing_had_grown() -> None:
    whole, index = start({"b.tar": 24}, None, Growth(), 4)
    steps = [next_step(whole, index) for _ in range(6)]
    position, index = grown(2, "next_epoch")
    assert [next_step(position, index) for _ in range(4)] == steps[2:]
    assert (position.epoch, position.order.num_steps) == (1, 9)
    assert position.changes == ["new: 1 shard with 12 samples, joining at epoch 1"]


@pytest.mark.parametrize("when", ["next_epoch", "now"])
def test_an_epoch_of_which_nothing_was_used_begins_with_the_new_shards(when: str) -> None:
    position, _ = grown(6, when)  # an epoch has six steps
    assert (position.epoch, position.step, position.steps_left) == (1, 0, 9)


def test_shards_that_wait_for_the_next_epoch_can_join_at_a_later_start() -> None:
    waiting, _ = grown(2, "next_epoch")
    state = through_a_file(waiting.state_dict())
    assert state["layouts"] == [[4, 4, 2, 1]]
    position, index = start({"a.tar": 12, "b.tar": 24}, state, Growth("now"), 4)
    assert position.steps_left == (16 + 12) / 4
    used = Counter(name for _ in range(7) for name, _ in next_step(position, index))
    assert used == {"a.tar": 12, "b.tar": 16}


def test_a_horizon_counts_with_the_shards_of_the_first_start() -> None:
    position, _ = grown(2, "now")
    assert (position.steps_in(3), position.steps_per_epoch, position.has_changed) == (18, 9, True)
    again, _ = start({"a.tar": 12, "b.tar": 24}, through_a_file(position.state_dict()), Growth(), 4)
    assert (again.steps_in(3), again.steps_per_epoch, again.has_changed) == (18, 9, True)


def test_a_start_that_used_nothing_leaves_no_trace() -> None:
    once, index = grown(2, "now", batch=4)
    state = through_a_file(once.state_dict())
    for batch in (5, 3, 4):
        again, _ = start({"a.tar": 12, "b.tar": 24}, state, Growth("now"), batch)
        state = through_a_file(again.state_dict())
        assert len(state["layouts"]) == 2
    assert [next_step(again, index) for _ in range(7)] == [next_step(once, index) for _ in range(7)]


def test_very_long_lines_are_merged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for end in (2**62, 0):
        monkeypatch.setattr(cut, "_END_OF_INT64", end)
        position, index = grown(1, "now", new=7)
        found = [each.tolist() for each in position.order.find(np.arange(31))]
        steps.append((found, [next_step(position, index) for _ in range(position.steps_left)]))
    assert steps[0] == steps[1]


def test_of_a_real_size_places_are_found_again() -> None:
    counts = np.full(300_000, 30_000)  # nine billion samples
    order = EpochOrder(counts, Recipe(0), 0, [Layout(4096, 64, 700_000, 200_000), Layout(8192, 64)])
    samples = order.locate(900_000, np.arange(8192))
    step, slot = order.find(samples)
    assert set(step.tolist()) == {900_000}
    assert slot.tolist() == list(range(8192))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        pytest.param({"a.tar": 1, "b.tar": 24}, ["a.tar is new", "data.grow=next_epoch", "data.grow=now"], id="new"),
        pytest.param(
            {"a.tar": 1, "c.tar": 1, "b.tar": 24}, ["2 shards such as a.tar are new", "data.grow=now"], id="two new"
        ),
        pytest.param({"d.tar": 9}, ["start a new run"], id="all others"),
        pytest.param({"a.tar": 1, "b.tar": 23}, ["Resume with the old shards"], id="changed"),
    ],
)
def test_changed_data_are_refused_with_the_remedy(files: dict[str, int], words: list[str]) -> None:
    position, index = start({"b.tar": 24}, None, Growth())
    next_step(position, index)
    with refused(ValueError, "the dataset changed", *words):
        start(files, through_a_file(position.state_dict()), Growth())
