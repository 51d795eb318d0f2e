"""Does lower precision learn the same? Trains experiment=digits in fp32, bf16 and fp16 with one seed and compares the losses.

    python scripts/precision_curves.py [--out docs/precision_curves.png] [--runs DIR] [key=value ...]

Prints a table and draws the curves with their differences. A second fp32 run with another seed is the yardstick: what
changes when nothing but chance does. Takes about a minute on two idle cores; needs the demo extra.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

PRECISIONS = ("fp32", "bf16", "fp16")
OTHER_SEED = "fp32, other seed"
SMOOTHED_OVER = 23  # steps: an epoch of the digits
ROWS_EVERY = 40  # steps

# Colours that everybody can tell apart (Okabe and Ito 2008); widths and dashes that show three lines lying on each other.
STYLES = {
    "fp32": {"color": "#56B4E9", "linewidth": 5.0},
    "bf16": {"color": "#D55E00", "linewidth": 2.2},
    "fp16": {"color": "#000000", "linewidth": 1.3, "linestyle": (0, (4, 3))},
}


@dataclass(frozen=True)
class Curve:
    """A run's training losses and final test accuracy.

    Attributes:
        loss: One for each attempted step, shape ``[steps]``; that of a skipped step is NaN.
        accuracy: Of the last evaluation.
        skipped: Steps that were skipped.
    """

    loss: np.ndarray
    accuracy: float
    skipped: int

    @property
    def smooth(self) -> np.ndarray:
        """Means of the last ``SMOOTHED_OVER`` losses, of fewer at the start."""
        known = ~np.isnan(self.loss)
        sums, counts = np.cumsum(np.where(known, self.loss, 0.0)), np.cumsum(known)
        sums[SMOOTHED_OVER:] -= sums[:-SMOOTHED_OVER].copy()
        counts[SMOOTHED_OVER:] -= counts[:-SMOOTHED_OVER].copy()
        return sums / np.maximum(counts, 1)


def train(precision: str, seed: int, run_dir: Path, overrides: list[str]) -> Curve:
    """Trains the digits in a process of its own."""
    arguments = [
        f"precision={precision}",
        f"run.seed={seed}",
        f"run.dir={run_dir}",
        "train.log_every=1",
        "tracker=none",
    ]
    command = [sys.executable, "-m", "dtrain.train", "experiment=digits", *arguments, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    loss = np.full(records[-1]["step"], np.nan)
    before = 0
    for record in records:
        if "train/loss" in record:
            if record["applied_steps"] > before:
                loss[record["step"] - 1] = record["train/loss"]
            before = record["applied_steps"]
    return Curve(loss, records[-1]["eval/accuracy"], len(loss) - records[-1]["applied_steps"])


def difference(curve: Curve, baseline: Curve) -> np.ndarray:
    """Relative difference of the smoothed losses."""
    return curve.smooth / baseline.smooth - 1


def table(curves: dict[str, Curve]) -> str:
    """The smoothed losses every ``ROWS_EVERY`` steps, and what is left at the end."""
    names, baseline = list(curves), curves["fp32"]
    lines = [f"{'step':<36}" + "".join(f"{name:>18}" for name in names)]
    steps = sorted({*range(ROWS_EVERY, len(baseline.loss), ROWS_EVERY), len(baseline.loss)})
    for step in steps:
        lines.append(f"{step:<36}" + "".join(f"{curves[name].smooth[step - 1]:>18.4f}" for name in names))
    largest = [np.abs(difference(curves[name], baseline)).max() if name != "fp32" else None for name in names]
    lines.append(f"{'largest difference to fp32':<36}" + "".join(f"{_percent(value):>18}" for value in largest))
    lines.append(f"{'test accuracy':<36}" + "".join(f"{curves[name].accuracy:>18.4f}" for name in names))
    lines.append(f"{'skipped steps':<36}" + "".join(f"{curves[name].skipped:>18}" for name in names))
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def draw(curves: dict[str, Curve], path: Path) -> None:
    """The three curves above, their differences to fp32 below."""
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name in PRECISIONS:
        curve = curves[name]
        steps = np.arange(1, len(curve.loss) + 1)
        above.plot(steps, curve.smooth, label=f"{name}: test accuracy {100 * curve.accuracy:.1f} %", **STYLES[name])
    above.set(yscale="log", ylabel=f"training loss, mean of {SMOOTHED_OVER} steps")
    above.set_title("digits, small CNN: one seed in three precisions", loc="left")
    above.legend(frameon=False)
    for name in PRECISIONS[1:]:
        change = 100 * difference(curves[name], curves["fp32"])
        below.plot(np.arange(1, len(change) + 1), change, label=name, **STYLES[name])
    below.axhline(0, color=STYLES["fp32"]["color"], linewidth=2)
    by_chance = _percent(np.abs(difference(curves[OTHER_SEED], curves["fp32"])).max())
    below.set_title(f"difference to fp32 (another seed in fp32 changes up to {by_chance})", loc="left")
    below.set(xlabel="step", ylabel="%")
    below.legend(frameon=False, ncols=2)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/precision_curves.png"), help="the picture")
    parser.add_argument("--runs", type=Path, help="where to keep the runs; by default they are thrown away")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = arguments.runs or Path(folder)
        curves = {name: train(name, 0, runs / name, arguments.overrides) for name in PRECISIONS}
        curves[OTHER_SEED] = train("fp32", 1, runs / "other-seed", arguments.overrides)
    print(table(curves))
    draw(curves, arguments.out)


if __name__ == "__main__":
    main()
