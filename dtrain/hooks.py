"""Hooks for ``train.hooks``: early stopping, histograms of gradients, and sample predictions of the model.

    'train.hooks=[{_target_: dtrain.hooks.EarlyStopping, metric: eval/accuracy, patience: 3}, {_target_: dtrain.hooks.Samples}]'

All ranks call a hook at the same step, with the same outcome or result, so they all take the same decision.
``dtrain.training.hook_calls`` lists the methods that a hook may have; ``examples/hooks.py`` shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dtrain.config.directions import require_direction
from dtrain.data import Batch
from dtrain.data.order.randomness import seed_generators
from dtrain.errors import ConfigError
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.monitor.run_logger import evaluation_samples
from dtrain.training.task import Evaluation

__all__ = ["EarlyStopping", "GradientHistograms", "Samples"]

Media = str | bytes | Mapping[str, str | bytes]


class EarlyStopping:
    """Ends the run when a metric has not improved for ``patience`` evaluations. The run's state is then ``finished``.

    The count is part of the checkpoints. A run that was ended early can be extended with a larger patience.

    Example:
        >>> from dtrain.hooks import EarlyStopping
        >>> EarlyStopping("eval/bits_per_byte", patience=5, min_delta=0.01).state_dict()
        {'metric': 'eval/bits_per_byte', 'best': None, 'since_best': 0, 'step': 0}

    Args:
        metric: Name of the metric in metrics.jsonl.
        patience: Number of evaluations in a row without improvement after which the run ends.
        min_delta: Smaller changes, and a change of exactly this size, do not count as an improvement.
        mode: ``"max"`` if a higher value is better, ``"min"`` if a lower one is; None: decided by the metric's name.

    Raises:
        ConfigError: If ``mode`` is None and the metric's name does not tell which direction is better.
        ValueError: If ``patience`` or ``min_delta`` is out of range.
    """

    def __init__(
        self, metric: str = "eval/loss", patience: int = 3, min_delta: float = 0.0, mode: str | None = None
    ) -> None:
        if patience < 1:
            raise ValueError(f"EarlyStopping.patience: got {patience}, want at least 1.")
        if not min_delta >= 0:
            raise ValueError(f"EarlyStopping.min_delta: got {min_delta}, want 0 or more.")
        self._metric = metric
        self.reads_metrics = [metric]  # a wrong name is refused before the first step
        self._patience = patience
        self._min_delta = min_delta
        self._sign = 1 if require_direction(metric, mode, "EarlyStopping.mode") == "max" else -1
        self._best: float | None = None
        self._since_best = 0
        self._step = 0  # of the last evaluation

    def on_start(self, run: TrainState) -> None:
        """Ends the run at once if it was killed between the decision to end it and its end.

        Raises:
            ConfigError: If the run has no evaluations.
        """
        _require_evaluations(run, "EarlyStopping")
        self._end_if_due(run)

    def on_evaluation(self, run: TrainState, result: Evaluation) -> None:
        """Counts evaluations without improvement. All ranks have the same values, so either all of them end or none.

        Raises:
            ValueError: If the evaluation does not have the metric; names those that it has.
        """
        metrics = result.record()
        if self._metric not in metrics:
            raise ValueError(f"EarlyStopping.metric: got {self._metric!r}, an evaluation has {', '.join(metrics)}.")
        if run.step.step == self._step:
            return  # repeated by a resumed run
        self._step, value = run.step.step, metrics[self._metric]
        # NaN is never better.
        if value == value and (self._best is None or self._sign * (value - self._best) > self._min_delta):
            self._best, self._since_best = value, 0
        else:
            self._since_best += 1
        self._end_if_due(run)

    def _end_if_due(self, run: TrainState) -> None:
        if self._since_best >= self._patience:
            run.end_early(f"no better {self._metric} in {self._since_best} evaluations")

    def state_dict(self) -> dict[str, Any]:
        """The best value, evaluations since then, and the step of the last one."""
        return {"metric": self._metric, "best": self._best, "since_best": self._since_best, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``, unless it belongs to a different metric."""
        if state["metric"] == self._metric:
            self._best, self._since_best, self._step = state["best"], state["since_best"], state["step"]


class GradientHistograms:
    """Logs a histogram of the gradient of each parameter to wandb; with other trackers it does nothing.

    The gradients are averaged over the ranks, unscaled and clipped.

    Args:
        every: Number of steps from one histogram to the next.

    Raises:
        ValueError: If ``every`` is less than 1.
    """

    def __init__(self, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"GradientHistograms.every: got {every}, want at least 1.")
        self._every = every

    def on_start(self, run: TrainState) -> None:
        """Registers a hook on the optimizer: in ``on_step``, the gradients may already be those of the next step.

        Raises:
            ConfigError: If the run is sharded.
        """

        def log(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
            # Called before each update; the gradients are averaged over the ranks, unscaled and clipped.
            if (run.step.step + 1) % self._every:
                return
            import wandb

            if wandb.run is None:  # tracker=none, or wandb could not be started
                return
            gradients = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
            values: dict[str, Any] = {name: gradient.float().cpu().numpy() for name, gradient in gradients.items()}
            # Without a step: the tracker logs in a thread, and wandb drops records of steps before the newest one.
            wandb.run.log({f"gradients/{n}": wandb.Histogram(value) for n, value in values.items()}, commit=False)

        if run.is_sharded:
            raise ConfigError(
                "GradientHistograms: each rank of a sharded run has only a part of the gradients. Remove the hook."
            )
        if run.world.rank == 0:  # the gradients are equal on all ranks, and wandb is open on rank 0 only
            run.optimizer.register_step_pre_hook(log)


class Samples:
    """Saves what the model predicts or generates for a few evaluation samples, as texts or pictures in ``<run.dir>/media``.

    The samples are the first ones in stored order, the same in each evaluation. The function is called as
    ``function(model, batch)`` on rank 0 only (in a sharded run on all ranks, with equal batches), in evaluation mode, without
    gradients, under autocast, with the averaged weights if there are any. Rows where ``batch.valid`` is false are padding.

    Args:
        function: Returns a text, the bytes of a PNG file, or a mapping of names to such contents. In a config:
            ``{_target_: package.function, _partial_: true}``. None: the task's method ``samples``.
        count: Number of samples.
        every: The function is called after every ``every``-th evaluation.
        name: Name of the media; the names of a mapping are appended to it.

    Raises:
        ValueError: If ``count`` or ``every`` is less than 1.

    Example:
        >>> from dtrain.hooks import Samples
        >>> def describe(model, batch):
        ...     return "\\n".join(f"{key}: {row}" for key, row in zip(batch.sample_keys, model(batch["image"]).tolist()))
        >>> hook = Samples(describe, count=4, every=2)
    """

    def __init__(
        self,
        function: Callable[[nn.Module, Batch], Media] | None = None,
        count: int = 8,
        every: int = 1,
        name: str = "samples",
    ) -> None:
        for key, value in {"count": count, "every": every}.items():
            if value < 1:
                raise ValueError(f"Samples.{key}: got {value}, want at least 1.")
        self._function = function
        self._count, self._every, self._name = count, every, name
        self._batch: Batch | None = None

    def on_start(self, run: TrainState) -> None:
        """Finds the function.

        Raises:
            ConfigError: If the run has no evaluations, or there is no function and the task has no method ``samples``.
        """
        _require_evaluations(run, "Samples")
        self._function = self._function or getattr(run.task, "samples", None)
        if not callable(self._function):
            raise ConfigError(
                f"Samples.function: the task {type(run.task).__name__} has no method samples(model, batch). Add it, or set "
                "function: {_target_: package.function, _partial_: true}."
            )

    def on_evaluation(self, run: TrainState, result: Evaluation) -> None:
        """Calls the function and saves what it returns. Does nothing with ``tracker.media=false``."""
        on_this_rank = run.is_sharded or run.world.rank == 0
        if run.totals.evaluations % self._every or not (on_this_rank and run.cfg.tracker.media):
            return
        if self._batch is None:
            self._batch = next(evaluation_samples(run, self._count))
        assert self._function is not None
        seed_generators(run.world.device, run.cfg.run.seed)  # what is generated differs because of the weights only
        with run.inference() as model:
            content = self._function(model, self._batch)
        named = content if isinstance(content, Mapping) else {"": content}
        for name, each in named.items():
            run.log_media("-".join(filter(None, (self._name, name))), each)


def _require_evaluations(run: TrainState, name: str) -> None:
    if run.eval_loader is None:
        raise ConfigError(f"{name}: data.eval is not set, so there are no evaluations. Set it, or remove the hook.")
