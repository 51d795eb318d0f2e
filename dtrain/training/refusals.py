"""What a step refuses because it would train on something else than the gradient of the mean loss.

* A *model* that averages gradients by rules of its own, so that the window's last backward would not, or not rightly.
* A *scale* that is not the run's: ``torch.amp.GradScaler`` decides for its own rank only.
* A *task* whose sum is a mean. Nobody can tell from one number, but from three: leave half of the rows out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.errors import ConfigError
from dtrain.data import Batch
from dtrain.precision import Precision
from dtrain.precision.loss_scale import LossScale
from dtrain.training.buffers import BufferGuard
from dtrain.training.seed import seed_generators
from dtrain.training.task import Task, checked

_CLOSE = 1e-2  # rows computed in bf16 in another arrangement differ by less
_FAR = 0.25


def refuse_model(model: nn.Module) -> None:
    """Refuses models whose gradients this step could not average.

    Args:
        model: As the step runs it: bare, or wrapped in DDP.

    Raises:
        ConfigError: If it is switched to leave gradients unaveraged, holds a DDP of its own, or has DDP's private mixed
            precision.
    """
    outer = model if isinstance(model, DistributedDataParallel) else None
    if outer is not None and not outer.require_backward_grad_sync:
        raise ConfigError(
            "model: it is under no_sync() (require_backward_grad_sync is False), so no backward would average the "
            "gradients over the ranks. Leave no_sync() before building the step, which enters it itself."
        )
    if outer is not None and outer.mixed_precision is not None:
        raise ConfigError(
            "model: DistributedDataParallel(mixed_precision=...) is private to torch and adds up in 16 bits before it "
            "divides, so that fp16 overflows the sooner the more ranks there are. Wrap the model without it and set "
            "precision=fp16 or bf16."
        )
    for name, module in (outer.module if outer is not None else model).named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"model: its module {name or 'at the top'!r} is wrapped in DistributedDataParallel. dtrain wraps the "
                "whole model itself, and two wrappers would average gradients twice. Use the bare module."
            )


def refuse_scale(loss_scale: Any) -> None:
    """Refuses gradient scalers, which decide and unscale on their own.

    Raises:
        ConfigError: If it is no ``LossScale``.
    """
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise ConfigError(
            f"loss_scale: got a {type(loss_scale).__name__}, want a dtrain.precision.loss_scale.LossScale or None. The "
            "step scales, checks and skips itself, on all ranks together; a second scaler would divide gradients twice "
            "and skip on one rank alone."
        )


class AveragedBackward:
    """Makes sure that DDP takes part in the backward that has to average over the ranks.

    Forward and backward of a window's last micro-batch run inside it. A task that calls ``model.module``, or the model
    under ``no_sync()``, leaves each rank with its own gradients.

    Args:
        model: As the step runs it.

    Raises:
        RuntimeError: On leaving it, if DDP was not asked to average.
    """

    def __init__(self, model: nn.Module) -> None:
        self._prepared = False
        self._wrapped = isinstance(model, DistributedDataParallel)
        if self._wrapped:
            model.register_forward_pre_hook(self._note)

    def __enter__(self) -> None:
        self._prepared = False

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None and self._wrapped and not self._prepared:
            raise RuntimeError(
                "the task did not run the model that it was given in a way that averages gradients over the ranks: it "
                "called model.module, or entered no_sync(), which is the step's to do. Call model(...)."
            )

    def _note(self, model: nn.Module, args: Any) -> None:
        self._prepared |= torch.is_grad_enabled() and bool(model.require_backward_grad_sync)


def refuse_mean(task: Task, model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> None:
    """Refuses a task whose ``loss_sum`` is a mean, or which does not look at ``batch.valid``.

    The task runs three times on ``batch``: with all valid rows, with one half of them, with the other. Sums of the
    halves add up to the whole. Means average to it, and what ignores ``valid`` stays as it is: these two are refused. A
    loss for which neither holds (a contrastive one has other negatives in each half) is let through. Nothing of it is
    left behind in the model's buffers, but a task that counts its own calls has seen three more.

    Args:
        task: The task.
        model: The bare model: DDP's forward would be a collective.
        batch: A micro-batch on the device. With fewer than two valid rows nothing is told from it.
        precision: Autocast.
        device: Where generators are seeded, to have the same dropout three times.

    Raises:
        ConfigError: If so; gives the three sums.
    """
    valid: Tensor = batch.valid
    rows = valid.nonzero().flatten()
    buffers = BufferGuard(model)
    buffers.keep()
    cut = len(rows) // 2
    # Three times in any case: a task that talks to the other ranks must do so equally often on each of them.
    parts = (rows[:cut], rows[cut:]) if cut else (rows, rows)
    masks = (valid, *(torch.zeros_like(valid).index_fill(0, part, True) for part in parts))
    runs = [_run(task, model, batch, mask, precision, device) for mask in masks]
    buffers.restore(torch.ones((), dtype=torch.bool, device=device))
    if not cut:
        return
    sums, counts = zip(*runs, strict=True)
    whole, *halves = sums
    if counts[0] == counts[1] == counts[2] != 0:
        raise ConfigError(
            f"task: it counts {counts[0]:g} whether all or half of the {len(rows)} rows are valid. Output.count is how "
            "many rows (or tokens) were summed: leave out those where batch.valid is false."
        )
    scale = max(map(abs, sums))
    averaged = sum(part * count for part, count in zip(halves, counts[1:], strict=True)) / (counts[1] + counts[2] or 1)
    if abs(whole - averaged) < _CLOSE * scale and abs(whole - sum(halves)) > _FAR * scale:
        raise ConfigError(
            f"task: its loss is {whole:g} with all {len(rows)} valid rows of a micro-batch, {halves[0]:g} with one half "
            f"of them and {halves[1]:g} with the other. That is a mean, or does not look at batch.valid; want the sum "
            "over the valid rows, for example losses[batch.valid].sum() with reduction='none'. dtrain divides once, by "
            "the count of the global batch."
        )


def _run(
    task: Task, model: nn.Module, batch: Batch, valid: Tensor, precision: Precision, device: torch.device
) -> tuple[float, float]:
    seed_generators(device, 0)
    part = Batch(batch.clone(), batch.sample_keys, valid)
    # With gradients, though none are asked for: compiled models would be compiled anew without.
    with precision.autocast(device.type):
        output = checked(task(model, part))
    return float(output.loss_sum.detach()), float(output.count)
