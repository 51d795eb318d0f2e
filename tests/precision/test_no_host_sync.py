"""No step waits for the device: proven without one, for on a fake CUDA tensor every look at a value raises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from dtrain.precision import CrossRankGradScaler
from tests.fake_cuda import Collectives, on_fake_cuda


def collectives_of_steps(scaler: Any, clip: bool, optimizers: int, **options: Any) -> list[list[str]]:
    """The collectives of each of three steps on CUDA, from loss to update, as one of four ranks."""
    weights = [torch.ones(4, device="cuda") for _ in range(4)]
    groups = [weights] if optimizers == 1 else [weights[:2], weights[2:]]
    of_model = [torch.optim.AdamW(group, **options) for group in groups]
    steps = []
    for _ in range(3):
        with Collectives() as collectives:
            scaler.scale(torch.ones((), device="cuda"))
            for weight in weights:
                # By hand: autograd needs the CUDA library even for fake tensors.
                weight.grad = torch.ones_like(weight)
            for optimizer in of_model:
                if clip:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
                scaler.step(optimizer)
            scaler.update()
        steps.append(collectives.names)
    return steps


def test_a_fused_step_never_waits_and_has_one_all_reduce_an_optimizer() -> None:
    cases = list(product((1, 2), (False, True), (1, 2)))

    def work() -> list[list[list[str]]]:
        return [
            collectives_of_steps(CrossRankGradScaler("cuda", hysteresis=hysteresis), clip, optimizers, fused=True)
            for optimizers, clip, hysteresis in cases
        ]

    for (optimizers, *_), steps in zip(cases, on_fake_cuda(work), strict=True):
        assert steps == [["c10d::allreduce_"] * optimizers] * 3


@pytest.mark.parametrize("make", [CrossRankGradScaler, torch.amp.GradScaler])
def test_an_optimizer_that_is_not_fused_is_caught_waiting(make: Callable[[str], Any]) -> None:
    def work() -> bool:
        with pytest.raises(DataDependentOutputException):
            collectives_of_steps(make("cuda"), clip=False, optimizers=1, foreach=True)
        return True

    assert on_fake_cuda(work)
