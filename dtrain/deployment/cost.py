"""What an export says of the time and memory of its artefact: measured beside the same weights in fp32, in its format."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtrain.config.errors import ConfigError
from dtrain.config.schema import ExportConfig
from dtrain.deployment import artefact
from dtrain.deployment.description import Description
from dtrain.deployment.measurement import Budget, measure
from dtrain.deployment.probe import made_up
from dtrain.deployment.program import Program, RowSpec


def check(options: ExportConfig) -> None:
    """Looks at the keys that say what is measured.

    Raises:
        ConfigError: If one of them cannot be.
    """
    if not options.batch or min(options.batch) < 1:
        raise ConfigError(f"export.batch: got {list(options.batch)}, want numbers of rows from 1 on, such as [1,32].")
    for name in ("max_latency_ms", "max_memory_gib"):
        limit = getattr(options, name)
        if limit is not None and not limit > 0:
            raise ConfigError(f"export.{name}: got {limit}, want a number above 0, or null for no limit.")
        if limit is not None and not options.measure:
            raise ConfigError(f"export.{name}={limit} asks for a measurement, export.measure=false for none. Drop one.")


def measured(
    options: ExportConfig,
    folder: Path,
    description: Description,
    in_fp32: Callable[[], nn.Module] | None,
    device: torch.device,
) -> dict[str, Any] | None:
    """Measures an artefact.

    Args:
        options: What to measure.
        folder: The artefact.
        description: Of it.
        in_fp32: Makes the model as it was before the cast; None if it was not cast.
        device: Where the model is, and runs if its format does.

    Returns:
        As ``measurement.measure``; None if nobody knows what goes in, or nobody wants to know.

    Raises:
        ConfigError: If one of the two artefacts cannot be written or does not run.
    """
    rows = description.rows
    if rows is None or not options.measure:
        return None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the probes shall have what this process keeps for itself
    # Beside the artefact, where there is room for one more.
    with tempfile.TemporaryDirectory(prefix=".fp32-", dir=folder.parent) as beside:
        artefacts, base = {description.dtype: folder}, None
        if in_fp32 is not None:
            artefacts[base := "fp32"] = Path(beside)
            program = Program(in_fp32(), description.input, torch.float32, description.channels_last).eval()
            described = dataclasses.replace(description, dtype=base, keep_fp32=[])
            artefact.write(Path(beside), program, described, made_up(rows, 2).to(device))
        try:
            return measure(
                artefacts,
                rows,
                description.format.runs_on(device),
                batches=options.batch,
                budget=Budget(options.max_latency_ms, options.max_memory_gib),
                base=base,
                trust=True,  # made by this process, from a config that it trusts
            )
        except ConfigError as error:
            raise ConfigError(f"{error}\n  export.measure=false exports without.") from error


def summary(cost: Mapping[str, Any] | None) -> dict[str, str]:
    """What ``measured`` returned, for ``print_banner``."""
    if cost is None:
        return {}
    lines = [
        f"{RowSpec.from_json(cost['rows'])} on {cost['device']}, {cost['threads']} threads: latency, samples a second, "
        + "peak memory"
        + (f", and each as a multiple of {cost['base']}" if cost["base"] else ""),
    ]
    for name, told in cost["artefacts"].items():
        lines += [f"{name}, batch {line['batch']}: {_figures(line)}" for line in told["batches"]]
        if "largest_batch" in told:
            best = told["largest_batch"]
            lines.append(f"{name}, largest batch {best['batch']:,}: ended by {best['ended_by']}")
    return {"cost": "\n".join([*lines, f"memory: {cost['memory']}"])}


def _figures(line: Mapping[str, Any]) -> str:
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
