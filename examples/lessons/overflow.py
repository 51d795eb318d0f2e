"""Lesson: numbers that become infinite in fp16, the steps that are skipped for them, and the loss scale that follows.

    python examples/lessons/overflow.py [--out FOLDER]

First, hand-written losses that overflow in the forward. Then, a training whose loss scale begins too high: steps are skipped
and the scale is halved until the gradients fit; later it repeatedly grows until they no longer fit.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from lesson import Figure, finish, parser
from torch import Tensor, nn

from dtrain.precision import CrossRankGradScaler

STEPS = 240


def naive_log_softmax(logits: Tensor) -> Tensor:
    """The textbook formula; exp(12) is larger than the largest fp16 number, 65,504."""
    exponentials = logits.exp()
    return (exponentials / exponentials.sum(dim=-1, keepdim=True)).log()


def softmax_table() -> None:
    """Prints the loss of a confident, wrong answer by both formulas in three formats."""
    print("loss of a sample whose wrong class has the logit on the left, and its right class 0:")
    print(f"{'logit':>6}{'fp32 naive':>14}{'bf16 naive':>14}{'fp16 naive':>14}{'fp16 log_softmax':>20}")
    for logit in (4.0, 8.0, 11.0, 12.0, 20.0, 90.0):
        row = torch.tensor([logit, 0.0])
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        naive = [-naive_log_softmax(row.to(dtype))[1].item() for dtype in dtypes]
        stable = -F.log_softmax(row.half(), dim=-1)[1].item()
        print(f"{logit:6g}" + "".join(f"{value:14.4g}" for value in naive) + f"{stable:20.4g}")


def loss_table() -> list[tuple[str, float, float, float]]:
    """Prints and returns losses of fp16 logits: written by hand in fp16, torch's under autocast, the formula in float64."""
    logits = torch.tensor([[14.0, 0.0, -14.0]])
    other = torch.tensor([[0.0, 2.0, 0.0]])
    label, rare = torch.tensor([1]), torch.tensor([2])
    binary = torch.tensor([[0.0, 1.0, 1.0]])
    similarity = torch.tensor([[0.875, 0.6875], [0.8125, 0.6875]])  # cosines of two images and two texts
    pairs = torch.arange(2)  # text i belongs to image i

    def by_hand(dtype: torch.dtype) -> list[Tensor]:
        z, o, t = logits.to(dtype), other.to(dtype), binary.to(dtype)
        p, q = z.exp() / z.exp().sum(), o.softmax(dim=1)
        s = 1 / (1 + (-z).exp())
        scores = (similarity.to(dtype) / 0.05).exp()
        return [
            -p[0, label].log().mean(),
            -z.softmax(dim=1)[0, rare].log().mean(),  # the softmax is right, but its result is rounded to zero
            -(t * s.log() + (1 - t) * (1 - s).log()).mean(),
            (q * (q / p).log()).sum(),
            -(scores.diag() / scores.sum(dim=1)).log().mean(),
        ]

    z, o = logits.half(), other.half()
    with torch.autocast("cpu", dtype=torch.float16):
        torchs = [
            F.cross_entropy(z, label),
            F.nll_loss(z.float().log_softmax(dim=1), rare),
            F.binary_cross_entropy_with_logits(z, binary),
            F.kl_div(
                z.float().log_softmax(dim=1), o.float().log_softmax(dim=1), log_target=True, reduction="batchmean"
            ),
            F.cross_entropy(similarity.half().float() / 0.05, pairs),
        ]
    names = ("cross-entropy", "negative log-likelihood", "binary cross-entropy", "KL divergence", "contrastive")
    print(f"\n{'':26}{'by hand, fp16':>15}{'torch, autocast':>17}{'float64':>10}")
    columns = zip(names, by_hand(torch.float16), torchs, by_hand(torch.float64), strict=True)
    rows = [(name, float(naive), float(stable), float(exact)) for name, naive, stable, exact in columns]
    for name, naive, stable, exact in rows:
        print(f"{name:26}{naive:15.4f}{stable:17.4f}{exact:10.4f}")
    return rows


def train() -> tuple[list[float], list[int], list[float]]:
    """Trains a classifier in fp16. Returns the loss scale and the loss of each step, and the skipped steps."""
    torch.manual_seed(0)
    centres = torch.randn(10, 16)
    labels = torch.arange(80) % 10
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # The defaults, 2^16 and growth after 2,000 steps, show in hours what these show in seconds.
    scaler = CrossRankGradScaler("cpu", init_scale=2.0**24, growth_interval=20)
    scales, skipped, losses = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        points = centres[labels] + 2.0 * torch.randn(len(labels), 16)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(points)
        loss = F.cross_entropy(logits.float(), labels)
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # does nothing if a gradient is inf or NaN
        scaler.update()  # then halves the scale; doubles it after 20 steps without
        scales.append(scale)
        losses.append(float(loss.detach()))
        if scaler.get_scale() < scale:
            skipped.append(step)
    return scales, skipped, losses


def main(out: Path) -> None:
    """Prints two tables and the changes of the scale, and draws them."""
    softmax_table()
    loss_table()
    scales, skipped, losses = train()
    grown = [step for step in range(1, STEPS) if scales[step] > scales[step - 1]]
    print(f"\nsteps skipped, scale halved: {skipped}")
    print(f"scale doubled before steps:  {grown}")
    print(f"loss scale: {scales[0]:,.0f} at first, {min(scales):,.0f} to {max(scales[20:]):,.0f} from step 20 on")
    print(f"mean loss: {losses[0]:.2f} in step 0, {sum(losses[-20:]) / 20:.2f} in the last 20 steps")

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.step(range(STEPS), scales, where="post", color="#0072B2")
    upper.plot(skipped, [scales[step] for step in skipped], "x", color="#D55E00", label="step skipped, scale halved")
    upper.set_yscale("log", base=2)
    upper.set(
        ylabel="loss scale",
        title="The scale is halved until the gradients fit into fp16, and doubled after 20 steps without overflow",
    )
    upper.legend()
    lower.plot(losses, color="#000000")
    lower.plot(skipped, [losses[step] for step in skipped], "x", color="#D55E00")
    lower.set(xlabel="step", ylabel="loss")
    finish(
        figure,
        out / "overflow.png",
        "A forward that overflows is not cured by any scale: every step is skipped, so the formula has to change.",
        "A gradient that overflows costs one step: it is skipped, nothing is updated, and the scale is halved.",
        "After a number of steps without overflow the scale is doubled, so it stays close to the largest that fits.",
    )


if __name__ == "__main__":
    main(parser(__doc__).parse_args().out)
