"""What DDP's all-reduce of gradients carries: another dtype, or whatever a hook of the user's makes of them.

* The *wire dtype* is what travels. Gradients are divided by the number of ranks before they are cast, so that the wire
  holds nothing larger than their mean, and come back in their own dtype.
* A *hook* is a DDP communication hook, ``hook(state, bucket) -> Future``. One that compresses may lose an infinity, or
  remember it for ever, so a guard looks at the gradients before the hook does.
"""

# Annotations have to be objects here: DDP compares those of a hook with its own, and a string is none of them.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.errors import ConfigError

#: What ``parallel.comm_dtype`` may be.
COMM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


def reduce_in(model: DistributedDataParallel, dtype: torch.dtype) -> None:
    """Makes ``model`` average its gradients in ``dtype``, on any backend.

    * ``float32`` is at least that: gradients of 16 bits are averaged in fp32, those of 64 bits in fp64.
    * ``bfloat16`` halves the bytes and keeps 8 bits of each gradient. Its range is that of fp32: nothing overflows.
    * ``float16`` halves the bytes and keeps 11 bits. A scaled gradient whose mean is above 65504 becomes infinite on
      every rank, so that the loss scale settles below ``65504 / largest gradient`` for the whole run; without a loss
      scale, gradients below 6e-8 become zero. Prefer bf16 unless the three bits matter.

    torch's ``fp16_compress_hook`` casts first, so that it overflows ``world size`` times earlier, and its
    ``bf16_compress_hook`` refuses gloo.

    Raises:
        ConfigError: If a parameter is complex and ``dtype`` has 16 bits.
    """
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if dtype != torch.float32 and any(own.is_complex for own in trained):
        raise ConfigError(f"parallel.comm_dtype: a parameter is complex and has no form in {dtype}. Leave it at fp32.")
    if any(_on_wire(own, dtype) != own for own in trained):
        model.register_comm_hook(_Wire(dtype, model.process_group), _average)


def bytes_per_step(model: DistributedDataParallel, dtype: torch.dtype) -> int:
    """Bytes that DDP has all ranks agree on in a step: gradients in the wire dtype, and buffers that it broadcasts.

    Each number is counted once. A ring sends and receives ``2 (ranks - 1) / ranks`` times that on every rank.

    Args:
        model: The wrapped model.
        dtype: As for ``reduce_in``; a hook of the user's may send less.
    """
    ignored = set(model.parameters_to_ignore)
    trained = (p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored)
    gradients = sum(p.numel() * _on_wire(p.dtype, dtype).itemsize for p in trained)
    return gradients + (sum(buffer.nbytes for buffer in model.modules_buffers) if model.broadcast_buffers else 0)


class HookGuard:
    """Registers a user's hook with ``model`` and looks at the gradients before the hook gets them.

    What is not finite is noted and replaced by zero: the hook's memory stays clean on every rank, and the step is
    skipped for what was noted.

    Args:
        model: The wrapped model.
        hook: A DDP communication hook.
        state: Its first argument. If the state remembers what a skipped step left (error feedback), it may have a
            method ``forget(skip)`` that drops it where ``skip`` (bool tensor, shape ``[]``, on the device) is true;
            torch's ``PowerSGDState`` needs none.
    """

    def __init__(self, model: DistributedDataParallel, hook: Hook, state: Any = None) -> None:
        self._hook = hook
        self._state = state
        self._bad = torch.zeros((), dtype=torch.bool, device=next(model.parameters()).device)
        self._starts: dict[int, Tensor] = {}
        model.register_comm_hook(state, self._checked)

    def flag(self) -> Tensor:
        """Whether this rank's gradients were not finite since it was last asked; bool, shape ``[]``, on the device."""
        bad, self._bad = self._bad, torch.zeros_like(self._bad)
        return bad

    @torch.no_grad()
    def reset(self, skip: Tensor) -> None:
        """Makes the hook forget the gradients of a skipped step; the same on every rank, without waiting for the device.

        Args:
            skip: bool, shape ``[]``.
        """
        if isinstance(self._state, PowerSGDState):
            self._reset_power_sgd(self._state, skip)
        elif callable(forget := getattr(self._state, "forget", None)):
            forget(skip)

    def _checked(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        # The largest magnitude is NaN if one of them is.
        self._bad = self._bad | ~torch.linalg.vector_norm(gradients, torch.inf).isfinite()
        torch.nan_to_num_(gradients, nan=0.0, posinf=0.0, neginf=0.0)
        future = self._hook(state, bucket)
        if gradients.device.type == "cpu":
            # gloo runs callbacks in threads of its own: the collectives that they start, as PowerSGD's do, would meet
            # those of the next bucket in another order on each rank.
            future.wait()
        return future

    def _reset_power_sgd(self, state: PowerSGDState, skip: Tensor) -> None:
        # The error of a gradient that was never applied, at a scale that is not the next one's.
        for error in state.error_dict.values():
            error.masked_fill_(skip, 0)
        # Finite gradients whose product overflowed leave a Q that every later step starts from. P is made of Q.
        for number, factor in state.q_memory_dict.items():
            if number not in self._starts or self._starts[number].shape != factor.shape:
                generator = torch.Generator().manual_seed(number)
                self._starts[number] = torch.randn(factor.shape, generator=generator).to(factor)
            factor.copy_(torch.where(skip, self._starts[number], factor))


@dataclass(frozen=True)
class _Wire:
    dtype: torch.dtype
    group: dist.ProcessGroup


def _on_wire(own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(own, dtype) if dtype == torch.float32 else dtype


def _average(wire: _Wire, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    gradients = bucket.buffer()
    dtype = _on_wire(gradients.dtype, wire.dtype)
    exact = gradients.to(torch.promote_types(gradients.dtype, dtype))
    message = exact.div_(wire.group.size()).to(dtype)

    def arrived(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(reduced.value()[0])

    return dist.all_reduce(message, group=wire.group, async_op=True).get_future().then(arrived)
