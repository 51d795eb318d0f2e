"""Toy networks, and a small regression that ranks, micro-batches and a plain float64 loop can all do.

* ``Net``: two layers, for whatever trains in milliseconds. ``NetWithBatchNorm`` has running statistics.
* ``NormNet``: convolutions with BatchNorm and a residual, for the commands that read a run of the digits.
* ``train_step`` and ``run_steps`` train on the regression (``micro_batches``, ``squared_error``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.training.setup.ema import Ema
from dtrain.training.step import StepOutcome, TrainStep
from dtrain.training.task import Output

CPU = torch.device("cpu")


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, rank, size, CPU, "gloo", launched=size > 1)


class Net(nn.Module):
    """Three numbers to one, or to ``outputs``; the same weights each time."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(3, 4)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).tanh())


class NetWithBatchNorm(nn.Sequential):
    """Three numbers to one, and running statistics, which a forward changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        # No bias before it: its gradient would be rounding noise, which Adam makes as large as any other.
        super().__init__(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


class NormNet(nn.Module):
    """Two convolutions with BatchNorm, the second beside a residual, and a linear layer."""

    def __init__(self, classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        hidden = self.norm1(self.conv1(images)).relu()
        hidden = hidden + self.norm2(self.conv2(hidden)).relu()
        return self.head(hidden.mean(dim=(2, 3)))


def norm_net(classes: int = 10, width: int = 8) -> NormNet:
    """The same, built by a function."""
    return NormNet(classes, width)


def samples(step: int, count: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: float64, shapes ``[count, 3]`` and ``[count]``, each number exact in fp32."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(count, 3, generator=generator)
    y = torch.randn(count, generator=generator)
    return x.double(), y.double()


def micro_batches(
    step: int, count: int, *, ranks: int = 1, rank: int = 0, rows: int | None = None, masked: Collection[int] = ()
) -> list[Batch]:
    """This rank's part of a global batch: contiguous, cut into micro-batches, filled up with masked rows.

    Args:
        step: Which global batch.
        count: Its size.
        ranks: How many ranks share it.
        rank: Which one this is.
        rows: Rows of a micro-batch; None: all of the rank's.
        masked: Samples of the global batch that are masked. What they hold would spoil every sum.
    """
    x, y = samples(step, count)
    share = -(-count // ranks)
    rows = rows or share
    mine = list(range(rank * share, min(count, (rank + 1) * share)))
    mine += [-1] * (-(-share // rows) * rows - len(mine))
    return [
        batch(x, y, [-1 if number in masked else number for number in mine[first : first + rows]])
        for first in range(0, len(mine), rows)
    ]


def batch(x: Tensor, y: Tensor, numbers: Sequence[int]) -> Batch:
    """The samples of those numbers; -1 is a masked row."""
    valid = torch.tensor(numbers) >= 0
    columns = {"x": x[numbers].float(), "y": torch.where(valid, y[numbers], 1e6).float()}
    return Batch(columns, [f"s/{number}" if number >= 0 else "" for number in numbers], valid)


def squared_error(model: nn.Module, batch: Batch) -> Output:
    """The task: squared error, and the share of positive predictions as a metric."""
    predicted = model(batch["x"]).squeeze(1).float()
    errors = (predicted - batch["y"]).square().masked_fill(~batch.valid, 0)
    count = batch.valid.sum()
    return Output(errors.sum(), count, {"positive": (((predicted > 0) & batch.valid).sum(), count)})


def averages(ema: Ema) -> dict[str, Tensor]:
    """The state of the averaged model."""
    with ema.swapped_in() as averaged:
        return {name: tensor.clone() for name, tensor in averaged.state_dict().items()}


def constant(applied_steps: int) -> float:
    return 1.0


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    task: Callable[..., Any] = squared_error,
    world: World = world(),  # noqa: B008 - it is frozen
    precision: str = "fp32",
    nominal: int = 12,
    schedule: Callable[[int], float] = constant,
    **options: Any,
) -> TrainStep:
    options.setdefault("loss_scale", None)
    return TrainStep(
        model,
        task,
        optimizer,
        world=world,
        precision=Precision(precision),
        nominal=nominal,
        schedule=schedule,
        **options,
    )


def run_steps(
    step: TrainStep,
    windows: Sequence[Sequence[Batch]],
    spoil: Callable[[int], None] = lambda number: None,
    settle_late: bool = True,
) -> list[StepOutcome]:
    """The outcome of each window. As in the loop, one is settled after the next one's backward.

    Args:
        step: Where to train.
        windows: The micro-batches of each step.
        spoil: Called with the number of a step between its backward and its vote.
        settle_late: False settles at once.
    """
    return list(_outcomes(step, windows, spoil, settle_late))


def _outcomes(
    step: TrainStep, windows: Sequence[Sequence[Batch]], spoil: Callable[[int], None], settle_late: bool
) -> Iterator[StepOutcome]:
    for number, window in enumerate(windows):
        step.accumulate(window, len(window))
        spoil(number)
        if (outcome := step.settle()) is not None:
            yield outcome
        step.apply()
        if not settle_late and (outcome := step.settle()) is not None:
            yield outcome
    if (outcome := step.settle()) is not None:
        yield outcome


class NetWithDropout(nn.Sequential):
    """A classifier of the digits with dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(192, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 10))
