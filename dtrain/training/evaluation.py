"""Evaluation: sums and counts over all ranks, each sample once, without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.data import ShardLoader
from dtrain.data.device_copies import DeviceCopies
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.training.task import ConcludingTask, Task, checked


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
) -> dict[str, float]:
    """Collective. Runs the task over one epoch of ``loader``.

    Args:
        model: The bare model: there are no gradients to average, and DDP's forward would be a collective.
        task: Gives loss sum, count and metrics of a micro-batch.
        loader: This rank's part of the evaluation set, padded and masked.
        world: The ranks.
        precision: Autocast.
        epoch: Counting evaluations up lets the loader's workers go on to the next one.
        progress: Called with (micro-batches done, all of them).

    Returns:
        ``loss`` and each metric of the task as sum / count over all ranks, ``samples``: how many valid ones there were,
        and ``bad_samples``; and what the task concludes from it.

    Raises:
        ConfigError: On every rank, if the result is not finite or nothing could be evaluated.
        TypeError: If the task returns something else than an ``Output``.
    """
    was_training = model.training
    model.eval()
    names: list[str] = []
    sums = torch.zeros(0, dtype=torch.float64, device=world.device)
    samples = bad = 0
    total = loader.steps_per_epoch * loader.micro_batches_per_step
    to_device = DeviceCopies(world.device)
    try:
        for number, batch in enumerate(loader.epoch(epoch)):
            samples += sum(1 for key in batch.sample_keys if key)
            bad += len(batch.bad)
            with precision.autocast(world.device.type):
                output = checked(task(model, to_device(batch)))
            if not names:
                names = ["loss", *sorted(output.metrics)]
                sums = torch.zeros(2 * len(names) + 2, dtype=torch.float64, device=world.device)
            pairs = [(output.loss_sum, output.count), *(output.metrics[name] for name in names[1:])]
            values = [value for pair in pairs for value in pair]
            sums[:-2] += torch.stack([_float64(value, world.device) for value in values])
            if progress is not None:
                progress(number + 1, total)
        sums[-2], sums[-1] = samples, bad
        dist.all_reduce(sums)
        totals: list[float] = sums.tolist()
        pairs_of = {name: (totals[2 * i], totals[2 * i + 1]) for i, name in enumerate(names)}
        result: dict[str, float] = {
            name: total / count if count else math.nan for name, (total, count) in pairs_of.items()
        }
        result |= {"samples": int(totals[-2]), "bad_samples": int(totals[-1])}
        if not math.isfinite(result["loss"]):
            raise ConfigError(
                f"evaluation: the loss is {result['loss']} over {result['samples']} samples. Has the run diverged, or does the "
                "task return no valid rows for this data?"
            )
        with precision.autocast(world.device.type):
            return {**result, **(task.conclude(model, result) if isinstance(task, ConcludingTask) else {})}
    finally:
        model.train(was_training)


def _float64(value: Tensor | float, device: torch.device) -> Tensor:
    return value.double() if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=device)
