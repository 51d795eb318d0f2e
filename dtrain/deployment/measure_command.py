"""``python -m dtrain.export measure ARTEFACT [ARTEFACT ...]``: what artefacts that are there already cost to use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dtrain.config.errors import ConfigError
from dtrain.config.json_option import add_json_option, write_json
from dtrain.config.schema import ExportConfig
from dtrain.deployment import cost
from dtrain.deployment.description import Description
from dtrain.deployment.measurement import Budget, measure
from dtrain.distributed.world import World
from dtrain.tracking.console import print_banner


def main(arguments: Sequence[str]) -> int:
    """Runs ``export measure``; returns the exit code.

    Args:
        arguments: The command line after ``measure``.
    """
    options = _parser().parse_args(arguments)
    try:
        cost.check(
            ExportConfig(
                batch=options.batch, max_latency_ms=options.max_latency_ms, max_memory_gib=options.max_memory_gib
            )
        )
        artefacts = {str(folder): Description.read(folder)[0] for folder in options.artefact}
        rows = {str(description.rows): description.rows for description in artefacts.values()}
        (spec, *others) = rows.values()
        if spec is None or others:
            raise ConfigError(
                f"export measure: the artefacts take {' and '.join(rows)}, want the same rows for all. Measure others each "
                "by itself; one that says None was exported with samples=0, and has to be exported again."
            )
        best = World.of().device
        devices = {str(device): device for device in (made.format.runs_on(best) for made in artefacts.values())}
        if len(devices) > 1:
            raise ConfigError(
                f"export measure: the artefacts run on {' and '.join(devices)}, want the same for all. Measure those of the "
                "onnx format, which run on the CPU, by themselves."
            )
        measured = measure(
            {name: Path(name) for name in artefacts},
            spec,
            next(iter(devices.values())),
            batches=options.batch,
            budget=Budget(options.max_latency_ms, options.max_memory_gib),
            base=next((name for name, description in artefacts.items() if description.dtype == "fp32"), None),
            trust=options.trust,
        )
    except ConfigError as error:
        print(f"dtrain: error: {error}", file=sys.stderr)
        return 1
    print_banner("export measure", cost.summary(measured))
    write_json(options.json, measured)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtrain.export measure",
        description="Measures latency, samples a second and peak memory of artefacts, in turns and each in a process of its "
        "own, as multiples of the first one in fp32.",
        allow_abbrev=False,
    )
    parser.add_argument("artefact", nargs="+", type=Path, help="a folder that dtrain.export has written")
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[1, 32], metavar="ROWS", help="of a forward (default 1 32)"
    )
    parser.add_argument("--max-latency-ms", type=float, metavar="X", help="also look for the largest batch within it")
    parser.add_argument("--max-memory-gib", type=float, metavar="X", help="and within this")
    parser.add_argument("--trust", action="store_true", help="also run programs and models that could do anything")
    add_json_option(parser)
    return parser
