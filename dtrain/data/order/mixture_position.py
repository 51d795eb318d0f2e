"""The position of a run on a mixture: its committed steps, and its state in a checkpoint.

* The *base* is the step from which the current global batch size and weights apply, and the number of samples that each source
  had given before. A run that is resumed with different values continues with a new base.
* The state has one number for each source, the samples that it has given, which ``mixed_sources`` turns into epochs and
  lanes. It does not depend on the number of ranks.
* Shards of a source may join and leave between two starts (``growth``). The source's current epoch continues with the shards it
  began with, or with the new ones as well (``Epochs``). The deal, and the other sources, do not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dtrain.data.order.epoch_order import Layout, default_lanes
from dtrain.data.order.growth import Growth
from dtrain.data.order.index import Index
from dtrain.data.order.lines import Recipe
from dtrain.data.order.mixed_sources import Epochs, EpochSpan, MixedSources
from dtrain.data.order.mixture_order import MOST_OFF, Deal, MixtureOrder, Schedule
from dtrain.data.order.position import Uses
from dtrain.data.order.run_shards import RunShards

_VERSION = 1


@dataclass(frozen=True)
class Base:
    """Where the current global batch size and weights began to apply.

    Attributes:
        step: Step of the run.
        drawn: Samples that each source gave before.
        epoch: Epoch of the mixture at that step.
        epoch_start: Samples that the source of ``epoch_of`` had given when that epoch began. If its shards changed, the number
            from which the end of that epoch follows as if all shards had been there from the beginning.
        epoch_steps: Steps of that epoch before ``step``; below 0 if it began after that step.
        epoch_samples: Samples of that epoch before ``step``.
    """

    step: int = 0
    drawn: tuple[int, ...] = ()
    epoch: int = 0
    epoch_start: int = 0
    epoch_steps: int = 0
    epoch_samples: int = 0


@dataclass(frozen=True)
class Plan:
    """What decides the deal.

    Attributes:
        global_batch_size: Samples of a step.
        weights: Weight of each source.
        epoch_of: Number of the source whose epochs are those of the mixture.
    """

    global_batch_size: int
    weights: tuple[Schedule, ...]
    epoch_of: int


class MixturePosition:
    """The position of a run on a mixture, with the attributes and methods of ``Position``.

    Args:
        names: Names of the sources.
        indexes: Their indexes.
        plan: Global batch size and weights.
        recipe: Seed, shuffle and window.
        seeds: Seed of each source.
        lanes: Lanes of each source, which need not divide the global batch size; None: 64, or ``ranks`` if that is larger.
        default_window: True if the recipe's shuffle window is a default; a loaded state then keeps its own.
        ranks: Number of ranks, for the default number of lanes; a loaded state keeps its own.
        growth: What may have changed in the data of a loaded state.
        as_recorded: See ``RunShards``.

    Raises:
        ValueError: If ``lanes`` is below 1.
    """

    order: MixtureOrder
    recipe: Recipe
    layout: Layout
    _period: int  # samples of the source of epoch_of in an epoch of the mixture

    def __init__(
        self,
        names: Sequence[str],
        indexes: Sequence[Index],
        plan: Plan,
        recipe: Recipe,
        seeds: Sequence[int],
        *,
        lanes: int | None = None,
        default_window: bool = False,
        ranks: int = 1,
        growth: Growth = Growth(),  # noqa: B008 - frozen
        as_recorded: bool = False,
    ) -> None:
        if lanes is not None and lanes < 1:
            raise ValueError(f"data.lanes: got {lanes}, want at least 1, or null for {default_lanes(ranks)}.")
        self._names, self._indexes, self._plan, self._seeds = tuple(names), tuple(indexes), plan, tuple(seeds)
        self._default_window, self._default_lanes = default_window, lanes is None
        self._numbers = np.cumsum([0, *(index.num_samples for index in indexes)])[:-1]  # first sample of each source
        self._shards = [RunShards(index, growth, as_recorded=as_recorded) for index in indexes]
        self._grow = growth.when
        self._epochs = [Epochs()] * len(indexes)
        self._use(recipe, lanes or default_lanes(ranks))
        self._begin_deal(self._zero)
        self.begin(0)
        self.steps_per_epoch = self.order.num_steps

    def begin(self, epoch: int) -> None:
        """Moves to the start of an epoch."""
        base = self._base
        if epoch < base.epoch or (epoch == base.epoch and base.epoch_steps) or not self._knows(epoch):
            # The epoch as if the run had begun with these weights and shards.
            self._shards = [shards.from_the_beginning() for shards in self._shards]
            self._epochs = [Epochs()] * len(self._shards)
            self._use(self.recipe, self.layout.lanes)
            self._begin_deal(self._zero)
        self.epoch, self.step = epoch, 0
        self._open_epoch()

    def _knows(self, epoch: int) -> bool:
        """Whether the sources have had their present shards since an epoch began."""
        return self._sources.have_given(self._deal.at(np.array([self._start(epoch)]))[0])

    @property
    def samples(self) -> int:
        """Committed samples of the epoch, including bad ones."""
        return self.order.position(self.step)

    @property
    def epochs(self) -> float:
        """Committed epochs, with the part of the current one."""
        return self.epoch + self.step / self.order.num_steps

    @property
    def steps_left(self) -> int:
        """Steps of the epoch that are not committed yet."""
        return self.order.num_steps - self.step

    def drawn(self, steps_ahead: int = 0) -> dict[str, int]:
        """Samples of each source, over all its epochs, after so many more steps than are committed."""
        return self._by_name(self._deal.at(np.array([self.order.start + self.step + steps_ahead]))[0].tolist())

    def source_epochs(self, steps_ahead: int = 0) -> dict[str, float]:
        """Epochs of each source, with the part of the current one, after so many more steps than are committed."""
        found = {}
        for number, (name, drawn) in enumerate(self.drawn(steps_ahead).items()):
            epoch, start, end = self._span(number, drawn)
            found[name] = epoch + (drawn - start) / (end - start)
        return found

    @property
    def has_changed(self) -> bool:
        """Whether shards of the source of ``epoch_of`` have joined or left since the run's first start."""
        return self._shards[self._plan.epoch_of].has_changed

    @property
    def changes(self) -> list[str]:
        """Sentences about shards that joined or left when the state was loaded."""
        return [
            f"{name}: {change}"
            for name, shards in zip(self._names, self._shards, strict=True)
            for change in shards.changes
        ]

    def advance(self) -> int:
        """Commits one step and returns its samples over all ranks, including bad ones; may begin the next epoch."""
        self.step += 1
        if self.step == self.order.num_steps:
            self.begin(self.epoch + 1)
        return self.layout.global_batch_size

    def steps_of(self, epoch: int) -> int:
        """Steps of an epoch, the current one or a later one."""
        return self._start(epoch + 1) - self._start(epoch)

    def steps_in(self, epochs: int) -> int:
        """Steps of the first epochs of a run with this global batch size and these weights, on its first shards."""
        plan = self._plan
        first = self._shards[plan.epoch_of]
        period = self._period_of(int(first.index.counts[: first.first].sum()), self._deal)
        return Deal(plan.weights, plan.global_batch_size).step_of(plan.epoch_of, epochs * period)

    def steps_until(self, epoch: int) -> int:
        """Steps from this position to the start of an epoch; below 0 if the position is past it."""
        known = max(epoch, self._base.epoch)  # an epoch before the base had at least one step
        return self._start(known) - self.order.start - self.step - (known - epoch)

    def settings(self) -> dict[str, Any]:
        """As ``Position.settings``."""
        return self._settings() | ({} if self._grow is None else {"grow": self._grow})

    def _settings(self) -> dict[str, Any]:
        plan = {
            "global_batch_size": self._plan.global_batch_size,
            "weights": self._by_name([[list(point) for point in points] for points in self._plan.weights]),
            "epoch_of": self._names[self._plan.epoch_of],
        }
        recipe = self.recipe
        return {"shuffle": recipe.shuffle, "window": recipe.window, "lanes": self.layout.lanes, "plan": plan}

    def at_segment(self, segment: Mapping[str, Any]) -> MixturePosition:
        """As ``Position.at_segment``."""
        settings, state = segment["settings"], segment["state"]
        # The deal rounds by the order of the sources, which may have been a different one.
        order = [self._names.index(name) for name in state["sources"] if name in self._names]
        names = [self._names[number] for number in order]
        # The order of the segment is that of the shards that it knew.
        indexes = [self._shards[number].head(state["sources"][self._names[number]]) for number in order]
        seeds = [self._seeds[number] for number in order]
        saved = settings["plan"]
        weights = tuple(tuple((step, weight) for step, weight in saved["weights"][name]) for name in names)
        plan = Plan(saved["global_batch_size"], weights, names.index(saved["epoch_of"]))
        recipe = Recipe(self.recipe.seed, settings["shuffle"], settings["window"])
        growth = Growth(allow_removed=True)
        position = MixturePosition(
            names, indexes, plan, recipe, seeds, lanes=settings["lanes"], growth=growth, as_recorded=True
        )
        position._numbers = self._numbers[order]
        position.load_state_dict(state)
        return position

    def find(self, samples: np.ndarray, steps: int) -> Uses:
        """As ``Position.find``; samples are counted over all sources in the order of the mixture."""
        begin, sizes = self.order.start + self.step, np.diff(self._sources.first_samples)
        order = MixtureOrder(self._sources, self._deal, self._plan.global_batch_size, 0, begin + steps, 0)
        drawn = self._deal.at(np.array([begin, begin + steps]))
        found = Uses.none()
        for source, (first, size) in enumerate(zip(self._numbers.tolist(), sizes.tolist(), strict=True)):
            asked = np.flatnonzero((samples >= first) & (samples < first + size))
            low, high = drawn[:, source].tolist()
            epochs = range(0)
            if asked.size and low < high:
                epochs = range(self._sources.span(source, low).epoch, self._sources.span(source, high - 1).epoch + 1)
            for epoch in epochs:
                draws = self._sources.draws(source, epoch, samples[asked] - first)
                use = np.flatnonzero((draws >= low) & (draws < high))
                step = self._deal.steps_of(source, draws[use], begin + steps)
                slot = order.slots(step, source, epoch, samples[asked[use]] - first)
                found = found.with_more(asked[use], np.full(len(use), epoch), step - begin, slot)
        return found

    def samples_of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """As ``Position.samples_of``."""
        at, batch = self.order.start + self.step + step, self._plan.global_batch_size
        located = MixtureOrder(self._sources, self._deal, batch, 0, at + 1, 0).locate(at, np.arange(batch))
        epochs, samples = np.divmod(located, self._sources.first_samples[-1])
        source = np.searchsorted(self._sources.first_samples, samples, side="right") - 1
        own = samples - self._sources.first_samples[source] + self._numbers[source]
        return epochs, np.where(located < 0, -1, own)

    def state_dict(self) -> dict[str, Any]:
        """The state, as values that JSON can hold.

        ``position`` counts the committed samples of ``epoch``, ``epoch_steps`` its committed steps, ``steps`` those of the
        run, and ``drawn`` the samples of each source. ``plan`` and ``base`` are ``Plan`` and ``Base``. ``shards`` has the list
        of the shards of each source that has any, and ``growth``, for those that have changed, ``first_shards`` and ``removed``
        as in ``Position.state_dict``, and ``epoch``, ``start`` and ``cuts`` of ``Epochs``.
        """
        lists = {
            name: index.shard_list.state_dict()
            for name, index in zip(self._names, self._indexes, strict=True)
            if index.shard_list is not None
        }
        growth = {
            name: shards.state_dict() | (asdict(epochs) if epochs != Epochs() else {})
            for name, shards, epochs in zip(self._names, self._shards, self._epochs, strict=True)
            if shards.has_changed or epochs != Epochs()
        }
        changed = ({"shards": lists} if lists else {}) | ({"growth": growth} if growth else {})
        return (
            self._settings()
            | changed
            | {
                "version": _VERSION,
                "sources": self._by_name([index.describe() for index in self._indexes]),
                "seed": self.recipe.seed,
                "epoch": self.epoch,
                "position": self.samples,
                "epoch_steps": self.step,
                "steps": self.order.start + self.step,
                "drawn": self.drawn(),
                "base": asdict(self._base) | {"drawn": self._by_name(self._base.drawn)},
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the position that ``state`` describes. Other weights or another global batch size apply from there on.

        Raises:
            ValueError: If the set of sources, their data, the seed, or how they are shuffled changed, or ``state`` is not a
                state of a mixture; names the difference. The position is then unchanged.
        """
        known = self._check(state)
        wanted, saved = self._plan, state["plan"]
        weights = tuple(tuple((step, weight) for step, weight in saved["weights"][name]) for name in self._names)
        self._plan = Plan(saved["global_batch_size"], weights, self._names.index(saved["epoch_of"]))
        self.recipe, self.layout = replace(self.recipe, window=state["window"]), Layout(0, state["lanes"])
        drawn = self._in_order(state["drawn"])
        base = Base(**{**state["base"], "drawn": self._in_order(state["base"]["drawn"])})
        self._begin_deal(self._load_sources(state, known, drawn, base))
        self.epoch, self.step = state["epoch"], state["epoch_steps"]
        # The deal rounds by the order of the sources, so under another order it needs a new base, too.
        if wanted != self._plan or list(state["sources"]) != list(self._names):
            before, self._plan = self._plan, wanted
            period, epoch_start = self._period, self._epoch_start(self.epoch)
            base = Base(state["steps"], drawn, self.epoch, epoch_start, self.step, state["position"])
            self._begin_deal(base)
            if before.epoch_of != wanted.epoch_of or period != self._period:
                self._begin_deal(replace(base, epoch_start=self._start_of_this_epoch(drawn)))
        self.layout = Layout(self._plan.global_batch_size, state["lanes"])
        self.steps_per_epoch = self._steps_per_epoch()
        self._open_epoch()

    def _load_sources(self, state: Mapping[str, Any], known: Sequence[int], drawn: Sequence[int], base: Base) -> Base:
        """Continues the epochs of all sources, whose shards may have changed.

        Args:
            state: The state.
            known: How many shards it knows of each source.
            drawn: Samples that each source has given.
            base: The base of the state.

        Returns:
            The base, with another end of the current epoch of the mixture if that of the source of ``epoch_of`` has changed.
        """
        saved = [saved_of_source(state, name) for name in self._names]
        self._epochs = [_saved_epochs(each) for each in saved]
        counts = [index.counts[:number] for index, number in zip(self._indexes, known, strict=True)]
        removed = [dict(each.get("removed", [])) for each in saved]
        before = MixedSources(counts, self._recipes, self.layout.lanes, self._epochs, removed)
        self._sources = before
        first = self._plan.epoch_of
        end = self._span(first, drawn[first]).end
        for source, given in enumerate(drawn):
            self._load_source(source, saved[source], known[source], given)
        self._use(self.recipe, self.layout.lanes)
        if self._span(first, drawn[first]).end == end and before.sizes[first] == self._sources.sizes[first]:
            return base
        # The deal goes on as it is: only epochs have another length.
        return replace(
            base,
            epoch=state["epoch"],
            epoch_start=self._start_of_this_epoch(drawn),
            epoch_steps=base.step - (state["steps"] - state["epoch_steps"]),
            epoch_samples=base.epoch_samples if base.epoch == state["epoch"] else 0,
        )

    def _load_source(self, source: int, saved: Mapping[str, Any], known: int, drawn: int) -> None:
        """Continues the epoch of a source, whose shards may have changed: sets its shards and its epochs."""
        before, epochs, every = self._sources, self._epochs[source], len(self._indexes[source].counts)
        epoch, start, _ = self._span(source, drawn)

        def unused(lost: np.ndarray) -> int:
            return int(np.count_nonzero(before.draws(source, epoch, lost) >= drawn))

        is_cut = bool(epochs.cuts) and epoch == epochs.epoch
        cuts = epochs.cuts if is_cut else ((0, known),)
        drawn_from = cuts[-1][1] if drawn > start else 0
        shards = self._shards[source].loaded(saved, known, epoch, joined=drawn_from, unused=unused)
        newly_removed = len(shards.removed) > len(saved.get("removed", []))
        self._shards[source] = shards
        if epochs.cuts and not is_cut:  # all epochs since the cut one have the same shards
            epochs = Epochs(epoch, start)
        if drawn == start:
            self._epochs[source] = Epochs(epoch, start) if every > known or newly_removed else epochs
            return
        joined = every if self._grow == "now" else cuts[-1][1]
        if cuts[-1][1] < joined:
            if len(cuts) > 1 and drawn == epochs.cut_at:  # that start ended before this source gave a sample
                cuts = (*cuts[:-2], (0, cuts[-2][1]))
            taken = drawn - Epochs(epoch, start, cuts).cut_at
            cuts = (*cuts[:-1], (taken, cuts[-1][1]), (0, joined))
        is_whole = cuts == ((0, every),) and not is_cut and not newly_removed
        self._epochs[source] = epochs if is_whole else Epochs(epoch, start, cuts)

    def _use(self, recipe: Recipe, lanes: int) -> None:
        """Cuts the sources into lanes."""
        self.recipe, self.layout = recipe, Layout(self._plan.global_batch_size, lanes)
        counts, removed = [index.counts for index in self._indexes], [shards.removed for shards in self._shards]
        self._sources = MixedSources(counts, self._recipes, lanes, self._epochs, removed)

    @property
    def _recipes(self) -> list[Recipe]:
        return [replace(self.recipe, seed=seed) for seed in self._seeds]

    def _span(self, source: int, drawn: int) -> EpochSpan:
        """The epoch of a source that has given so many samples."""
        span, epochs = self._sources.span(source, drawn), self._epochs[source]
        return span._replace(start=epochs.start) if epochs.cuts and span.epoch == epochs.epoch else span

    def _begin_deal(self, base: Base) -> None:
        plan = self._plan
        self._base = base
        self._deal = Deal(plan.weights, plan.global_batch_size, base.step, base.drawn)
        self._period = self._period_of(int(self._sources.sizes[plan.epoch_of]), self._deal)

    def _period_of(self, size: int, deal: Deal) -> int:
        """Samples that a source of this size gives in an epoch of the mixture, if it is the source of ``epoch_of``."""
        plan = self._plan
        # No step passes the ends of two epochs: a source that is smaller than its part of a step goes through several.
        most = min(plan.global_batch_size, plan.global_batch_size * deal.most_share[plan.epoch_of] + MOST_OFF)
        return int(math.ceil(most / size) * size)

    def _steps_per_epoch(self) -> int:
        """Steps of the first epoch of a run with these shards and weights."""
        plan = self._plan
        deal = Deal(plan.weights, plan.global_batch_size)
        size = int(self._sources.sizes[plan.epoch_of])
        return deal.step_of(plan.epoch_of, self._period_of(size, deal))

    def _start_of_this_epoch(self, drawn: Sequence[int]) -> int:
        """``Base.epoch_start`` of an epoch of the mixture that ends with the one that its source is in."""
        source = self._plan.epoch_of
        return self._span(source, drawn[source]).end - int(self._sources.sizes[source])

    def _open_epoch(self) -> None:
        start, base = self._start(self.epoch), self._base
        before = base.epoch_samples if self.epoch == base.epoch else 0
        batch = self._plan.global_batch_size
        self.order = MixtureOrder(self._sources, self._deal, batch, start, self.steps_of(self.epoch), before)

    def _start(self, epoch: int) -> int:
        """The step of the run at which an epoch begins."""
        if epoch == self._base.epoch:
            return self._base.step - self._base.epoch_steps
        return self._deal.step_of(self._plan.epoch_of, self._epoch_start(epoch))

    def _epoch_start(self, epoch: int) -> int:
        """Samples of the source of ``epoch_of`` at which an epoch begins."""
        return self._base.epoch_start + (epoch - self._base.epoch) * self._period

    @property
    def _zero(self) -> Base:
        return Base(drawn=(0,) * len(self._names))

    def _by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._names, values, strict=True))

    def _in_order(self, values: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(values[name] for name in self._names)

    def _check(self, state: Mapping[str, Any]) -> list[int]:
        """Compares a state with this mixture; returns how many shards of each source it knows."""
        wanted = {"sources", "seed", "shuffle", "window", "lanes", "epoch", "position", "epoch_steps", "steps"}
        missing = sorted(({"version", "drawn", "plan", "base"} | wanted) - set(state))
        if missing or state["version"] != _VERSION:
            raise ValueError(
                f"not the state of a mixture: version {state.get('version')!r} (want {_VERSION}), missing keys: "
                f"{', '.join(missing) or 'none'}. A run on one source cannot continue on a mixture: start a new run, with "
                "run.weights_from=DIR to begin with its weights."
            )
        if set(state["sources"]) != set(self._names):
            changes = [f"{name} was removed" for name in state["sources"] if name not in self._names]
            changes += [f"{name} is new" for name in self._names if name not in state["sources"]]
            raise ValueError(
                f"the set of sources of data.mixture changed since this state was saved: {', '.join(changes)}. Resume with "
                f"{', '.join(state['sources'])} (a weight of 0 turns a source off), or start a new run."
            )
        known = [
            shards.check(saved_of_source(state, name), f"the data of data.mixture.{name}")
            for name, shards in zip(self._names, self._shards, strict=True)
        ]
        fixed = {"seed": self.recipe.seed, "shuffle": self.recipe.shuffle}
        fixed |= {} if self._default_window else {"window": self.recipe.window}
        fixed |= {} if self._default_lanes else {"lanes": self.layout.lanes}
        for name, value in fixed.items():
            if state[name] != value:
                raise ValueError(
                    f"{name}: the state was saved with {state[name]}, this loader has {value}. The sources of a mixture are "
                    f"always in the middle of an epoch: resume with {name}={state[name]}, or start a new run."
                )
        return known


def saved_of_source(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What the state of a mixture says of one source, as ``RunShards`` reads it."""
    shards = {"shards": state["shards"][name]} if name in state.get("shards", {}) else {}
    return {"data": state["sources"][name], **shards, **state.get("growth", {}).get(name, {})}


def _saved_epochs(saved: Mapping[str, Any]) -> Epochs:
    if "epoch" not in saved:
        return Epochs()
    return Epochs(saved["epoch"], saved["start"], tuple((taken, shards) for taken, shards in saved["cuts"]))
