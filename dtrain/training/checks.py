"""Refuses models, scalers and tasks with which a step would not train on the gradient of the mean loss.

* A *model* must not average gradients itself: the last backward of a window averages them, once. Its shapes must be known.
* A *loss scale* must be dtrain's: ``torch.amp.GradScaler`` decides for its own rank only.
* A *task* must return sums. To distinguish a sum from a mean, the task is called with all valid rows of a micro-batch, with one
  half of them and with the other half.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from dtrain.data import Batch
from dtrain.data.order.randomness import seed_generators
from dtrain.errors import ConfigError, Explained
from dtrain.precision import Precision
from dtrain.precision.loss_scale import LossScale
from dtrain.training.setup.buffers import BufferGuard
from dtrain.training.task import Task, run_task

# Relative to the largest of the sums.
_EQUAL = 1e-2  # the same rows, batched differently in bf16, differ by less
_DIFFERENT = 0.25
_MOST_NAMES = 10
_UNUSED = re.compile(r"Parameter indices which did not receive grad for rank (\d+): ([\d ]*\d)")


class UnusedParameters(Explained, RuntimeError):
    """DDP waits for the gradients of parameters that a step has not used."""


def check_model(model: nn.Module) -> None:
    """Refuses models whose gradients the step could not average.

    Raises:
        ConfigError: If the model is under ``no_sync()``, contains another DDP, or uses DDP's own mixed precision.
    """
    outer = model if isinstance(model, DistributedDataParallel) else None
    if outer is not None and not outer.require_backward_grad_sync:
        raise ConfigError(
            "model: it is under no_sync() (require_backward_grad_sync is False), so no backward would average the "
            "gradients over the ranks. Leave no_sync() before the step is built; the step enters it itself."
        )
    if outer is not None and outer.mixed_precision is not None:
        raise ConfigError(
            "model: DistributedDataParallel(mixed_precision=...) sums gradients in 16 bits before it divides, so that fp16 "
            "overflows earlier with more ranks. Wrap the model without it and set precision=fp16 or bf16."
        )
    for name, module in (outer.module if outer is not None else model).named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"model: its module {name or 'at the top'!r} is wrapped in DistributedDataParallel. dtrain wraps the "
                "whole model itself, and two wrappers would average gradients twice. Use the bare module."
            )


def check_initialised(model: nn.Module) -> None:
    """Refuses a model with parameters or buffers of unknown shape, which the optimizer, DDP and checkpoints need.

    Raises:
        ConfigError: If it has a lazy module; names its class and the first such tensor.
    """
    for name, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if is_lazy(tensor):
                raise ConfigError(
                    f"model: {name + '.' if name else ''}{key} of a {type(module).__name__} has no shape before the first "
                    "forward, but the optimizer, DDP and checkpoints need it. Give the number of inputs (nn.Linear instead of "
                    "nn.LazyLinear), or call the model once in the function that builds it."
                )


def check_loss_scale(loss_scale: Any) -> None:
    """Refuses gradient scalers, which skip and unscale by themselves.

    Raises:
        ConfigError: If the argument is neither a ``LossScale`` nor None.
    """
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise ConfigError(
            f"loss_scale: got a {type(loss_scale).__name__}, want a dtrain.precision.loss_scale.LossScale or None. The "
            "step scales, checks and skips itself, on all ranks alike; a second scaler would divide gradients twice and "
            "skip on one rank alone."
        )


class AveragedBackward:
    """Context of a window's last micro-batch; checks that its backward averages gradients over the ranks.

    It does not if the task calls ``model.module``, or the model under ``no_sync()``: each rank would keep its own gradients.

    Raises:
        RuntimeError: On exit, if DDP was not prepared to average.
    """

    def __init__(self, model: nn.Module) -> None:
        self._prepared = False
        self._wrapped = isinstance(model, DistributedDataParallel)
        if self._wrapped:
            model.register_forward_pre_hook(self._note_forward)

    def __enter__(self) -> None:
        self._prepared = False

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and self._wrapped and not self._prepared:
            raise RuntimeError(
                "the task did not run the given model in a way that averages gradients over the ranks: it called "
                "model.module, or entered no_sync(), which the step does itself. Call model(...)."
            )

    def _note_forward(self, model: nn.Module, args: Any) -> None:
        self._prepared |= torch.is_grad_enabled() and bool(model.require_backward_grad_sync)


@contextmanager
def unused_parameters_explained(current: Callable[[], nn.Module]) -> Iterator[None]:
    """Names the parameters when DDP finds that a step has not used all of them; torch gives their numbers only.

    Args:
        current: Returns the model as the step calls it; a step that is done again has a new DDP.

    Raises:
        UnusedParameters: Instead of DDP's ``RuntimeError``.
    """
    try:
        yield
    except RuntimeError as error:
        model = current()
        found = _UNUSED.search(str(error)) if isinstance(model, DistributedDataParallel) else None
        if found is None:
            raise
        ignored = getattr(model, "parameters_to_ignore", ())
        bare: nn.Module = model.module  # type: ignore[assignment]
        ddp_names = [name for name, p in bare.named_parameters() if p.requires_grad and name not in ignored]
        names = [ddp_names[number] for number in map(int, found[2].split())]
        shown = ", ".join(names[:_MOST_NAMES]) + (
            f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else ""
        )
        raise UnusedParameters(
            f"model: the last step has not used {shown} on rank {found[1]}, so that DDP waits for their gradients. If that is "
            "intended, set parallel.find_unused_parameters=true; else use them in the forward and in the loss, or remove them."
        ) from error


def check_mean_loss(task: Task, model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> None:
    """Refuses a task whose ``loss_sum`` is a mean, or which ignores ``batch.valid``.

    The task runs three times on ``batch``: with all valid rows, with one half of them, with the other. The sums of the halves
    add up to the whole. A mean of the whole is the mean of the halves, and a task that ignores ``valid`` returns the same
    number three times: both are refused. A loss for which neither holds is accepted, such as a contrastive one, which has
    other negatives in each half. The model's buffers are restored.

    Args:
        task: The task; it is called three times.
        model: The bare model: DDP's forward would be a collective.
        batch: A micro-batch on the device. With fewer than two valid rows nothing is refused.
        precision: Provides autocast.
        device: Where generators are seeded, so that the three calls draw the same dropout.

    Raises:
        ConfigError: If the sums or counts come from such a task; names them.
    """
    valid: Tensor = batch.valid
    rows = valid.nonzero().flatten()
    buffers = BufferGuard(model)
    buffers.save()
    cut = len(rows) // 2
    # Three times in any case: a task that calls collectives must do so equally often on every rank.
    parts = (rows[:cut], rows[cut:]) if cut else (rows, rows)
    masks = (valid, *(torch.zeros_like(valid).index_fill(0, part, True) for part in parts))
    try:
        runs = [_run(task, model, batch, mask, precision, device) for mask in masks]
    finally:
        buffers.restore(torch.ones((), dtype=torch.bool, device=device))
    if not cut:
        return
    sums, counts = zip(*runs, strict=True)
    whole, *halves = sums
    if counts[0] == counts[1] == counts[2] != 0:
        raise ConfigError(
            f"task: its count is {counts[0]:g} with all and with half of the {len(rows)} rows valid. Output.count is the "
            "number of summed rows (or tokens): leave out those where batch.valid is false."
        )
    scale = max(map(abs, sums))
    averaged = sum(part * count for part, count in zip(halves, counts[1:], strict=True)) / (counts[1] + counts[2] or 1)
    if abs(whole - averaged) < _EQUAL * scale and abs(whole - sum(halves)) > _DIFFERENT * scale:
        raise ConfigError(
            f"task: its loss is {whole:g} with all {len(rows)} valid rows of a micro-batch, {halves[0]:g} with one half "
            f"of them and {halves[1]:g} with the other. That is a mean, or ignores batch.valid; want the sum over the "
            "valid rows, for example losses[batch.valid].sum() with reduction='none'. dtrain divides once, by the count of "
            "the global batch."
        )


def _run(
    task: Task, model: nn.Module, batch: Batch, valid: Tensor, precision: Precision, device: torch.device
) -> tuple[float, float]:
    seed_generators(device, 0)
    part = Batch(batch.clone(), batch.sample_keys, valid)
    # Gradients stay enabled: without them compiled models would be compiled a second time.
    with precision.autocast(device.type):
        output = run_task(task, model, part)
    return float(output.loss_sum.detach()), float(output.count)
