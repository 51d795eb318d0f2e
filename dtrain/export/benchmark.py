"""Latency, throughput and memory of artefacts compared with fp32; the largest batch within a budget; ``dtrain export measure``.

* Each artefact runs in its own process, a *probe*. Probes take turns for several *rounds*, so that a slowdown of the
  machine affects all of them. A ratio is the median over the rounds of the ratios within a round.
* The *latency* is the time of a call, from rows in host memory to fp32 outputs on the device, including normalisation and
  casts. The first call of a batch size does not count.
* *Memory* is defined in ``dtrain.export.probe``: weights, rows, and everything that a call allocates.
* The *budget* is ``export.max_latency_ms`` and ``export.max_memory_gib``. If one is set, the export also searches for the
  largest batch within it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from dtrain.command_line import add_json_option, write_json
from dtrain.config.schema import ExportConfig
from dtrain.console import print_banner
from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.export import artefact
from dtrain.export.description import Description
from dtrain.export.formats import FORMATS
from dtrain.export.probe import Probe, made_up_rows
from dtrain.export.program import Program, RowSpec

_ROUNDS = 5
# Duration of all rounds for one artefact and batch size; slow calls end them early, after at least one round.
_SECONDS = 0.8
# Duration of the search for the largest batch, and of the calls of one size.
_SEARCH_SECONDS, _TRIAL_SECONDS = 30.0, 0.05
_TRIALS = 2  # of a size that exceeds the budget: another process may have slowed down the first one
_MAX_BATCH = 65_536  # throughput does not improve beyond it
_PRECISION = 32  # the search ends within 1/32 of the limit, because times vary by a few percent


def check_budget(options: ExportConfig) -> None:
    """Checks ``export.batch`` and the budget.

    Raises:
        ConfigError: If one is out of range, or a budget is set with ``export.measure=false``.
    """
    if not options.batch or min(options.batch) < 1:
        raise ConfigError(f"export.batch: got {list(options.batch)}, want numbers of rows from 1 on, such as [1,32].")
    for name in ("max_latency_ms", "max_memory_gib"):
        limit = getattr(options, name)
        if limit is not None and not limit > 0:
            raise ConfigError(f"export.{name}: got {limit}, want a number above 0, or null for no limit.")
        if limit is not None and not options.measure:
            raise ConfigError(
                f"export.{name}={limit} needs a measurement, but export.measure=false. Remove one of them."
            )


def benchmark_export(
    options: ExportConfig,
    folder: Path,
    description: Description,
    in_fp32: Callable[[], nn.Module] | None,
    device: torch.device,
) -> dict[str, Any] | None:
    """Measures a new artefact and the same weights in fp32, stored in the same format.

    Args:
        options: Batch sizes and budget.
        folder: The artefact.
        description: Its description.
        in_fp32: Builds the model before the cast; None if it was not cast.
        device: Device of the model; the artefact runs on it if its format supports it.

    Returns:
        The result of ``benchmark``; None if ``export.measure`` is false, or dtype and shape of the input are unknown.

    Raises:
        ConfigError: If one of the two artefacts cannot be written or fails.
    """
    if description.rows is None or not options.measure:
        return None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the probes need the memory
    # Created next to the artefact, where there is space for another copy.
    with tempfile.TemporaryDirectory(prefix=".fp32-", dir=folder.parent) as twin:
        artefacts, base = {description.dtype: folder}, None
        if in_fp32 is not None:
            artefacts[base := "fp32"] = Path(twin)
            program = Program(in_fp32(), description.input, torch.float32, description.channels_last).eval()
            twin_description = dataclasses.replace(description, dtype=base, keep_fp32=[])
            artefact.write(Path(twin), program, twin_description, made_up_rows(description.rows, 2).to(device))
        try:
            runs_on = FORMATS[description.stored_as].runs_on(device)
            # Trusted, because this process exported both from a config that it trusts.
            return benchmark(artefacts, description.rows, runs_on, options, base=base, trust=True)
        except ConfigError as error:
            raise ConfigError(f"{error}\n  Set export.measure=false to export without measuring.") from error


def benchmark(
    artefacts: Mapping[str, Path],
    rows: RowSpec,
    device: torch.device,
    options: ExportConfig,
    *,
    base: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Measures artefacts in turns.

    Args:
        artefacts: Name in the report to folder.
        rows: Input rows of all artefacts.
        device: Device on which all of them run.
        options: Batch sizes and budget.
        base: Name of the artefact that the others are compared with; None for no ratios.
        trust: As for ``artefact.load``.

    Returns:
        The part ``cost`` of ``report.json``. ``artefacts`` has, by name, ``batches``, the figures of each batch size, and
        ``largest_batch`` if a budget is set.

    Raises:
        ConfigError: If an artefact cannot be loaded or fails, or memory has a budget but cannot be measured.
    """
    with ExitStack() as processes:
        probes = {name: processes.enter_context(Probe(folder, device, trust)) for name, folder in artefacts.items()}
        threads = [probe.wait_until_loaded() for probe in probes.values()]
        timings = {batch: _in_turns(probes, batch) for batch in options.batch}
        figures: dict[str, Any] = {}
        for name, probe in probes.items():
            lines = [timings[batch][name].to_json(batch) for batch in options.batch]
            if base is not None and name != base:
                for batch, line in zip(options.batch, lines, strict=True):
                    line["ratios"] = timings[batch][name].ratios(timings[batch][base])
            figures[name] = {"batches": lines}
            if options.max_latency_ms is not None or options.max_memory_gib is not None:
                figures[name]["largest_batch"] = _largest_batch_within(options, probe)
    return {
        "date": date.today().isoformat(),
        "device": _device_name(device),
        "threads": threads[0],
        "torch": torch.__version__,
        "rows": dataclasses.asdict(rows),
        "memory": "torch's tensors" if device.type == "cuda" else "weights, and the growth of resident memory in calls",
        "base": base,
        "budget": {"latency_ms": options.max_latency_ms, "memory_gib": options.max_memory_gib},
        "artefacts": figures,
    }


def benchmark_summary(cost: Mapping[str, Any] | None) -> dict[str, str]:
    """Formats the result of ``benchmark`` for ``print_banner``; empty for None."""
    if cost is None:
        return {}
    ratios = f", and in parentheses each as a multiple of {cost['base']}" if cost["base"] else ""
    lines = [
        f"{RowSpec.from_json(cost['rows'])} on {cost['device']}, {cost['threads']} threads: latency, samples per second, peak "
        f"memory{ratios}"
    ]
    for name, figures in cost["artefacts"].items():
        lines += [f"{name}, batch {line['batch']}: {_figures_text(line)}" for line in figures["batches"]]
        if "largest_batch" in figures:
            best = figures["largest_batch"]
            lines.append(f"{name}, largest batch {best['batch']:,}: limited by {best['ended_by']}")
    return {"cost": "\n".join([*lines, f"memory: {cost['memory']}"])}


def largest_batch(limit_of: Callable[[int], str | None]) -> tuple[int, str]:
    """Searches for the largest batch: doubles until a limit is exceeded, then bisects to within 1/32.

    Args:
        limit_of: Maps a number of rows to the limit that it exceeds, or to None. If a batch exceeds a limit, all larger ones
            must exceed one, too.

    Returns:
        The largest tried batch within all limits, 0 if a single row exceeds one; and the limit that the smallest tried batch
        beyond it exceeds.
    """
    within, beyond, reason = 0, _MAX_BATCH + 1, f"the search, which ends at {_MAX_BATCH:,} rows"
    while beyond - within > max(1, within // _PRECISION):
        batch = min(max(2 * within, 1), (within + beyond) // 2)
        limit = limit_of(batch)
        if limit is None:
            within = batch
        else:
            beyond, reason = batch, limit
    return within, reason


def main(arguments: Sequence[str]) -> int:
    """Runs ``dtrain export measure`` with the arguments after ``measure``; returns the exit code."""
    options = _parser().parse_args(arguments)
    limits = ExportConfig(
        batch=options.batch, max_latency_ms=options.max_latency_ms, max_memory_gib=options.max_memory_gib
    )
    try:
        check_budget(limits)
        descriptions = {str(folder): artefact.read_description(folder)[0] for folder in options.artefact}
        rows = {str(description.rows): description.rows for description in descriptions.values()}
        (spec, *others) = rows.values()
        if spec is None or others:
            raise ConfigError(
                f"export measure: the artefacts take {' and '.join(rows)}, want the same rows for all. Measure the others "
                "separately. None means that the artefact was exported with samples=0: export it again."
            )
        best = World.from_environment().device
        devices = {FORMATS[description.stored_as].runs_on(best) for description in descriptions.values()}
        if len(devices) > 1:
            raise ConfigError(
                f"export measure: the artefacts run on {' and '.join(sorted(map(str, devices)))}, want the same device for "
                "all. Measure onnx artefacts, which run on the CPU, separately."
            )
        cost = benchmark(
            {name: Path(name) for name in descriptions},
            spec,
            devices.pop(),
            limits,
            base=next((name for name, description in descriptions.items() if description.dtype == "fp32"), None),
            trust=options.trust,
        )
    except ConfigError as error:
        print(f"dtrain: error: {error}", file=sys.stderr)
        return 1
    print_banner("export measure", benchmark_summary(cost))
    write_json(options.json, cost)
    return 0


@dataclass
class _Timing:
    """Calls of one artefact with one batch size; ``rounds`` has the seconds of each call, by round."""

    rounds: list[list[float]] = field(default_factory=list)
    peak_bytes: int | None = None
    out_of_memory: str | None = None

    def add(self, reply: Mapping[str, Any]) -> None:
        self.out_of_memory = reply.get("out_of_memory")
        if self.out_of_memory is None:
            self.rounds.append(reply["calls"])
            if reply["peak_bytes"] is not None:
                self.peak_bytes = max(self.peak_bytes or 0, reply["peak_bytes"])

    @property
    def latency_ms(self) -> float:
        return 1e3 * median(seconds for calls in self.rounds for seconds in calls)

    def to_json(self, batch: int) -> dict[str, Any]:
        if self.out_of_memory is not None:
            return {"batch": batch, "out_of_memory": self.out_of_memory}
        calls = sorted(seconds for calls in self.rounds for seconds in calls)
        return {
            "batch": batch,
            "latency_ms": self.latency_ms,
            "latency_p95_ms": 1e3 * calls[math.ceil(0.95 * len(calls)) - 1],
            "samples_per_second": 1e3 * batch / self.latency_ms,
            "peak_mib": None if self.peak_bytes is None else self.peak_bytes / 2**20,
            "calls": len(calls),
            "rounds": len(self.rounds),
        }

    def ratios(self, base: _Timing) -> dict[str, float | None] | None:
        """Each figure as a multiple of ``base``'s; None if one of the two ran out of memory."""
        if self.out_of_memory is not None or base.out_of_memory is not None:
            return None
        latency = median(median(own) / median(other) for own, other in zip(self.rounds, base.rounds, strict=True))
        peak = self.peak_bytes / base.peak_bytes if self.peak_bytes is not None and base.peak_bytes else None
        return {"latency": latency, "samples_per_second": 1 / latency, "peak_memory": peak}


def _in_turns(probes: Mapping[str, Probe], batch: int) -> dict[str, _Timing]:
    """Runs at least one round and, if the time allows, ``_ROUNDS``. Each round starts with a different probe."""
    names = list(probes)
    timings = {name: _Timing() for name in names}
    end = time.monotonic() + _SECONDS * len(names)
    for number in range(_ROUNDS):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if timings[name].out_of_memory is None:
                timings[name].add(probes[name].run(batch, _SECONDS / _ROUNDS))
        if time.monotonic() > end:
            break
    return timings


def _largest_batch_within(budget: ExportConfig, probe: Probe) -> dict[str, Any]:
    end = time.monotonic() + _SEARCH_SECONDS

    def limit_of(batch: int) -> str | None:
        if time.monotonic() > end:
            return f"the search, which ends after {_SEARCH_SECONDS:g} s"
        for _ in range(_TRIALS):
            timing = _Timing()
            timing.add(probe.run(batch, _TRIAL_SECONDS))
            if (limit := _exceeded(budget, batch, timing)) is None:
                return None
        return limit

    batch, limit = largest_batch(limit_of)
    return {"batch": batch, "ended_by": limit}


def _exceeded(budget: ExportConfig, batch: int, timing: _Timing) -> str | None:
    """The limit of the budget that a batch exceeds, and its measured value; None if it exceeds none."""
    if timing.out_of_memory is not None:
        return f"memory: {batch:,} rows fail with {timing.out_of_memory}"
    if budget.max_latency_ms is not None and timing.latency_ms > budget.max_latency_ms:
        return f"latency: {batch:,} rows take {timing.latency_ms:.4g} ms"
    if budget.max_memory_gib is None:
        return None
    if timing.peak_bytes is None:
        raise ConfigError(
            f"export.max_memory_gib: got {budget.max_memory_gib}, but this system does not report the peak memory of a "
            "process on a CPU (Linux does). Set export.max_memory_gib=null."
        )
    peak = timing.peak_bytes / 2**30
    return f"memory: {batch:,} rows take {peak:.3g} GiB" if peak > budget.max_memory_gib else None


def _figures_text(line: Mapping[str, Any]) -> str:
    if "out_of_memory" in line:
        return f"out of memory ({line['out_of_memory']})"
    ratios = line.get("ratios") or {}

    def with_ratio(text: str, name: str) -> str:
        return text if ratios.get(name) is None else f"{text} ({ratios[name]:.2f})"

    figures = [
        with_ratio(f"{line['latency_ms']:.3g} ms", "latency"),
        with_ratio(f"{line['samples_per_second']:,.0f}/s", "samples_per_second"),
        "unknown" if line["peak_mib"] is None else with_ratio(f"{line['peak_mib']:,.4g} MiB", "peak_memory"),
    ]
    return ", ".join(figures) + f"; p95 {line['latency_p95_ms']:.3g} ms"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtrain export measure",
        description="Measures latency, samples per second and peak memory of artefacts. Each runs in a separate process; the "
        "measurements alternate. Each figure is also shown as a multiple of the same figure of the first fp32 artefact.",
        allow_abbrev=False,
    )
    parser.add_argument("artefact", nargs="+", type=Path, help="folder that dtrain export wrote")
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[1, 32], metavar="ROWS", help="batch sizes to measure (default: 1 32)"
    )
    parser.add_argument(
        "--max-latency-ms", type=float, metavar="X", help="also find the largest batch that takes at most X ms"
    )
    parser.add_argument(
        "--max-memory-gib", type=float, metavar="X", help="also find the largest batch that needs at most X GiB"
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also run artefacts of other users that may run any code: pt2, aotinductor, or a model that is not built by "
        "classes of torch.nn, torch.optim and dtrain",
    )
    add_json_option(parser)
    return parser
