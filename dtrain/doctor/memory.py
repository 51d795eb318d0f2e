"""``dtrain doctor memory``: the memory that a rank needs in a step, for each strategy; no GPU is needed.

    dtrain doctor memory experiment=bytes_gpt [ranks=8] [ranks_per_node=8] [device_memory=80GB] [key=value ...]

* A *strategy* is how the ranks share the model: ``ddp``, ``fsdp`` or ``hsdp``, with its options.
* A step needs memory for parameters, gradients, optimizer state and averaged weights, which follow from their shapes, and for
  activations, which are measured (``step_memory``). *Working* memory is what communication needs: parameters that FSDP has
  gathered, and messages in a different dtype.
* A strategy *fits* if it needs at most nine tenths of the device. The rest is for what torch's tensors do not show: CUDA's
  context, NCCL, libraries, and gaps between tensors.

It needs one process and reads one micro-batch. It writes nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dtrain import command_line
from dtrain.command_line import add_json_option, write_json
from dtrain.config import compose
from dtrain.config.compose import Composed
from dtrain.config.schema import Config, ParallelConfig
from dtrain.console import Finding, align_rows, print_banner, size_text
from dtrain.data import ShardLoader
from dtrain.distributed.process_group import process_group
from dtrain.distributed.world import World
from dtrain.doctor.step_memory import StepMemory, measure_step
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.precision.reduce_dtype import REDUCE_DTYPES, reduced_dtype
from dtrain.runs.recompose import recompose_if_run, take
from dtrain.training.build import build_precision
from dtrain.training.monitor.communication import (
    Traffic,
    gradient_traffic,
    padded_numel,
    sharded_traffic,
    traffic_of,
    vote_traffic,
)
from dtrain.training.setup.loaders import prepare_data, train_loader

#: The part of a device's memory that a step may use.
USABLE = 0.9
_GATHERED = 3  # units at once: the current one, the next one, and the buffer that the next one is received in
_PRESETS = {"none": "ddp", "full": "fsdp", "hybrid": "hsdp"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(MB|GB|TB|MiB|GiB|TiB)")
_UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}


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


# -- of a run


class MemoryPlan:
    """The memory of a run by strategy, and what to change if it does not fit.

    Args:
        cfg: The composed config.
        precision: Its precision policy.
        device: The device whose kernels are assumed.
        loader: The training loader of one of the ranks; its first micro-batch is read.
        ranks: Number of ranks.
        ranks_per_node: Ranks per machine; with ``hsdp`` they share a copy, unless ``parallel.shard_size`` is set.
        capacity: Bytes of a device; None: unknown.

    Attributes:
        step: The measurement.
        rows: Rows of a micro-batch.
        micro_batches: Micro-batches in a step.
        needs: Strategies and their memory, the config's first.

    Raises:
        ConfigError: If a part of the run cannot be built.
    """

    def __init__(
        self,
        cfg: Config,
        precision: Precision,
        device: torch.device,
        loader: ShardLoader,
        *,
        ranks: int,
        ranks_per_node: int,
        capacity: int | None,
    ) -> None:
        self._cfg, self._precision, self._device = cfg, precision, device
        self._ranks, self._per_node = ranks, ranks_per_node
        self._share = -(-cfg.train.global_batch_size // ranks)
        self.capacity = capacity
        self.rows, self.micro_batches = loader.rows_per_micro_batch, loader.micro_batches_per_step
        self._batch = next(iter(loader)).to("cpu")
        self.step = measure_step(cfg, precision, device, self._batch)
        strategies: dict[str, Strategy] = {}
        for strategy in self._strategies():
            strategies.setdefault(strategy.name, strategy)
        self.needs = [(it, usage(self.step, it, self.micro_batches)) for it in strategies.values()]

    @property
    def need(self) -> Usage:
        """The memory of the config's strategy."""
        return self.needs[0][1]

    def fits(self, need: Usage) -> bool:
        """Whether a device has enough memory, or its memory is unknown."""
        return self.capacity is None or need.total <= USABLE * self.capacity

    def _strategies(self) -> Iterator[Strategy]:
        """The strategy of the config, then the others by the bytes that they send, fewest first."""
        own = replace(self._cfg.parallel)
        if own.shard == "none":  # as build.wrap
            own.find_unused_parameters |= self._cfg.train.deterministic
        yield Strategy.from_config(own, self._ranks, self._per_node)
        if own.shard != "none":
            yield Strategy.from_config(ParallelConfig(), self._ranks, self._per_node)
        if self.step.unshardable or self._ranks == 1:
            return
        for shard in ("hybrid", "full"):
            size = own.shard_size if shard == "hybrid" else None
            plain = ParallelConfig(shard=shard, shard_size=size, shard_modules=own.shard_modules)
            strategy = Strategy.from_config(plain, self._ranks, self._per_node)
            if shard == "full" or (1 < strategy.shard_ranks < self._ranks and self._ranks % strategy.shard_ranks == 0):
                yield strategy
                yield replace(strategy, parallel=self._smallest(plain))

    def _smallest(self, parallel: ParallelConfig) -> ParallelConfig:
        """The options with which a sharded model needs least memory on the device."""
        gather = "fp32" if self._precision.compute_dtype == torch.float32 else "compute"
        after = "micro_batch" if self.micro_batches > 1 else parallel.reduce_after
        return replace(parallel, gather_dtype=gather, reduce_after=after)

    # -- output

    def table(self) -> str:
        """A line for each strategy, in GiB, or in MiB if all are small."""
        columns = [
            name
            for name in Usage.__dataclass_fields__
            if name != "sent" and any(getattr(need, name) for _, need in self.needs)
        ]
        unit, size = ("GiB", 2**30) if any(need.total >= 2**30 for _, need in self.needs) else ("MiB", 2**20)
        rows = [[f"{unit} on each rank", *columns, "total", "sent", ""]]
        for strategy, need in self.needs:
            cells = [f"{getattr(need, name) / size:.2f}" for name in (*columns, "total", "sent")]
            rows.append([strategy.name, *cells, _VERDICTS[self.fits(need)] if self.capacity is not None else ""])
        return align_rows(rows, range(1, len(columns) + 3))

    def finding(self) -> Finding:
        """Whether the run fits, with what to change if it does not."""
        strategy, need = self.needs[0]
        text = (
            f"a step needs {size_text(need.total)} on each rank ({strategy.name}), {size_text(need.activations)} of it for the "
            f"activations of {self.rows} rows"
        )
        if self.capacity is not None:
            text += f"; the device has {size_text(self.capacity)}"
        return Finding("memory", text, "ok" if self.fits(need) else "warning", "\n".join(self.advice()))

    def advice(self) -> list[str]:
        """Changes with which the run fits, one line each, the smallest change first. Empty if it fits."""
        if self.fits(self.need):
            return []
        others = [
            f"{strategy.overrides} needs {size_text(need.total)}" for strategy, need in self.needs if self.fits(need)
        ]
        lines = [*self._first_that_fits(self._smaller()), *self._first_that_fits(self._recomputed()), *others[:2]]
        return lines or [self._with_more_ranks()]

    def _first_that_fits(self, tried: Iterator[tuple[str, Usage]]) -> list[str]:
        return next(([f"{text} needs {size_text(need.total)}"] for text, need in tried if self.fits(need)), [])

    def _smaller(self) -> Iterator[tuple[str, Usage]]:
        """The run with smaller micro-batches."""
        rows = self.rows
        while rows > 1:
            rows = next(size for size in range(rows // 2, 0, -1) if self._share % size == 0)
            step = self._measured(self._cfg, rows)
            need = usage(step, self.needs[0][0], self._share // rows)
            yield f"train.micro_batch_size={rows} (the global batch stays the same)", need

    def _recomputed(self) -> Iterator[tuple[str, Usage]]:
        """The run with recomputed activations, and then with other strategies as well."""
        if self.step.blocks and not self._cfg.train.checkpoint_activations:
            cfg, option = self._with_recomputation()
            step = self._measured(cfg, self.rows)
            for number, (strategy, _) in enumerate(self.needs):
                yield f"{strategy.overrides} {option}" if number else option, usage(step, strategy, self.micro_batches)

    def _with_recomputation(self) -> tuple[Config, str]:
        """A config that recomputes the activations of all blocks, and the override for it."""
        patterns = list(dict.fromkeys(f"{name.rpartition('.')[0]}.*".removeprefix(".") for name in self.step.blocks))
        cfg = deepcopy(self._cfg)
        cfg.train.checkpoint_activations = list(cfg.train.checkpoint_activations) or patterns
        return cfg, f"'train.checkpoint_activations=[{','.join(cfg.train.checkpoint_activations)}]'"

    def _measured(self, cfg: Config, rows: int) -> StepMemory:
        known = len(self._batch.valid)  # repeated if there are fewer than ``rows``
        batch = self._batch.chosen([row % known for row in range(rows)])
        return measure_step(cfg, self._precision, self._device, batch)

    def _with_more_ranks(self) -> str:
        """The number of ranks that is enough if all options that save memory are set."""
        if self.step.unshardable:
            return f"Nothing else fits, since the model cannot be sharded. {self.step.unshardable}"
        cfg, option = self._with_recomputation() if self.step.blocks else (self._cfg, "")
        step, ranks, samples = self._measured(cfg, rows=1), self._ranks, self._cfg.train.global_batch_size
        parallel = ParallelConfig(shard="full", shard_modules=self.needs[0][0].parallel.shard_modules)
        while ranks <= samples:
            strategy = Strategy.from_config(self._smallest(parallel), ranks, self._per_node)
            need = usage(step, strategy, -(-samples // ranks))
            text = f"{ranks} ranks with {strategy.overrides} train.micro_batch_size=1 {option}".rstrip()
            if self.fits(need):
                return f"{text} need {size_text(need.total)}"
            ranks *= 2
        return f"Nothing fits: {text} need {size_text(need.total)}. Use a smaller model or a larger device"

    def to_json(self) -> dict[str, Any]:
        """The table and the advice."""
        strategies = {
            strategy.name: asdict(need) | {"total": need.total, "fits": self.fits(need) if self.capacity else None}
            for strategy, need in self.needs
        }
        return {"capacity": self.capacity, "rows": self.rows, "strategies": strategies, "advice": self.advice()}


_VERDICTS = {True: "fits", False: "does not fit"}


def device_bytes(device: torch.device) -> int | None:
    """Memory of a GPU in bytes; None for a CPU, whose memory several processes share."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def plan_of(
    cfg: Config, precision: Precision, world: World, *, ranks: int, ranks_per_node: int, capacity: int | None
) -> MemoryPlan:
    """The plan of a run, from one micro-batch of the first of ``ranks`` ranks, read without worker processes.

    Raises:
        ConfigError: If a part of the run cannot be built.
    """
    cfg = deepcopy(cfg)
    cfg.data.num_workers = 0
    with closing(train_loader(cfg, replace(world, rank=0, size=ranks), precision)) as loader:
        return MemoryPlan(
            cfg, precision, world.device, loader, ranks=ranks, ranks_per_node=ranks_per_node, capacity=capacity
        )


# -- command line


def main(arguments: Sequence[str]) -> int:
    """Runs ``doctor memory`` with the arguments after ``memory``; returns the exit code: 1 if the run does not fit.

    Raises:
        SystemExit: If the config cannot be composed or the run cannot be built.
    """
    options, rest = _parser().parse_known_args(arguments)
    chosen, rest = take(rest, ranks="", ranks_per_node="", device_memory="")
    codes: list[int] = []

    def job(composed: Composed) -> None:
        compose.require_choice(composed)
        cfg = composed.cfg
        World.of_one_process("doctor memory", " ranks=N computes the memory of N ranks.")
        with process_group(cfg.parallel.timeout_start) as world:
            gpus = torch.cuda.device_count() if world.device.type == "cuda" else 1
            per_node = _count("ranks_per_node", chosen["ranks_per_node"]) or cfg.launch.processes_per_node or gpus
            ranks = _count("ranks", chosen["ranks"]) or cfg.launch.nodes * per_node
            capacity = parse_size(chosen["device_memory"]) or device_bytes(world.device)
            precision, _ = build_precision(cfg.precision, world.device)
            prepare_data(cfg.data)
            plan = plan_of(cfg, precision, world, ranks=ranks, ranks_per_node=min(per_node, ranks), capacity=capacity)
        show(plan, precision, ranks)
        write_json(options.json, plan.to_json())
        codes.append(int(not plan.fits(plan.need)))

    command_line.run(job, rest, rewrite=recompose_if_run)
    return codes[0] if codes else 0


def show(plan: MemoryPlan, precision: Precision, ranks: int) -> None:
    """Prints the plan."""
    step = plan.step
    numbers = sum(parameter.tensor.numel() for parameter in step.parameters)
    device = "unknown: device_memory=80GB compares with a GPU of that size"
    if plan.capacity is not None:
        device = f"{size_text(plan.capacity)}, of which {USABLE:.0%} may be used"
    rows = {
        "model": f"{numbers:,} parameters, {precision.name}",
        "step": f"{ranks} rank{'s' * (ranks != 1)} x {plan.micro_batches} micro-batch{'es' * (plan.micro_batches != 1)} x "
        f"{plan.rows} rows",
        "measured": f"on {'tensors without data' if step.is_fake else 'a real step'}, with the kernels of this device",
        "device": device,
    }
    if step.unshardable:
        rows["not sharded"] = step.unshardable
    print_banner("memory of a step", rows)
    print(plan.table(), end="")
    for line in plan.advice():
        print(f"-> {line}")


def parse_size(text: str) -> int | None:
    """Bytes of a size as makers of GPUs write it: ``80GB`` and ``80GiB`` are both 80 times 2^30. None for ``""``.

    Raises:
        ConfigError: If it is not a size.
    """
    if not text:
        return None
    found = _SIZE.fullmatch(text)
    if found is None or not float(found[1]):
        raise ConfigError(f"doctor memory: got device_memory={text}, want a size such as 80GB.")
    return int(float(found[1]) * _UNITS[found[2][0]])


def _count(name: str, text: str) -> int | None:
    if text and (not text.isdecimal() or int(text) < 1):
        raise ConfigError(f"doctor memory: got {name}={text}, want a whole number of at least 1.")
    return int(text) if text else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtrain doctor memory",
        usage="%(prog)s experiment=NAME [ranks=N] [ranks_per_node=N] [device_memory=80GB] [key=value ...] [--json FILE]",
        description="Shows the memory that a rank needs in a step with ddp, fsdp and hsdp, whether it fits, and what to\n"
        "change if it does not. Nothing is trained. It needs no GPU, and no memory for the model. ranks=N is\n"
        "for N ranks (default: launch.nodes x launch.processes_per_node), device_memory=80GB for a GPU that this\n"
        "machine does not have. The exit code is 1 if the run does not fit.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_json_option(parser)
    return parser
