"""``dtrain doctor memory``: the memory that a rank needs in a step, for each strategy; no GPU is needed.

    dtrain doctor memory experiment=bytes_gpt [ranks=8] [ranks_per_node=8] [device_memory=80GB] [key=value ...]

It needs one process and reads one micro-batch. It writes nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import torch

from dtrain import command_line
from dtrain.command_line import add_json_option, write_json
from dtrain.config import compose
from dtrain.config.compose import Composed
from dtrain.config.schema import Config, ParallelConfig
from dtrain.console import Finding, align_rows, print_banner, size_text
from dtrain.data import ShardLoader
from dtrain.distributed.process_group import process_group
from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.runs.recompose import recompose_if_run, take
from dtrain.training.build import build_precision
from dtrain.training.memory_retry import smaller
from dtrain.training.memory_usage import USABLE, Strategy, Usage, usage
from dtrain.training.setup.loaders import prepare_data, train_loader
from dtrain.training.step_memory import StepMemory, measure_step

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(MB|GB|TB|MiB|GiB|TiB)")
_UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}


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
        own = self._cfg.parallel
        yield Strategy.of_run(self._cfg, self._ranks, self._per_node)
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
        while (fewer := smaller(rows, self._share)) is not None:
            rows = fewer
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
        "change if it does not. Nothing is trained; neither a GPU nor memory for the model is needed. ranks=N sets the\n"
        "number of ranks (default: launch.nodes x launch.processes_per_node), device_memory=80GB the memory of a GPU\n"
        "that this machine does not have. The exit code is 1 if the run does not fit.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_json_option(parser)
    return parser
