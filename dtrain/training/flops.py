"""How much a model has to compute for a sample: counted, operation by operation, in one forward of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from dtrain.data import Batch
from dtrain.precision import Precision
from dtrain.training.buffers import BufferGuard
from dtrain.training.task import Task

_BACKWARD = 2  # forwards: one for the gradients of the activations, one for those of the weights


def flops_per_row(task: Task, model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> float:
    """Floating-point operations of forward and backward for one row of a batch.

    Matrix products, convolutions and attention are counted, as two operations for each multiplication and addition; what is
    done element by element is not. The backward counts as two forwards (Chowdhery et al. 2022, PaLM, appendix B), so what
    ``train.checkpoint_activations`` computes again is no work, and a frozen part counts as if it were trained.

    The task runs once more, on every rank, on a copy of the batch, by uncompiled code, whose operations can be seen. Nothing
    of it is left behind in the model's buffers, but what counts its own calls has seen one more.

    Args:
        task: The task.
        model: The bare model.
        batch: A micro-batch on the device.
        precision: Autocast.
        device: Where the model is.

    Raises:
        Exception: What the task raises, or torch where a mode that sees every operation is more than it can do.
    """
    buffers = BufferGuard(model)
    buffers.keep()
    try:
        # With gradients, though none are asked for: a task may differentiate in its forward.
        with _eager(model), _Counter() as counter, precision.autocast(device.type):
            task(model, batch.clone())
    finally:
        buffers.restore(torch.ones((), dtype=torch.bool, device=device))
    return (1 + _BACKWARD) * counter.total / len(batch.sample_keys)


def _eager(model: nn.Module) -> AbstractContextManager[Any]:
    # Only where something is compiled: the import of the compiler takes seconds.
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


class _Counter(TorchDispatchMode):
    """Adds up torch's own formulas.

    Not its ``FlopCounterMode``, whose account by modules raises where a forward calls ``torch.autograd.grad``.

    Attributes:
        total: Operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operation = func.overloadpacket
        if (
            operation is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        ):  # which torch 2.13 has no formula for
            query, key, value = (tensor.shape for tensor in args[:3])
            self.total += sdpa_flop_count(query, key, value)
        elif operation in flop_registry:
            self.total += flop_registry[operation](*args, **kwargs, out_val=out)
        return out
