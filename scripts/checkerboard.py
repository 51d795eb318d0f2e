"""What does lower precision do to a picture? Trains experiment=checkerboard in several precisions, and draws what they learnt.

    python scripts/checkerboard.py [--out docs/checkerboard.png] [--runs DIR] [--precisions fp32 bf16 fp16] [key=value ...]

One seed for all; prints loss, time and memory. The textbook's size, for a GPU: data.train.size=512 model.width=256
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
import torch
import yaml
from hydra.utils import instantiate
from matplotlib.figure import Figure
from safetensors.torch import load_file

from dtrain.precision import Precision


@dataclass(frozen=True)
class Fit:
    """A finished run.

    Attributes:
        precision: Its name.
        picture: What the network shows, computed in that precision: fp32 ``[size, size]``.
        loss: Mean squared error of the pixels.
        accuracy: Share of the pixels on the right side of one half.
        seconds: Time in the training loop.
        memory: GiB on the GPU at the most; None on a CPU.
    """

    precision: str
    picture: np.ndarray
    loss: float
    accuracy: float
    seconds: float
    memory: float | None


def fit(precision: str, run_dir: Path, overrides: list[str]) -> Fit:
    """Trains in a process of its own."""
    arguments = ["experiment=checkerboard", f"precision={precision}", f"run.dir={run_dir}", "tracker=none", *overrides]
    command = [sys.executable, "-m", "dtrain.train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    memory = [record["memory/max_allocated_gib"] for record in records if "memory/max_allocated_gib" in record]
    seconds = json.loads((run_dir / "status.json").read_text())["trained_seconds"]
    last = records[-1]
    return Fit(
        precision,
        picture(run_dir, precision),
        last["eval/loss"],
        last["eval/accuracy"],
        seconds,
        max(memory, default=None),
    )


def picture(run_dir: Path, precision: str) -> np.ndarray:
    """What the network of a run shows."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    model = instantiate(config["model"]).eval()
    (newest,) = sorted((run_dir / "checkpoints").glob("step-*"))[-1:]
    model.load_state_dict(load_file(newest / "model.safetensors"))
    coordinates = torch.from_numpy(instantiate(config["data"]["train"])["coordinates"])
    with torch.inference_mode(), Precision(precision).autocast("cpu"):
        shown: np.ndarray = model(coordinates).float().squeeze((1, 2)).numpy()
    return shown


def table(fits: list[Fit]) -> str:
    """A line for each precision."""
    lines = [f"{'checkerboard':<16}{'loss':>10}{'accuracy':>12}{'seconds':>10}{'GiB':>8}"]
    for one in fits:
        memory = f"{one.memory:.2f}" if one.memory is not None else "-"
        lines.append(f"{one.precision:<16}{one.loss:>10.4f}{one.accuracy:>12.4f}{one.seconds:>10.1f}{memory:>8}")
    return "\n".join(lines)


def draw(fits: list[Fit], path: Path) -> None:
    """The pictures side by side, on one scale of grey."""
    figure = Figure(figsize=(3.2 * len(fits), 3.6), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(fits), squeeze=False)[0], fits, strict=True):
        axes.imshow(one.picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(f"{one.precision}: loss {one.loss:.3f}, {one.seconds:.0f} s", fontsize=10)
        axes.set_axis_off()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/checkerboard.png"), help="the picture")
    parser.add_argument("--runs", type=Path, help="where to keep the runs; by default they are thrown away")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16", "fp16"], help="which, in this order")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for all runs")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = arguments.runs or Path(folder)
        fits = [fit(precision, runs / precision, arguments.overrides) for precision in arguments.precisions]
    print(table(fits))
    draw(fits, arguments.out)


if __name__ == "__main__":
    main()
