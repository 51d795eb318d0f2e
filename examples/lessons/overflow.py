"""Lesson: numbers that become infinite in fp16, the step that is skipped for them, and the loss scale that follows.

    python examples/lessons/overflow.py [--out FOLDER]

First the naive softmax, which overflows in the forward. Then a training whose loss scale begins too high: steps are skipped and
the scale is halved until the gradients fit; later it grows until they do not.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from dtrain.precision import CrossRankGradScaler

STEPS = 240


def naive_log_softmax(logits: Tensor) -> Tensor:
    """The formula of the textbook; exp(12) is larger than fp16's largest number, 65,504."""
    exponentials = logits.exp()
    return (exponentials / exponentials.sum(dim=-1, keepdim=True)).log()


def table() -> None:
    """Prints the loss of a confident, wrong answer by both formulas in three formats."""
    print("loss of a sample whose wrong class has the logit on the left, and its right class 0:")
    print(f"{'logit':>6}" + "".join(f"{name:>20}" for name in ("fp32 naive", "bf16 naive", "fp16 naive", "fp16 log_softmax")))
    for logit in (4.0, 8.0, 11.0, 12.0, 20.0, 90.0):
        row = torch.tensor([logit, 0.0])
        values = [-naive_log_softmax(row.to(dtype))[1].item() for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        values.append(-F.log_softmax(row.half(), dim=-1)[1].item())
        print(f"{logit:6g}" + "".join(f"{value:20.4g}" for value in values))


def train() -> tuple[list[float], list[int], list[float]]:
    """Trains a classifier in fp16. Returns the loss scale and the loss of each step, and the skipped steps."""
    torch.manual_seed(0)
    centres = torch.randn(10, 32)
    labels = torch.arange(512) % 10
    points = centres[labels] + 2.0 * torch.randn(512, 32)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # A real training starts at 65536 and grows after 2,000 steps; this one shows in seconds what happens there in hours.
    scaler = CrossRankGradScaler("cpu", init_scale=2.0**24, growth_interval=30, max_scale=2.0**30)
    scales, skipped, losses = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(points)
        loss = F.cross_entropy(logits.float(), labels)
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # does nothing if a gradient is inf or NaN
        scaler.update()  # then halves the scale
        scales.append(scale)
        losses.append(float(loss.detach()))
        if scaler.get_scale() < scale:
            skipped.append(step)
    return scales, skipped, losses


def main(out: Path) -> None:
    """Prints a table and the story of the scale, and draws it."""
    table()
    scales, skipped, losses = train()
    print(f"\nskipped steps: {skipped}")
    print(f"loss scale: {scales[0]:,.0f} at first, then between {min(scales):,.0f} and {max(scales[20:]):,.0f}")
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.4f}")

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.step(range(STEPS), scales, where="post", color="#0072B2")
    upper.plot(skipped, [scales[step] for step in skipped], "x", color="#D55E00", label="step skipped, scale halved")
    upper.set_yscale("log", base=2)
    upper.set(ylabel="loss scale", title="The scale falls until the gradients fit into fp16, and rises to see whether more fits")
    upper.legend()
    lower.plot(losses, color="#000000")
    lower.plot(skipped, [losses[step] for step in skipped], "x", color="#D55E00")
    lower.set(yscale="log", xlabel="step", ylabel="loss")
    figure.savefig(out / "overflow.png", dpi=110)
    print(
        f"\n{out / 'overflow.png'}\n"
        "The naive softmax is wrong in every format once exp() overflows or a probability rounds to zero; log_softmax never is.\n"
        "A gradient that overflows costs one step: it is skipped, nothing is updated, and the scale is halved.\n"
        "A forward that overflows is not cured by any scale: every step is skipped, so the formula has to change."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the picture")
    main(parser.parse_args().out)
