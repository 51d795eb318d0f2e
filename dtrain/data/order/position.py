"""The committed samples of an epoch, and the state that resumes from there.

* The *position* is an epoch, its order, and how many of its steps are committed. The trainer owns it and advances it after
  each optimizer step; micro-batches that workers have built ahead do not count. It knows nothing of ranks, workers or
  micro-batches, so it is equal on all ranks.
* The *state* is a few numbers: the data's fingerprint, the epoch, the recipe of its order, and its layouts. It resumes with
  any number of ranks and workers, and with another global batch size: the uncommitted rest of the epoch is then cut anew
  (see ``order.epoch_order``), and every sample is still used once.
* An epoch is finished in the order in which it began. A different shuffle, shuffle window or number of lanes takes effect in
  the next epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from dtrain.data.order.epoch_order import EpochOrder, Layout, Recipe, choose_lanes
from dtrain.data.order.index import Index

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

    Attributes:
        epoch: Number of the current epoch.
        order: Order of the current epoch, as it was when the epoch began.
        step: Committed steps of the current epoch.
        steps_per_epoch: Steps of a whole epoch.
    """

    order: EpochOrder

    def __init__(
        self, index: Index, recipe: Recipe, layout: Layout, *, default_window: bool = False, default_lanes: bool = False
    ) -> None:
        self._index = index
        self._default_window, self._default_lanes = default_window, default_lanes
        self.recipe, self.layout = recipe, layout
        self.begin(0)
        self.steps_per_epoch = self.order.num_steps

    def begin(self, epoch: int) -> None:
        """Moves to the start of an epoch."""
        self.epoch, self.step = epoch, 0
        self.order = EpochOrder(self._index.counts, self.recipe, epoch, [self.layout])

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

    def steps_in(self, epochs: int) -> int:
        """Steps of the first epochs of a run with this global batch size."""
        return epochs * self.steps_per_epoch

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
        return order | {"global_batch_size": layout.global_batch_size, "lanes": layout.lanes}

    def at_segment(self, segment: Mapping[str, Any]) -> Position:
        """The position at which a segment of a run on these data began; see ``ShardLoader.segment``.

        Raises:
            ValueError: If its data or seed are different ones.
        """
        settings, state = segment["settings"], segment["state"]
        recipe = Recipe(self.recipe.seed, settings["shuffle"], settings["window"], settings["tail"])
        position = Position(self._index, recipe, Layout(settings["global_batch_size"], settings["lanes"]))
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
            order = EpochOrder(self._index.counts, self.recipe, epoch, [self.layout])
        return found

    def samples_of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Epoch and sample of each slot of a step, ``step`` steps after the committed ones, int64; -1 where it is masked."""
        epoch, order, in_epoch = self.epoch, self.order, self.step + step
        if in_epoch >= order.num_steps:  # all later epochs have the same number of steps
            later, in_epoch = divmod(in_epoch - order.num_steps, self.steps_per_epoch)
            epoch += 1 + later
            order = EpochOrder(self._index.counts, self.recipe, epoch, [self.layout])
        samples = order.locate(in_epoch, np.arange(order.layouts[-1].global_batch_size))
        return np.full(len(samples), epoch), samples

    def state_dict(self) -> dict[str, Any]:
        """The state, as values that JSON can hold.

        ``position`` counts the committed samples of ``epoch``. ``layouts`` has [global batch size, lanes, committed steps]
        for each layout of the epoch.
        """
        *earlier, current = self.order.layouts
        layouts = [*earlier, replace(current, steps=self.step - self.order.first_step)]
        recipe = self.order.recipe
        return {
            "version": _VERSION,
            "data": self._index.describe(),
            "seed": recipe.seed,
            "shuffle": recipe.shuffle,
            "window": recipe.window,
            "tail": recipe.tail,
            "epoch": self.epoch,
            "position": self.samples,
            "layouts": [list(astuple(layout)) for layout in layouts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the position that ``state`` describes.

        Raises:
            ValueError: If the dataset or the seed changed, or ``state`` is not a state of a loader; names the difference.
                The position is then unchanged.
        """
        self._check(state)
        layouts = [Layout(*layout) for layout in state["layouts"]]
        begun = Recipe(state["seed"], state["shuffle"], state["window"], state["tail"])
        batch = self.layout.global_batch_size
        if layouts[-1].global_batch_size != batch and layouts[-1].steps == 0 and layouts[1:]:
            del layouts[-1]  # that run ended before its first step, so this layout has used no sample
        self._keep_defaults(begun, layouts[-1])
        step = sum(layout.steps for layout in layouts)
        if not step:
            self.begin(state["epoch"])
            return
        if layouts[-1].global_batch_size != batch:
            # The rest of this epoch keeps its shuffle, and the new lanes were chosen for the new shuffle: they fit only
            # if both are equal.
            same_shuffle = begun.shuffle == self.recipe.shuffle
            layouts.append(self.layout if same_shuffle else Layout(batch, choose_lanes(batch, None, begun.shuffle)))
        self.epoch, self.step = state["epoch"], step
        self.order = EpochOrder(self._index.counts, begun, self.epoch, layouts)
        if not self.steps_left:  # with tail=drop, the rest may be smaller than one of the new global batches
            self.begin(self.epoch + 1)

    def _check(self, state: Mapping[str, Any]) -> None:
        missing = sorted({"version", "data", "seed", "shuffle", "window", "tail", "epoch", "layouts"} - set(state))
        if missing or state["version"] != _VERSION:
            raise ValueError(
                f"not the state of a loader: version {state.get('version')!r} (want {_VERSION}), missing keys: "
                f"{', '.join(missing) or 'none'}."
            )
        if difference := self._index.difference(state["data"]):
            raise ValueError(
                f"the dataset changed since this state was saved: {difference} Resume with the old shards, or start a new run."
            )
        if state["seed"] != self.recipe.seed:
            raise ValueError(
                f"seed: the state was saved with {state['seed']}, this loader has {self.recipe.seed}. Resume with "
                f"seed={state['seed']}, or start a new run."
            )

    def _keep_defaults(self, begun: Recipe, layout: Layout) -> None:
        """Keeps the saved values of settings that are defaults: a changed default must not change a resumed run."""
        if begun.shuffle == self.recipe.shuffle:
            if self._default_window:
                self.recipe = replace(self.recipe, window=begun.window)
            if self._default_lanes and layout.global_batch_size == self.layout.global_batch_size:
                self.layout = replace(layout, steps=0)
