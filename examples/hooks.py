"""A hook of your own: it lowers the learning rate when a metric has stopped improving.

    PYTHONPATH=examples dtrain train --nproc 2 experiment=digits schedule=constant \\
        'train.hooks=[{_target_: hooks.ReduceOnPlateau, patience: 2}]'

A hook is any class with some of the methods ``on_start``, ``on_step``, ``on_evaluation``, ``on_save`` and ``on_end``. All ranks
call it at the same step, with the same outcome or result, so they all take the same decision. Its counters are in
``state_dict``, which is part of the checkpoints, so a resumed run decides as an uninterrupted one would. ``dtrain.hooks`` has
hooks that are ready to use.
"""

from __future__ import annotations

from typing import Any

import torch

from dtrain.training.checkpoint.state import TrainState
from dtrain.training.task import Evaluation


class ReduceOnPlateau:
    """Multiplies the learning rate by ``factor`` whenever a metric has not fallen in the last ``patience`` evaluations."""

    def __init__(self, metric: str = "eval/loss", patience: int = 2, factor: float = 0.5) -> None:
        self.reads_metrics = [metric]  # a wrong name is refused before the first step
        self._metric, self._patience, self._factor = metric, patience, factor
        self._state: dict[str, Any] = {"best": None, "since_best": 0, "multiplier": 1.0}

    def on_start(self, run: TrainState) -> None:
        """Registers a hook on the optimizer, because the schedule sets the learning rate before each update."""

        def reduce(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= self._state["multiplier"]

        run.optimizer.register_step_pre_hook(reduce)

    def on_evaluation(self, run: TrainState, result: Evaluation) -> None:
        """The result is equal on all ranks, and so is the new rate."""
        value, state = result.record()[self._metric], self._state
        if state["best"] is None or value < state["best"]:
            state.update(best=value, since_best=0)
        else:
            state["since_best"] += 1
        if state["since_best"] == self._patience:
            state.update(since_best=0, multiplier=state["multiplier"] * self._factor)

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before ``on_start``, on every rank."""
        self._state = state
