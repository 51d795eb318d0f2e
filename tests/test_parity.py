"""A recipe equals the plain PyTorch script that a textbook would give for it, at every step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.data.digits import arrays
from dtrain.data.order.randomness import seed_generators
from dtrain.models import SmallCNN
from tests.ranks import run_ranks
from tests.whole_runs import metrics, train_on

STEPS = 15
# The digits, unshuffled, at half the preset's batch; the curve is that of two epochs.
RECIPE = (
    "data=memory",
    "data.shuffle=none",
    "data.eval=null",
    "checkpoint.best=null",
    "train.global_batch_size=32",
    "train.max_epochs=2",
    f"train.max_steps={STEPS}",
    "checkpoint.every_steps=null",
)


def textbook_digits(rank: int, ranks: int) -> list[float]:
    """The recipe as a script: AdamW, clipping, warm-up and cosine."""
    data = arrays("train")
    images = (torch.from_numpy(data["image"]).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    labels = torch.from_numpy(data["label"])
    seed_generators(torch.device("cpu"), 0)
    model: nn.Module = SmallCNN()
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    horizon = 2 * math.ceil(len(labels) / 32)
    warmup = round(0.05 * horizon)
    losses = []
    for step in range(STEPS):
        if step < warmup:
            factor = (step + 1) / warmup
        else:
            factor = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (horizon - warmup)))
        optimizer.param_groups[0]["lr"] = 3e-3 * factor
        share = 32 // ranks
        mine = slice(32 * step + share * rank, 32 * step + share * (rank + 1))
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    return losses


@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_digits_recipe_has_the_losses_of_a_plain_script(tmp_path: Path, ranks: int) -> None:
    train_on(ranks, tmp_path, *RECIPE)
    (expected, *_) = run_ranks(ranks, lambda rank: textbook_digits(rank, ranks))
    assert metrics(tmp_path) == pytest.approx(expected, rel=2e-5)


def textbook_checkerboard(size: int, width: int, steps: int) -> list[float]:
    """1x1 convolutions on the grid of all coordinates, the whole picture in every step."""
    axis = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    inputs = torch.stack([x, y])[None]
    fields = np.add.outer(np.arange(size) // (size // 8), np.arange(size) // (size // 8)) % 2
    picture = torch.from_numpy(fields).float()[None, None]
    layers: list[nn.Module] = []
    seed_generators(torch.device("cpu"), 0)
    for channels in (2, width, width):
        layers += [nn.Conv2d(channels, width, 1), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(width, 1, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses: list[Tensor] = []
    for _ in range(steps):
        loss = F.mse_loss(model(inputs), picture)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@pytest.mark.slow
def test_the_checkerboards_curve_on_one_rank_is_that_of_the_textbooks_script(tmp_path: Path) -> None:
    options = ("data.train.size=32", "model.width=16", "train.max_steps=40")
    train_on(1, tmp_path, *options, experiment="checkerboard")
    expected = run_ranks(1, lambda rank: textbook_checkerboard(32, 16, 40), init=False)[0]
    losses = metrics(tmp_path)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < 0.5 * losses[0]
