"""dtrain in ``bench_step.py``: its step alone, its vote alone, and everything that ``dtrain.train`` runs."""

from __future__ import annotations

from contextlib import redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from bench_step_setting import CPU, INIT_SCALE, LOG_EVERY, ROWS, Contender, Setting, Turn
from omegaconf import OmegaConf

from dtrain.config.schema import Config, TrackerConfig, TrainConfig
from dtrain.data import Batch, Generated, ShardLoader
from dtrain.distributed.stop import StopRequests
from dtrain.precision import Precision
from dtrain.precision.host_vote import HostVote
from dtrain.precision.loss_scale import LossScale
from dtrain.tracking.sinks import NullSinks, Sinks, build_sinks
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.loop import Loop
from dtrain.training.parts import Parts, Progress
from dtrain.training.schedule import WarmupCosine
from dtrain.training.step import TrainStep


def step(setting: Setting, scaled: bool = False) -> Contender:
    """dtrain's step without its loop: outcome read in the step after, nothing logged."""
    step = _train_step(setting, scaled)

    def train(turn: Turn) -> None:
        for batch in turn:
            step.accumulate([batch], 1)
            step.settle()
            step.apply()

    return train


def step_scaled(setting: Setting) -> Contender:
    """The same with a loss scale."""
    return step(setting, scaled=True)


def everything(setting: Setting) -> Contender:
    """dtrain as ``dtrain.train`` runs it: loader, loop, records, console, stop requests, status, a final checkpoint.

    Without the watch for hangs, a thread that looks every 5 s.
    """
    step = _train_step(setting, scaled=False)
    loader = _InMemory(setting)
    train = TrainConfig(global_batch_size=ROWS * setting.world.size, log_every=LOG_EVERY, eval_every=0)
    cfg: Any = OmegaConf.structured(Config(train=train))  # slow to read, as in a run
    (setting.folder / "logs").mkdir()
    parts = Parts(
        cfg,
        setting.folder,
        setting.world,
        Precision("fp32"),
        loader,
        None,
        setting.bare,
        setting.task,
        setting.optimizer,
        step,
        None,
        Progress(),
    )
    sinks: Sinks | NullSinks = NullSinks()
    if setting.world.rank == 0:
        with redirect_stdout((setting.folder / "log").open("a")):  # which the console keeps
            sinks = build_sinks(TrackerConfig(), setting.folder, "bench", {}, 0)
    checkpoints = Checkpoints(setting.folder / "checkpoints", keep_last=1)
    stop = StopRequests(setting.folder / "STOP" if setting.world.rank == 0 else None)

    def train(turn: Turn) -> None:
        loader.turn = turn
        Loop(parts, step.step + len(turn), checkpoints, sinks, stop).run()

    return train


def vote(setting: Setting) -> Contender:
    """What dtrain's ranks say to each other in a step: packed, summed, decided on and read. In a world of one, without sum."""
    voting = HostVote(setting.world.size)
    loss, count, right, norm, scale = (torch.tensor(value) for value in (2.3, ROWS, 6, 1.0, 1.0))

    def train(turn: Turn) -> None:
        for _ in turn:
            voting.add([loss, count, right, count])
            overflow = voting.overflow(norm)
            voting.cast(overflow, norm, scale, stop=False, save=False, samples=ROWS, bad=0, nbytes=0)
            voting.decide(scale, ROWS * setting.world.size, None)
            voting.tally(["accuracy"])

    return train


def all_reduce(setting: Setting) -> Contender:
    """What the vote is compared with."""
    word = torch.zeros(8)

    def train(turn: Turn) -> None:
        for _ in turn:
            dist.all_reduce(word)

    return train


def _train_step(setting: Setting, scaled: bool) -> TrainStep:
    return TrainStep(
        setting.wrapped(),
        setting.task,
        setting.optimizer,
        world=setting.world,
        precision=Precision("fp32"),
        loss_scale=LossScale(CPU, init=INIT_SCALE) if scaled else None,
        nominal=ROWS * setting.world.size,
        schedule=WarmupCosine(horizon=1_000_000),
    )


class _InMemory(ShardLoader):
    """dtrain's loader with its order, positions and commits, but without workers: what they would have built is there."""

    turn: Turn

    def __init__(self, setting: Setting) -> None:
        dataset = Generated(_never, 2**40)
        fields = {"image": {"name": "image", "role": "feature"}, "label": {"name": "label", "role": "label"}}
        source = ShardLoader.over(dataset, fields, global_batch_size=ROWS, num_workers=0).source
        world = setting.world
        super().__init__(
            source, global_batch_size=ROWS * world.size, rank=world.rank, world_size=world.size, num_workers=0
        )

    def _open_stream(self) -> Any:
        return _Prefetched(self.turn)


class _Prefetched:
    """In place of a loader's running workers."""

    is_open, at = True, None

    def __init__(self, turn: Turn) -> None:
        self._batches = iter(turn)

    def take(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        pass


def _never(sample: int, rng: Any) -> dict[str, Any]:
    raise NotImplementedError
