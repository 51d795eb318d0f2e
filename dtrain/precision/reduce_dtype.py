"""The *reduce dtype*, in which DDP sums gradients over the ranks.

Gradients are divided by the number of ranks before they are cast to it, so that nothing larger than their mean has to fit,
and are cast back afterwards.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with types, and strings would not be equal.

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dtrain.errors import ConfigError

#: The values of ``parallel.reduce_dtype``.
REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def reduce_in(model: DistributedDataParallel, dtype: torch.dtype) -> None:
    """Makes ``model`` average its gradients in ``dtype``, on any backend.

    * ``float32`` is a lower bound: 16-bit gradients are averaged in fp32, 64-bit ones in fp64.
    * ``bfloat16`` halves the bytes and keeps 8 bits of each mantissa. It has the range of fp32, so nothing overflows.
    * ``float16`` halves the bytes and keeps 11 bits. A scaled gradient whose mean is above 65504 becomes infinite on
      every rank, so the loss scale stays below ``65504 / largest gradient`` for the whole run. Without a loss scale,
      gradients below 6e-8 become zero. Prefer bf16 unless the three bits matter.

    torch's own hooks differ: ``fp16_compress_hook`` casts before it divides, so it overflows ``world size`` times
    earlier, and ``bf16_compress_hook`` refuses gloo.

    Args:
        model: The wrapped model.
        dtype: One of ``REDUCE_DTYPES``.

    Raises:
        ConfigError: If a parameter is complex and ``dtype`` has 16 bits.
    """
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if dtype != torch.float32 and any(own.is_complex for own in trained):
        raise ConfigError(
            f"parallel.reduce_dtype: a parameter is complex and cannot be reduced in {dtype}. Leave it at fp32."
        )
    if any(reduced_dtype(own, dtype) != own for own in trained):
        model.register_comm_hook(_ReduceDtype(dtype, model.process_group), _cast_for_reduce)


def keeps_views(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradients may stay views of DDP's buckets between steps: all of them are views, in every step.

    DDP's buckets always exist. Gradients that are set to None after a step are accumulated outside the buckets and copied into
    them in the last backward of a window: they need their size once more. Zeroed views are accumulated in the buckets.
    A parameter that a step may leave unused needs a gradient of None, or the optimizer would update it.

    Args:
        model: The model, in DDP or not.
        optimizer: Over its parameters.
    """
    if not isinstance(model, DistributedDataParallel) or not model.gradient_as_bucket_view:
        return False
    if model.find_unused_parameters or model.static_graph or model.parameters_to_ignore:
        return False
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:  # a subclass that does more
        return False
    averaged = {id(parameter) for parameter in model.module.parameters()}
    return all(id(parameter) in averaged for group in optimizer.param_groups for parameter in group["params"])


@dataclass(frozen=True)
class _ReduceDtype:
    dtype: torch.dtype
    group: dist.ProcessGroup


def reduced_dtype(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of the dtype ``own`` are reduced, for the reduce dtype ``dtype``."""
    return torch.promote_types(own, dtype) if dtype == torch.float32 else dtype


def _cast_for_reduce(reduce: _ReduceDtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    dtype = reduced_dtype(gradients.dtype, reduce.dtype)
    exact = gradients.to(torch.promote_types(gradients.dtype, dtype))
    # Divided before the cast: a mean that fits the dtype must not overflow as a sum.
    message = exact.div_(reduce.group.size()).to(dtype)

    def cast_back(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(reduced.value()[0])

    work = dist.all_reduce(message, group=reduce.group, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(cast_back)
    return averaged
