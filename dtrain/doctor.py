"""``python -m dtrain.doctor``: what this machine offers to training, and what will go wrong on it.

Under torchrun also how fast the ranks sum. Each trap is a line with what to do. The exit code is 1 if something will not
work (a precision that the device lacks does not count), 2 for a wrong usage.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

import torch.distributed as dist

from dtrain.config.app import rank
from dtrain.config.errors import ConfigError
from dtrain.diagnosis.finding import Finding, as_text
from dtrain.diagnosis.machine import machine
from dtrain.diagnosis.precisions import precisions
from dtrain.diagnosis.world import all_reduce_speed, ranks_agree
from dtrain.distributed.process_group import process_group
from dtrain.distributed.world import World


def main(arguments: Sequence[str] | None = None) -> int:
    """Looks and prints; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if list(given[:1]) == ["numerics"]:
        from dtrain import doctor_numerics  # the rest must work where training cannot even be imported

        return doctor_numerics.main(given[1:])
    parser = _parser()
    options = parser.parse_args(given)
    if options.subcommand is not None:
        parser.error(
            f"there is no subcommand {options.subcommand!r}. Say none for this machine, or numerics for a run."
        )
    try:
        with process_group(options.timeout) as world:
            found = machine(world)
            elsewhere = other_machines(world, found)
            computed = precisions(world.device)
            together = [ranks_agree(world), *all_reduce_speed(world)] if world.size > 1 else []
    except ConfigError as error:
        if rank() == 0:
            print(f"doctor: error: {error}", file=sys.stderr)
        return 1
    if world.rank == 0:
        print("dtrain doctor")
        print(as_text([*found, *computed, *together]))
        for host, trouble in elsewhere.items():
            print(f"on {host}\n{as_text(trouble)}")
        if not together:
            print("For the speed of all-reduce: torchrun --standalone --nproc-per-node=2 -m dtrain.doctor")
    everything = [*found, *together, *(finding for trouble in elsewhere.values() for finding in trouble)]
    return int(any(finding.level == "error" for finding in everything))


def other_machines(world: World, found: list[Finding]) -> dict[str, list[Finding]]:
    """Collective. What is not well on machines other than rank 0's, by host name."""
    first_here = world.local_rank == 0
    everybody: list[tuple[str, list[Finding]]] = [("", [])] * world.size
    trouble = [finding for finding in found if finding.level != "ok"]
    dist.all_gather_object(everybody, (socket.gethostname(), trouble if first_here else []))
    here = everybody[0][0]
    return {host: findings for host, findings in everybody if host != here and findings}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtrain.doctor",
        description="Shows versions, devices, precisions and limits of this machine, and what to do about known traps. "
        "Under torchrun it also measures all-reduce over the ranks. `numerics --help` is about the numbers of a run.",
    )
    parser.add_argument("subcommand", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="that ranks wait for each other (default 60)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
