"""The run that is looked at: its parts, built as the trainer builds them, with two differences.

* Its learning rate is zero: every kernel of the optimizer runs, and no parameter moves, so that a step can be repeated on
  the same micro-batches as often as one likes.
* Its directory is not touched, and a checkpoint is not looked for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dtrain.config.errors import users_to_fix
from dtrain.config.schema import Config
from dtrain.data import ShardLoader
from dtrain.distributed.collectives import together
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.precision.comm_hooks import HookGuard
from dtrain.training import build
from dtrain.training.ema import Ema
from dtrain.training.loaders import check_same_data, prepare_data, train_loader
from dtrain.training.parts import Parts, Progress
from dtrain.training.seed import be_deterministic, seed_generators
from dtrain.training.step import TrainStep
from dtrain.training.task import Task

# Skips are counted and told, and end nothing.
_NEVER = 10**9


@dataclass
class Subject:
    """What of a run is the same with and without communication; ``model`` is the bare one."""

    cfg: Config
    world: World
    precision: Precision
    loader: ShardLoader
    model: nn.Module
    task: Task
    optimizer: torch.optim.Optimizer
    ema: Ema | None

    @classmethod
    def build(cls, cfg: Config, world: World) -> tuple[Subject, list[str]]:
        """Collective.

        Returns:
            The parts, and what the precision warns of.

        Raises:
            ConfigError: What the trainer would raise.
        """
        precision, warnings = together(lambda: build.build_precision(cfg.precision, world.device))
        prepare_data(cfg.data)
        loader = together(lambda: train_loader(cfg, world, precision))
        check_same_data(loader, None)
        if cfg.train.deterministic:
            be_deterministic()
        seed_generators(world.device, cfg.run.seed)
        model = together(lambda: build.build_model(cfg.model, world.device, cfg.train.channels_last))
        model = build.equip(model, cfg.train, cfg.parallel, world)
        precision.wrap_keep_fp32(model)
        with users_to_fix("train.ema_decay"):
            ema = Ema(model, cfg.train.ema_decay) if cfg.train.ema_decay is not None else None
        task = together(lambda: build.by_target("task", cfg.task))
        optimizer = together(lambda: build.build_optimizer(cfg.optimizer, model, world.device))
        model.train()
        return cls(cfg, world, precision, loader, model, task, optimizer, ema), warnings

    def step_alone(self) -> TrainStep:
        """The step of a rank that is on its own.

        It may take turns with the one with the others where ``takes_turns``; else it comes first.
        """
        return self._step(self.model, dataclasses.replace(self.world, size=1), None)

    def step_with_others(self) -> TrainStep:
        """Collective. The step as the trainer runs it."""
        wrapped, guard = build.wrap(self.model, self.cfg.parallel, self.world, self.cfg.train.deterministic)
        return self._step(wrapped, self.world, guard)

    @property
    def takes_turns(self) -> bool:
        """Whether DDP leaves alone a backward whose forward it has not seen; with a static graph it reduces some."""
        return not self.cfg.parallel.static_graph

    def parts(self, step: TrainStep) -> Parts:
        """What a checkpoint of this run would be made of."""
        return Parts(
            self.cfg,
            Path(),
            self.world,
            self.precision,
            self.loader,
            None,
            self.model,
            self.task,
            self.optimizer,
            step,
            self.ema,
            Progress(),
        )

    def gradient_bytes(self) -> int:
        """What the ranks sum in a step, as wide as ``parallel.comm_dtype`` sends it."""
        numbers = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        return numbers * (2 if self.cfg.parallel.comm_dtype in ("bf16", "fp16") else 4)

    def _step(self, model: nn.Module, world: World, guard: HookGuard | None) -> TrainStep:
        cfg = self.cfg
        return TrainStep(
            model,
            self.task,
            self.optimizer,
            world=world,
            precision=self.precision,
            loss_scale=build.build_loss_scale(cfg.precision.loss_scale, self.precision, world.device),
            nominal=cfg.train.global_batch_size,
            schedule=lambda applied_steps: 0.0,
            clip_norm=cfg.train.clip_norm,
            ema=self.ema,
            guard=guard,
            seed=cfg.run.seed,
            max_consecutive_skips=_NEVER,
        )
