"""A checkpoint evaluated in one precision: built, loaded, run over the evaluation set, its cost measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from dtrain.config.app import Composed
from dtrain.config.run import Run, without_secrets
from dtrain.config.schema import Config
from dtrain.data import ShardLoader
from dtrain.distributed.collectives import together
from dtrain.distributed.world import World
from dtrain.packing.progress import progress
from dtrain.tracking.evaluated import Evaluated
from dtrain.tracking.peak_memory import forget_peak, peak
from dtrain.training import build
from dtrain.training.checkpoint import Checkpoint
from dtrain.training.evaluation import evaluate
from dtrain.training.loaders import check_same_data, eval_loader
from dtrain.training.result import NotFinite
from dtrain.training.state import load_weights


def evaluate_checkpoint(
    composed: Composed, name: str, world: World, checkpoint: Checkpoint, path: Path, weights: str
) -> Evaluated:
    """Collective. Evaluates a checkpoint in the precision of one config; what it takes is free again afterwards.

    Args:
        composed: The config; ``data.eval`` is set.
        name: Of its precision.
        world: The ranks.
        checkpoint: What it holds.
        path: Where it is.
        weights: ``ema``, ``raw``, or ``""`` for the default.

    Raises:
        ConfigError: On every rank, if model, task or data cannot be built, or the checkpoint is of another model.
    """
    cfg: Config = composed.cfg
    forget_peak(world.device)
    precision, _ = together(lambda: build.build_precision(cfg.precision, world.device))
    loader = together(lambda: eval_loader(cfg, world, precision))
    assert loader is not None  # data.eval is set
    check_same_data(None, loader)
    model = together(lambda: build.build_model(cfg.model, world.device, cfg.train.channels_last))
    used = together(lambda: load_weights(model, checkpoint, weights))
    precision.wrap_keep_fp32(model)
    task = together(lambda: build.by_target("task", cfg.task))
    began = time.monotonic()
    with _shown_progress(loader, world, name) as tick:
        try:
            result = evaluate(model, task, loader, world=world, precision=precision, progress=tick)
        except NotFinite as error:
            result = error.evaluation
    seconds = time.monotonic() - began
    loader.close()
    config = without_secrets(Run.of(composed).config)
    return Evaluated(
        checkpoint=path,
        weights=used,
        precision=name,
        data={"eval": config["data"]["eval"], **loader.index.describe()},
        config={group: config[group] for group in ("model", "task", "precision")},
        ranks=world.size,
        metrics=result.metrics,
        tables=result.tables,
        seconds=seconds,
        memory=_most_memory(world),
    )


@contextmanager
def _shown_progress(loader: ShardLoader, world: World, precision: str) -> Iterator[Callable[[int, int], None] | None]:
    """Shows on rank 0's standard error how far the evaluation is; yields what ``evaluate`` takes as ``progress``."""
    if world.rank != 0:
        yield None
        return
    total = loader.steps_per_epoch * loader.micro_batches_per_step
    with progress(Console(stderr=True), f"evaluating in {precision}, micro-batches", total) as tick:
        yield lambda done, all: tick(1)


def _most_memory(world: World) -> dict[str, float]:
    """Collective. The peak of the rank that took most, by the name of the metric."""
    name, gib = peak(world.device)
    most = torch.tensor(gib, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {name: most.item()}
