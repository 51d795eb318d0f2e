"""No step waits for the device: proven without one, for on a fake CUDA tensor every look at a value raises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.precision import CrossRankGradScaler, kernels
from tests.ranks import run_ranks

T = TypeVar("T")


class Collectives(TorchDispatchMode):
    """Counts the collectives that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


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


def on_fake_cuda(work: Callable[[], T]) -> T:
    """Runs ``work`` in a process of its own, as rank 0 of four, with fake CUDA tensors."""

    def rank_0(rank: int) -> T:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
            # The self-test reads values, once, at start.
            mock.patch.object(kernels, "self_test", return_value=kernels.Kernels()),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            return work()

    return run_ranks(1, rank_0, init=False)[0]


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
