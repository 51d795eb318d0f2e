"""Shows trained presets beside the published figures: a table, and a picture of all training losses.

    python -m benchmarks.low_precision seeds --experiment mnist1d_conv --seeds 0 1 2     # for each experiment
    python -m benchmarks.proof [--runs runs] [--out docs/proof.png]

Reads the finished runs ``RUNS/seeds-EXPERIMENT/PRECISION-seed-N``, which ``low_precision seeds`` writes; trains nothing. The
result of a run is its last evaluation. Runs that have not finished are named below the table and left out.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks import harness
from benchmarks.low_precision import STYLES

POINTS = 60  # of a curve; each is the mean of the losses around it


class Published(NamedTuple):
    """What others have published: the metric, its value, and how values are shown."""

    metric: str
    value: str
    shown: str


#: Sources are in docs/proof.md.
PUBLISHED = {
    "mnist1d_logistic": Published("eval/accuracy", "31.5 %", ".1%"),
    "mnist1d_mlp": Published("eval/accuracy", "65.1 %", ".1%"),
    "mnist1d_conv": Published("eval/accuracy", "92.3 %", ".1%"),
    "mnist1d_gru": Published("eval/accuracy", "89.1 %, 92.1 %", ".1%"),
    "shakespeare_cpu": Published("eval/loss", "1.88", ".3f"),
    "cifar10_tutorial": Published("eval/accuracy", "54 to 55 %", ".1%"),
    "cifar10_cpu": Published("eval/accuracy", "-", ".1%"),
}

Key = tuple[str, str]  # experiment and precision


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="(default %(default)s)")
    parser.add_argument("--out", type=Path, help="the picture")
    arguments = harness.parse(parser)
    runs, unfinished = find(arguments.runs)
    if not runs:
        raise SystemExit(
            f"{arguments.runs} has no finished run seeds-EXPERIMENT/PRECISION-seed-N of {', '.join(PUBLISHED)}."
        )
    show(runs, unfinished)
    if arguments.out is not None:
        draw(runs, arguments.out)
    results = {" ".join(key): [run.last(PUBLISHED[key[0]].metric) for run in of_key] for key, of_key in runs.items()}
    harness.finish(arguments, results)


def find(folder: Path) -> tuple[dict[Key, list[harness.Run]], list[str]]:
    """The finished runs of each experiment and precision, and a line about each other run."""
    runs: dict[Key, list[harness.Run]] = {}
    unfinished = []
    for experiment in PUBLISHED:
        for precision in STYLES:
            for path in sorted((folder / f"seeds-{experiment}").glob(f"{precision}-seed-*")):
                run = harness.Run(path)
                if not ((path / "status.json").exists() and (path / "metrics.jsonl").exists()):
                    unfinished.append(f"{experiment} {path.name}: not started")
                elif run.status["state"] != "finished":
                    step = run.records[-1]["step"] if run.records else 0
                    unfinished.append(f"{experiment} {path.name}: {run.status['state']} at step {step:,}, left out")
                else:
                    runs.setdefault((experiment, precision), []).append(run)
    return runs, unfinished


def show(runs: Mapping[Key, Sequence[harness.Run]], unfinished: Sequence[str]) -> None:
    """Prints the table."""
    table = harness.Table("finished runs", runs, {key: " ".join(key) for key in runs})
    table.text("published", {key: PUBLISHED[key[0]].value for key in runs})
    table.text("mean (min-max)", {key: result(key[0], of_key) for key, of_key in runs.items()})
    table.text("seeds", {key: " ".join(seed(run) for run in of_key) for key, of_key in runs.items()})
    table.text("steps", {key: f"{of_key[0].records[-1]['step']:,}" for key, of_key in runs.items()})
    table.text("skipped", {key: " ".join(str(skipped(run)) for run in of_key) for key, of_key in runs.items()})
    table.text("loss scale, first-last (min-max)", {key: scale(of_key[0]) for key, of_key in runs.items()})
    table.text("seconds", {key: " ".join(f"{run.seconds:,.0f}" for run in of_key) for key, of_key in runs.items()})
    table.show(*unfinished)


def result(experiment: str, runs: Sequence[harness.Run]) -> str:
    """``mean (min-max)`` of the last evaluations."""
    metric, _, shown = PUBLISHED[experiment]
    values = [value for run in runs if (value := run.last(metric)) is not None]
    mean, low, high = (format(value, shown) for value in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ({low}-{high})" if len(values) > 1 else mean


def seed(run: harness.Run) -> str:
    """The number at the end of the run's name."""
    return re.sub(".*-", "", run.run_dir.name)


def skipped(run: harness.Run) -> int:
    """Skipped steps of the whole run."""
    return int(run.records[-1]["step"] - run.records[-1]["applied_steps"])


def scale(run: harness.Run) -> str:
    """First and last recorded loss scale, and the range; nothing without one."""
    scales = run.values("precision/loss_scale")
    if not scales:
        return ""
    first, last, low, high = (f"{value:,.0f}" for value in (scales[0], scales[-1], min(scales), max(scales)))
    return f"{first}-{last} ({low}-{high})"


def curve(run: harness.Run) -> tuple[np.ndarray, np.ndarray]:
    """Steps and means of neighbouring training losses, ``[points]`` each."""
    pairs = [(record["step"], record["train/loss"]) for record in run.records if "train/loss" in record]
    groups = np.array_split(np.array(pairs), min(POINTS, len(pairs)))
    means = np.array([group.mean(axis=0) for group in groups])
    return means[:, 0], means[:, 1]


def draw(runs: Mapping[Key, Sequence[harness.Run]], path: Path) -> None:
    """One panel for each experiment, one line for each run."""
    experiments = list(dict.fromkeys(experiment for experiment, _ in runs))
    rows = -(-len(experiments) // 3)
    figure = Figure(figsize=(10, 2.9 * rows), layout="constrained")
    panels = figure.subplots(rows, 3, squeeze=False).flat
    for experiment, axes in zip(experiments, panels, strict=False):
        for precision, style in STYLES.items():
            of_key = runs.get((experiment, precision), ())
            for number, run in enumerate(of_key):
                thin = style | {"linewidth": style["linewidth"] / 2}
                label = f"{precision}: {result(experiment, of_key)}" if number == 0 else None
                axes.plot(*curve(run), label=label, **thin)
        axes.set_title(experiment, loc="left", fontsize=10)
        axes.set_xlabel("step")
        low, high = axes.dataLim.intervaly
        axes.set_yscale("log" if high > 10 * low else "linear")
        axes.locator_params(axis="x", nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=7)
    for axes in list(panels):
        axes.set_axis_off()
    figure.supylabel("training loss", fontsize=10)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
