"""Lesson: one small training in fp32, bf16 and fp16, with its results and costs side by side.

    python examples/lessons/checkerboard.py [--out FOLDER] [--steps N]

A network learns the brightness of a checkerboard's pixels from their coordinates, with 2,048 random pixels per step, and
then draws all 512x512 pixels. Parameters stay fp32; autocast computes the layers in 16 bits. The printed
memory is for one forward and backward of all pixels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lesson import Figure, finish, parser
from torch import nn

from dtrain.precision import CrossRankGradScaler

SIZE = 512
SQUARES = 8
COLUMNS = ("mean error", "CPU ms a step", "MiB for the backward", "MiB peak, resident")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Features(nn.Module):
    """Sines of many frequencies, without which a network learns sharp edges slowly (Tancik et al. 2020)."""

    def __init__(self, count: int = 64) -> None:
        super().__init__()
        self.register_buffer("frequencies", 12 * torch.randn(2, count))

    def forward(self, coordinates: torch.Tensor) -> torch.Tensor:
        """``[n, 2]`` -> ``[n, 2 * count]``, in fp32: the sine of a large argument needs all of its digits."""
        with torch.autocast("cpu", enabled=False):
            angle = coordinates @ self.frequencies
            return torch.cat([angle.sin(), angle.cos()], dim=1)


def board() -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates in [-1, 1], ``[SIZE * SIZE, 2]``, and brightness, 0 or 1, ``[SIZE * SIZE, 1]``."""
    axis = torch.linspace(-1, 1, SIZE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    square = torch.arange(SIZE) * SQUARES // SIZE
    return torch.stack([x, y], dim=2).reshape(-1, 2), ((square[:, None] + square) % 2).float().reshape(-1, 1)


def train(precision: str, steps: int) -> tuple[np.ndarray, dict[str, float]]:
    """Trains on one core. Returns the picture; and its error, the CPU time per step and the memory, by column name."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    coordinates, brightness = board()
    model = nn.Sequential(Features(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = CrossRankGradScaler("cpu", enabled=precision == "fp16")
    autocast = torch.autocast("cpu", dtype=DTYPES[precision], enabled=precision != "fp32")
    chosen = torch.randint(SIZE * SIZE, (steps, 2048))
    started = time.process_time()  # CPU time: other programs on the machine change it little

    def loss(pixels: torch.Tensor) -> torch.Tensor:
        with autocast:
            logits = model(coordinates[pixels])
        return F.binary_cross_entropy_with_logits(logits.float(), brightness[pixels])

    for pixels in chosen:
        optimizer.zero_grad()
        scaler.scale(loss(pixels)).backward()
        scaler.step(optimizer)
        scaler.update()
    milliseconds = 1000 * (time.process_time() - started) / steps
    before, all_pixels = resident(), torch.arange(SIZE * SIZE)
    activations = saved_bytes(lambda: loss(all_pixels)) / 2**20
    scaler.scale(loss(all_pixels)).backward()
    peak = resident("VmHWM") - before
    with torch.inference_mode(), autocast:
        picture = torch.cat([model(part).float().sigmoid() for part in coordinates.split(32_768)])
    error = float((picture - brightness).abs().mean())
    return picture.reshape(SIZE, SIZE).numpy(), dict(
        zip(COLUMNS, (error, milliseconds, activations, peak), strict=True)
    )


def saved_bytes(forward: Callable[[], torch.Tensor]) -> int:
    """What a forward keeps in memory for its backward."""
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()  # as long as it exists, so do these tensors, and no address is used twice
    assert loss.requires_grad
    return sum(storages.values())


def resident(field: str = "VmRSS") -> float:
    """Memory of this process in MiB: now, or its peak (``VmHWM``); 0 where /proc does not exist."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), 0.0)


def main(out: Path, steps: int) -> None:
    """Trains each precision in a separate process, so that each has its own memory peak; prints and draws the results."""
    pictures = {"target\n512x512 pixels": board()[1].reshape(SIZE, SIZE).numpy()}
    print(" " * 6 + "".join(f"{column:>22}" for column in COLUMNS))
    for precision in DTYPES:
        file = out / f"checkerboard_{precision}.npz"
        command = [sys.executable, __file__, f"--steps={steps}", f"--train={precision}", f"--out={out}"]
        if code := subprocess.run(command, check=False).returncode:
            sys.exit(f"The training in {precision} ended with exit code {code}, see above")
        with np.load(file) as result:
            error, milliseconds, activations, peak = (float(result[column]) for column in COLUMNS)
            caption = (
                f"mean error {error:.3f}, {milliseconds:.1f} CPU ms a step,\n{activations:.0f} MiB for the backward"
            )
            pictures[f"{precision}\n{caption}"] = result["picture"]
        file.unlink()
        print(f"{precision:6}{error:22.4f}{milliseconds:22.1f}{activations:22.0f}{peak:22.0f}", flush=True)

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (text, picture) in zip(figure.subplots(1, 4), pictures.items(), strict=True):
        name, _, caption = text.partition("\n")
        axes.imshow(picture, cmap="gray", vmin=0, vmax=1)
        axes.set(title=name, xlabel=caption, xticks=[], yticks=[])
    finish(
        figure,
        out / "checkerboard_512.png",
        "All three formats learn the same picture: rounding in the layers is noise that training averages out.",
        "What must be exact stays fp32: parameters, the sines of large angles, the loss, and the optimizer's sums.",
        "16 bits save time only where there are kernels for them: bf16 on recent CPUs, bf16 and fp16 on GPUs.",
    )


if __name__ == "__main__":
    command_line = parser(__doc__)
    command_line.add_argument("--steps", type=int, default=200, help="of each training")
    command_line.add_argument("--train", choices=DTYPES, help=argparse.SUPPRESS)
    options = command_line.parse_args()
    if options.steps < 1:
        command_line.error(f"argument --steps: got {options.steps}, want at least 1")
    if options.train:
        picture, measured = train(options.train, options.steps)
        np.savez(options.out / f"checkerboard_{options.train}.npz", picture=picture, **measured)
    else:
        main(options.out, options.steps)
