"""The running workers of a loader, and which micro-batch they hand over next."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from dtrain.data.batch import Batch
from dtrain.data.dataset import MicroBatches


class Stream:
    """Workers that build a rank's micro-batches, epoch after epoch. They end when the stream is dropped.

    Args:
        dataset: The micro-batches.
        loading: Options of torch's DataLoader.
        start: Epoch and step of the first micro-batch.
        steps: Steps in the first epoch, and in each one after it.
        micro_batches_per_step: Micro-batches of a step.

    Attributes:
        at: Epoch and step of the next micro-batch; None in the middle of a step.
    """

    def __init__(
        self,
        dataset: MicroBatches,
        loading: Mapping[str, Any],
        start: tuple[int, int],
        steps: tuple[int, int],
        micro_batches_per_step: int,
    ) -> None:
        self._iterator = iter(
            DataLoader(dataset, batch_size=None, worker_init_fn=_leave_signals_to_the_trainer, **loading)
        )
        self._epoch, self._step = start
        self._micro_batch = 0
        self._num_steps, self._later_steps = steps
        self._micro_batches = micro_batches_per_step

    @property
    def at(self) -> tuple[int, int] | None:
        """Epoch and step of the next micro-batch; None in the middle of a step."""
        return None if self._micro_batch else (self._epoch, self._step)

    def take(self) -> Batch:
        """The next micro-batch; waits for the workers."""
        batch: Batch = next(self._iterator)
        self._micro_batch += 1
        if self._micro_batch == self._micro_batches:
            self._micro_batch = 0
            self._step += 1
        if self._step == self._num_steps:
            self._epoch, self._step, self._num_steps = self._epoch + 1, 0, self._later_steps
        return batch


def _leave_signals_to_the_trainer(worker: int) -> None:
    # A stop request reaches the whole process group. The trainer finishes its step with these workers and then ends them.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
