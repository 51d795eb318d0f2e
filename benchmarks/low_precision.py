"""Compares training in fp32, bf16 and fp16, by whole runs; three commands.

    python -m benchmarks.low_precision curves [--out docs/precision_curves.png] [KEY=VALUE ...]
    python -m benchmarks.low_precision seeds --experiment digits --seeds 0 1 2 [--ranks 2] [KEY=VALUE ...]
    python -m benchmarks.low_precision checkerboard [--out docs/checkerboard.png] [KEY=VALUE ...]

* ``curves`` trains experiment=digits with one seed in each precision, and in fp32 with another seed, which shows the
  difference by chance. It prints the smoothed training losses and draws them. About a minute on two idle cores; needs
  scikit-learn.
* ``seeds`` trains an experiment with several seeds in each precision. A precision is within fp32's spread if the mean of its
  seeds lies between the smallest and the largest fp32 result. Equal seeds have equal initial weights and batches. The runs
  stay in ``--runs``; the same command again reads finished runs and resumes the others.
* ``checkerboard`` trains a network to show a picture, prints loss, time and memory, and draws the pictures that were learned.
  For a GPU, the textbook's size: data.train.size=512 model.width=256
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from hydra.utils import instantiate
from matplotlib.figure import Figure
from safetensors.torch import load_file

from benchmarks import harness
from dtrain.precision import Precision

BASE = "fp32"
OTHER_SEED = "fp32, other seed"
SMOOTHED_OVER = 23  # steps: an epoch of the digits
ROWS_EVERY = 40  # steps
# Colours that everybody can tell apart (Okabe and Ito 2008); widths and dashes keep lines visible that lie on each other.
STYLES: dict[str, dict[str, Any]] = {
    "fp32": {"color": "#56B4E9", "linewidth": 5.0},
    "bf16": {"color": "#D55E00", "linewidth": 2.2},
    "fp16": {"color": "#000000", "linewidth": 1.3, "linestyle": (0, (4, 3))},
}


def main() -> None:
    """Command line."""
    commands = {"curves": curves, "seeds": seeds, "checkerboard": checkerboard}
    parser = harness.command_line(__doc__)
    parser.add_argument("command", choices=commands)
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="config of all runs")
    parser.add_argument(
        "--precisions", nargs="+", default=list(STYLES), help="seeds, checkerboard: precisions to compare"
    )
    parser.add_argument("--experiment", default="digits", help="seeds: experiment to train (default %(default)s)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds: of each precision")
    parser.add_argument("--ranks", type=int, default=1, help="seeds: of each run (default %(default)s)")
    parser.add_argument("--metric", default="eval/accuracy", help="seeds: its last value is the result of a run")
    parser.add_argument("--runs", type=Path, help="where to keep the runs; seeds: runs/seeds-EXPERIMENT")
    parser.add_argument("--out", type=Path, help="curves, checkerboard: the picture")
    arguments = harness.parse(parser, seeds=[0])
    if arguments.quick:
        arguments.overrides.append("train.max_steps=3")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.runs is None and arguments.command == "seeds":
            arguments.runs = Path("runs", f"seeds-{arguments.experiment}")
        arguments.runs = (arguments.runs or Path(folder)).absolute()
        results = commands[arguments.command](arguments)
    harness.finish(arguments, results)


# -- curves


def curves(arguments: argparse.Namespace) -> dict[str, Any]:
    """Training losses of one seed in each precision."""

    def train(name: str, precision: str, seed: int) -> harness.Run:
        overrides = ["experiment=digits", f"precision={precision}", f"run.seed={seed}", "train.log_every=1"]
        return harness.train(arguments.runs / name, *overrides, *arguments.overrides)

    runs = {name: train(name, name, 0) for name in STYLES} | {OTHER_SEED: train("other-seed", BASE, 1)}
    smooth = {name: smoothed(losses(run)) for name, run in runs.items()}
    changes = {name: 100 * (curve / smooth[BASE] - 1) for name, curve in smooth.items() if name != BASE}
    accuracies = {name: run.last("eval/accuracy") for name, run in runs.items()}
    number = len(smooth[BASE])
    steps = sorted({*range(ROWS_EVERY, number, ROWS_EVERY), number})
    table = harness.Table("step", [*map(str, steps), "largest difference to fp32", "test accuracy", "skipped steps"])
    for name, run in runs.items():
        cells = {str(step): f"{smooth[name][step - 1]:.4f}" for step in steps}
        cells["largest difference to fp32"] = f"{np.abs(changes[name]).max():.2f} %" if name in changes else ""
        cells["test accuracy"] = f"{accuracies[name]:.4f}"
        cells["skipped steps"] = str(number - run.records[-1]["applied_steps"])
        table.text(name, cells)
    table.show()
    if arguments.out is not None:
        draw_curves(smooth, changes, accuracies, arguments.out)
    return {"smoothed_loss": {name: curve.tolist() for name, curve in smooth.items()}, "accuracy": accuracies}


def losses(run: harness.Run) -> np.ndarray:
    """Training loss of each attempted step, float64 ``[steps]``; NaN where the step was skipped."""
    loss = np.full(run.records[-1]["step"], np.nan)
    applied = 0
    for record in run.records:
        if "train/loss" in record:
            if record["applied_steps"] > applied:
                loss[record["step"] - 1] = record["train/loss"]
            applied = record["applied_steps"]
    return loss


def smoothed(loss: np.ndarray) -> np.ndarray:
    """Means of the last ``SMOOTHED_OVER`` losses, of fewer at the start, without the skipped steps."""
    known = ~np.isnan(loss)
    sums, counts = np.cumsum(np.where(known, loss, 0.0)), np.cumsum(known)
    sums[SMOOTHED_OVER:] -= sums[:-SMOOTHED_OVER].copy()
    counts[SMOOTHED_OVER:] -= counts[:-SMOOTHED_OVER].copy()
    return sums / np.maximum(counts, 1)


def draw_curves(
    smooth: Mapping[str, np.ndarray], changes: Mapping[str, np.ndarray], accuracies: Mapping[str, Any], path: Path
) -> None:
    """The losses above, their differences to fp32 in percent below."""
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = np.arange(1, len(smooth[BASE]) + 1)
    for name, style in STYLES.items():
        above.plot(steps, smooth[name], label=f"{name}: test accuracy {100 * accuracies[name]:.1f} %", **style)
        if name != BASE:
            below.plot(steps, changes[name], label=name, **style)
    above.set(yscale="log", ylabel=f"training loss, mean of {SMOOTHED_OVER} steps")
    above.set_title("digits, small CNN: one seed in three precisions", loc="left")
    above.legend(frameon=False)
    below.axhline(0, color=STYLES[BASE]["color"], linewidth=2)
    by_chance = f"{np.abs(changes[OTHER_SEED]).max():.2f} %"
    below.set_title(f"difference to fp32 (another seed in fp32 changes up to {by_chance})", loc="left")
    below.set(xlabel="step", ylabel="%")
    below.legend(frameon=False, ncols=2)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


# -- seeds


def seeds(arguments: argparse.Namespace) -> dict[str, Any]:
    """Results of several seeds in each precision."""
    results: dict[str, list[float]] = {precision: [] for precision in arguments.precisions}
    trained: dict[str, list[int]] = {precision: [] for precision in arguments.precisions}
    # Seed by seed, so that an interrupted comparison has all precisions.
    for seed in arguments.seeds:
        for precision in arguments.precisions:
            run = harness.Run(arguments.runs / f"{precision}-seed-{seed}")
            overrides = [f"experiment={arguments.experiment}", f"precision={precision}", f"run.seed={seed}"]
            if not is_finished(run, [*overrides, *arguments.overrides]):
                harness.train(run.run_dir, *overrides, *arguments.overrides, ranks=arguments.ranks)
                trained[precision].append(seed)
            value = run.last(arguments.metric)
            if value is None:
                path = run.run_dir / "metrics.jsonl"
                raise SystemExit(f"--metric: {path} has no {arguments.metric!r}. Choose one that it has: eval/loss.")
            results[precision].append(value)
    title = " ".join([arguments.experiment, *arguments.overrides])
    note = f"within the spread: {BASE}'s smallest <= mean <= {BASE}'s largest; seeds {arguments.seeds}"
    make_seeds_table(title, arguments.metric, results).show(note)
    return {"results": results, "trained_now": trained}


def is_finished(run: harness.Run, overrides: Sequence[str]) -> bool:
    """Whether a run with these overrides has finished; ``dtrain.train`` resumes or refuses any other."""
    stored = run.run_dir / "overrides.yaml"
    if not (stored.exists() and (run.run_dir / "status.json").exists()):
        return False
    same = yaml.safe_load(stored.read_text())["overrides"] == harness.train_overrides(run.run_dir, overrides)
    return same and run.status["state"] == "finished"


def make_seeds_table(title: str, metric: str, results: Mapping[str, Sequence[float]]) -> harness.Table[str]:
    """Each precision's results, their mean, and whether that lies within the spread of fp32."""
    means = {precision: statistics.mean(values) for precision, values in results.items()}
    table = harness.Table(title, results)
    table.text(
        f"{metric} of each", {name: " ".join(f"{one:.4f}" for one in values) for name, values in results.items()}
    )
    table.text("mean", {name: f"{mean:.4f}" for name, mean in means.items()})
    table.text("min-max", {name: f"{min(values):.4f}-{max(values):.4f}" for name, values in results.items()})
    if base := results.get(BASE):
        others = {name: mean for name, mean in means.items() if name != BASE}
        table.text(f"mean - {BASE}'s", {name: f"{mean - means[BASE]:+.4f}" for name, mean in others.items()})
        within = {name: "yes" if min(base) <= mean <= max(base) else "NO" for name, mean in others.items()}
        table.text(f"within {BASE}'s spread", within)
    return table


# -- checkerboard


def checkerboard(arguments: argparse.Namespace) -> dict[str, Any]:
    """Loss, time, memory and picture of a coordinate network in each precision."""
    rows: dict[str, dict[str, float | None]] = {}
    pictures = {}
    for precision in arguments.precisions:
        overrides = ["experiment=checkerboard", f"precision={precision}", *arguments.overrides]
        run = harness.train(arguments.runs / precision, *overrides)
        # Of tensors on a GPU, of the whole process on a CPU.
        memory = max(run.values("memory/max_allocated_gib") + run.values("memory/max_resident_gib"), default=None)
        values = {"loss": run.last("eval/loss"), "accuracy": run.last("eval/accuracy")}
        rows[precision] = values | {"seconds": run.seconds, "GiB": memory}
        pictures[precision] = picture(run.run_dir, precision)
    table = harness.Table("checkerboard", rows)
    for name, decimals in {"loss": 4, "accuracy": 4, "seconds": 1, "GiB": 2}.items():
        values = {precision: row[name] for precision, row in rows.items()}
        table.text(name, {row: "-" if value is None else f"{value:.{decimals}f}" for row, value in values.items()})
    table.show()
    if arguments.out is not None:
        figure = Figure(figsize=(3.2 * len(rows), 3.6), layout="constrained")
        for axes, (precision, row) in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows.items(), strict=True):
            axes.imshow(pictures[precision], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(f"{precision}: loss {row['loss']:.3f}, {row['seconds']:.0f} s", fontsize=10)
            axes.set_axis_off()
        figure.savefig(arguments.out, dpi=130)
    return {"rows": rows}


def picture(run_dir: Path, precision: str) -> np.ndarray:
    """The picture that a run's network shows in this precision, fp32 ``[size, size]``."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    model = instantiate(config["model"]).eval()
    newest = max((run_dir / "checkpoints").glob("step-*"))
    model.load_state_dict(load_file(newest / "model.safetensors"))
    coordinates = torch.from_numpy(instantiate(config["data"]["train"])["coordinates"])
    with torch.inference_mode(), Precision(precision).autocast("cpu"):
        pixels: np.ndarray = model(coordinates).float().squeeze((1, 2)).numpy()
    return pixels


if __name__ == "__main__":
    main()
