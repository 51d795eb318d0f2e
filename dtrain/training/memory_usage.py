"""The memory of a rank in a step by strategy, computed from what a step of the whole model needs (``step_memory``).

* A *strategy* is how the ranks share the model: ``ddp``, ``fsdp`` or ``hsdp``, with its options.
* A step needs memory for parameters, gradients, optimizer state and averaged weights, which follow from their shapes, and for
  activations, which are measured. *Working* memory is what communication needs: parameters that FSDP has gathered, and
  messages in a different dtype.
* A strategy *fits* if it needs at most nine tenths of the device (``USABLE``). The rest is for what torch's tensors do not
  show: CUDA's context, NCCL, libraries, and gaps between tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from dtrain.config.schema import Config, ParallelConfig
from dtrain.precision.reduce_dtype import REDUCE_DTYPES, reduced_dtype
from dtrain.training.monitor.communication import (
    Traffic,
    gradient_traffic,
    padded_numel,
    sharded_traffic,
    traffic_of,
    vote_traffic,
)
from dtrain.training.step_memory import StepMemory

#: The part of a device's memory that a step may use.
USABLE = 0.9
_GATHERED = 3  # units at once: the current one, the next one, and the buffer that the next one is received in
_PRESETS = {"none": "ddp", "full": "fsdp", "hybrid": "hsdp"}


@dataclass(frozen=True)
class Strategy:
    """How ranks share the model.

    Attributes:
        parallel: The group ``parallel`` of the config.
        ranks: Number of ranks.
        shard_ranks: Number of ranks that hold one copy of the model together.
    """

    parallel: ParallelConfig
    ranks: int
    shard_ranks: int = 1

    @classmethod
    def from_config(cls, parallel: ParallelConfig, ranks: int, ranks_per_node: int) -> Strategy:
        """The strategy that ``parallel`` describes."""
        groups = {"none": 1, "full": ranks, "hybrid": parallel.shard_size or min(ranks_per_node, ranks)}
        return cls(parallel, ranks, groups[parallel.shard])

    @classmethod
    def of_run(cls, cfg: Config, ranks: int, ranks_per_node: int) -> Strategy:
        """The strategy of a run."""
        parallel = replace(cfg.parallel)
        if parallel.shard == "none":  # as build.wrap
            parallel.find_unused_parameters |= cfg.train.deterministic
        return cls.from_config(parallel, ranks, ranks_per_node)

    @property
    def name(self) -> str:
        """``one rank``, ``ddp``, ``fsdp``, ``hsdp 2x4`` (copies x ranks of a copy), with the options that change its memory."""
        if self.parallel.shard == "none":
            return "ddp" if self.ranks > 1 else "one rank"
        copies = f" {self.ranks // self.shard_ranks}x{self.shard_ranks}" if self.parallel.shard == "hybrid" else ""
        return " ".join([f"{_PRESETS[self.parallel.shard]}{copies}", *self._options()])

    @property
    def overrides(self) -> str:
        """The overrides that select this strategy."""
        return " ".join([f"parallel={_PRESETS[self.parallel.shard]}", *(f"parallel.{one}" for one in self._options())])

    def _options(self) -> list[str]:
        defaults, own = asdict(ParallelConfig()), asdict(self.parallel)
        changed = (key for key in ("gather_dtype", "reduce_after", "offload") if own[key] != defaults[key])
        return [f"{key}={str(own[key]).lower()}" for key in changed]


@dataclass(frozen=True)
class Usage:
    """Memory of one rank in a step, in bytes.

    Attributes:
        parameters: Parameters and buffers.
        gradients: Gradients, and DDP's buckets.
        optimizer: State of the optimizer.
        average: Averaged weights.
        activations: What forward and backward allocate, two batches included.
        working: Gathered parameters and messages.
        update: Temporary tensors of the optimizer and of the average, when activations are freed.
        sent: Bytes that each rank sends in a step.
    """

    parameters: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    working: int
    update: int
    sent: int

    @property
    def total(self) -> int:
        """The largest sum at one time."""
        lasting = self.parameters + self.gradients + self.optimizer + self.average
        return lasting + max(self.activations + self.working, self.update)


def usage(step: StepMemory, strategy: Strategy, micro_batches: int) -> Usage:
    """The memory of a rank of a strategy.

    Args:
        step: Measured on a rank that holds the whole model.
        strategy: The strategy. It may shard the model only if ``step.unshardable`` is empty.
        micro_batches: Micro-batches in a step.
    """
    if strategy.parallel.shard == "none":
        return _usage_of_copies(step, strategy, micro_batches)
    return _usage_of_parts(step, strategy, micro_batches)


def _usage_of_copies(step: StepMemory, strategy: Strategy, micro_batches: int) -> Usage:
    tensors = [parameter.tensor for parameter in step.parameters]
    gradients = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    activations, working, lasting = step.activations, 0, gradients
    if strategy.ranks == 1:
        if micro_batches == 1:  # gradients come while activations go
            activations = max(step.with_gradients - gradients, 0)
    else:
        # DDP's buckets exist all the time. Gradients are views of them, or separate tensors.
        parallel = strategy.parallel
        accumulates_outside = micro_batches > 1 and (parallel.find_unused_parameters or parallel.static_graph)
        lasting += gradients * (accumulates_outside or not parallel.gradient_as_bucket_view)
        reduce = REDUCE_DTYPES[parallel.reduce_dtype]
        working = sum(_message_bytes(tensor, reduce) for tensor in trained)
    traffic = _ddp_traffic(step, trained, strategy)
    return Usage(
        parameters=sum(tensor.nbytes for tensor in tensors) + 2 * step.buffers,  # a skipped step restores buffers
        gradients=lasting,
        optimizer=sum(parameter.state + parameter.other_state for parameter in step.parameters),
        average=sum(tensor.nbytes for tensor in tensors) * step.averaged,
        activations=activations + 2 * step.batch,
        working=working,
        update=step.update,
        sent=round(traffic.sent),
    )


def _message_bytes(gradient: Tensor, dtype: torch.dtype) -> int:
    reduced = reduced_dtype(gradient.dtype, dtype)
    return gradient.numel() * reduced.itemsize if reduced != gradient.dtype else 0


def _ddp_traffic(step: StepMemory, trained: Sequence[Tensor], strategy: Strategy) -> Traffic:
    ranks = strategy.ranks
    gradients = gradient_traffic(trained, ranks, REDUCE_DTYPES[strategy.parallel.reduce_dtype])
    return traffic_of([*gradients, vote_traffic(ranks, 0)])


def _usage_of_parts(step: StepMemory, strategy: Strategy, micro_batches: int) -> Usage:
    parallel, ranks = strategy.parallel, strategy.shard_ranks
    units = step.units[parallel.gather_dtype]

    def part(tensor: Tensor) -> int:
        """Bytes of the largest part of a tensor."""
        return padded_numel(tensor, ranks) // ranks * tensor.dtype.itemsize

    gathered, reduced = [], []
    for unit in units:
        sizes = [(padded_numel(p, ranks), unit.gather_dtype or p.dtype, p.requires_grad) for p in unit.parameters]
        gathered.append(sum(numel * dtype.itemsize for numel, dtype, _ in sizes))
        reduce = REDUCE_DTYPES[parallel.reduce_dtype]
        reduced.append(sum(numel * reduce.itemsize for numel, _, trained in sizes if trained))
    # The model's own unit stays gathered, with its gradients, while the others come and go.
    working = 2 * gathered[-1] + max(
        (_GATHERED * gather + reduce for gather, reduce in zip(gathered[:-1], reduced[:-1], strict=True)),
        default=reduced[-1],
    )
    tensors = [parameter.tensor for parameter in step.parameters]
    parts = sum(part(tensor) for tensor in tensors)
    # Gradients of micro-batches that are not reduced are whole.
    whole = sum(reduced) * (micro_batches > 1 and parallel.reduce_after == "window")
    on_device = not parallel.offload
    state = sum(
        parameter.state / max(parameter.tensor.nbytes, 1) * part(parameter.tensor) for parameter in step.parameters
    )
    casts = parallel.gather_dtype == "fp32"
    traffic = sharded_traffic(
        units,
        parallel,
        ranks=ranks,
        world_size=strategy.ranks,
        micro_batches=micro_batches,
        buffers=step.buffers,
    )
    return Usage(
        parameters=parts * on_device + 2 * step.buffers,
        gradients=sum(part(tensor) for tensor in tensors if tensor.requires_grad) * on_device + whole,
        optimizer=(round(state) + sum(parameter.other_state for parameter in step.parameters)) * on_device,
        average=parts * step.averaged * on_device,
        activations=(step.activations if casts else step.activations_sharded) + 2 * step.batch,
        working=working,
        update=step.update // ranks * on_device,
        sent=round(traffic.sent),
    )
