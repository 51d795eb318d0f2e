"""dtrain, as its README: shards, ``checkpoint.every_steps``, and the same command again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.faults import protocol
from dtrain.data import Batch
from dtrain.data.writer import write_shards
from dtrain.train import main as train
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.task import Output


def prepare(data: Path) -> None:
    """Writes the samples."""
    rows = enumerate(zip(*protocol.arrays(), strict=True))
    samples = ({"__key__": f"{number:06d}", "x.npy": x, "y.npy": y, "cls": number} for number, (x, y) in rows)
    write_shards(samples, data, shards=10, total=protocol.SAMPLES)


class Logged:
    """The task, and a hook that gives its log the step of the start."""

    def __init__(self) -> None:
        self.log: protocol.Log | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """The loss of a micro-batch; here every micro-batch is the part of one rank of a step."""
        losses = (model(batch["x"]) - batch["y"]).square()[batch.valid]
        if isinstance(model, DistributedDataParallel):  # before the first step, the task is checked with the bare model
            if self.log is None:
                self.log = protocol.Log(int(os.environ["FAULTS_STEP"]))
            self.log.step(batch["number"][batch.valid], losses.mean())
        return Output(losses.sum(), batch.valid.sum())


class FirstStep:
    """Tells the task where this start begins."""

    def on_start(self, run: TrainState) -> None:
        """Called before the first step."""
        os.environ["FAULTS_STEP"] = str(run.step.step)


def main() -> None:
    """One start."""
    sys.argv[1:] = [
        "data=shards",
        f"data.train={protocol.data_folder()}/train-*.tar",
        "data.fields={x.npy: {name: x, role: feature}, y.npy: {name: y, role: target}, cls: {name: number, role: id}}",
        "model={_target_: benchmarks.faults.protocol.model}",
        "task={_target_: benchmarks.faults.dtrain.Logged}",
        "optimizer=sgd",
        f"optimizer.lr={protocol.RATE}",
        "optimizer.nesterov=false",
        "optimizer.weight_decay=0",
        "schedule=constant",
        f"train.global_batch_size={protocol.BATCH}",
        f"train.max_epochs={protocol.EPOCHS}",
        "train.deterministic=true",
        "train.hooks=[{_target_: benchmarks.faults.dtrain.FirstStep}]",
        f"checkpoint.every_steps={protocol.SAVE_EVERY}",  # resume
        f"run.dir={protocol.folder()}/run",
        f"run.seed={protocol.SEED}",
        "tracker=none",
    ]
    train()


if __name__ == "__main__":
    main()
