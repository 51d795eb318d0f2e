"""Sources of a mixture whose shards change between starts. The oracle keeps what each source's epoch still owes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from dtrain.data.order.growth import Growth
from dtrain.data.order.lines import Recipe
from dtrain.data.order.mixture_order import Schedule
from dtrain.data.order.mixture_position import MixturePosition, Plan, saved_of_source
from tests.data.order.growing import Sample, Shards, SourcePromise, more_files, through_a_file
from tests.refusals import refused

Files = dict[str, dict[str, int]]


def start(
    files: Mapping[str, Mapping[str, int]],
    state: Mapping[str, Any] | None,
    growth: Growth = Growth(),  # noqa: B008
    *,
    batch: int = 8,
    weights: Sequence[float | Schedule] = (1, 1, 1, 1),
    epoch_of: int = 0,
    lanes: int | None = 3,
    recipe: Recipe = Recipe(0),  # noqa: B008
) -> MixturePosition:
    """A position on these files of each source, restored."""
    names = list(files)
    saved = {name: None if state is None else saved_of_source(state, name) for name in names}
    indexes = [Shards.of(files[name], saved[name], growth) for name in names]
    points = tuple(it if isinstance(it, tuple) else ((0, float(it)),) for it in weights[: len(names)])
    seeds = [sum(map(ord, name)) for name in names]
    position = MixturePosition(
        names, indexes, Plan(batch, points, epoch_of), recipe, seeds, lanes=lanes, default_window=True, growth=growth
    )
    if state is not None:
        position.load_state_dict(state)
    return position


def owned(position: MixturePosition, numbers: np.ndarray) -> list[tuple[str, int, Sample] | None]:
    """Source, its epoch, and the sample of each located number; None for a masked one."""
    totals = [index.num_samples for index in position._indexes]
    firsts = np.cumsum([0, *totals]).tolist()
    found: list[tuple[str, int, Sample] | None] = []
    for number in numbers.tolist():
        epoch, own = divmod(number, firsts[-1])
        source = max(at for at, first in enumerate(firsts[:-1]) if first <= own and totals[at])
        index = position._indexes[source]
        assert isinstance(index, Shards)
        place = (position._names[source], epoch, index.sample(own - firsts[source]))
        found.append(place if number >= 0 else None)
    return found


def next_step(position: MixturePosition) -> list[tuple[str, int, Sample] | None]:
    """The samples of the next step, by slot."""
    numbers = position.order.locate(position.step, np.arange(position.layout.global_batch_size))
    position.advance()
    return owned(position, numbers)


def walk(position: MixturePosition, promises: dict[str, SourcePromise]) -> list[tuple[str, int, Sample] | None]:
    """One step, which has to keep the promises."""
    before = position.drawn()
    taken = next_step(position)
    for name, given in position.drawn().items():
        own = [(epoch, sample) for source, epoch, sample in filter(None, taken) if source == name]
        promises[name].take(given - before[name], own)
    assert len(taken) == sum(position.drawn().values()) - sum(before.values())
    return taken


def changed(rng: random.Random, files: dict[str, int], ever: set[str]) -> None:
    """Adds and removes shards of one source; some sample is left."""
    for name in rng.sample(sorted(files), rng.randint(0, len(files) // 2)) * rng.choice([0, 0, 1]):
        del files[name]
    new = {name: size for name, size in more_files(rng, files, 4).items() if name not in ever}
    files |= new if sum(files.values()) else {**new, f"z-{len(ever)}.tar": 3}
    ever |= set(files)


def drawn_weights(rng: random.Random, sources: int) -> list[float | Schedule]:
    """Constant weights, and some that change; the last one is that of the source whose epochs are the mixture's."""
    rest: list[float | Schedule] = [
        rng.choice([0.0, 0.1, 1.0, rng.random(), ((0, 1.0), (9, rng.choice([0.0, 3.0])))]) for _ in range(sources - 1)
    ]
    return [*rest, rng.choice([0.2, 1.0, 5.0])]


@pytest.mark.parametrize("cases", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_every_source_gives_every_sample_as_often_as_promised_however_it_changes(cases: int) -> None:
    for case in range(cases):
        rng = random.Random(case)
        sources = [f"s{number}" for number in range(rng.randint(1, 4))]
        files: Files = {name: {"b-010.tar": rng.randint(1, 20)} | more_files(rng, {}, 3) for name in sources}
        ever = {name: set(files[name]) for name in sources}
        promises, lanes = {name: SourcePromise() for name in sources}, rng.randint(1, 7)
        recipe = Recipe(case, rng.choice(["window", "window", "full", "none"]), rng.randint(1, 3))
        lanes = 1 if recipe.shuffle == "full" else lanes
        state: dict[str, Any] | None = None
        segments = []
        for _ in range(rng.randint(2, 6)):
            when = rng.choice(["next_epoch", "now"])
            growth, order = Growth(when, allow_removed=True), rng.sample(sources, len(sources))
            if state is not None:
                for name in rng.sample(sources, rng.randint(0, len(sources))):
                    changed(rng, files[name], ever[name])
            position = start(
                {name: files[name] for name in order},
                state,
                growth,
                batch=rng.randint(1, 14),
                weights=drawn_weights(rng, len(sources)),
                epoch_of=len(sources) - 1,
                lanes=lanes,
                recipe=recipe,
            )
            for name in sources:
                promises[name].start(files[name], now=when == "now")
            segment = through_a_file({"settings": position.settings(), "state": position.state_dict()})
            walked = []
            for step in range(rng.choice([0, 1, rng.randint(0, 12), rng.randint(0, 40)])):
                assert position.steps_left > 0
                walked.append([(step, slot, use) for slot, use in enumerate(walk(position, promises)) if use])
                numbers = position.order.shards_ahead(position.step, np.arange(position.layout.global_batch_size), 5)
                assert set(numbers.tolist()) < set(range(sum(len(index.counts) for index in position._indexes) + 1))
            segments.append((segment, walked))
            state = through_a_file(position.state_dict())
        # The last position finds the uses of all segments.
        position = start(files, state, Growth("next_epoch", allow_removed=True), lanes=lanes, recipe=recipe)
        asked = np.arange(sum(index.num_samples for index in position._indexes))
        keys = [use[::2] for use in owned(position, asked) if use]
        for segment, walked in segments:
            there, total = position.at_segment(segment), len(asked)
            found = there.find(asked, len(walked))
            columns = (column.tolist() for column in (found.step, found.slot, found.epoch, found.sample))
            uses = sorted((step, slot, epoch, keys[sample]) for step, slot, epoch, sample in zip(*columns, strict=True))
            wanted = [(step, slot, use[1], use[::2]) for steps in walked for step, slot, use in steps]
            assert uses == sorted(wanted), case
            for step in range(0, len(walked), 5):
                epochs, numbers = there.samples_of(step)
                assert numbers.max() < total
                drawn = zip(epochs.tolist(), numbers.tolist(), strict=True)
                found_here = [(step, slot, e, keys[n]) for slot, (e, n) in enumerate(drawn) if n >= 0]
                assert found_here == sorted((s, slot, use[1], use[::2]) for s, slot, use in walked[step])


OLD = {"web": {"b.tar": 24}, "books": {"b.tar": 20}}
GROWN = {"web": {"a.tar": 12, "b.tar": 24}, "books": {"b.tar": 20}}


def grown(steps: int, when: str, files: Files = GROWN, **options: Any) -> MixturePosition:
    """After some steps on ``OLD``, resumed on other files."""
    first = start(OLD, None, **options)
    for _ in range(steps):
        next_step(first)
    return start(files, through_a_file(first.state_dict()), Growth(when, allow_removed=True), **options)


def of(name: str, steps: list[list[tuple[str, int, Sample] | None]]) -> list[list[Any]]:
    return [[use for use in step if use and use[0] == name] for step in steps]


@pytest.mark.parametrize("when", ["next_epoch", "now"])
def test_the_other_sources_go_on_as_if_nothing_had_happened(when: str) -> None:
    alone = start(OLD, None)
    steps = [next_step(alone) for _ in range(30)]
    position = grown(4, when)
    again = [next_step(position) for _ in range(26)]
    assert of("books", again) == of("books", steps[4:])
    assert [len(step) for step in of("web", again)] == [len(step) for step in of("web", steps[4:])]


def test_with_next_epoch_the_epoch_of_the_source_ends_as_it_began() -> None:
    alone = start(OLD, None)
    steps = [next_step(alone) for _ in range(15)]
    position = grown(4, "next_epoch")
    web = [use for step in of("web", [next_step(position) for _ in range(11)]) for use in step]
    expected = [use for step in of("web", steps[4:]) for use in step]
    assert web[:8] == expected[:8]  # 16 of the 24 samples were used before
    assert {epoch for _, epoch, _ in web[:8]} == {0}
    assert sorted(sample for _, epoch, sample in web[8:] if epoch == 1) == sorted(
        (name, number) for name, size in GROWN["web"].items() for number in range(size)
    )
    assert grown(4, "next_epoch").changes == ["web: new: 1 shard with 12 samples, joining at epoch 1"]


def test_with_now_new_samples_are_drawn_in_proportion_to_what_is_left() -> None:
    position = grown(3, "now")  # 12 old ones of web are left, and 12 new ones
    assert position.changes == ["web: new: 1 shard with 12 samples, joining the rest of epoch 0"]
    drawn = [sample[0] for step in of("web", [next_step(position) for _ in range(6)]) for _, _, sample in step]
    assert [abs(drawn[: 4 * step].count("a.tar") - 2 * step) <= 1 for step in range(1, 7)] == [True] * 6


@pytest.mark.parametrize(("batch", "lanes"), [(40, 64), (17, 5)])
def test_every_stretch_of_steps_has_its_share_of_new_samples(batch: int, lanes: int) -> None:
    files = {"web": {f"b-{n:02}.tar": 90 + n for n in range(12)}, "books": {"b.tar": 400}}
    for taken in (1, 5):
        first = start(files, None, batch=batch, lanes=lanes, weights=(3, 1))
        for _ in range(taken):
            next_step(first)
        more = {**files, "web": files["web"] | {f"a-{n}.tar": 70 for n in range(9)}}
        position = start(
            more, through_a_file(first.state_dict()), Growth("now"), batch=batch, lanes=lanes, weights=(3, 1)
        )
        left = sum(files["web"].values()) - first.drawn()["web"]
        share, old, new = 9 * 70 / (left + 9 * 70), 0, 0
        while old + new < left + 9 * 70 - batch:
            names = [use[2][0] for use in next_step(position) if use and use[0] == "web"]
            new += sum(name.startswith("a-") for name in names)
            old += sum(name.startswith("b-") for name in names)
            assert abs(new - (old + new) * share) < 4


def test_the_epoch_of_the_mixture_ends_with_that_of_its_source_however_it_grew() -> None:
    # web gives 4 samples a step: its epochs have 6 steps, and with the new shard 9.
    position = grown(4, "now")
    assert (position.epoch, position.step, position.steps_left, position.steps_per_epoch) == (0, 4, 5, 9)
    assert (position.steps_in(2), position.has_changed, position.steps_until(3)) == (12, True, 5 + 9 + 9)
    position = grown(4, "next_epoch")
    assert (position.steps_left, position.steps_until(2), position.samples) == (2, 2 + 9, 32)
    position = grown(10, "now")
    assert (position.epoch, position.step, position.steps_left, position.samples) == (1, 4, 5, 32)
    again = start(GROWN, through_a_file(position.state_dict()), batch=10)
    assert (again.epoch, again.step, again.samples, again.steps_left) == (1, 4, 32, 4)  # 20 samples, five a step
    position = grown(4, "now", files={"web": OLD["web"], "books": {"b.tar": 20, "c.tar": 9}})
    assert (position.steps_left, position.steps_in(2), position.has_changed) == (2, 12, False)


def test_a_source_of_several_epochs_a_step_grows() -> None:
    files: Files = {"tiny": {"a.tar": 3}, "web": {"a.tar": 50}}
    first = start(files, None, batch=16)
    next_step(first)  # of tiny, two epochs and two samples
    more: Files = {"tiny": {"a.tar": 3, "b.tar": 40}, "web": {"a.tar": 50}}
    position = start(more, through_a_file(first.state_dict()), Growth("now"), batch=16)
    used = [
        (epoch, name) for step in of("tiny", [next_step(position) for _ in range(5)]) for _, epoch, (name, _) in step
    ]
    assert (used.count((2, "a.tar")), used.count((2, "b.tar"))) == (1, 39)
    assert position.steps_left == 1
    next_step(position)
    assert position.epoch == 1


def test_beginning_an_earlier_epoch_is_as_if_the_shards_had_been_there_from_the_beginning() -> None:
    files = {"web": {"a.tar": 12}, "books": {"b.tar": 20}}
    position = grown(10, "now", files=files)
    assert position.epoch == 1
    fresh = start(files, None)
    for epoch in (1, 0):  # the current epoch began with another shard
        position.begin(epoch)
        assert (position.epoch, position.step) == (epoch, 0)
    web = [use for step in of("web", [next_step(position) for _ in range(3)]) for use in step]
    assert sorted(use[2] for use in web) == sorted(
        use[2] for step in range(3) for use in of("web", [next_step(fresh)])[0]
    )
    state = through_a_file(position.state_dict())
    assert start(files, state, Growth(allow_removed=True)).drawn() == position.drawn()


def test_removed_samples_are_masked_in_this_epoch_and_no_part_of_later_ones() -> None:
    position = grown(4, "next_epoch", files={"web": {"a.tar": 12}, "books": {"b.tar": 20}})
    assert position.changes == [
        "web: new: 1 shard with 12 samples, joining at epoch 1",
        "web: removed: 1 shard with 24 samples, 8 of them left out of the rest of epoch 0",
    ]
    steps = [next_step(position) for _ in range(8)]
    assert [step.count(None) for step in steps] == [4, 4, 0, 0, 0, 0, 0, 0]
    assert [epoch for step in of("web", steps[2:]) for _, epoch, _ in step] == [1] * 12 + [2] * 12


@pytest.mark.parametrize("shuffle", ["window", "none"])
def test_partners_are_of_the_same_epoch_of_the_same_source_and_were_not_removed(shuffle: str) -> None:
    files: Files = {"web": {"a.tar": 30, "b.tar": 24, "c.tar": 9}, "books": {"b.tar": 20}}
    first = start(files, None, batch=6, recipe=Recipe(0, shuffle))
    for _ in range(2):
        next_step(first)
    state = through_a_file(first.state_dict())
    later: Files = {"web": {"b.tar": 24, "c.tar": 9, "d.tar": 15}, "books": {"b.tar": 20}}
    position = start(later, state, Growth("now", allow_removed=True), batch=6, recipe=Recipe(0, shuffle))
    slots, mixed = np.arange(6), 0
    for _ in range(12):
        own = owned(position, position.order.locate(position.step, slots))
        partners = owned(position, position.order.partners(position.step, slots))
        for one, other in zip(own, partners, strict=True):
            if one is not None:
                assert other is not None
                assert one[:2] == other[:2]
                assert other[2][0] != "a.tar"
                mixed += one != other
        position.advance()
    assert mixed > 30


def test_a_source_that_gave_nothing_begins_with_its_new_shards() -> None:
    first = start(OLD, None, weights=(1, ((9, 0.0), (10, 1.0))))
    next_step(first)
    files = {"web": {"b.tar": 24}, "books": {"a.tar": 4, "b.tar": 20}}
    position = start(files, through_a_file(first.state_dict()), Growth("next_epoch"), weights=(0.1, 1))
    assert position.changes == ["books: new: 1 shard with 4 samples, joining at epoch 0"]
    books = [use for step in of("books", [next_step(position) for _ in range(6)]) for use in step]
    assert len({sample for _, epoch, sample in books if epoch == 0}) == 24


def test_a_start_in_which_a_source_gave_nothing_leaves_no_trace() -> None:
    position = grown(2, "now")
    once = through_a_file(position.state_dict())
    for _ in range(3):
        again = start({"web": {**GROWN["web"], "c.tar": 5}, "books": {"b.tar": 20}}, once, Growth("now"))
        assert again.state_dict()["growth"]["web"]["cuts"] == ((8, 1), (0, 3))
        once = through_a_file(again.state_dict())


def test_a_state_holds_no_more_of_a_cut_epoch_than_it_needs() -> None:
    position = grown(2, "now")
    for _ in range(9):
        next_step(position)
    assert position.source_epochs() == {"web": 1 + 8 / 36, "books": 2 + 4 / 20}
    again = start(GROWN, through_a_file(position.state_dict()))
    assert again.state_dict()["growth"] == {"web": {"first_shards": 1, "epoch": 1, "start": 36, "cuts": ()}}
    assert [next_step(again) for _ in range(20)] == [next_step(position) for _ in range(20)]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        pytest.param(GROWN, ["data.mixture.web", "a.tar is new", "data.grow=next_epoch"], id="new"),
        pytest.param(
            {**OLD, "web": {"a.tar": 1, "b.tar": 23}}, ["data.mixture.web", "Resume with the old shards"], id="changed"
        ),
        pytest.param({**OLD, "books": {"c.tar": 9}}, ["data.mixture.books", "start a new run"], id="all others"),
    ],
)
def test_changed_data_are_refused_with_the_source_and_the_remedy(files: Files, words: list[str]) -> None:
    first = start(OLD, None)
    next_step(first)
    with refused(ValueError, "changed since this state was saved", *words):
        start(files, through_a_file(first.state_dict()))
