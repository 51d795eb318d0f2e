"""A window that a rank cannot finish because its memory is exhausted: the collectives that the other ranks still expect of it.

What this rank sends does not matter, because no rank applies the step. Which collectives are left is known from their number
so far: with DDP they are its buckets, and with a sharded model those that were recorded in a micro-batch of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class StepOutOfMemory(Exception):
    """The settled step ran out of memory on at least one rank, so no rank has applied it."""


def collectives_so_far() -> int:
    """Collectives that this rank has begun in the default group."""
    return _number(dist.group.WORLD)


def are_numbered() -> bool:
    """Whether the default group numbers its collectives, as those of gloo and NCCL do."""
    try:
        return dist.group.WORLD is None or int(dist.group.WORLD._get_sequence_number_for_group()) >= 0  # type: ignore[attr-defined]
    except RuntimeError:
        return False


def _number(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group()) if group is not None else 0
    except RuntimeError:  # see are_numbered
        return 0


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

    def begin_micro_batch(self, last: bool) -> None:
        """Before the forward of a micro-batch; ``last``: its backward averages gradients."""

    def begin_backward(self) -> None:
        """Before the backward that averages gradients."""
        if self._ddp is not None:
            self._backward_began = collectives_so_far()

    def finish(self, micro_batches: int) -> None:
        """Collective with the windows of the other ranks: begins what this rank has not begun, with zeros.

        Args:
            micro_batches: Micro-batches of the window that this rank has not begun.
        """
        ddp = self._ddp
        if ddp is None:
            return
        reducer, backward_began = ddp.reducer, self._backward_began
        done = collectives_so_far() - backward_began if backward_began is not None else 0
        has_not_begun = backward_began is None and collectives_so_far() == self._began
        if has_not_begun:  # then it lacks what the first forward of a window begins with
            # In a window after one that failed, the buckets have been rebuilt: the first step is settled at once.
            if not self._failed:
                reducer._rebuild_buckets()
            if ddp.broadcast_buffers and ddp.modules_buffers:
                ddp._sync_buffers()
        buckets = reducer._get_zeros_like_grad_buckets()
        for bucket in buckets[done:]:
            reducer._run_comm_hook(bucket).wait()
        if ddp.find_unused_parameters and done <= len(buckets):
            ddp.process_group.allreduce([reducer._get_local_used_map()]).wait()
        self._failed = True


class UnfinishedShardedWindow(UnfinishedWindow):
    """The same for a sharded model; ``record`` must have been called.

    Args:
        model: The sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._records: dict[tuple[bool, bool], list[_Collective]] = {}
        self._kind: tuple[bool, bool] | None = None  # of the micro-batch that has begun; None: none has
        self._begun = 0

    @property
    def is_recorded(self) -> bool:
        """Whether the collectives of a window are known."""
        return len(self._records) == 4

    @contextmanager
    def record(self, first: bool, last: bool) -> Iterator[None]:
        """Records the collectives of the block, which are those of every micro-batch of this kind.

        Args:
            first: It is the first one of its window: no parameters are gathered yet.
            last: It is the last one, which reduces gradients and frees the parameters.
        """
        found: list[_Collective] = []
        with ExitStack() as patches:
            for name in filter(partial(hasattr, dist), _OF_FSDP):
                patches.enter_context(_noted(name, found))
            yield
        self._records[first, last] = found

    def begin(self) -> None:
        self._kind = None

    def begin_micro_batch(self, last: bool) -> None:
        self._kind, self._begun = (self._kind is None, last), self._count()

    def finish(self, micro_batches: int) -> None:
        left = [
            self._records[number == 0 and self._kind is None, number == micro_batches - 1]
            for number in range(micro_batches)
        ]
        if self._kind is not None:
            left.insert(0, self._records[self._kind][self._count() - self._begun :])
        for collective in (each for record in left for each in record):
            collective()
        self._kind = None

    def _count(self) -> int:
        groups = {each.group for record in self._records.values() for each in record}
        return sum(map(_number, groups))


# Names since torch 2.13, which call those before.
_OF_FSDP = (
    "all_gather_single",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_reduce",
)


@dataclass(frozen=True)
class _Collective:
    """A collective of FSDP2: its function in ``torch.distributed``, its options, and sizes and dtypes of its tensors."""

    name: str
    group: Any
    options: Mapping[str, Any]
    tensors: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]

    def __call__(self) -> None:
        """Takes part with zeros."""
        tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self.tensors]
        getattr(dist, self.name)(*tensors, group=self.group, **self.options)


@contextmanager
def _noted(name: str, found: list[_Collective]) -> Iterator[None]:
    function = getattr(dist, name)

    def noting(*arguments: Any, **options: Any) -> Any:
        given = [*arguments, *options.values()]
        tensors = tuple((it.shape, it.dtype, it.device) for it in given if isinstance(it, torch.Tensor))
        before = len(found)
        result = function(*arguments, **options)
        del found[before:]  # what the function itself has called
        kept = {key: options[key] for key in ("op",) if key in options}
        found.append(_Collective(name, options.get("group"), kept, tensors))
        return result

    setattr(dist, name, noting)
    try:
        yield
    finally:
        setattr(dist, name, function)
