"""Lesson: gradients that become zero in fp16, and how loss scaling prevents it.

    python examples/lessons/underflow.py [--out FOLDER]

A network with 10, 20 and 1 units learns a sine. Its loss has a small weight, like that of an auxiliary loss, or of one pixel in
the mean over a megapixel image. So its gradients are tiny.
"""

from __future__ import annotations

from pathlib import Path

import torch
from lesson import Figure, finish, parser
from torch import nn

from dtrain.precision import CrossRankGradScaler

STEPS = 300
WEIGHT = 1e-6
COLOURS = {"fp32": "#56B4E9", "fp16, loss scaling": "#000000", "fp16": "#D55E00"}


def network() -> nn.Sequential:
    """The same initial weights for every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))


def loss_of(model: nn.Module, precision: str) -> torch.Tensor:
    """The weighted loss on 256 samples."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 10, generator=generator)
    y = torch.sin(x.sum(dim=1, keepdim=True) / 2)
    with torch.autocast("cpu", dtype=torch.float16, enabled=precision != "fp32"):
        return WEIGHT * ((model(x).float() - y) ** 2).mean()


def gradient(scale: float) -> torch.Tensor:
    """The gradient of the first layer in fp16 at a loss scale, before it is divided by the scale."""
    model = network()
    (loss_of(model, "fp16") * scale).backward()
    weight = model[0].weight.grad
    assert weight is not None
    return weight


def losses(precision: str) -> list[float]:
    """The loss of each training step."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-16)
    scaler = CrossRankGradScaler("cpu", enabled="scaling" in precision)  # starts at 2^16
    history = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, precision)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(float(loss.detach()) / WEIGHT)
    return history


def main(out: Path) -> None:
    """Prints a table and the final losses, and draws both pictures."""
    scales = [2.0**exponent for exponent in range(0, 49, 4)]
    print(f"{'loss scale':>12}{'zero':>8}{'inf or NaN':>12}   of the 200 gradients of the first layer")
    shares = []
    for scale in scales:
        values = gradient(scale)
        shares.append((float((values == 0).float().mean()), float((~values.isfinite()).float().mean())))
        print(f"{'2^' + str(int(torch.tensor(scale).log2())):>12}{shares[-1][0]:8.0%}{shares[-1][1]:12.0%}")

    curves = {name: losses(name) for name in COLOURS}
    print(f"\n{'':24}{'first loss':>12}{'last loss':>12}")
    for name, curve in curves.items():
        print(f"{name:24}{curve[0]:12.3g}{curve[-1]:12.3g}")

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(scales, [zero for zero, _ in shares], "o-", color="#0072B2", label="zero")
    left.plot(scales, [infinite for _, infinite in shares], "s--", color="#D55E00", label="inf or NaN")
    left.set_xscale("log", base=2)
    left.set(xlabel="loss scale", ylabel="share of the gradients", title="Gradients of the first layer in fp16")
    left.legend()
    for name, curve in curves.items():
        right.plot(curve, color=COLOURS[name], label=name, linewidth=4 if name == "fp32" else 1.6)
    right.set(yscale="log", xlabel="step", ylabel="loss / weight", title="Training")
    right.legend()
    finish(
        figure,
        out / "underflow.png",
        "fp16 rounds everything below 3e-8 to zero: without scaling these gradients are lost, and nothing says so.",
        "Multiplying the loss by 2^k multiplies every gradient by 2^k; dividing by it afterwards, in fp32, is exact.",
        "There is a wide range of scales in which nothing is lost at either end; the scaler finds it by itself.",
    )


if __name__ == "__main__":
    main(parser(__doc__).parse_args().out)
