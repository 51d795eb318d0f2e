"""The trainer's step on fake CUDA tensors, where every look at a value raises: it never waits for the device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily

from dtrain.data import Batch
from dtrain.distributed.world import World
from dtrain.precision import Precision
from dtrain.precision import vote as vote_module
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.vote import Vote
from dtrain.training import step as step_module
from dtrain.training.ema import Ema
from dtrain.training.step import TrainStep
from dtrain.training.task import Output
from tests.precision.test_no_host_sync import Collectives, on_fake_cuda

CUDA = torch.device("cuda", 0)
RANKS = 4


class Scale(nn.Module):
    """Has a parameter, and a buffer that the forward changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=CUDA))
        self.register_buffer("calls", torch.zeros((), device=CUDA))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight


def task(model: nn.Module, batch: Batch) -> Output:
    with torch.no_grad():  # autograd needs the CUDA library even for fake tensors
        loss, count = model(batch["x"]).float().sum(), batch.valid.sum()
    return Output(loss, count, {"again": (loss, count)})


def vote_on_fake_cuda(device: torch.device, ranks: int) -> Vote:
    """Page-locked memory also needs the CUDA library."""
    with unset_fake_temporarily():
        vote = Vote(torch.device("cpu"), ranks)
    vote._device, vote._host = device, torch.zeros_like(vote._host)
    return vote


def collectives_of_steps(precision: str, **implementation: Any) -> list[list[str]]:
    """The collectives of each of three steps of two micro-batches."""
    model = Scale()

    def backward(loss: Tensor, factor: Tensor) -> None:
        model.weight.grad = torch.ones_like(model.weight) * loss * factor

    settled = [0.0, RANKS, RANKS, 1.0, 1.0, 8.0, 1.0, 8.0, 0.0, 0.0, 8.0, 0.0, 0.0]
    seen = []
    with (
        mock.patch.object(Tensor, "backward", backward),
        mock.patch.object(step_module, "Vote", vote_on_fake_cuda),
        mock.patch.object(step_module, "seed_generators"),
        # The one copy to the host and the one wait for it, which is that of the step before.
        mock.patch.object(vote_module._HostCopy, "start") as copied,
        mock.patch.object(vote_module._HostCopy, "wait", return_value=settled),
    ):
        step = TrainStep(
            model,
            task,
            torch.optim.AdamW(model.parameters(), lr=0.1, **implementation),
            world=World(0, RANKS, 0, RANKS, CUDA, "nccl", launched=True),
            precision=Precision(precision),
            loss_scale=LossScale(CUDA, init=1.0) if precision == "fp16" else None,
            nominal=8,
            schedule=lambda applied_steps: 1.0,
            clip_norm=1.0,
            ema=Ema(model, 0.5),
        )
        step.step = 1  # in the first one the task is tried out, which waits
        for _ in range(3):
            window = [Batch({"x": torch.ones(2, 3, device=CUDA)}, ["a", "b"], valid()) for _ in range(2)]
            with Collectives() as collectives:
                step.accumulate(window, 2)
                step.settle()
                step.apply()
            seen.append(collectives.names)
        assert copied.call_count == 3
    return seen


def valid() -> Any:
    return torch.ones(2, dtype=torch.bool, device=CUDA)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_fused_step_never_waits_and_has_one_all_reduce(precision: str) -> None:
    assert on_fake_cuda(lambda: collectives_of_steps(precision, fused=True)) == [["c10d::allreduce_"]] * 3


def test_a_step_whose_optimizer_is_not_fused_is_caught_waiting() -> None:
    def work() -> bool:
        with pytest.raises(DataDependentOutputException):
            collectives_of_steps("fp16", foreach=True)
        return True

    assert on_fake_cuda(work)
