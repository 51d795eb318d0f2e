"""The objects of a run that a checkpoint is about, taken and put back together: everything or nothing."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtrain import __version__
from dtrain.config.errors import ConfigError
from dtrain.config.schema import Config
from dtrain.data import ShardLoader
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.training.checkpoint import Checkpoint
from dtrain.training.ema import Ema
from dtrain.training.state import (
    changed_groups,
    group_values,
    host_copy,
    load_module,
    load_optimizer,
    optimizer_state,
)
from dtrain.training.step import TrainStep
from dtrain.training.task import Task


@dataclass
class Progress:
    """Totals of a run over all its starts.

    Attributes:
        samples: Committed samples.
        seconds: Time spent in the loop.
        skipped_steps: Steps that no rank applied.
        bad_samples: Samples that could not be read.
        evaluations: Evaluations done.
        evaluation_due: Whether the evaluation after the last step was left for a stop, and is still to be done.
        restarts: Starts that found the run begun and not finished.
        lost_seconds: Training that was done and not saved, and was done again.
        down_seconds: Time in which no process trained, between two starts.
    """

    samples: int = 0
    seconds: float = 0.0
    skipped_steps: int = 0
    bad_samples: int = 0
    evaluations: int = 0
    evaluation_due: bool = False
    restarts: int = 0
    lost_seconds: float = 0.0
    down_seconds: float = 0.0

    def interrupted(self, status: Mapping[str, Any] | None, now: float | None = None) -> None:
        """Adds up what happened before this start, once the checkpoint that it continues from is restored.

        Args:
            status: What status.json says; None if there is none.
            now: Unix seconds; None for those of the clock.
        """
        if status is None:
            return
        self.restarts, self.lost_seconds, self.down_seconds = (
            status.get(name, 0) for name in ("restarts", "lost_seconds", "down_seconds")
        )
        if status["state"] == "finished":  # to go on with more steps is no interruption
            return
        self.restarts += 1
        self.lost_seconds += max(0.0, status.get("trained_seconds", 0.0) - self.seconds)
        self.down_seconds += max(0.0, (time.time() if now is None else now) - status["time"])

    def interruptions(self) -> str:
        """For a banner; ``""`` if there were none."""
        if not self.restarts:
            return ""
        return (
            f"{self.restarts}, with {self.lost_seconds:.0f} s of training to be done again and {self.down_seconds:.0f} s "
            "between the starts"
        )

    def times(self) -> dict[str, Any]:
        """For status.json, from which the next start learns what an interruption cost."""
        return {
            "restarts": self.restarts,
            "lost_seconds": round(self.lost_seconds, 3),
            "down_seconds": round(self.down_seconds, 3),
            "trained_seconds": round(self.seconds, 3),
        }


@dataclass
class Parts:
    """What a loop works with; ``model`` is the bare one."""

    cfg: Config
    run_dir: Path
    world: World
    precision: Precision
    train_loader: ShardLoader
    eval_loader: ShardLoader | None
    model: nn.Module
    task: Task
    optimizer: torch.optim.Optimizer
    step: TrainStep
    ema: Ema | None
    progress: Progress
    _built: list[dict[str, Any]] = field(init=False, repr=False)  # the optimizer's groups, before it changes them

    def __post_init__(self) -> None:
        self._built = group_values(self.optimizer)

    def checkpoint(self, metrics: dict[str, float]) -> Checkpoint:
        """A copy of everything on the host; settle the step first. Only rank 0 needs one.

        Args:
            metrics: Of the evaluation at this step, if there was one.
        """
        tensors, values = optimizer_state(self.optimizer, self.model)
        groups = {"model": host_copy(self.model.state_dict()), "optimizer": host_copy(tensors)}
        if self.ema is not None:
            groups["ema"] = host_copy(self.ema.averaged().state_dict())
        scale = self.step.loss_scale
        state: dict[str, Any] = {
            "counters": self.step.state_dict(),
            "optimizer": values,
            "optimizer_groups": changed_groups(self.optimizer, self._built),
            "loss_scale": scale.state_dict() if scale is not None else None,
            "loader": self.train_loader.state_dict(),
            "progress": asdict(self.progress),
            "metrics": metrics,
            "versions": {"dtrain": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }
        return Checkpoint(groups, state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Puts a checkpoint back, on every rank.

        Raises:
            ConfigError: If it is of another model or another data set; names what differs.
        """
        state = checkpoint.state
        try:
            self.train_loader.load_state_dict(state["loader"])
        except ValueError as error:
            raise ConfigError(f"data: {error}") from error
        load_module(self.model, checkpoint.tensors["model"], "the checkpoint")
        tensors = checkpoint.tensors["optimizer"]
        load_optimizer(self.optimizer, self.model, tensors, state["optimizer"], state["optimizer_groups"])
        if self.ema is not None:
            # A run that switches its average on starts it from the weights.
            load_module(self.ema.module, checkpoint.tensors.get("ema", checkpoint.tensors["model"]), "the checkpoint")
        if self.step.loss_scale is not None and state["loss_scale"] is not None:
            self.step.loss_scale.load_state_dict(state["loss_scale"])
            scale = self.cfg.precision.loss_scale  # how it adapts is config, and may change when a run goes on
            self.step.loss_scale.configure(
                growth_factor=scale.growth_factor,
                backoff_factor=scale.backoff_factor,
                growth_interval=scale.growth_interval,
            )
        self.step.load_state_dict(state["counters"])
        self.progress = Progress(**state["progress"])
