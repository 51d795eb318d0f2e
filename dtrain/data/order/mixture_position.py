"""How far a run on a mixture has come: the committed steps, and its state in a checkpoint.

* The *base* is the step from which the current global batch size and weights apply, and what each source had given before.
  A run that is resumed with other values continues with a new base.
* The state has one number for each source, the samples that it has given, which ``mixture_order`` turns into epochs and
  lanes. It does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dtrain.data.order.epoch_order import Layout, Recipe, default_lanes
from dtrain.data.order.index import Index
from dtrain.data.order.mixture_order import MOST_OFF, Deal, MixedSources, MixtureOrder, Schedule
from dtrain.data.order.position import Uses

_VERSION = 1


@dataclass(frozen=True)
class Base:
    """Where the current global batch size and weights began to apply.

    Attributes:
        step: Step of the run.
        drawn: Samples that each source gave before.
        epoch: Epoch of the mixture at that step.
        epoch_start: Samples that the source of ``epoch_of`` had given when that epoch began.
        epoch_steps: Steps of that epoch before ``step``.
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

    Raises:
        ValueError: If ``lanes`` is below 1.
    """

    order: MixtureOrder

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
    ) -> None:
        if lanes is not None and lanes < 1:
            raise ValueError(f"data.lanes: got {lanes}, want at least 1, or null for {default_lanes(ranks)}.")
        self._names, self._indexes, self._plan, self._seeds = tuple(names), tuple(indexes), plan, tuple(seeds)
        self._default_window, self._default_lanes = default_window, lanes is None
        self._numbers = np.cumsum([0, *(index.num_samples for index in indexes)])[:-1]  # first sample of each source
        self._use(recipe, lanes or default_lanes(ranks))
        self._begin_deal(self._zero)
        self.begin(0)
        self.steps_per_epoch = self.order.num_steps

    def begin(self, epoch: int) -> None:
        """Moves to the start of an epoch."""
        base = self._base
        if epoch < base.epoch or (epoch == base.epoch and base.epoch_steps):
            self._begin_deal(self._zero)  # the epoch as if the run had begun with these weights
        self.epoch, self.step = epoch, 0
        self._open_epoch()

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
        """Steps of the first epochs of a run with this global batch size and these weights."""
        return Deal(self._plan.weights, self._plan.global_batch_size).step_of(
            self._plan.epoch_of, epochs * self._period
        )

    def steps_until(self, epoch: int) -> int:
        """Steps from this position to the start of an epoch; below 0 if the position is past it."""
        known = max(epoch, self._base.epoch)  # an epoch before the base had at least one step
        return self._start(known) - self.order.start - self.step - (known - epoch)

    def settings(self) -> dict[str, Any]:
        """As ``Position.settings``."""
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
        indexes, seeds = [self._indexes[number] for number in order], [self._seeds[number] for number in order]
        saved = settings["plan"]
        weights = tuple(tuple((step, weight) for step, weight in saved["weights"][name]) for name in names)
        plan = Plan(saved["global_batch_size"], weights, names.index(saved["epoch_of"]))
        recipe = Recipe(self.recipe.seed, settings["shuffle"], settings["window"])
        position = MixturePosition(names, indexes, plan, recipe, seeds, lanes=settings["lanes"])
        position._numbers = self._numbers[order]
        position.load_state_dict(state)
        return position

    def find(self, samples: np.ndarray, steps: int) -> Uses:
        """As ``Position.find``; samples are counted over all sources in the order of the mixture."""
        begin, sizes = self.order.start + self.step, self._sources.sizes
        order = MixtureOrder(self._sources, self._deal, self._plan.global_batch_size, 0, begin + steps, 0)
        drawn = self._deal.at(np.array([begin, begin + steps]))
        found = Uses.none()
        for source, (first, size) in enumerate(zip(self._numbers.tolist(), sizes.tolist(), strict=True)):
            asked = np.flatnonzero((samples >= first) & (samples < first + size))
            low, high = drawn[:, source].tolist()
            epochs = range(low // size, -(-high // size)) if asked.size else range(0)
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
        return epochs, samples - self._sources.first_samples[source] + self._numbers[source]

    def state_dict(self) -> dict[str, Any]:
        """The state, as values that JSON can hold.

        ``position`` counts the committed samples of ``epoch``, ``epoch_steps`` its committed steps, ``steps`` those of the
        run, and ``drawn`` the samples of each source. ``plan`` and ``base`` are ``Plan`` and ``Base``.
        """
        return self.settings() | {
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the position that ``state`` describes. Other weights or another global batch size apply from there on.

        Raises:
            ValueError: If the set of sources, their data, the seed, or how they are shuffled changed, or ``state`` is not a
                state of a mixture; names the difference. The position is then unchanged.
        """
        self._check(state)
        self._use(replace(self.recipe, window=state["window"]), state["lanes"])
        wanted, saved = self._plan, state["plan"]
        weights = tuple(tuple((step, weight) for step, weight in saved["weights"][name]) for name in self._names)
        self._plan = Plan(saved["global_batch_size"], weights, self._names.index(saved["epoch_of"]))
        drawn = self._in_order(state["drawn"])
        self._begin_deal(Base(**{**state["base"], "drawn": self._in_order(state["base"]["drawn"])}))
        self.epoch, self.step = state["epoch"], state["epoch_steps"]
        # The deal rounds by the order of the sources, so under another order it needs a new base, too.
        if wanted != self._plan or list(state["sources"]) != list(self._names):
            before, self._plan = self._plan, wanted
            period, epoch_start = self._period, self._epoch_start(self.epoch)
            base = Base(state["steps"], drawn, self.epoch, epoch_start, self.step, state["position"])
            self._begin_deal(base)
            if before.epoch_of != wanted.epoch_of or period != self._period:
                # The epoch of the mixture ends with the one that the source is in.
                size = self._indexes[wanted.epoch_of].num_samples
                self._begin_deal(replace(base, epoch_start=drawn[wanted.epoch_of] // size * size))
        self._open_epoch()

    def _use(self, recipe: Recipe, lanes: int) -> None:
        """Cuts the sources into lanes."""
        self.recipe, self.layout = recipe, Layout(self._plan.global_batch_size, lanes)
        recipes = [replace(recipe, seed=seed) for seed in self._seeds]
        self._sources = MixedSources([index.counts for index in self._indexes], recipes, lanes)

    def _begin_deal(self, base: Base) -> None:
        plan = self._plan
        self._base = base
        self._deal = Deal(plan.weights, plan.global_batch_size, base.step, base.drawn)
        size = self._indexes[plan.epoch_of].num_samples
        # No step passes the ends of two epochs: a source that is smaller than its part of a step goes through several.
        most = min(plan.global_batch_size, plan.global_batch_size * self._deal.most_share[plan.epoch_of] + MOST_OFF)
        self._period: int = math.ceil(most / size) * size

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

    def _check(self, state: Mapping[str, Any]) -> None:
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
        for name, index in zip(self._names, self._indexes, strict=True):
            if difference := index.difference(state["sources"][name]):
                raise ValueError(
                    f"the data of data.mixture.{name} changed since this state was saved: {difference} Resume with the old "
                    "shards, or start a new run."
                )
        fixed = {"seed": self.recipe.seed, "shuffle": self.recipe.shuffle}
        fixed |= {} if self._default_window else {"window": self.recipe.window}
        fixed |= {} if self._default_lanes else {"lanes": self.layout.lanes}
        for name, value in fixed.items():
            if state[name] != value:
                raise ValueError(
                    f"{name}: the state was saved with {state[name]}, this loader has {value}. The sources of a mixture are "
                    f"always in the middle of an epoch: resume with {name}={state[name]}, or start a new run."
                )
