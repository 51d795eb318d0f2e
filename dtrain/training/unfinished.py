"""A window that a rank cannot finish because its memory is exhausted: what DDP's other ranks still expect of it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class StepOutOfMemory(Exception):
    """The settled step ran out of memory on at least one rank, so no rank has applied it."""


def collectives_so_far() -> int:
    """Collectives that this rank has begun in the default group."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group()) if group is not None else 0


class UnfinishedWindow:
    """What DDP's other ranks expect of this one in an accumulation window; nothing without DDP.

    Args:
        model: The model as the step calls it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._began = 0
        self._failed = False  # DDP waits for the end of a backward for ever
        self._backward_began: int | None = None

    def begin(self) -> None:
        """At the start of a window."""
        if self._ddp is not None:
            self._began, self._backward_began = collectives_so_far(), None

    def begin_backward(self) -> None:
        """Before the backward that averages gradients."""
        if self._ddp is not None:
            self._backward_began = collectives_so_far()

    def finish(self) -> None:
        """Collective with the windows of the other ranks: begins what this rank has not begun, with zeros."""
        ddp = self._ddp
        if ddp is None:
            return
        reducer, backward_began = ddp.reducer, self._backward_began
        done = collectives_so_far() - backward_began if backward_began is not None else 0
        if (
            backward_began is None and collectives_so_far() == self._began
        ):  # before the forward of the first micro-batch, which begins with these
            if not self._failed:  # else it is past that, because the first step is settled at once
                reducer._rebuild_buckets()
            if ddp.broadcast_buffers and ddp.modules_buffers:
                ddp._sync_buffers()
        buckets = reducer._get_zeros_like_grad_buckets()
        for bucket in buckets[done:]:
            reducer._run_comm_hook(bucket).wait()
        if ddp.find_unused_parameters and done <= len(buckets):
            ddp.process_group.allreduce([reducer._get_local_used_map()]).wait()
        self._failed = True
