from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.training.setup.buffers import BufferGuard
from tests.refusals import refused

# -- buffers


YES, NO = torch.tensor(True), torch.tensor(False)


class Buffers(nn.Module):
    """Buffers of several dtypes and shapes, one of them empty, one unset; a forward changes all, one by a new tensor."""

    calls: Tensor
    seen: Tensor
    low: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, 3, dtype=torch.bool), persistent=False)
        self.register_buffer("low", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("unset", None)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.fill_(True)
        self.low *= 2
        self.average = 0.5 * self.average + 0.5 * x.mean(0)
        return self.norm(x)


def contents(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_skipped_forward_leaves_every_buffer_as_it_was(bad: float) -> None:
    model = Buffers()
    guard = BufferGuard(model)
    model(torch.randn(4, 3))
    before = contents(model)
    for _ in range(2):
        guard.save()
        model(torch.full((4, 3), bad))
        model(torch.randn(4, 3))
        guard.restore(YES)
        assert same(contents(model), before)


def test_an_applied_forward_keeps_what_it_changed() -> None:
    model, other = Buffers(), Buffers()
    guard = BufferGuard(model)
    for number in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        guard.save()
        model(x)
        other(x)
        guard.restore(NO)
    assert same(contents(model), contents(other))


def test_a_model_without_buffers_costs_nothing() -> None:
    guard = BufferGuard(nn.Linear(2, 2))
    guard.save()
    assert guard.not_finite() is None
    guard.restore(YES)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["low", "average", "norm.running_mean"])
def test_a_buffer_that_becomes_infinite_or_nan_is_found(name: str, bad: float) -> None:
    model = Buffers()
    guard = BufferGuard(model)
    guard.save()
    model(torch.randn(4, 3))
    assert not guard.not_finite()
    model.get_buffer(name)[1] = bad
    assert guard.not_finite()


def test_a_buffer_that_is_infinite_by_design_is_not_found() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model.register_buffer("lowest", torch.full((2,), torch.inf))
    model.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))
    guard = BufferGuard(model)
    guard.save()
    model.lowest.fill_(3)
    assert not guard.not_finite()
    model.spectrum[0] = complex(0, torch.nan)
    assert guard.not_finite()


@pytest.mark.parametrize("shape", [(3, 2), (4, 3)], ids=["transposed", "grown"])
def test_a_buffer_whose_shape_changes_is_refused_by_name(shape: tuple[int, ...]) -> None:
    model = Buffers()
    guard = BufferGuard(model)
    guard.save()
    model.seen = torch.zeros(shape, dtype=torch.bool)
    for use in (guard.not_finite, lambda: guard.restore(YES)):
        with refused(ConfigError, "seen", "[2, 3]", "__init__", list(shape)):
            use()
