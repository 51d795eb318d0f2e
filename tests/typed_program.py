"""A user's program with annotations, which type checkers check against the installed package: see tests/test_package.py.

``assert_type`` fails where a type is ``Any``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import assert_type

from dtrain.config.schema import Config
from dtrain.data import Batch, Mixture, ShardDataset, ShardLoader
from dtrain.distributed.world import World
from dtrain.export import artefact
from dtrain.export.artefact import Artefact
from dtrain.precision import CrossRankGradScaler, Precision
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.step import StepOutcome
from dtrain.training.task import Evaluation, Output, Task

FIELDS = {"jpg": {"name": "image", "role": "image", "size": 224}, "cls": {"name": "label", "role": "label"}}


class MyTask:
    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        logits = model(batch["image"]).float()
        losses = F.cross_entropy(logits, batch["label"], reduction="none")
        right = logits.argmax(dim=1) == batch["label"]
        assert_type(batch.valid, Tensor)
        assert_type(batch.sample_keys, list[str])
        metrics = {"accuracy": ((right & batch.valid).sum(), batch.valid.sum())}
        return Output(losses.masked_fill(~batch.valid, 0).sum(), batch.valid.sum(), metrics)


class MyHook:
    def on_start(self, run: TrainState) -> None:
        assert_type(run.model, nn.Module)
        assert_type(run.optimizer, torch.optim.Optimizer)
        assert_type(run.task, Task)
        assert_type(run.world, World)
        assert_type(run.world.rank, int)
        assert_type(run.precision, Precision)

    def on_step(self, run: TrainState, outcome: StepOutcome) -> None:
        assert_type(outcome.step, int)
        assert_type(outcome.grad_norm, float)
        if outcome.grad_norm > 100:
            run.end_early("the gradient is too large")

    def on_evaluation(self, run: TrainState, result: Evaluation) -> None:
        assert_type(result["accuracy"], float)
        assert_type(result.tables["confusion"], Tensor)

    def on_save(self, run: TrainState, path: Path) -> None: ...

    def on_end(self, run: TrainState, state: str) -> None: ...


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    task: Task = MyTask()
    mixture = Mixture({"web": "web/*.tar", "books": ["books/a.tar"]}, weights={"web": 3, "books": 1})
    loader = ShardLoader(mixture, FIELDS, global_batch_size=256, rank=0, world_size=2, precision="fp16")
    scaler = CrossRankGradScaler(device.type)
    assert_type(loader.epoch(0), Iterator[Batch])
    assert_type(loader.steps_per_epoch, int)
    for batch in loader.epoch(0):
        output = task(model, batch.to(device))
        assert_type(output, Output)
        scaled = scaler.scale(output.loss_sum)
        assert_type(scaled, Tensor)
        torch.autograd.backward(scaled)
        scaler.unscale_(optimizer)
        assert_type(scaler.step(optimizer), float | None)
        scaler.update()
        loader.commit()
    assert_type(loader.state_dict(), dict[str, Any])
    assert_type(scaler.state_dict(), dict[str, Any])


def samples() -> None:
    dataset = ShardDataset("shards/train-*.tar", FIELDS, seed=0)
    assert_type(len(dataset), int)
    assert_type(next(iter(dataset)), dict[str, Any])
    loader = DataLoader(dataset, batch_size=64, num_workers=4)
    for batch in loader:
        print(batch["image"].shape)


def predict(folder: Path) -> Tensor:
    loaded = artefact.load(folder, None)
    assert_type(loaded, Artefact)
    outputs = loaded.outputs(torch.zeros(1, 28, 28, 3, dtype=torch.uint8))
    assert_type(outputs, Tensor)
    return outputs


def configured(cfg: Config) -> None:
    assert_type(cfg.train.max_steps, int | None)
