"""What the contenders of ``bench_step.py`` train with, and the clock.

* A *setting* is a model, fused AdamW, a task and where files go; every contender has one of its own.
* A *turn* hands a contender the same batch again and again, and times the steps that it does meanwhile. It is the only
  clock: Lightning's Trainer and dtrain's Loop are whole loops, which nobody can ask for a single step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch
from dtrain.distributed.world import World
from dtrain.models import SmallCNN
from dtrain.tasks import Classification

CPU = torch.device("cpu")
ROWS = 64
LOG_EVERY = 10
INIT_SCALE = 1024.0  # of those that scale the loss
_WARM = 10  # steps of a turn before its clock starts: fresh optimizers and DDP wrappers make their buffers


def mlp() -> tuple[nn.Module, Tensor]:
    """A model so small that the step around it is most of the time, and its inputs."""
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)), torch.randn(ROWS, 32)


def cnn() -> tuple[nn.Module, Tensor]:
    """The model of experiment=digits on larger images: about 10 ms a step."""
    return SmallCNN(width=32), torch.randn(ROWS, 3, 16, 16).contiguous(memory_format=torch.channels_last)


#: By name: what the table calls it, what makes it, steps of a turn (a multiple of ``LOG_EVERY``).
MODELS: dict[str, tuple[str, Callable[[], tuple[nn.Module, Tensor]], int]] = {
    "mlp": ("MLP 32-64-10", mlp, 100),
    "cnn": ("SmallCNN on 16x16", cnn, 20),
}


class Setting:
    """What one contender trains with.

    Args:
        name: Of the model.
        world: The ranks.
        folder: For its files; it is made.
    """

    def __init__(self, name: str, world: World, folder: Path) -> None:
        torch.manual_seed(0)
        self.bare, inputs = MODELS[name][1]()
        labels = torch.randint(10, (ROWS,))
        keys = [f"shard/{row}" for row in range(ROWS)]
        self.batch = Batch({"image": inputs, "label": labels}, keys, torch.ones(ROWS, dtype=torch.bool))
        self.world = world
        self.folder = folder
        folder.mkdir(parents=True)
        self.task = Classification()
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-4, fused=True)

    def wrapped(self) -> nn.Module:
        """The model, in DDP where there are several ranks."""
        return DistributedDataParallel(self.bare) if self.world.size > 1 else self.bare

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss of the batch."""
        return self.task(model, batch).loss_sum / ROWS


class Turn:
    """The batches of one turn, and the clock.

    Args:
        batch: What is handed over every time.
        steps: How many are timed.
        clock: In seconds.

    Attributes:
        seconds: What the timed steps took, from one batch asked for to another.
    """

    def __init__(self, batch: Batch, steps: int, clock: Callable[[], float]) -> None:
        self._batch = batch
        self._steps = steps
        self._clock = clock
        self.seconds = math.nan

    def __len__(self) -> int:
        return _WARM + self._steps + 1  # the last one is there to be asked for

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(_WARM):
            yield self._batch
        started = self._clock()
        for _ in range(self._steps):
            yield self._batch
        self.seconds = self._clock() - started
        yield self._batch


Contender = Callable[[Turn], None]


class Log:
    """What a loop of one's own logs: a line in a file and one for people to read, every ``LOG_EVERY`` steps."""

    def __init__(self, setting: Setting) -> None:
        self._records = (setting.folder / "metrics.jsonl").open("a") if setting.world.rank == 0 else None
        self._lines = (setting.folder / "log").open("a")
        self._optimizer = setting.optimizer
        self._step = 0
        self._at = time.time()

    def __call__(self, loss: Tensor, norm: Tensor | None = None) -> None:
        self._step += 1
        if self._step % LOG_EVERY or self._records is None:
            return
        now = time.time()
        record = {
            "step": self._step,
            "time": now,
            "loss": loss.item(),
            "lr": self._optimizer.param_groups[0]["lr"],
            "samples_per_second": ROWS * LOG_EVERY / (now - self._at),
        }
        if norm is not None:
            record["grad_norm"] = norm.item()
        self._at = now
        self._records.write(json.dumps(record) + "\n")
        self._records.flush()
        print(f"step {self._step} loss {record['loss']:.4g}", file=self._lines, flush=True)
