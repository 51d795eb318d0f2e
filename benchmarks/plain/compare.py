"""Trains with dtrain and with the plain scripts, from the same initial weights on the same batches, and compares the losses.

    DTRAIN_MNIST1D=... DTRAIN_CIFAR10=... DTRAIN_TEXT=... python -m benchmarks.plain.compare [EXPERIMENT ...] [--steps 200]

Each plain script trains in one process and writes its initial weights and the loss of each step. dtrain starts from these
weights (``run.weights_from``) and reads the samples in stored order, as the plain script does then, with one rank and with
two. The relative difference of each step is |dtrain - plain| / plain; the largest one is printed. With ``--time N``, N steps
of both are timed as well, in turns, dtrain with one rank and the logging of its preset.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness

#: Environment variables that name the data, and those of the tests, which are used without them.
DATA = {
    name: f"DTRAIN_TEST_{name.removeprefix('DTRAIN_')}" for name in ("DTRAIN_MNIST1D", "DTRAIN_CIFAR10", "DTRAIN_TEXT")
}


class Plain(NamedTuple):
    """The plain script of an experiment.

    Attributes:
        arguments: Its module and arguments.
        data: The environment variable that names its data.
        overrides: Config with which dtrain has the same batches.
    """

    arguments: tuple[str, ...]
    data: str
    overrides: tuple[str, ...] = ()


EXPERIMENTS = {
    f"mnist1d_{model}": Plain(("benchmarks.plain.mnist1d", model), "DTRAIN_MNIST1D")
    for model in ("logistic", "mlp", "conv", "gru")
} | {
    "shakespeare_cpu": Plain(
        ("benchmarks.plain.nanogpt", "--order=stored"),
        "DTRAIN_TEXT",
        ("data.random_offset=false", "data.shuffle=none"),
    ),
    "cifar10_tutorial": Plain(
        ("benchmarks.plain.cifar10_tutorial", "--order=stored"), "DTRAIN_CIFAR10", ("data.shuffle=none",)
    ),
}


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    parser.add_argument("--steps", type=int, default=200, help="to compare (default %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="(default 1 2)")
    parser.add_argument("--time", type=int, metavar="N", help="also time this many steps")
    parser.add_argument("--rounds", type=int, default=3, help="of --time (default %(default)s)")
    arguments = harness.parse(parser, steps=10, rounds=1)
    if unknown := set(arguments.experiments) - set(EXPERIMENTS):
        parser.error(f"there is no {sorted(unknown)[0]!r}; choose of {', '.join(EXPERIMENTS)}")
    for name, of_tests in DATA.items():
        if not os.environ.get(name) and os.environ.get(of_tests):
            os.environ[name] = os.environ[of_tests]
    names = arguments.experiments or [name for name, plain in EXPERIMENTS.items() if os.environ.get(plain.data)]
    if missing := [name for name in names if not os.environ.get(EXPERIMENTS[name].data)] or (
        not names and [*EXPERIMENTS]
    ):
        parser.error(f"{missing[0]}: set {EXPERIMENTS[missing[0]].data} to the folder of its data (docs/proof.md)")
    with harness.scratch() as folder:
        results = {name: compare(folder / name, name, arguments) for name in names}
    rows = {
        f"{name}, {ranks} rank{'s' * (ranks > 1)}": result for name in names for ranks, result in results[name].items()
    }
    table = harness.Table(f"{arguments.steps} steps", rows)
    table.text("first loss", {row: f"{result['losses'][0]:.6f}" for row, result in rows.items()})
    table.text("last loss", {row: f"{result['losses'][-1]:.6f}" for row, result in rows.items()})
    table.text("largest relative difference", {row: f"{result['difference']:.1e}" for row, result in rows.items()})
    if arguments.time:
        for column in ("plain", "dtrain"):
            times = {row: f"{result[column]:.2f} s" for row, result in rows.items() if column in result}
            table.text(f"{column}, {arguments.time} steps", times)
        ratios = {row: f"{result['ratio']:.2f}" for row, result in rows.items() if "ratio" in result}
        table.text("ratio", ratios)
    table.show()
    harness.finish(arguments, results)


def compare(folder: Path, name: str, arguments: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """Losses, largest relative difference and, with ``--time``, seconds, by number of ranks."""
    plain = run_plain(folder / "plain", name, arguments.steps)
    results: dict[int, dict[str, Any]] = {}
    for ranks in arguments.ranks:
        run = run_dtrain(folder, f"{ranks}-ranks", name, arguments.steps, "train.log_every=1", ranks=ranks)
        losses = run.values("train/loss")
        difference = largest_difference(losses, plain["losses"])
        results[ranks] = {"losses": losses, "plain_losses": plain["losses"], "difference": difference}
    if arguments.time and 1 in results:
        plain_times, dtrain_times = [], []
        for turn in range(arguments.rounds):
            plain_times.append(run_plain(folder / "plain", name, arguments.time)["seconds"])
            dtrain_times.append(run_dtrain(folder, f"time-{turn}", name, arguments.time).seconds)
        ratio = harness.ratio(dtrain_times, plain_times)
        results[1] |= {"plain": min(plain_times), "dtrain": min(dtrain_times), "ratio": ratio}
    return results


def run_plain(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """What the plain script of an experiment writes: ``losses`` and ``seconds``."""
    folder.mkdir(parents=True, exist_ok=True)
    module, *options = EXPERIMENTS[name].arguments
    harness.run(harness.python("-m", module, *options, f"--steps={steps}", f"--out={folder}"))
    return dict(json.loads((folder / "losses.json").read_text()))


def run_dtrain(folder: Path, run: str, name: str, steps: int, *more: str, ranks: int = 1) -> harness.Run:
    """A run from the initial weights of the plain script in ``folder / "plain"``."""
    return harness.train(folder / run, *overrides(name, folder / "plain", steps), *more, ranks=ranks)


def overrides(name: str, plain: Path, steps: int) -> list[str]:
    """The config with which dtrain trains as the plain script that has written the folder ``plain``."""
    weights = f"run.weights_from={plain}/initial.safetensors"
    return [f"experiment={name}", weights, f"train.max_steps={steps}", "data.eval=null", *EXPERIMENTS[name].overrides]


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two lists of losses.

    Raises:
        ValueError: If they are not equally long.
    """
    return max(abs(loss - plain) / abs(plain) for loss, plain in zip(losses, expected, strict=True))


if __name__ == "__main__":
    main()
