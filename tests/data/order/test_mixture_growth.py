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


@pytest.mark.parametrize("cases", [60, pytest.param(1500, marks=pytest.mark.slow)])
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
