"""The collectives of a step and the bytes that they send, for DDP, FSDP and HSDP.

* The *size* of a collective is the size of the whole tensor: each value counts once, padding included.
* What a rank *sends* is ``(n - 1) / n`` of that size in an all-gather, a reduce-scatter or a broadcast over n ranks, and twice
  as much in an all-reduce, which is a reduce-scatter and an all-gather. Rings send this much, and no algorithm sends less
  (Patarasuk and Yuan 2009). For a broadcast it is the mean over the ranks.
* A *unit* is what FSDP gathers at once: the parameters of a matching module, or all others, the *root* unit.

DDP all-reduces gradients once a step. FSDP gathers the parameters of each unit in the forward and again in the backward of
every micro-batch (the root unit only once, because it is kept in between), and reduce-scatters gradients in the last one. HSDP
does so within each group of ranks that share one copy, and all-reduces each piece between the copies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.schema import ParallelConfig
from dtrain.console import size_text
from dtrain.distributed.sharding import is_sharded
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.precision.modules import dtype_name
from dtrain.precision.reduce_dtype import REDUCE_DTYPES, reduced_dtype
from dtrain.precision.vote import payload_bytes
from dtrain.training.checkpoint.state import TrainState

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
        collectives: Those with more than one rank and more than zero bytes.
    """

    collectives: tuple[Collective, ...]

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
        parts = [f"{one.name} {size_text(one.nbytes)}" for one in self.collectives if one.content != _VOTE]
        return f"each rank sends {size_text(self.sent)} in a step: {', '.join([*parts, _VOTE])}"

    def table(self, milliseconds: float) -> list[str]:
        """Lines for a profile: each collective, and the rate if a step communicates for that many milliseconds."""
        lines = [f"  {'sent in a step by a rank':<48}{'size':>12}{'sent':>12}"]
        lines += [f"  {one.name:<48}{size_text(one.nbytes):>12}{size_text(one.sent):>12}" for one in self.collectives]
        rate = f"   {self.sent / milliseconds / 1e6:.2f} GB/s while it communicates" if milliseconds else ""
        return [*lines, f"  {'all':<48}{size_text(self.nbytes):>12}{size_text(self.sent):>12}{rate}"]


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers at once.

    Attributes:
        parameters: With their whole shapes.
        gather_dtype: Dtype in which they are gathered; None: their own.
    """

    parameters: Sequence[Tensor]
    gather_dtype: torch.dtype | None = None


def run_traffic(run: TrainState, metrics: int = 0) -> Traffic:
    """What a step of a run sends; ``metrics`` is the number of metrics of the task, which are in the vote."""
    micro_batches = run.train_loader.micro_batches_per_step
    return step_traffic(run.step.model, run.cfg.parallel, run.world, run.precision, micro_batches, metrics)


def step_traffic(
    model: nn.Module, parallel: ParallelConfig, world: World, precision: Precision, micro_batches: int, metrics: int = 0
) -> Traffic:
    """What a step of a run sends; nothing in a world of one.

    Args:
        model: The model, wrapped or sharded.
        parallel: The group ``parallel`` of the config.
        world: The ranks.
        precision: The precision policy.
        micro_batches: Micro-batches in a step.
        metrics: Number of metrics of the task, which are in the vote.
    """
    if isinstance(model, DistributedDataParallel):
        return ddp_traffic(model, REDUCE_DTYPES[parallel.reduce_dtype], metrics=metrics)
    if is_sharded(model):
        names = [name for name, module in model.named_modules() if is_sharded(module)]
        return sharded_traffic(
            sharded_units(model, [*names[1:], ""], parallel, precision),
            parallel,
            ranks=shard_ranks(parallel, world),
            world_size=world.size,
            micro_batches=micro_batches,
            buffers=sum(buffer.nbytes for buffer in model.buffers()),
            backend=world.backend,
            metrics=metrics,
        )
    return traffic_of([vote_traffic(world.size, metrics)])


def ddp_traffic(model: DistributedDataParallel, dtype: torch.dtype, *, metrics: int = 0) -> Traffic:
    """What a step of DDP sends: gradients, buffers, the vote, and which parameters were unused if DDP looks for them.

    Args:
        model: The wrapped model.
        dtype: The reduce dtype.
        metrics: Number of metrics of the task, which are in the vote.
    """
    ignored = set(model.parameters_to_ignore)
    trained = [p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    ranks = model.process_group.size()
    found = gradient_traffic(trained, ranks, dtype)
    if model.broadcast_buffers:
        found.append(Collective("broadcast", "buffers", sum(buffer.nbytes for buffer in model.modules_buffers), ranks))
    if model.find_unused_parameters and not model.static_graph:
        found.append(Collective("all_reduce", "flags of used parameters", 4 * len(trained), ranks))
    return traffic_of([*found, vote_traffic(ranks, metrics)])


def gradient_traffic(trained: Iterable[Tensor], ranks: int, dtype: torch.dtype) -> list[Collective]:
    """DDP's all-reduces of the gradients of ``trained`` in the reduce dtype ``dtype``; one for each dtype on the network."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in trained:
        reduced = reduced_dtype(parameter.dtype, dtype)
        sizes[reduced] += parameter.numel() * reduced.itemsize
    return [Collective("all_reduce", f"gradients in {dtype_name(own)}", size, ranks) for own, size in sizes.items()]


def sharded_units(model: nn.Module, names: Sequence[str], parallel: ParallelConfig, precision: Precision) -> list[Unit]:
    """The units of a model.

    Args:
        model: The bare model, sharded or not.
        names: Names of the modules that are units, from ``unit_names``; the last one is ``""``, the model itself.
        parallel: The group ``parallel`` of the config.
        precision: The precision policy, which is already applied to the model; modules that it keeps in fp32 are units as well.
    """
    kept = precision.wrap_keep_fp32(model) if parallel.gather_dtype == "compute" else []
    low = precision.compute_dtype if parallel.gather_dtype == "compute" else None
    owners = sorted({*names, *kept}, key=len)
    parameters: dict[str, list[Tensor]] = {name: [] for name in owners}
    for name, parameter in model.named_parameters():
        owner = [unit for unit in owners if not unit or name.startswith(f"{unit}.")][-1]
        parameters[owner].append(parameter)
    return [
        Unit(parameters[name], None if any(f"{name}.".startswith(f"{keep}.") for keep in kept) else low)
        for name in reversed(owners)
    ]


def shard_ranks(parallel: ParallelConfig, world: World) -> int:
    """Number of ranks that share one copy of a sharded model."""
    return world.size if parallel.shard == "full" else parallel.shard_size or world.local_size


def sharded_traffic(
    units: Sequence[Unit],
    parallel: ParallelConfig,
    *,
    ranks: int,
    world_size: int,
    micro_batches: int,
    buffers: int = 0,
    backend: str = "nccl",
    metrics: int = 0,
) -> Traffic:
    """What a step of FSDP or HSDP sends: parameters, gradients, buffers, the vote.

    Args:
        units: The units; the last one is the model itself, and may be empty.
        parallel: The group ``parallel`` of the config.
        ranks: Number of ranks that share one copy of the model.
        world_size: Number of all ranks.
        micro_batches: Micro-batches in a step.
        buffers: Bytes of the buffers, which rank 0 broadcasts.
        backend: With gloo, which has no reduce-scatter, torch calls an all-reduce instead.
        metrics: Number of metrics of the task, which are in the vote.
    """
    reductions = micro_batches if parallel.reduce_after == "micro_batch" else 1
    gathered: Counter[torch.dtype] = Counter()
    reduced: Counter[torch.dtype] = Counter()
    for unit in units:
        gathers = micro_batches * (1 if unit is units[-1] else 2)
        for parameter in unit.parameters:
            dtype, padded = unit.gather_dtype or parameter.dtype, padded_numel(parameter, ranks)
            gathered[dtype] += gathers * padded * dtype.itemsize
            if parameter.requires_grad:
                dtype = parameter.dtype
                if unit.gather_dtype is not None or parallel.reduce_dtype != "fp32":
                    dtype = REDUCE_DTYPES[parallel.reduce_dtype]
                reduced[dtype] += reductions * padded * dtype.itemsize
    scatter = "all_reduce" if "gloo" in backend else "reduce_scatter"
    found = [
        Collective("all_gather", f"parameters in {dtype_name(own)}", size, ranks) for own, size in gathered.items()
    ]
    for own, size in reduced.items():
        gradients = f"gradients in {dtype_name(own)}"
        found.append(Collective(scatter, gradients, size, ranks))
        found.append(Collective("all_reduce", gradients, size // ranks, world_size // ranks))
    found.append(Collective("broadcast", "buffers", buffers, world_size))
    return traffic_of([*found, vote_traffic(world_size, metrics)])


def vote_traffic(ranks: int, metrics: int) -> Collective:
    """The vote of a task with that many metrics."""
    return Collective("all_reduce", _VOTE, payload_bytes(metrics), ranks)


def padded_numel(parameter: Tensor, ranks: int) -> int:
    """Elements of a parameter with FSDP's padding: it splits the first dimension into ``ranks`` pieces of equal size."""
    return ranks * math.ceil(parameter.shape[0] / ranks) * math.prod(parameter.shape[1:])


def traffic_of(found: Iterable[Collective]) -> Traffic:
    """The traffic of a step, from its collectives."""
    return Traffic(tuple(one for one in found if one.nbytes and one.ranks > 1))
