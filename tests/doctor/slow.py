"""Parts of a run that are slow on purpose; configs of tests name them as ``_target_``."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.tasks import Classification
from dtrain.training.task import Output


class SleepyAugmentation:
    """Sleeps and returns the sample unchanged."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        time.sleep(self._seconds)
        return sample


class SleepyModel(nn.Module):
    """Sleeps, then applies one linear layer."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 10)
        self._seconds = seconds

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, 10]``."""
        time.sleep(self._seconds)
        return self.head(images.flatten(1))


def sleepy_hook(seconds, bucket):  # without annotations: DDP compares them with types
    """Sleeps, then averages as DDP does."""
    time.sleep(seconds)
    summed = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return summed.get_future().then(lambda future: future.value()[0])


class FailsOnRankOne(Classification):
    """A task that fails on rank 1 only."""

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("made up")
        return super().__call__(model, batch)


#: One entry for each call of ``counting_hook`` in this process.
calls: list[int] = []


def counting_hook(state, bucket):
    """Records the call and averages as DDP does."""
    calls.append(bucket.index())
    return sleepy_hook(0.0, bucket)
