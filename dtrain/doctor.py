"""``python -m dtrain.doctor [key=value ...]``: what this machine offers to training, and what limits a run on it.

* Without a config: versions, devices, precisions and known traps of this machine; under torchrun also how fast the ranks
  sum.
* With one (``experiment=digits``, or ``run.dir=DIR`` of a run that was started before): also its disks, its loader alone,
  its step alone with and without communication, both together, and a verdict with what to change. Nothing is trained and
  nothing is left behind.

Each trap is a line with what to do. The exit code is 1 if something will not work (a precision that the device lacks does
not count), 2 for a wrong usage.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch.distributed as dist

from dtrain.config import app
from dtrain.config.app import Composed
from dtrain.config.errors import ConfigError
from dtrain.config.json_option import add_json_option, write_json
from dtrain.config.run import Run, recompose_if_run
from dtrain.diagnosis.all_reduce import AllReduce
from dtrain.diagnosis.finding import Finding, as_text
from dtrain.diagnosis.machine import machine
from dtrain.diagnosis.precisions import precisions
from dtrain.diagnosis.world import ranks_agree
from dtrain.distributed.collectives import decided_by_rank_zero
from dtrain.distributed.network import settle_network
from dtrain.distributed.orphan import end_with_torchrun
from dtrain.distributed.process_group import process_group
from dtrain.distributed.srun import join_srun
from dtrain.distributed.world import World

_JOIN_WITHIN = 60.0  # seconds, where no config says


def main(arguments: Sequence[str] | None = None) -> int:
    """Looks and prints; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if list(given[:1]) == ["numerics"]:
        from dtrain import doctor_numerics  # the rest must work where training cannot even be imported

        return doctor_numerics.main(given[1:])
    parser = _parser()
    options, rest = parser.parse_known_args(given)
    if rest and rest[0].isidentifier():
        parser.error(
            f"there is no subcommand {rest[0]!r}. Say none for this machine, numerics for the numbers of a run, or "
            "KEY=VALUE, such as experiment=digits, for what limits a run."
        )
    join_srun()
    settle_network()
    if rest:
        codes: list[int] = []
        app.run(lambda composed: codes.append(look_at_run(composed, options)), rest, rewrite=recompose_if_run)
        return codes[0] if codes else 0  # none if Hydra was only asked to show the config
    try:
        return look_at_machine(options)
    except ConfigError as error:
        if app.rank() == 0:
            print(f"doctor: error: {error}", file=sys.stderr)
        return 1


def look_at_machine(options: argparse.Namespace) -> int:
    """Prints about this machine and the ranks; returns the exit code."""
    with process_group(options.timeout or _JOIN_WITHIN) as world:
        found, _ = _surroundings(world)
    if world.rank == 0:
        if world.size == 1:
            print("For the speed of all-reduce: torchrun --standalone --nproc-per-node=2 -m dtrain.doctor")
        print("For what limits a run: the same with its config, such as experiment=digits, or run.dir=DIR")
        write_json(options.json, {"findings": [asdict(finding) for finding in found]})
    return _code(found)


def look_at_run(composed: Composed, options: argparse.Namespace) -> int:
    """Prints about this machine, the ranks and a run; returns the exit code."""
    from dtrain.diagnosis.examination import examine  # as above
    from dtrain.diagnosis.saving import place_of

    app.require_choice(composed)
    cfg = composed.cfg
    run = Run.of(composed)
    end_with_torchrun()
    with process_group(options.timeout or cfg.parallel.timeout_start) as world:

        def tell(text: str) -> None:
            if world.rank == 0:
                print(f"... {text}", file=sys.stderr, flush=True)

        decided_by_rank_zero(lambda: str(place_of(run.dir)))  # before a minute of measuring, not after
        found, all_reduce = _surroundings(world)
        examined = examine(cfg, run.dir, world, all_reduce, seconds=options.seconds, tell=tell)
    everything = [*found, *examined.findings]
    if world.rank == 0:
        print(f"{run.name} on {world.size} rank{'s' * (world.size > 1)}")
        print(as_text(examined.findings), flush=True)
        write_json(options.json, {"findings": [asdict(finding) for finding in everything], "run": examined.to_json()})
    return _code(everything)


def _surroundings(world: World) -> tuple[list[Finding], AllReduce | None]:
    """Collective. Looks at all machines and the ranks, and prints what it finds; what it counts, and how fast they sum."""
    found = machine(world)
    elsewhere = other_machines(world, found)
    computed = precisions(world.device)
    all_reduce = AllReduce.measure(world) if world.size > 1 else None
    ranks = [ranks_agree(world), *all_reduce.findings()] if all_reduce is not None else []
    if world.rank == 0:
        print("dtrain doctor")
        print(as_text([*found, *computed, *ranks]))
        for host, trouble in elsewhere.items():
            print(f"on {host}\n{as_text(trouble)}")
        sys.stdout.flush()
    return [*found, *ranks, *(finding for trouble in elsewhere.values() for finding in trouble)], all_reduce


def other_machines(world: World, found: list[Finding]) -> dict[str, list[Finding]]:
    """Collective. What is not well on machines other than rank 0's, by host name."""
    first_here = world.local_rank == 0
    everybody: list[tuple[str, list[Finding]]] = [("", [])] * world.size
    trouble = [finding for finding in found if finding.level != "ok"]
    dist.all_gather_object(everybody, (socket.gethostname(), trouble if first_here else []))
    here = everybody[0][0]
    return {host: findings for host, findings in everybody if host != here and findings}


def _code(found: Sequence[Finding]) -> int:
    return int(any(finding.level == "error" for finding in found))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, want a number of seconds above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtrain.doctor",
        usage="%(prog)s [--json FILE] [--timeout SECONDS]\n"
        "       torchrun --standalone --nproc-per-node=2 -m dtrain.doctor experiment=NAME [KEY=VALUE ...] [--seconds S]\n"
        "       torchrun --standalone --nproc-per-node=2 -m dtrain.doctor run.dir=DIR [KEY=VALUE ...]\n"
        "       python -m dtrain.doctor numerics --help",
        description="Shows versions, devices, precisions and limits of this machine, and what to do about known traps;\n"
        "under torchrun also how fast the ranks sum.\n\n"
        "With the config of a run, or the directory of one that was started before, it measures the disks of its\n"
        "shards and checkpoints, its loader alone, its step alone on one batch with and without communication,\n"
        "and both together; and says what limits the run and what to change. Start it with as many processes as\n"
        "the run. Nothing is trained, and nothing is left behind.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds", type=_positive, default=3.0, metavar="S", help="for each measure of a run (default 3)"
    )
    add_json_option(parser)
    parser.add_argument(
        "--timeout",
        type=_positive,
        metavar="SECONDS",
        help="that ranks wait for each other (default 60; with a config its parallel.timeout_start)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
