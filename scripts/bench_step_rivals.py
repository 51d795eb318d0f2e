"""The loops that ``bench_step.py`` compares dtrain with, each as its users write it.

Each is a function that takes a setting, and returns what trains in every turn. All of them log every 10 steps.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from bench_common import declare_torchvision_operators
from bench_step_setting import INIT_SCALE, LOG_EVERY, ROWS, Contender, Log, Setting, Turn
from torch import Tensor

from dtrain.data import Batch

_CLIP_NORM = 1.0


# -- loops of one's own


def bare(setting: Setting, exchange: bool = True) -> Contender:
    """Forward, backward, step, zero_grad; with several ranks an all-reduce of 8 floats: what a loop must know to stop."""
    model, log, word = setting.wrapped(), Log(setting), torch.zeros(8)
    exchange = exchange and setting.world.size > 1

    def train(turn: Turn) -> None:
        for batch in turn:
            loss = setting.loss(model, batch)
            loss.backward()
            if exchange:
                dist.all_reduce(word)
            setting.optimizer.step()
            setting.optimizer.zero_grad()
            log(loss)

    return train


def bare_without_exchange(setting: Setting) -> Contender:
    """The same without the all-reduce: a loop that never has to agree on anything."""
    return bare(setting, exchange=False)


def bare_with_norm(setting: Setting) -> Contender:
    """With the gradient's norm, and no step if it is not finite."""
    model, log, word = setting.wrapped(), Log(setting), torch.zeros(8)
    parameters = list(model.parameters())

    def train(turn: Turn) -> None:
        for batch in turn:
            loss = setting.loss(model, batch)
            loss.backward()
            if setting.world.size > 1:
                dist.all_reduce(word)
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            if norm.isfinite():
                setting.optimizer.step()
            setting.optimizer.zero_grad()
            log(loss, norm)

    return train


def grad_scaler(setting: Setting) -> Contender:
    """torch.amp.GradScaler as its documentation has it, with the norm of the unscaled gradients."""
    model, log, word = setting.wrapped(), Log(setting), torch.zeros(8)
    parameters = list(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE)

    def train(turn: Turn) -> None:
        for batch in turn:
            loss = setting.loss(model, batch)
            scaler.scale(loss).backward()
            if setting.world.size > 1:
                dist.all_reduce(word)
            scaler.unscale_(setting.optimizer)
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            scaler.step(setting.optimizer)
            scaler.update()
            setting.optimizer.zero_grad()
            log(loss, norm)

    return train


# -- other trainers


def fabric(setting: Setting, clip: bool = False) -> Contender:
    """Lightning Fabric: set up, backward and, if asked for, clipping are its own; the loop is not."""
    with _quiet():
        from lightning.fabric import Fabric

        size = setting.world.size
        runner = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
        runner.launch()
        model, optimizer = runner.setup(setting.bare, setting.optimizer)
    log = Log(setting)

    def train(turn: Turn) -> None:
        for batch in turn:
            loss = setting.loss(model, batch)
            runner.backward(loss)
            norm = runner.clip_gradients(model, optimizer, max_norm=_CLIP_NORM) if clip else None
            optimizer.step()
            optimizer.zero_grad()
            log(loss, norm)

    return train


def fabric_clipping(setting: Setting) -> Contender:
    """The same with a gradient norm, which Fabric checks to be finite."""
    return fabric(setting, clip=True)


def accelerate(setting: Setting, clip: bool = False) -> Contender:
    """Accelerate: model, optimizer and backward are its own."""
    with _quiet():
        from accelerate import Accelerator

        runner = Accelerator(cpu=True)
        model, optimizer = runner.prepare(setting.bare, setting.optimizer)
    log = Log(setting)

    def train(turn: Turn) -> None:
        for batch in turn:
            loss = setting.loss(model, batch)
            runner.backward(loss)
            norm = runner.clip_grad_norm_(model.parameters(), _CLIP_NORM) if clip else None
            optimizer.step()
            optimizer.zero_grad()
            log(loss, norm)

    return train


def accelerate_clipping(setting: Setting) -> Contender:
    """The same with a gradient norm."""
    return accelerate(setting, clip=True)


def lightning(setting: Setting, clip: bool = False) -> Contender:
    """Lightning's Trainer with its CSV logger; without progress bar and checkpoints, which are on by default."""
    with _quiet():
        from lightning import LightningModule, Trainer
        from lightning.pytorch.loggers import CSVLogger

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = setting.bare

        def training_step(self, batch: Batch, number: int) -> Tensor:
            loss = setting.loss(self.model, batch)
            self.log("loss", loss, batch_size=ROWS)
            return loss

        def transfer_batch_to_device(self, batch: Batch, device: torch.device, number: int) -> Batch:
            return batch.to(device)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return setting.optimizer

    size = setting.world.size
    module = Module()

    def train(turn: Turn) -> None:
        with _quiet():
            Trainer(
                accelerator="cpu",
                devices=size,
                strategy="ddp" if size > 1 else "auto",
                max_epochs=1,
                logger=CSVLogger(str(setting.folder), version=0),
                log_every_n_steps=LOG_EVERY,
                gradient_clip_val=_CLIP_NORM if clip else None,
                enable_progress_bar=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            ).fit(module, turn)

    return train


def lightning_clipping(setting: Setting) -> Contender:
    """The same with ``gradient_clip_val``."""
    return lightning(setting, clip=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the advice of other trainers out of the table."""
    declare_torchvision_operators()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
