"""Keeps masked rows out of BatchNorm's statistics in training.

* A micro-batch with masked rows is cut to its valid rows. So a rank's statistics describe only its samples, as in a
  loop without masked rows.
* BatchNorm cannot normalise fewer than two rows, and every rank must run forward and backward. So a micro-batch with fewer
  valid rows is not cut, and running statistics are restored after it.
* A micro-batch stays whole, with a warning, if it has a column without one entry per row, as a hook may add.
* *Fixed shapes*: micro-batches are not cut for compiled models and ScriptModules, which may accept one shape only; for
  SyncBatchNorm, whose running statistics are equal on all ranks; and for a task that calls collectives, such as a
  contrastive one that gathers the rows of all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.data import Batch
from dtrain.precision import Precision
from dtrain.training.breakpoints import without_breakpoints
from dtrain.training.setup.buffers import BufferGuard
from dtrain.training.setup.model import is_compiled
from dtrain.training.task import Task, copy_of_task


class ValidRows:
    """Cuts the micro-batches of a model; does nothing if the model has no BatchNorm or needs fixed shapes.

    Args:
        model: The bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = [] if fixed_shapes(model) else _norms(model)
        self._said = False  # that batches stay whole because of their columns

    def observe(self, task: Task, model: nn.Module, batch: Batch, precision: Precision) -> None:
        """From now on micro-batches stay whole if the task calls collectives; arguments as in ``calls_collectives``."""
        if self._norms and calls_collectives(task, model, batch, precision):
            self._norms = []

    def for_batch(self, batch: Batch) -> AbstractContextManager[Batch]:
        """The micro-batch to train on in a block, which runs forward and backward."""
        if not self._norms or (kept := len(batch.kept_rows())) == len(batch.valid):
            return nullcontext(batch)
        return self._cut(batch, kept)

    @contextmanager
    def _cut(self, batch: Batch, kept: int) -> Iterator[Batch]:
        # One in eval() mode, as in a frozen backbone, uses and keeps its running statistics.
        norms = [norm for norm in self._norms if norm.training or norm.running_mean is None]
        if not norms:
            yield batch
        elif kept >= 2 and not (others := batch.other_columns()):
            yield batch.valid_rows()
        elif kept >= 2:
            if not self._said:
                warnings.warn(
                    f"the batch has {len(batch.valid)} rows, and {', '.join(map(repr, others))} does not have one entry per "
                    "row. Batches with masked rows stay whole, and these rows enter the BatchNorm statistics. Add tensors "
                    "or lists with one entry per row, or set data.tail=drop to avoid short batches.",
                    stacklevel=2,
                )
            self._said = True
            yield batch
        else:
            statistics = BufferGuard(nn.ModuleList(norms))
            statistics.save()
            yield batch
            # Not before the backward: recomputed activations update them once more.
            statistics.restore(torch.ones((), dtype=torch.bool, device=batch.valid.device))


def has_batchnorm(model: nn.Module) -> bool:
    """Whether a training step of the model depends on the rows of a micro-batch together."""
    return bool(_norms(model))


def fixed_shapes(model: nn.Module) -> str:
    """Why the micro-batches of a model with BatchNorm are not cut to their valid rows; ``""`` if they are, or it has none."""
    if not (norms := _norms(model)):
        return ""
    if any(isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        return "SyncBatchNorm"
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "a ScriptModule"
    return "train.compile" if is_compiled(model) else ""


def calls_collectives(task: Task, model: nn.Module, batch: Batch, precision: Precision) -> bool:
    """Whether a task, or hooks around its model, call collectives. Calls a copy of the task and restores the buffers.

    Args:
        task: The task.
        model: The bare model: DDP's forward would be a collective. Those of a sharded model's forward do not count.
        batch: A micro-batch on the device.
        precision: Provides autocast.

    Returns:
        True also if the task raises, because torch does not support such an observation of everything.

    Raises:
        MemoryError, torch.OutOfMemoryError: If memory is exhausted.
    """
    buffers = BufferGuard(model)
    buffers.save()
    try:
        with without_breakpoints(), _Collectives(model) as seen, precision.autocast(batch.valid.device.type):
            copy_of_task(task)(model, batch.clone())
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # noqa: BLE001 - the step raises errors of the task
        return True
    finally:
        buffers.restore(torch.ones((), dtype=torch.bool, device=batch.valid.device))
    return seen.found


class _Collectives(TorchDispatchMode):
    """Notes collectives outside of the model's forward (``found``)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._in_forward = 0
        self.found = False

    def __enter__(self) -> _Collectives:
        def begin(*args: Any) -> None:
            self._in_forward += 1

        def end(*args: Any) -> None:
            self._in_forward -= 1

        # First and last: the hooks of a sharded model gather its parameters.
        before = self._model.register_forward_pre_hook(begin, prepend=True)
        self._hooks = [before, self._model.register_forward_hook(end, always_call=True)]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= not self._in_forward and func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def _norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
