"""How DDP all-reduces gradients: in another dtype, or by a user's communication hook.

* The *reduce dtype* is the dtype in which gradients are summed over the ranks. They are divided by the number of ranks
  before they are cast to it, so that nothing larger than their mean has to fit, and are cast back afterwards.
* A *hook* is a DDP communication hook, ``hook(state, bucket) -> Future``. A compressing hook may hide an infinity from the
  overflow check, or keep it in its state for all later steps. ``HookGuard`` therefore checks the gradients before
  the hook gets them.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with types, and strings would not be equal.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.errors import ConfigError

#: The values of ``parallel.reduce_dtype``.
REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


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


class HookGuard:
    """Registers a user's communication hook with ``model`` and checks the gradients before the hook gets them.

    Values that are not finite set a flag, for which the step is skipped, and are replaced by zero, so that the state of
    the hook stays finite on every rank.

    Args:
        model: The wrapped model.
        hook: A DDP communication hook.
        state: Its first argument. A state that accumulates something of skipped steps (error feedback) may have a method
            ``forget(skip)`` that drops it where ``skip`` (bool tensor, shape ``[]``, on the device) is true. torch's
            ``PowerSGDState`` is handled without one.
    """

    def __init__(self, model: DistributedDataParallel, hook: Hook, state: Any = None) -> None:
        self._hook = hook
        self._state = state
        self._bad = torch.zeros((), dtype=torch.bool, device=next(model.parameters()).device)
        self._starts: dict[int, Tensor] = {}
        model.register_comm_hook(state, self._checked)

    def flag(self) -> Tensor:
        """Whether this rank's gradients were not finite since the last call: bool, shape ``[]``, on the device."""
        bad, self._bad = self._bad, torch.zeros_like(self._bad)
        return bad

    @torch.no_grad()
    def reset(self, skip: Tensor) -> None:
        """Drops from the hook's state what a skipped step left there; does not wait for the device.

        Args:
            skip: bool, shape ``[]``; equal on all ranks.
        """
        if isinstance(self._state, PowerSGDState):
            self._reset_power_sgd(self._state, skip)
        elif callable(forget := getattr(self._state, "forget", None)):
            forget(skip)

    def _checked(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        # The inf-norm is NaN if any gradient is.
        self._bad = self._bad | ~torch.linalg.vector_norm(gradients, torch.inf).isfinite()
        torch.nan_to_num_(gradients, nan=0.0, posinf=0.0, neginf=0.0)
        future = self._hook(state, bucket)
        if gradients.device.type == "cpu":
            # gloo runs callbacks in its own threads. Collectives that they start, as PowerSGD's do, could be matched with
            # those of the next bucket, in a different order on each rank.
            future.wait()
        return future

    def _reset_power_sgd(self, state: PowerSGDState, skip: Tensor) -> None:
        # The error feedback belongs to a gradient that was not applied, and to a loss scale that will change.
        for error in state.error_dict.values():
            error.masked_fill_(skip, 0)
        # Finite gradients whose product overflowed leave a Q that is not finite, from which every later step would start.
        # P is computed from Q.
        for number, factor in state.q_memory_dict.items():
            if number not in self._starts or self._starts[number].shape != factor.shape:
                generator = torch.Generator().manual_seed(number)
                self._starts[number] = torch.randn(factor.shape, generator=generator).to(factor)
            factor.copy_(torch.where(skip, self._starts[number], factor))


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
