"""Fake CUDA tensors, on which every look at a value raises, and a count of collectives: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks

T = TypeVar("T")


def on_fake_cuda(work: Callable[[], T]) -> T:
    """Runs ``work`` in a process of its own, as rank 0 of four, with fake CUDA tensors."""
    if torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("a torch with CUDA asks the driver, also for fake tensors, and there is none")

    def rank_0(rank: int) -> T:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            return work()

    return run_ranks(1, rank_0, init=False)[0]


class Collectives(TorchDispatchMode):
    """Counts the collectives that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
