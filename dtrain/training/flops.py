"""How much a model has to compute for a sample: counted, operation by operation, in one forward of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

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

    The task runs once more, on every rank and without gradients, by uncompiled code, whose operations can be seen. Nothing
    of it is left behind in the model's buffers.

    Args:
        task: The task.
        model: The bare model.
        batch: A micro-batch on the device.
        precision: Autocast.
        device: Where the model is.
    """
    buffers = BufferGuard(model)
    buffers.keep()
    with torch.no_grad(), _eager(model), _counter() as counter, precision.autocast(device.type):
        task(model, batch)
    buffers.restore(torch.ones((), dtype=torch.bool, device=device))
    return (1 + _BACKWARD) * counter.get_total_flops() / len(batch.sample_keys)


def _eager(model: nn.Module) -> AbstractContextManager[Any]:
    # Only where something is compiled: the import of the compiler takes seconds.
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _counter() -> FlopCounterMode:
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # which torch 2.13 does not count

    def attention(query: Any, key: Any, value: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
        return sdpa_flop_count(query, key, value)

    mapping: dict[Any, Callable[..., Any]] = {cpu: attention}
    return FlopCounterMode(display=False, custom_mapping=mapping)
