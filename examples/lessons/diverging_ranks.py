"""Lesson: why all ranks must skip the same steps.

    python examples/lessons/diverging_ranks.py [--out FOLDER]

Starts two processes. Each owns the parameters of one layer, similar to ZeRO and FSDP: gradients are averaged over the ranks,
and each rank updates its own layer and sends it to the other rank. In four steps, a gradient of rank 1's layer overflows. The
training runs twice: with a separate ``torch.amp.GradScaler`` on each rank, and with dtrain's ``CrossRankGradScaler``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lesson import Figure, finish, parser
from torch import nn

from dtrain.precision import CrossRankGradScaler

STEPS = 300
OVERFLOWS = (60, 120, 180, 240)
SCALERS = {
    "torch.amp.GradScaler": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
    "CrossRankGradScaler": lambda: CrossRankGradScaler("cpu", init_scale=1024.0),
}


def train(rank: int, scaler: Any, overflows: Sequence[int]) -> dict[str, list[float]]:
    """Trains on this rank's half of the data; all ranks have the same network. Returns scale and loss of each step."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    layers = (network[0], network[2])  # of rank 0, of rank 1
    optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
    x = torch.randn(2, 128, 8)  # [rank, sample, input]
    y = (x.sum(dim=2, keepdim=True) / 2).tanh()
    history: dict[str, list[float]] = {"scale": [], "loss": []}
    for step in range(STEPS):
        network.zero_grad()
        history["scale"].append(scaler.get_scale())
        history["loss"].append(float(((network(x) - y) ** 2).mean().detach()))
        scaler.scale(((network(x[rank]) - y[rank]) ** 2).mean()).backward()
        for parameter in network.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        if step in overflows and rank == 1:
            layers[1].weight.grad.fill_(float("inf"))  # rank 0 has no such gradient: it updates the other layer
        scaler.step(optimizer)
        scaler.update()
        for owner, layer in enumerate(layers):
            for parameter in layer.parameters():
                dist.broadcast(parameter.data, src=owner)
    return history


def run(rank: int, folder: str) -> None:
    """One process of two."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    results = {name: train(rank, make(), OVERFLOWS) for name, make in SCALERS.items()}
    results["without an overflow"] = train(rank, SCALERS["CrossRankGradScaler"](), ())
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def main(out: Path) -> None:
    """Prints scales and losses of both ranks, and draws them."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (folder,), nprocs=2, start_method="spawn")
        ranks = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(2)]

    print(f"{'':24}{'scale of rank 0':>16}{'of rank 1':>12}{'last loss':>12}")
    for name in ranks[0]:
        first, second = (rank[name]["scale"][-1] for rank in ranks)
        print(f"{name:24}{first:16g}{second:12g}{ranks[0][name]['loss'][-1]:12.5f}")

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    stock, ours = SCALERS
    left.step(range(STEPS), ranks[0][ours]["scale"], where="post", color="#BBBBBB", lw=6, label=f"{ours}, both ranks")
    for rank, colour in enumerate(("#0072B2", "#D55E00")):
        left.step(range(STEPS), ranks[rank][stock]["scale"], where="post", color=colour, label=f"{stock}, rank {rank}")
    left.set(xlabel="step", ylabel="loss scale", title="Rank 1 finds inf in four steps")
    left.set_yscale("log", base=2)
    left.legend(fontsize="small")
    for name, colour, style in zip(ranks[0], ("#D55E00", "#000000", "#56B4E9"), ("-", "--", ":"), strict=True):
        right.plot(ranks[0][name]["loss"], style, color=colour, label=name)
    right.set(yscale="log", xlabel="step", ylabel="loss", title="Training")
    right.legend(fontsize="small")
    finish(
        figure,
        out / "diverging_ranks.png",
        "With a scaler of its own, rank 1 skips four steps and halves its scale each time, and rank 0 does neither.",
        "From then on gradients of different scales are averaged, so every later update is wrong, without a message.",
        "CrossRankGradScaler first adds up the overflow flags of all ranks, so both skip, and both halve.",
    )


if __name__ == "__main__":
    main(parser(__doc__).parse_args().out)
