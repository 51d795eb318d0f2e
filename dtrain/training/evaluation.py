"""Evaluation: sums and counts over all ranks, each sample once, without gradients.

Nothing is fetched from the device before the end, and nothing is kept of a micro-batch but its sums, so that memory does not
grow with their number. An evaluation inside a run can be left: whether some rank is asked to stop is agreed beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.data import ShardLoader
from dtrain.data.device_copies import DeviceCopies
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.training.result import Evaluation, NotFinite
from dtrain.training.task import ConcludingTask, Output, Task, checked


class Interrupted(Exception):
    """All ranks have left an evaluation, because one of them is asked to stop."""


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    task: Task,
    loader: ShardLoader,
    *,
    world: World,
    precision: Precision,
    epoch: int = 0,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Evaluation:
    """Collective. Runs the task over one epoch of ``loader``.

    Args:
        model: The bare model: there are no gradients to average, and DDP's forward would be a collective.
        task: Gives loss sum, count, metrics and tables of a micro-batch.
        loader: This rank's part of the evaluation set, padded and masked.
        world: The ranks.
        precision: Autocast.
        epoch: Counting evaluations up lets the loader's workers go on to the next one.
        progress: Called with (micro-batches done, all of them).
        stop: Whether this rank is asked to stop; asked for in every micro-batch. None: it runs to its end.

    Returns:
        ``loss`` and each metric of the task as sum / count over all ranks, ``samples``: how many valid ones there were,
        and ``bad_samples``; what the task concludes from it; the task's tables.

    Raises:
        Interrupted: On every rank before the same micro-batch, if ``stop`` was true on one of them.
        NotFinite: On every rank, if the loss is not finite; it holds the result.
        TypeError: If the task returns something else than an ``Output``.
        ValueError: If the task's metrics or tables differ between micro-batches or ranks, or no sample can be read.
    """
    was_training = model.training
    model.eval()
    sums = _Sums(world.device)
    samples = bad = 0
    total = loader.steps_per_epoch * loader.micro_batches_per_step
    to_device = DeviceCopies(world.device)
    stop_vote = _StopVote(stop, world) if stop is not None else None
    try:
        for number, batch in enumerate(loader.epoch(epoch)):
            if stop_vote is not None and stop_vote.agreed():
                raise Interrupted
            samples += sum(1 for key in batch.sample_keys if key)
            bad += len(batch.bad)
            with precision.autocast(world.device.type):
                sums.add(checked(task(model, to_device(batch))))
            if progress is not None:
                progress(number + 1, total)
        result = sums.over_all_ranks(samples, bad)
        if not math.isfinite(result["loss"]):
            raise NotFinite(
                f"evaluation: the loss is {result['loss']} over {result['samples']} samples. Has the run diverged, or does the "
                "task return no valid rows for this data?",
                result,
            )
        if isinstance(task, ConcludingTask):
            with precision.autocast(world.device.type):
                return Evaluation({**result, **task.conclude(model, result)}, result.tables)
        return result
    finally:
        model.train(was_training)


class _StopVote:
    """Whether some rank is asked to stop, known one micro-batch later, so that nobody waits for the answer.

    Args:
        stop: Whether this rank is.
        world: The ranks.
    """

    def __init__(self, stop: Callable[[], bool], world: World) -> None:
        self._stop = stop
        self._alone = world.size == 1
        self._asked = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def agreed(self) -> bool:
        """Collective, as often on every rank. What the ranks said at the call before; alone, what this one says now."""
        if self._alone:
            return self._stop()
        if self._work is not None:
            self._work.wait()
            if self._asked.item():
                return True
        # On the host, where gloo adds up beside whatever the GPUs do.
        self._asked = torch.tensor([self._stop()], dtype=torch.int32)
        self._work = dist.all_reduce(self._asked, async_op=True)
        return False


class _Sums:
    """What micro-batches add up to, on the device: pairs of sum and count in fp64, tables in int64."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] = []
        self._pairs = torch.zeros(0, dtype=torch.float64, device=device)  # of the loss, then of each metric
        self._tables: dict[str, Tensor] = {}

    def add(self, output: Output) -> None:
        tables = dict(sorted(output.tables.items()))
        if not len(self._pairs):
            self._names = sorted(output.metrics)
            self._pairs = torch.zeros(2 + 2 * len(self._names), dtype=torch.float64, device=self._device)
            self._tables = {name: torch.zeros_like(table, device=self._device) for name, table in tables.items()}
        elif (found := _layout(sorted(output.metrics), tables)) != (before := _layout(self._names, self._tables)):
            raise ValueError(
                f"the task returned {found}, before that {before}. Every micro-batch must have the same metrics and "
                "tables; a sum and a count of 0 are fine."
            )
        pairs = [(output.loss_sum, output.count), *(output.metrics[name] for name in self._names)]
        self._pairs += torch.stack([self._float64(value) for pair in pairs for value in pair])
        for name, table in tables.items():
            self._tables[name] += table.to(self._device)

    def over_all_ranks(self, samples: int, bad: int) -> Evaluation:
        """Collective."""
        layouts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(layouts, _layout(self._names, self._tables))
        for rank, layout in enumerate(layouts):
            if layout != layouts[0]:
                raise ValueError(f"the task returned {layouts[0]} on rank 0 and {layout} on rank {rank}.")
        counted = torch.tensor([samples, bad], dtype=torch.float64, device=self._device)
        sums = torch.cat([self._pairs, counted])
        dist.all_reduce(sums)
        for table in self._tables.values():
            dist.all_reduce(table)
        *totals, samples_of_all, bad_of_all = sums.tolist()
        metrics = {
            name: total / count if count else math.nan
            for name, total, count in zip(["loss", *self._names], totals[::2], totals[1::2], strict=True)
        }
        metrics |= {"samples": int(samples_of_all), "bad_samples": int(bad_of_all)}
        return Evaluation(metrics, {name: table.cpu() for name, table in self._tables.items()})

    def _float64(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self._device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self._device)


def _layout(metrics: list[str], tables: Mapping[str, Tensor]) -> str:
    """Of what a task returned; the texts are equal if the sums can be added."""
    shapes = "".join(f", table {name} {list(table.shape)}" for name, table in tables.items())
    return f"metrics {metrics}{shapes}"
