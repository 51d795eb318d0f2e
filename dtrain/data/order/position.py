"""The committed samples of an epoch, and the state that resumes from there.

* The *position* is an epoch, its order, and how many of its steps are committed. The trainer owns it and advances it after
  each optimizer step; micro-batches that workers have built ahead do not count. It knows nothing of ranks, workers or
  micro-batches, so it is equal on all ranks.
* The *state* is a few numbers: the data's fingerprint, the epoch, the recipe of its order, and its layouts. It resumes with
  any number of ranks and workers, and with another global batch size: the uncommitted rest of the epoch is then cut anew
  (see ``order.epoch_order``), and every sample is still used once.
* An epoch is finished in the order in which it began. A different shuffle, shuffle window or number of lanes takes effect in
  the next epoch.
* Shards may join and leave between two starts (``growth``). The state has the list of all shards that the run has known, and
  each layout of the epoch says how many of them it draws from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from dtrain.data.order.epoch_order import EpochOrder, Layout, choose_lanes
from dtrain.data.order.growth import Growth
from dtrain.data.order.index import Index
from dtrain.data.order.lines import Recipe
from dtrain.data.order.run_shards import RunShards

_VERSION = 2


@dataclass(frozen=True)
class Uses:
    """Uses of some samples, int64, shape ``[uses]`` each.

    Attributes:
        sample: Which of the samples that were asked for.
        epoch: Epoch of the data; of a mixture, that of the sample's source.
        step: Steps after the position that come before it.
        slot: Slot of the global batch.
    """

    sample: np.ndarray
    epoch: np.ndarray
    step: np.ndarray
    slot: np.ndarray

    @classmethod
    def none(cls) -> Uses:
        """No use."""
        return cls(*(np.zeros(0, np.int64) for _ in range(4)))

    def with_more(self, *columns: np.ndarray) -> Uses:
        """These and further uses, in the order of the attributes."""
        mine = (self.sample, self.epoch, self.step, self.slot)
        return Uses(*(np.concatenate(pair) for pair in zip(mine, columns, strict=True)))


class Position:
    """The position of a run; a new one is at the start of epoch 0.

    Args:
        index: Index of the dataset.
        recipe: Order of the epochs after the current one.
        layout: How those epochs are cut.
        default_window: True if the recipe's shuffle window is a default; a loaded state then keeps its own.
        default_lanes: The same for the layout's lanes.
        growth: What may have changed in the data of a loaded state.
        as_recorded: See ``RunShards``.

    Attributes:
        epoch: Number of the current epoch.
        order: Order of the current epoch, as it was when the epoch began.
        step: Committed steps of the current epoch.
        steps_per_epoch: Steps of a whole epoch.
    """

    order: EpochOrder

    def __init__(
        self,
        index: Index,
        recipe: Recipe,
        layout: Layout,
        *,
        default_window: bool = False,
        default_lanes: bool = False,
        growth: Growth = Growth(),  # noqa: B008 - frozen
        as_recorded: bool = False,
    ) -> None:
        self._index, self._shards = index, RunShards(index, growth, as_recorded=as_recorded)
        self._default_window, self._default_lanes = default_window, default_lanes
        self.recipe, self.layout = recipe, layout
        self.begin(0)
        self.steps_per_epoch = self.order.num_steps

    def begin(self, epoch: int) -> None:
        """Moves to the start of an epoch."""
        self.epoch, self.step = epoch, 0
        self.order = self._order(epoch)

    def _order(self, epoch: int) -> EpochOrder:
        """The order of a whole epoch."""
        return EpochOrder(self._index.counts, self.recipe, epoch, [self.layout], self._shards.removed)

    @property
    def samples(self) -> int:
        """Committed samples of the epoch, including bad ones."""
        return self.order.position(self.step)

    @property
    def epochs(self) -> float:
        """Committed epochs, with the part of the current one."""
        return self.epoch + self.samples / self.order.num_samples

    @property
    def steps_left(self) -> int:
        """Steps of the epoch that are not committed yet."""
        return self.order.num_steps - self.step

    def steps_of(self, epoch: int) -> int:
        """Steps of an epoch."""
        return self.order.num_steps if epoch == self.epoch else self.steps_per_epoch

    @property
    def has_changed(self) -> bool:
        """Whether shards have joined or left since the run's first start."""
        return self._shards.has_changed

    @property
    def changes(self) -> list[str]:
        """Sentences about shards that joined or left when the state was loaded."""
        return self._shards.changes

    def steps_in(self, epochs: int) -> int:
        """Steps of the first epochs of a run with this global batch size, on the shards of its first start."""
        counts = self._index.counts[: self._shards.first]
        return epochs * EpochOrder(counts, self.recipe, 0, [self.layout]).num_steps

    def steps_until(self, epoch: int) -> int:
        """Steps from this position to the start of an epoch; below 0 if the position is past it."""
        return self.steps_left + (epoch - self.epoch - 1) * self.steps_per_epoch

    def advance(self) -> int:
        """Commits one step and returns its samples over all ranks, including bad ones; may begin the next epoch."""
        order = self.order
        used = order.position(self.step + 1) - order.position(self.step)
        self.step += 1
        if self.step == order.num_steps:
            self.begin(self.epoch + 1)
        return used

    def settings(self) -> dict[str, Any]:
        """What the order of later steps depends on besides the data, the seed and the state, as values that JSON can hold."""
        recipe, layout = self.recipe, self.layout
        order = {"shuffle": recipe.shuffle, "window": recipe.window, "tail": recipe.tail}
        if self._shards.growth.when is not None:
            order["grow"] = self._shards.growth.when
        return order | {"global_batch_size": layout.global_batch_size, "lanes": layout.lanes}

    def at_segment(self, segment: Mapping[str, Any]) -> Position:
        """The position at which a segment of a run on these data began; see ``ShardLoader.segment``.

        Raises:
            ValueError: If its data or seed are different ones.
        """
        settings, state = segment["settings"], segment["state"]
        recipe = Recipe(self.recipe.seed, settings["shuffle"], settings["window"], settings["tail"])
        index = self._shards.head(state["data"])  # the order of the segment is that of the shards that it knew
        layout = Layout(settings["global_batch_size"], settings["lanes"])
        position = Position(index, recipe, layout, growth=Growth(allow_removed=True), as_recorded=True)
        position.load_state_dict(state)
        return position

    def find(self, samples: np.ndarray, steps: int) -> Uses:
        """Where the next steps use samples.

        Args:
            samples: Sample numbers, int64, shape ``[n]``.
            steps: Number of steps after the committed ones.
        """
        found = Uses.none()
        epoch, order, before = self.epoch, self.order, -self.step
        while before < steps:
            step, slot = order.find(samples)
            use = np.flatnonzero((step >= max(0, -before)) & (step < steps - before))
            found = found.with_more(use, np.full(len(use), epoch), before + step[use], slot[use])
            before += order.num_steps
            epoch += 1
            order = self._order(epoch)
        return found

    def samples_of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and sample of each slot of a step, ``step`` steps after the committed ones, int64; -1 where it is masked."""
        epoch, order, in_epoch = self.epoch, self.order, self.step + step
        if in_epoch >= order.num_steps:  # all later epochs have the same number of steps
            later, in_epoch = divmod(in_epoch - order.num_steps, self.steps_per_epoch)
            epoch += 1 + later
            order = self._order(epoch)
        samples = order.locate(in_epoch, np.arange(order.layouts[-1].global_batch_size))
        return np.full(len(samples), epoch), samples

    def state_dict(self) -> dict[str, Any]:
        """The state, as values that JSON can hold.

        ``position`` counts the committed samples of ``epoch``. ``layouts`` has [global batch size, lanes, committed steps]
        for each layout of the epoch, and the number of its shards where these are not all. ``shards`` is the list of the
        shards, ``first_shards`` their number at the first start if they have grown since, and ``removed`` has [number, epoch]
        of each shard that was removed.
        """
        *earlier, current = self.order.layouts
        layouts = [*earlier, replace(current, steps=self.step - self.order.first_step)]
        recipe = self.order.recipe
        state = {
            "version": _VERSION,
            "data": self._index.describe(),
            "seed": recipe.seed,
            "shuffle": recipe.shuffle,
            "window": recipe.window,
            "tail": recipe.tail,
            "epoch": self.epoch,
            "position": self.samples,
            "layouts": [[value for value in astuple(layout) if value is not None] for layout in layouts],
        }
        if self._index.shard_list is not None:
            state["shards"] = self._index.shard_list.state_dict()
        state |= self._shards.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the position that ``state`` describes.

        Raises:
            ValueError: If the dataset or the seed changed, or ``state`` is not a state of a loader; names the difference.
                The position is then unchanged.
        """
        known = self._check(state)
        layouts = [Layout(*layout) for layout in state["layouts"]]
        begun = Recipe(state["seed"], state["shuffle"], state["window"], state["tail"])
        step = sum(layout.steps for layout in layouts)

        def unused(lost: np.ndarray) -> int:
            whole = [replace(it, shards=_shards_of(it, known)) for it in layouts]
            order = EpochOrder(self._index.counts, begun, state["epoch"], whole, dict(state.get("removed", [])))
            return int(np.count_nonzero(order.find(lost)[0] >= step))

        drawn_from = _shards_of(layouts[-1], known) if step else 0
        self._shards = self._shards.loaded(state, known, state["epoch"], joined=drawn_from, unused=unused)
        batch, joined = self.layout.global_batch_size, _shards_of(layouts[-1], known)
        if self._shards.growth.when == "now":
            joined = len(self._index.counts)

        def changes() -> bool:
            return layouts[-1].global_batch_size != batch or _shards_of(layouts[-1], known) < joined

        if changes() and layouts[-1].steps == 0 and layouts[1:]:
            del layouts[-1]  # that run ended before its first step, so this layout has used no sample
        self._keep_defaults(begun, layouts[-1])
        self.steps_per_epoch = self._order(state["epoch"] + 1).num_steps
        if not step:
            self.begin(state["epoch"])
            return
        if changes():
            # The rest of this epoch keeps its shuffle, and the new lanes were chosen for the new shuffle: they fit only
            # if both are equal.
            same_shuffle = begun.shuffle == self.recipe.shuffle
            layouts.append(self.layout if same_shuffle else Layout(batch, choose_lanes(batch, None, begun.shuffle)))
            layouts[-1] = replace(layouts[-1], shards=joined)
        everything = len(self._index.counts)
        layouts = [replace(it, shards=None if (n := _shards_of(it, known)) == everything else n) for it in layouts]
        self.epoch, self.step = state["epoch"], step
        self.order = EpochOrder(self._index.counts, begun, self.epoch, layouts, self._shards.removed)
        if not self.steps_left:  # with tail=drop, the rest may be smaller than one of the new global batches
            self.begin(self.epoch + 1)

    def _check(self, state: Mapping[str, Any]) -> int:
        """Compares data and seed; returns how many shards the state knows."""
        missing = sorted({"version", "data", "seed", "shuffle", "window", "tail", "epoch", "layouts"} - set(state))
        if missing or state["version"] != _VERSION:
            raise ValueError(
                f"not the state of a loader: version {state.get('version')!r} (want {_VERSION}), missing keys: "
                f"{', '.join(missing) or 'none'}."
            )
        known = self._shards.check(state)
        if state["seed"] != self.recipe.seed:
            raise ValueError(
                f"seed: the state was saved with {state['seed']}, this loader has {self.recipe.seed}. Resume with "
                f"seed={state['seed']}, or start a new run."
            )
        return known

    def _keep_defaults(self, begun: Recipe, layout: Layout) -> None:
        """Keeps the saved values of settings that are defaults: a changed default must not change a resumed run."""
        if begun.shuffle == self.recipe.shuffle:
            if self._default_window:
                self.recipe = replace(self.recipe, window=begun.window)
            if self._default_lanes and layout.global_batch_size == self.layout.global_batch_size:
                self.layout = replace(layout, steps=0, shards=None)


def _shards_of(layout: Layout, known: int) -> int:
    return known if layout.shards is None else layout.shards
