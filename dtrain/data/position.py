"""How far a training has come in its samples, and the state that continues from there.

* The *position* is an epoch, its order, and how many of its steps are committed. It belongs to the trainer, and moves when
  the optimizer step is done: what workers have prefetched by then is nobody's state. Nor does it know ranks, workers or
  micro-batches, so it is equal on all ranks.
* The *state* is a few numbers: the fingerprint of the data, the epoch, the recipe of its order, and the layouts that it
  was cut into so far. It continues at any number of ranks or workers, and at another global batch size: what remains of
  the epoch is then cut anew, and every sample is still used once.
* An epoch ends in the order in which it was begun. What a new run asks for, a shuffle for example, begins with the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

from dtrain.data.order import EpochOrder, Layout, Recipe, choose_lanes
from dtrain.data.source import Index

_VERSION = 1


class Position:
    """Where a training is, at first at the start of epoch 0.

    Args:
        index: What all ranks know about the samples.
        recipe: Order of the epochs.
        layout: How an epoch is cut.
        default_window: Nobody asked for the recipe's window, so a state that is loaded keeps its own.
        default_lanes: The same of the layout's lanes.

    Attributes:
        recipe: Order of the epochs after this one.
        layout: How they are cut.
        epoch: This epoch.
        order: Its order, in which it was begun.
        step: How many of its steps are committed.
    """

    order: EpochOrder

    def __init__(
        self, index: Index, recipe: Recipe, layout: Layout, *, default_window: bool = False, default_lanes: bool = False
    ) -> None:
        self._index = index
        self._default_window, self._default_lanes = default_window, default_lanes
        self.recipe, self.layout = recipe, layout
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Goes to the start of an epoch."""
        self.epoch, self.step = epoch, 0
        self.order = EpochOrder(self._index.counts, self.recipe, epoch, [self.layout])

    @property
    def samples(self) -> int:
        """How many samples of the epoch are committed; bad ones included."""
        return self.order.position(self.step)

    @property
    def steps_left(self) -> int:
        """Steps of the epoch that are not committed yet."""
        return self.order.num_steps - self.step

    def advance(self) -> int:
        """Commits a step; after the last one of an epoch the next epoch begins.

        Returns:
            How many samples that step has, over all ranks; bad ones included.
        """
        order = self.order
        used = order.position(self.step + 1) - order.position(self.step)
        self.step += 1
        if self.step == order.num_steps:
            self.begin(self.epoch + 1)
        return used

    def state_dict(self) -> dict[str, Any]:
        """The state, which JSON can hold.

        ``position`` counts the committed samples of ``epoch``; ``layouts`` are (global batch size, lanes, steps) of each
        stretch that the epoch was cut into, the last one with the steps committed so far.
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
        """Goes to where ``state`` was taken.

        Raises:
            ValueError: If the data set or the seed changed since, or this is no such state; names what differs. The
                position is then as it was.
        """
        self._check(state)
        layouts = [Layout(*layout) for layout in state["layouts"]]
        begun = Recipe(state["seed"], state["shuffle"], state["window"], state["tail"])
        batch = self.layout.global_batch_size
        if layouts[-1].global_batch_size != batch and layouts[-1].steps == 0 and layouts[1:]:
            del layouts[-1]  # of a run that ended before its first step: it used nothing
        self._keep_defaults(begun, layouts[-1])
        step = sum(layout.steps for layout in layouts)
        if not step:
            self.begin(state["epoch"])
            return
        if layouts[-1].global_batch_size != batch:
            same_shuffle = begun.shuffle == self.recipe.shuffle
            layouts.append(self.layout if same_shuffle else Layout(batch, choose_lanes(batch, None, begun.shuffle)))
        self.epoch, self.step = state["epoch"], step
        self.order = EpochOrder(self._index.counts, begun, self.epoch, layouts)
        if not self.steps_left:  # with tail=drop, less than one of the new global batches may be left
            self.begin(self.epoch + 1)

    def _check(self, state: Mapping[str, Any]) -> None:
        missing = sorted({"version", "data", "seed", "shuffle", "window", "tail", "epoch", "layouts"} - set(state))
        if missing or state["version"] != _VERSION:
            raise ValueError(
                f"not a state of this loader: version {state.get('version')!r} (want {_VERSION}), missing keys: "
                f"{', '.join(missing) or 'none'}."
            )
        if state["data"]["fingerprint"] != self._index.fingerprint:
            raise ValueError(
                f"the data set changed since this state was saved: {self._index.difference(state['data'])} "
                "Continue with the old shards, or start a new run."
            )
        if state["seed"] != self.recipe.seed:
            raise ValueError(
                f"seed: the state was saved with {state['seed']}, this loader has {self.recipe.seed}. Continue with "
                f"seed={state['seed']}, or start a new run."
            )

    def _keep_defaults(self, begun: Recipe, layout: Layout) -> None:
        """What was not asked for stays as it was: another default must not change a run that goes on."""
        if begun.shuffle == self.recipe.shuffle:
            if self._default_window:
                self.recipe = replace(self.recipe, window=begun.window)
            if self._default_lanes and layout.global_batch_size == self.layout.global_batch_size:
                self.layout = replace(layout, steps=0)
