"""Three hooks: histograms of the gradients in wandb, a backbone that is frozen at first, and early stopping.

    PYTHONPATH=examples dtrain train --nproc 2 experiment=digits \\
        'train.hooks=[{_target_: hooks.FreezeBackbone, head: "8."}, {_target_: hooks.StopEarly, patience: 3}]'

A hook is any class with some of the methods ``on_start``, ``on_step``, ``on_evaluation``, ``on_save`` and ``on_end``. All ranks
call it at the same step, with the same outcome or result, so they all take the same decision.
"""

from __future__ import annotations

import json

import torch

from dtrain.config.directions import require_direction
from dtrain.distributed.collectives import from_rank0
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.task import Evaluation


class GradientHistograms:
    """Logs a histogram of the gradient of each parameter to wandb.

    Args:
        every: Steps between two logs.
    """

    def __init__(self, every: int = 100) -> None:
        self._every = every

    def on_start(self, run: TrainState) -> None:
        """Registers a hook of torch. In ``on_step``, the gradients of the next step may have been computed already."""

        def log(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
            # Called before each update; the gradients are averaged over the ranks, unscaled and clipped.
            if (run.step.step + 1) % self._every:
                return
            import wandb

            if wandb.run is None:  # tracker=none, or wandb could not be started
                return
            gradients = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
            values = {name: gradient.float().cpu().numpy() for name, gradient in gradients.items()}
            # Without a step: the tracker logs in a thread, and wandb drops records of steps before the newest one.
            wandb.run.log({f"gradients/{n}": wandb.Histogram(value) for n, value in values.items()}, commit=False)

        if run.world.rank == 0:  # the gradients are equal on all ranks, and wandb is open on rank 0 only
            run.optimizer.register_step_pre_hook(log)


class FreezeBackbone:
    """Trains only the head during the first epochs. Clipping and the logged norm still take all gradients into account.

    Args:
        head: Beginning of the names of the parameters that are trained from the start, such as ``head.``.
        epochs: How many epochs the other parameters are frozen for.
    """

    def __init__(self, head: str, epochs: int = 1) -> None:
        self._head = head
        self._epochs = epochs

    def on_start(self, run: TrainState) -> None:
        """Registers a hook of torch. ``requires_grad`` cannot be changed here: DDP reads it when the model is wrapped."""
        parameters = dict(run.model.named_parameters())
        backbone = [parameter for name, parameter in parameters.items() if not name.startswith(self._head)]
        if len(backbone) == len(parameters):
            raise ValueError(f"FreezeBackbone.head: {self._head!r} begins none of the names {', '.join(parameters)}.")

        def freeze(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
            epoch, _ = run.train_loader.position  # of the run, so it is right after a resume as well
            if epoch < self._epochs:
                for parameter in backbone:
                    # The optimizer leaves out parameters without a gradient: no decay, no momentum.
                    parameter.grad = None

        run.optimizer.register_step_pre_hook(freeze)


class StopEarly:
    """Ends the run when a metric has not improved in the last evaluations. The run is then finished.

    Args:
        metric: Name of the metric in metrics.jsonl.
        patience: Evaluations without improvement.
        mode: ``"max"`` if a higher value is better, ``"min"`` if a lower one is; None: by the metric's name.
    """

    def __init__(self, metric: str = "eval/accuracy", patience: int = 3, mode: str | None = None) -> None:
        self._metric = metric
        self.reads_metrics = [metric]  # a wrong name is refused before the first step
        self._patience = patience
        self._best = {"max": max, "min": min}[require_direction(metric, mode, "StopEarly.mode")]
        self._values: list[float] = []

    def on_start(self, run: TrainState) -> None:
        """Collective. Reads the evaluations of earlier starts: each start makes a new object."""

        def earlier() -> list[float]:
            records = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
            return [record[self._metric] for record in records if self._metric in record]

        self._values = from_rank0(earlier) if run.step.step else []

    def on_evaluation(self, run: TrainState, result: Evaluation) -> None:
        """All ranks have the same values, so all end or none does."""
        metrics = result.record()
        if self._metric not in metrics:
            raise ValueError(f"StopEarly.metric: got {self._metric!r}, an evaluation has {', '.join(metrics)}.")
        self._values.append(metrics[self._metric])
        since_best = len(self._values) - 1 - self._values.index(self._best(self._values))
        if since_best >= self._patience:
            run.end_early(f"no better {self._metric} in {since_best} evaluations")
