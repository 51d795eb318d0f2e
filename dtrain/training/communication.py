"""The collectives of a step and the bytes that they send, for DDP, FSDP and HSDP.

* The *size* of a collective is that of the whole tensor: each value counts once, padding included.
* What a rank *sends* is ``(n - 1) / n`` of that size in an all-gather, a reduce-scatter or a broadcast over n ranks, and twice
  as much in an all-reduce, which is a reduce-scatter and an all-gather. Rings send so much, and no algorithm sends less
  (Patarasuk and Yuan 2009). For a broadcast it is the mean over the ranks.
* A *unit* is what FSDP gathers at once: the parameters of a matching module, or all others, the *root* unit.

DDP all-reduces gradients once a step. FSDP gathers the parameters of each unit in the forward and again in the backward of
every micro-batch (the root unit only once, because it is kept in between), and reduce-scatters gradients in the last one. HSDP
does so within each group of ranks that share one copy, and all-reduces each piece between the copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.world import World
from dtrain.precision.comm_hooks import REDUCE_DTYPES, reduced_dtype
from dtrain.precision.modules import dtype_name
from dtrain.precision.vote import payload_bytes
from dtrain.tracking.finding import size_text

_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
_VOTE = "the vote"


@dataclass(frozen=True)
class Collective:
    """All calls of one kind in a step.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``broadcast``.
        content: What is sent, in words.
        nbytes: Size of the tensors of all calls together.
        ranks: Number of ranks that take part in a call.
    """

    operation: str
    content: str
    nbytes: int
    ranks: int

    @property
    def name(self) -> str:
        """Operation, content and number of ranks in words."""
        return f"{self.operation.replace('_', '-')} of {self.content} over {self.ranks} ranks"

    @property
    def sent(self) -> float:
        """Bytes that each rank sends, and receives, in a step."""
        return _PASSES[self.operation] * self.nbytes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Traffic:
    """What a step sends.

    Attributes:
        collectives: Without those of one rank and those of nothing.
        hook: Whether a user's communication hook sends the gradients, which are then missing here.
    """

    collectives: tuple[Collective, ...]
    hook: bool = False

    @property
    def nbytes(self) -> int:
        """Size of all collectives of a step."""
        return sum(one.nbytes for one in self.collectives)

    @property
    def sent(self) -> float:
        """Bytes that each rank sends, and receives, in a step."""
        return sum(one.sent for one in self.collectives)

    def describe(self) -> str:
        """One line; ``""`` if nothing is sent."""
        if not self.collectives:
            return ""
        parts = ["gradients as parallel.comm_hook sends them"] if self.hook else []
        parts += [f"{one.name} {size_text(one.nbytes)}" for one in self.collectives if one.content != _VOTE]
        total = "" if self.hook else f"each rank sends {size_text(self.sent)} in a step: "
        return f"{total}{', '.join([*parts, _VOTE])}"

    def table(self, milliseconds: float) -> list[str]:
        """Lines for a profile: each collective, and the rate if a step communicates for that many milliseconds."""
        lines = [f"  {'sent in a step by a rank':<48}{'size':>12}{'sent':>12}"]
        lines += [f"  {one.name:<48}{size_text(one.nbytes):>12}{size_text(one.sent):>12}" for one in self.collectives]
        if self.hook:
            return [*lines, "  and the gradients as parallel.comm_hook sends them"]
        rate = f"   {self.sent / milliseconds / 1e6:.2f} GB/s while it communicates" if milliseconds else ""
        return [*lines, f"  {'all':<48}{size_text(self.nbytes):>12}{size_text(self.sent):>12}{rate}"]


def step_traffic(
    model: nn.Module, parallel: ParallelConfig, world: World, micro_batches: int, metrics: int = 0
) -> Traffic:
    """What a step of a run sends; nothing in a world of one.

    Args:
        model: The model, wrapped or sharded.
        parallel: The group ``parallel`` of the config.
        world: The ranks.
        micro_batches: Micro-batches in a step.
        metrics: Number of metrics of the task, which are in the vote.
    """
    if isinstance(model, DistributedDataParallel):
        dtype = REDUCE_DTYPES[parallel.reduce_dtype]
        return ddp_traffic(model, dtype, metrics=metrics, hook=parallel.comm_hook is not None)
    return _traffic([vote_traffic(world.size, metrics)])


def ddp_traffic(model: DistributedDataParallel, dtype: torch.dtype, *, metrics: int = 0, hook: bool = False) -> Traffic:
    """What a step of DDP sends: gradients, buffers, the vote, and which parameters were unused if DDP looks for them.

    Args:
        model: The wrapped model.
        dtype: The reduce dtype.
        metrics: Number of metrics of the task, which are in the vote.
        hook: Whether a user's communication hook sends the gradients.
    """
    ignored = set(model.parameters_to_ignore)
    trained = [p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    ranks = model.process_group.size()
    found = [] if hook else gradient_traffic(trained, ranks, dtype)
    if model.broadcast_buffers:
        found.append(Collective("broadcast", "buffers", sum(buffer.nbytes for buffer in model.modules_buffers), ranks))
    if model.find_unused_parameters and not model.static_graph:
        found.append(Collective("all_reduce", "flags of used parameters", 4 * len(trained), ranks))
    return _traffic([*found, vote_traffic(ranks, metrics)], hook)


def gradient_traffic(trained: Iterable[Tensor], ranks: int, dtype: torch.dtype) -> list[Collective]:
    """DDP's all-reduces of the gradients of ``trained`` in the reduce dtype ``dtype``; one for each dtype on the network."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in trained:
        reduced = reduced_dtype(parameter.dtype, dtype)
        sizes[reduced] = sizes.get(reduced, 0) + parameter.numel() * reduced.itemsize
    return [Collective("all_reduce", f"gradients in {dtype_name(own)}", size, ranks) for own, size in sizes.items()]


def sharded_traffic(
    units: Sequence[Sequence[Tensor]],
    *,
    ranks: int,
    copies: int,
    gather_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    micro_batches: int,
    backend: str = "nccl",
    metrics: int = 0,
) -> Traffic:
    """What a step of FSDP (``copies`` is 1) or HSDP sends.

    Args:
        units: Parameters of each unit, with their whole shapes; the root unit is the last one, and may be empty.
        ranks: Number of ranks that share one copy of the model.
        copies: Number of copies.
        gather_dtype: Dtype in which parameters are gathered; None: their own.
        reduce_dtype: Dtype in which gradients are reduced.
        micro_batches: Micro-batches in a step.
        backend: ``gloo`` has no reduce-scatter: torch calls its all-reduce instead.
        metrics: Number of metrics of the task, which are in the vote.
    """
    gathered = reduced = 0
    for unit in units:
        passes = 1 if unit is units[-1] else 2
        for parameter in unit:
            padded = padded_numel(parameter, ranks)
            gathered += passes * padded * (gather_dtype or parameter.dtype).itemsize
            reduced += padded * reduce_dtype.itemsize * parameter.requires_grad
    in_dtype = f" in {dtype_name(gather_dtype)}" if gather_dtype is not None else ""
    scatter = "all_reduce" if backend == "gloo" else "reduce_scatter"
    gradients = f"gradients in {dtype_name(reduce_dtype)}"
    found = [
        Collective("all_gather", f"parameters{in_dtype}", micro_batches * gathered, ranks),
        Collective(scatter, gradients, reduced, ranks),
        Collective("all_reduce", gradients, reduced // ranks, copies),
        vote_traffic(ranks * copies, metrics),
    ]
    return _traffic(found)


def vote_traffic(ranks: int, metrics: int) -> Collective:
    """The vote of a task with that many metrics."""
    return Collective("all_reduce", _VOTE, payload_bytes(metrics), ranks)


def padded_numel(parameter: Tensor, ranks: int) -> int:
    """Elements of a parameter that FSDP splits along its first dimension into ``ranks`` pieces of one size."""
    return ranks * math.ceil(parameter.shape[0] / ranks) * math.prod(parameter.shape[1:])


def _traffic(found: Iterable[Collective], hook: bool = False) -> Traffic:
    return Traffic(tuple(one for one in found if one.nbytes and one.ranks > 1), hook)
