"""Kills training jobs of several trainers and loaders at random steps, and counts lost and doubled samples.

    python -m benchmarks.faults [--only NAME ...] [--kills 2] [--rounds 3] [--seed 0]

Every contender trains the same small model on the same 20,000 samples for two epochs on two ranks, as its own documentation
says. A round is, for each contender, an undisturbed run; the same run with SIGKILL at random steps, of one rank or of all,
each followed by the same command on two ranks again; and the same with the starts on two, four, two ranks. All contenders
get the same kills.

Columns: *lost* and *doubled*: samples of the two epochs that the final weights have not seen, or have seen too often;
*repeated*: steps that were computed again; *losses*: the largest difference of a step's loss from that of the undisturbed
run; *goodput*: duration of the undisturbed run divided by that of the killed one, with all starts; *failed*: killed runs that
could not be resumed; *lines*: of the contender's program that exist only for saving and resuming. Needs the group ``bench`` of
pyproject.toml.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.faults import protocol, runs
from benchmarks.loader import is_installed

#: Name in the table, by module.
CONTENDERS = {
    "ddp": "DDP, torch.save per epoch",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "stateful_loader": "StatefulDataLoader",
    "streaming": "mosaicml-streaming",
    "litdata": "litdata",
    "webdataset": "webdataset",
    "torchft": "torchft",
    "dtrain": "dtrain",
}
PACKAGES = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "stateful_loader": "torchdata",
    "streaming": "mosaicml-streaming",
    "litdata": "litdata",
    "webdataset": "webdataset",
    "torchft": "torchft",
}
_MODULES = {"stateful_loader": "torchdata.stateful_dataloader", "ddp": "torch", "dtrain": "torch"}
#: Ranks of the starts, in turn, by row.
RANKS: dict[str, Sequence[int]] = {"": (2,), ", other ranks": (2, 4)}


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=3)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="contenders")
    parser.add_argument("--kills", type=int, default=2, help="kills of a run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of steps and victims; round N uses SEED + N")
    parser.add_argument("--samples", type=int, default=protocol.SAMPLES, help="samples (default %(default)s)")
    arguments = harness.parse(parser, rounds=1, kills=1, samples=2000)
    protocol.resize(arguments.samples)
    there = [name for name in arguments.only if is_installed(_MODULES.get(name, name))]
    with harness.scratch() as folder:
        for name in there:
            module = importlib.import_module(f"benchmarks.faults.{name}")
            if hasattr(module, "prepare"):
                module.prepare(folder / name / "data")
        measured = itertools.count()
        found = harness.interleaved(
            arguments.rounds,
            there,
            lambda name: measure(name, folder / name, arguments.kills, arguments.seed + next(measured) // len(there)),
        )
    show(arguments, {name: found.get(name, []) for name in arguments.only})


def measure(contender: str, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """One round of a contender: by row, what became of the killed run; ``failed`` where a start did not resume."""
    undisturbed = runs.run(contender, folder / "undisturbed", RANKS[""], [])
    result: dict[str, Any] = {"undisturbed": undisturbed.counts()}
    for row, ranks in RANKS.items():
        try:
            killed = runs.run(contender, folder / "killed", ranks, runs.random_kills(kills, seed))
        except RuntimeError as error:
            result[row] = {"failed": str(error)}
            continue
        differences = [abs(loss - killed.losses.get(step, float("inf"))) for step, loss in undisturbed.losses.items()]
        more = {"difference": max(differences), "goodput": undisturbed.seconds / killed.seconds}
        result[row] = killed.counts() | more
    return result


def show(arguments: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    """Prints the table and what went wrong."""
    rows = {(name, row): [one[row] for one in rounds] for name, rounds in found.items() for row in RANKS}
    labels = {(name, row): CONTENDERS[name] + row for name, row in rows}
    size = f"{protocol.SAMPLES:,} samples, {protocol.EPOCHS} epochs, {arguments.kills} kills"
    table = harness.Table(size, rows, labels)
    for heading in ("lost", "doubled", "repeated"):
        table.text(heading, {row: _cell(rounds, heading) for row, rounds in rows.items()})
    table.text("losses", {row: _losses(rounds) for row, rounds in rows.items()})
    table.text("goodput", {row: _cell(rounds, "goodput", 2) for row, rounds in rows.items()})
    failures = {row: sum("failed" in one for one in rounds) for row, rounds in rows.items()}
    table.text("failed", {row: f"{number} of {len(rows[row])}" for row, number in failures.items() if number})
    table.text("lines", {(name, row): str(runs.lines_for_resuming(name)) for name, row in rows})
    table.show(harness.rounds_note(arguments.rounds, f"; kills of seed {arguments.seed} and the following"))
    for (name, row), rounds in rows.items():
        for one in rounds:
            if "failed" in one:
                print(f"{CONTENDERS[name]}{row} did not resume: {_reason(one['failed'])}")
    for name, rounds in found.items():
        if any(one["undisturbed"]["lost"] or one["undisturbed"]["doubled"] for one in rounds):
            undisturbed = [one["undisturbed"] for one in rounds]
            lost, doubled = _cell(undisturbed, "lost"), _cell(undisturbed, "doubled")
            print(f"{CONTENDERS[name]}, undisturbed: {lost} lost, {doubled} doubled")
    harness.finish(arguments, {"measured": found}, ("torch", *PACKAGES.values()))


def _reason(output: str) -> str:
    """Which start failed, and the line that says why."""
    what, *lines = output.splitlines()
    causes = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return " ".join([what, *causes[:1]])


def _cell(rounds: Sequence[dict[str, Any]], name: str, decimals: int = 0) -> str:
    values = [one[name] for one in rounds if name in one]
    if not values:
        return "failed" if rounds else "not installed"
    return harness.spread(values, decimals)


def _losses(rounds: Sequence[dict[str, Any]]) -> str:
    values = [one["difference"] for one in rounds if "difference" in one]
    if not values:
        return _cell(rounds, "difference")
    # A run whose epochs are shorter has no loss for some of the steps.
    return "equal bits" if max(values) == 0 else "other steps" if max(values) == float("inf") else f"{max(values):.1e}"


if __name__ == "__main__":
    main()
