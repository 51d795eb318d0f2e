"""``dtrain doctor [key=value ...]``: checks this machine, and finds what limits a run on it.

* Without a config: versions, devices, precisions and known problems of this machine; under torchrun also the speed of
  all-reduce.
* With a config (``experiment=digits``, or ``run.dir=DIR`` of a run that was started): also the disks, the loader alone, the
  step alone with and without communication, loader and step together, and the bottleneck with advice. No model is trained,
  and no file is left behind.

Each problem is one line with its remedy. The last line says whether this machine is fit, and what to do first. Exit code: 0,
also if something is slow; 1 if something does not work, except a precision that the device does not support; 2 for wrong
usage.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch.distributed as dist

from dtrain import command_line
from dtrain.command_line import add_json_option, write_json
from dtrain.config import compose
from dtrain.config.compose import Composed
from dtrain.config.schema import ParallelConfig
from dtrain.console import Finding, as_text
from dtrain.distributed.collectives import from_rank0
from dtrain.distributed.hang import HangWatch
from dtrain.distributed.process_exit import exit_with_torchrun
from dtrain.distributed.process_group import process_group, settle_network
from dtrain.distributed.torchrun import launched_rank, record_failure
from dtrain.distributed.world import World, join_srun
from dtrain.doctor.machine import clocks_agree, examine_machine, examine_precisions, ranks_agree, verdict
from dtrain.doctor.measure import AllReduce
from dtrain.errors import ConfigError
from dtrain.runs.recompose import recompose_if_run
from dtrain.runs.run_spec import RunSpec

_JOIN_TIMEOUT = 60.0  # seconds, without a config


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, ``sys.argv`` by default; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Imported here: the rest must work where training cannot be imported.
    if list(arguments[:1]) == ["numerics"]:
        from dtrain.doctor import numerics

        return numerics.main(arguments[1:])
    if list(arguments[:1]) == ["memory"]:
        from dtrain.doctor import memory

        return memory.main(arguments[1:])
    if list(arguments[:1]) == ["lr"]:
        from dtrain.doctor import lr

        return lr.main(arguments[1:])
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and rest[0].isidentifier():
        parser.error(
            f"there is no subcommand {rest[0]!r}. Use none to check this machine, memory to compute what fits into memory, "
            "lr to find a learning rate, numerics to audit the precision of a run, or KEY=VALUE, such as experiment=digits, to "
            "find what limits a run."
        )
    join_srun()
    settle_network()
    if rest:
        codes: list[int] = []
        command_line.run(lambda composed: codes.append(examine_run(composed, options)), rest, rewrite=recompose_if_run)
        return codes[0] if codes else 0  # no code if Hydra only printed the config
    try:
        return check_machine(options)
    except ConfigError as error:
        if launched_rank() == 0:
            print(f"doctor: error: {error}", file=sys.stderr)
        record_failure(f"doctor: error: {error}", shown=launched_rank() == 0)
        return 1


def check_machine(options: argparse.Namespace) -> int:
    """Prints the findings about this machine and the ranks; returns the exit code."""
    timeout = options.timeout or _JOIN_TIMEOUT
    limits = ParallelConfig(timeout_start=timeout, timeout_step=timeout)
    with process_group(timeout) as world, HangWatch(world, limits):
        findings, _ = _environment(world)
    if world.rank == 0:
        if world.size == 1:
            print("To measure all-reduce: dtrain doctor --nproc 2")
        print("To find what limits a run: the same command with its config, such as experiment=digits, or run.dir=DIR")
        print(verdict(findings), flush=True)
        write_json(options.json, {"findings": [asdict(finding) for finding in findings]})
    return _exit_code(findings)


def examine_run(composed: Composed, options: argparse.Namespace) -> int:
    """Prints the findings about this machine, the ranks and a run; returns the exit code.

    A run that needs packages that are missing is not measured.
    """
    from dtrain.doctor.disks import writable_folder  # not above, as in main
    from dtrain.doctor.examination import examine
    from dtrain.doctor.judge import missing_extras

    compose.require_choice(composed)
    cfg = composed.cfg
    spec = RunSpec.from_composed(composed)
    exit_with_torchrun()
    with process_group(options.timeout or cfg.parallel.timeout_start) as world, HangWatch(world, cfg.parallel):

        def print_message(text: str) -> None:
            if world.rank == 0:
                print(f"... {text}", file=sys.stderr, flush=True)

        from_rank0(lambda: str(writable_folder(spec.dir)))  # checked before a minute of measurements
        findings, all_reduce = _environment(world)
        missing = [Finding(**it) for it in from_rank0(lambda: [asdict(finding) for finding in missing_extras(cfg)])]
        examined = (
            None
            if missing
            else examine(cfg, spec.dir, world, all_reduce, seconds=options.seconds, on_message=print_message)
        )
    of_run = missing if examined is None else examined.findings
    everything = [*findings, *of_run]
    if world.rank == 0:
        print(f"{spec.name} on {world.size} rank{'s' * (world.size > 1)}")
        print(as_text(of_run))
        # The bottleneck is a property of the run, not of the machine.
        print(verdict([finding for finding in everything if finding.subject != "bottleneck"]), flush=True)
        measured = {"run": examined.to_json()} if examined is not None else {}
        write_json(options.json, {"findings": [asdict(finding) for finding in everything], **measured})
    return _exit_code(everything)


def _environment(world: World) -> tuple[list[Finding], AllReduce | None]:
    """Collective. Prints findings about all machines and ranks; returns those that count for the exit code, and all-reduce."""
    found = examine_machine(world)
    elsewhere = other_machines(world, found)
    precisions = examine_precisions(world.device)
    all_reduce = AllReduce.measure(world) if world.size > 1 else None
    ranks = [ranks_agree(world), *clocks_agree(world), *all_reduce.findings()] if all_reduce is not None else []
    if world.rank == 0:
        print("dtrain doctor")
        print(as_text([*found, *precisions, *ranks]))
        for host, problems in elsewhere.items():
            print(f"on {host}\n{as_text(problems)}")
        sys.stdout.flush()
    others = [
        replace(finding, subject=f"{finding.subject} on {host}")
        for host, problems in elsewhere.items()
        for finding in problems
    ]
    return [*found, *ranks, *others], all_reduce


def other_machines(world: World, found: list[Finding]) -> dict[str, list[Finding]]:
    """Collective. Host name to problems, for each machine except rank 0's."""
    all_findings: list[tuple[str, list[Finding]]] = [("", [])] * world.size
    problems = [finding for finding in found if finding.level != "ok"]
    dist.all_gather_object(all_findings, (socket.gethostname(), problems if world.local_rank == 0 else []))
    rank0_host = all_findings[0][0]
    return {host: findings for host, findings in all_findings if host != rank0_host and findings}


def _exit_code(findings: Sequence[Finding]) -> int:
    failed = any(finding.level == "error" for finding in findings)
    if failed:
        record_failure("", shown=True)  # the findings are on the terminal
    return int(failed)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, want a positive number of seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtrain doctor",
        usage="%(prog)s [--nproc N] [--json FILE] [--timeout SECONDS]\n"
        "       dtrain doctor [--nproc N] experiment=NAME [KEY=VALUE ...] [--seconds S]\n"
        "       dtrain doctor [--nproc N] run.dir=DIR [KEY=VALUE ...]\n"
        "       dtrain doctor memory --help\n"
        "       dtrain doctor lr --help\n"
        "       dtrain doctor numerics --help",
        description="Shows versions, devices, precisions and limits of this machine, with remedies for known problems;\n"
        "with --nproc N, also the speed of all-reduce.\n\n"
        "With the config or the directory of a run, it measures the disks of its shards and checkpoints, its loader\n"
        "alone, its step alone on one batch with and without communication, and loader and step together. It then\n"
        "shows what limits the run and what to change. Start it with as many processes as the run. No model is\n"
        "trained, and no file is left behind.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds", type=_positive, default=3.0, metavar="S", help="seconds of each measurement of a run (default: 3)"
    )
    add_json_option(parser)
    parser.add_argument(
        "--timeout",
        type=_positive,
        metavar="SECONDS",
        help="how many seconds ranks wait for each other (default: 60; with a config, its parallel.timeout_start)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
