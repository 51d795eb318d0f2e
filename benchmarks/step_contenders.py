"""The rows of ``benchmarks.step``: training loops as their users write them, and dtrain's.

* A *setting* is a model, fused AdamW, a task and a folder; every row has its own.
* A *turn* yields the same batch again and again and times the steps in between. It is the only clock: Lightning's Trainer
  and dtrain's Loop are whole loops that cannot run a single step.
* A *contender* makes, from a setting, the function that trains during a turn. All loops log every 10 steps.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness
from dtrain.config.schema import Config, ParallelConfig, TrackerConfig, TrainConfig
from dtrain.data import Batch, Generated, ShardLoader
from dtrain.distributed.sharding import is_sharded, shard_model
from dtrain.distributed.stop import StopRequests
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.vote import make_vote
from dtrain.tasks import Classification
from dtrain.tracking.sinks import NullSinks, Sinks, build_sinks
from dtrain.training.checkpoint.checkpoints import Checkpoints
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.loop import Loop
from dtrain.training.monitor.run_logger import RunLogger
from dtrain.training.schedule import WarmupCosine
from dtrain.training.step import TrainStep

CPU = torch.device("cpu")
ROWS = 64
LOG_EVERY = 10
WARM_UP = 10  # steps of a turn before its clock starts: new optimizers and DDP wrappers allocate their buffers
INIT_SCALE = 1024.0
CLIP_NORM = 1.0
STEPS = 100  # timed steps of a turn, a multiple of LOG_EVERY


class Setting:
    """Model, batch, task and optimizer of one row; creates the folder."""

    def __init__(self, world: World, folder: Path) -> None:
        torch.manual_seed(0)
        # So small that the work around the step takes most of the time.
        self.bare = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
        inputs, labels = torch.randn(ROWS, 32), torch.randint(10, (ROWS,))
        keys = [f"shard/{row}" for row in range(ROWS)]
        self.batch = Batch({"image": inputs, "label": labels}, keys, torch.ones(ROWS, dtype=torch.bool))
        self.world = world
        self.folder = folder
        folder.mkdir(parents=True)
        self.task = Classification()
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-4, fused=True)

    def wrapped(self) -> nn.Module:
        """The model, in DDP if there are several ranks and it is not sharded."""
        return DistributedDataParallel(self.bare) if self.world.size > 1 and not is_sharded(self.bare) else self.bare

    def shard(self) -> None:
        """Shards the model with FSDP2, and begins with another optimizer."""
        shard_model(self.bare, ParallelConfig(shard="full"), self.world)
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-4, fused=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss of the batch."""
        return self.task(model, batch).loss_sum / ROWS


class Turn:
    """Yields the same batch again and again.

    ``seconds`` is then the time of the last ``steps`` steps, by ``clock``, from one request for a batch to another.
    """

    def __init__(self, batch: Batch, steps: int, clock: Callable[[], float]) -> None:
        self._batch = batch
        self._steps = steps
        self._clock = clock
        self.seconds = math.nan

    def __len__(self) -> int:
        return WARM_UP + self._steps + 1  # the request for the last one stops the clock

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(WARM_UP):
            yield self._batch
        started = self._clock()
        for _ in range(self._steps):
            yield self._batch
        self.seconds = self._clock() - started
        yield self._batch


Train = Callable[[Turn], None]


class Log:
    """The log of a hand-written loop, every ``LOG_EVERY`` steps: a JSON record and a readable line."""

    def __init__(self, setting: Setting) -> None:
        self._records = (setting.folder / "metrics.jsonl").open("a") if setting.world.rank == 0 else None
        self._lines = (setting.folder / "log").open("a")
        self._optimizer = setting.optimizer
        self._step = 0
        self._time = time.time()

    def __call__(self, loss: Tensor, norm: Tensor | None) -> None:
        self._step += 1
        if self._step % LOG_EVERY or self._records is None:
            return
        now = time.time()
        record = {
            "step": self._step,
            "time": now,
            "loss": loss.item(),
            "lr": self._optimizer.param_groups[0]["lr"],
            "samples_per_second": ROWS * LOG_EVERY / (now - self._time),
        }
        if norm is not None:
            record["grad_norm"] = norm.item()
        self._time = now
        self._records.write(json.dumps(record) + "\n")
        self._records.flush()
        print(f"step {self._step} loss {record['loss']:.4g}", file=self._lines, flush=True)


def make_loop(
    setting: Setting,
    model: nn.Module,
    optimizer: Any,
    *,
    backward: Callable[[Tensor], object] = Tensor.backward,
    norm: Callable[[], Tensor] | None = None,
    step: Callable[[Tensor | None], object] | None = None,
    exchange: bool = False,
) -> Train:
    """The loop that users write: forward, backward, norm if there is one, step, zero_grad, log.

    ``step`` gets the norm; None is ``optimizer.step``. With ``exchange`` several ranks all-reduce 8 floats in every step.
    """
    log, word = Log(setting), torch.zeros(8)
    exchange = exchange and setting.world.size > 1

    def train(turn: Turn) -> None:
        total = None
        for batch in turn:
            loss = setting.loss(model, batch)
            backward(loss)
            if exchange:
                dist.all_reduce(word)
            if norm is not None:
                total = norm()
            if step is None:
                optimizer.step()
            else:
                step(total)
            optimizer.zero_grad()
            log(loss, total)

    return train


# -- plain torch


def bare(setting: Setting, *, exchange: bool = True) -> Train:
    """Nothing but the loop."""
    return make_loop(setting, setting.wrapped(), setting.optimizer, exchange=exchange)


def bare_with_norm(setting: Setting) -> Train:
    """With the norm of the gradients; a step whose norm is not finite is skipped."""
    model, optimizer = setting.wrapped(), setting.optimizer

    def step(norm: Tensor | None) -> None:
        if norm is not None and norm.isfinite():
            optimizer.step()

    return make_loop(setting, model, optimizer, norm=grad_norm_of(model), step=step, exchange=True)


def bare_fsdp(setting: Setting) -> Train:
    """FSDP2 with the norm of the gradients, from this rank's parts; a step whose norm is not finite is skipped."""
    setting.shard()
    model, optimizer = setting.bare, setting.optimizer
    parameters, square = list(model.parameters()), torch.zeros(8)

    @torch.no_grad()
    def norm() -> Tensor:
        gradients = [p.grad.to_local() for p in parameters if p.grad is not None]  # type: ignore[attr-defined]
        square[0] = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)
        return square[0].sqrt()

    def step(norm: Tensor | None) -> None:
        if norm is not None and norm.isfinite():
            optimizer.step()

    return make_loop(setting, model, optimizer, norm=norm, step=step)


def grad_scaler(setting: Setting) -> Train:
    """torch.amp.GradScaler as in its documentation, with the norm of the unscaled gradients."""
    model, optimizer = setting.wrapped(), setting.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE)
    grad_norm = grad_norm_of(model)

    def backward(loss: Tensor) -> None:
        scaler.scale(loss).backward()

    def norm() -> Tensor:
        scaler.unscale_(optimizer)
        return grad_norm()

    def step(norm: Tensor | None) -> None:
        scaler.step(optimizer)
        scaler.update()

    return make_loop(setting, model, optimizer, backward=backward, norm=norm, step=step, exchange=True)


def grad_norm_of(model: nn.Module) -> Callable[[], Tensor]:
    """A function that computes the L2 norm of all gradients."""
    parameters = list(model.parameters())
    return lambda: torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


# -- other trainers


def fabric(setting: Setting, *, clip: bool = False) -> Train:
    """Lightning Fabric sets up, runs the backward and may clip, which checks that the norm is finite."""
    with quiet():
        from lightning.fabric import Fabric

        size = setting.world.size
        runner = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
        runner.launch()
        model, optimizer = runner.setup(setting.bare, setting.optimizer)
    norm = functools.partial(runner.clip_gradients, model, optimizer, max_norm=CLIP_NORM) if clip else None
    return make_loop(setting, model, optimizer, backward=runner.backward, norm=norm)


def accelerate(setting: Setting, *, clip: bool = False) -> Train:
    """Accelerate prepares model and optimizer, runs the backward and may clip."""
    with quiet():
        from accelerate import Accelerator

        runner = Accelerator(cpu=True)
        model, optimizer = runner.prepare(setting.bare, setting.optimizer)

    def norm() -> Tensor:
        return runner.clip_grad_norm_(model.parameters(), CLIP_NORM)

    return make_loop(setting, model, optimizer, backward=runner.backward, norm=norm if clip else None)


def lightning(setting: Setting, *, clip: bool = False) -> Train:
    """Lightning's Trainer with its CSV logger; without progress bar and checkpoints, which are on by default."""
    with quiet():
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
        with quiet():
            Trainer(
                accelerator="cpu",
                devices=size,
                strategy="ddp" if size > 1 else "auto",
                max_epochs=1,
                logger=CSVLogger(str(setting.folder), version=0),
                log_every_n_steps=LOG_EVERY,
                gradient_clip_val=CLIP_NORM if clip else None,
                enable_progress_bar=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            ).fit(module, turn)

    return train


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the hints that other trainers print."""
    harness.declare_torchvision_operators()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- dtrain


def step_alone(setting: Setting, *, scaled: bool = False, sharded: bool = False) -> Train:
    """dtrain's step without its loop: each outcome is read in the next step, nothing is logged."""
    if sharded:
        setting.shard()
    step = train_step(setting, scaled)

    def train(turn: Turn) -> None:
        for batch in turn:
            step.accumulate([batch], 1)
            step.settle()
            step.apply()

    return train


def everything(setting: Setting, *, sharded: bool = False) -> Train:
    """dtrain's loop with loader, records, console, stop requests, status and a final checkpoint.

    Of ``dtrain.train`` only the hang detection is missing, a thread that wakes every 5 s.
    """
    if sharded:
        setting.shard()
    step, loader, world = train_step(setting, scaled=False), InMemoryLoader(setting), setting.world
    options = TrainConfig(global_batch_size=ROWS * world.size, log_every=LOG_EVERY, eval_every=0)
    cfg = Config(train=options)
    (setting.folder / "logs").mkdir()
    run = TrainState(
        cfg=cfg,
        run_dir=setting.folder,
        train_loader=loader,
        eval_loader=None,
        step=step,
        checkpoints=Checkpoints(setting.folder / "checkpoints", keep_last=1),
    )
    sinks: Sinks | NullSinks = NullSinks()
    if world.rank == 0:
        with redirect_stdout((setting.folder / "log").open("a")):  # the console keeps writing there
            sinks = build_sinks(TrackerConfig(), setting.folder, "bench", {}, 0)
    stop = StopRequests(setting.folder / "STOP" if world.rank == 0 else None)

    def train(turn: Turn) -> None:
        loader.turn = turn
        last = step.step + len(turn)
        Loop(run, last, RunLogger(run, last, sinks), stop).run()

    return train


def vote(setting: Setting) -> Train:
    """dtrain's control all-reduce of a step: packed, summed, decided on and read; a single rank sums nothing."""
    host_vote = make_vote(CPU, setting.world.size)
    loss, count, right, norm, scale = (torch.tensor(value) for value in (2.3, ROWS, 6, 1.0, 1.0))
    norms = {setting.world.size: norm}

    def train(turn: Turn) -> None:
        for _ in turn:
            host_vote.add([loss, count, right, count])
            overflow = host_vote.overflow(norms)
            host_vote.all_reduce(overflow, norms, scale, stop=False, save=False, samples=ROWS, bad=0, nbytes=0)
            host_vote.decide(scale, ROWS * setting.world.size, None)
            host_vote.step_stats(["accuracy"])

    return train


def all_reduce(setting: Setting) -> Train:
    """An all-reduce of as many floats as the vote has, for comparison."""
    word = torch.zeros(8)

    def train(turn: Turn) -> None:
        for _ in turn:
            dist.all_reduce(word)

    return train


def train_step(setting: Setting, scaled: bool) -> TrainStep:
    """dtrain's step for a setting."""
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


class InMemoryLoader(ShardLoader):
    """dtrain's loader with order, positions and commits, whose batches come from a turn instead of workers."""

    turn: Turn

    def __init__(self, setting: Setting) -> None:
        dataset = Generated(never_called, 2**40)
        fields = {"image": {"name": "image", "role": "feature"}, "label": {"name": "label", "role": "label"}}
        source = ShardLoader.over(dataset, fields, global_batch_size=ROWS, num_workers=0).source
        rank, size = setting.world.rank, setting.world.size
        super().__init__(source, global_batch_size=ROWS * size, rank=rank, world_size=size, num_workers=0)

    def _open_stream(self) -> Any:
        return TurnStream(self.turn)


class TurnStream:
    """Replaces the stream of the loader's workers."""

    is_open, at = True, None

    def __init__(self, turn: Turn) -> None:
        self._batches = iter(turn)

    def take(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        pass


def never_called(sample: int, rng: Any) -> dict[str, Any]:
    raise NotImplementedError


# -- the rows


BARE = "bare loop"
BARE_WITH_NORM = "bare loop, all-reduce, norm, finite check"
BARE_FSDP = "FSDP2: bare loop, all-reduce, norm, finite check"
VOTE = "dtrain's vote"
ALL_REDUCE = "an all-reduce of 8 floats"
NO_LOOPS = (ALL_REDUCE, VOTE)

#: By row: the factory of its training function, and the package that it needs.
CONTENDERS: dict[str, tuple[Callable[[Setting], Train], str]] = {
    BARE: (functools.partial(bare, exchange=False), "torch"),
    "bare loop, all-reduce": (bare, "torch"),
    BARE_WITH_NORM: (bare_with_norm, "torch"),
    "torch GradScaler, all-reduce, norm": (grad_scaler, "torch"),
    "Fabric": (fabric, "lightning"),
    "Fabric, clipping": (functools.partial(fabric, clip=True), "lightning"),
    "Accelerate": (accelerate, "accelerate"),
    "Accelerate, clipping": (functools.partial(accelerate, clip=True), "accelerate"),
    "Lightning": (lightning, "lightning"),
    "Lightning, clipping": (functools.partial(lightning, clip=True), "lightning"),
    "dtrain, the step alone": (step_alone, "torch"),
    "dtrain, the step alone, loss scale": (functools.partial(step_alone, scaled=True), "torch"),
    "dtrain, everything on": (everything, "torch"),
    BARE_FSDP: (bare_fsdp, "torch"),
    "FSDP2: dtrain, the step alone": (functools.partial(step_alone, sharded=True), "torch"),
    "FSDP2: dtrain, everything on": (functools.partial(everything, sharded=True), "torch"),
    ALL_REDUCE: (all_reduce, "torch"),
    VOTE: (vote, "torch"),
}
