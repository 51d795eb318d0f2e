from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.errors import ConfigError
from dtrain.training.setup import ema as module
from dtrain.training.setup.buffers import BufferGuard
from dtrain.training.setup.ema import Ema
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


# -- ema


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_the_average_is_that_of_a_float64_loop_over_the_applied_steps(decay: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ema = Ema(model, decay)
    want = [p.detach().double().clone() for p in model.parameters()]
    for step in range(200):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        skipped = step % 7 == 3
        ema.update(YES if skipped else NO)
        if not skipped:
            want = [decay * w + (1 - decay) * p.double() for w, p in zip(want, model.parameters(), strict=True)]
    with ema.swapped_in() as averaged:
        for average, expected in zip(averaged.parameters(), want, strict=True):
            torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 10, 12, 100])
def test_on_a_gpu_the_average_moves_in_chunks_that_need_little_memory(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Temporaries(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._foreach_sub.List:
                elements.append(sum(tensor.numel() for tensor in result))
            return result

    elements: list[int] = []
    monkeypatch.setattr(module, "_CHUNK", chunk)
    model = nn.ParameterList([torch.randn(size) for size in (3, 7, 1, 1, 12, 2)])
    ema, on_host = Ema(model, 0.9), Ema(model, 0.9)
    with torch.no_grad():
        for parameter in model:
            parameter.add_(torch.randn(parameter.shape))
    with Temporaries():
        ema._update_on_device(NO)
        ema._update_on_device(YES)
    on_host.update(NO)
    for one, other in zip(ema._averages, on_host._averages, strict=True):
        torch.testing.assert_close(one, other)
    assert max(elements) <= max(chunk, 12)
    assert sum(elements) == 2 * 26


def test_the_averages_are_in_the_model_with_its_present_buffers_until_the_block_ends_by_an_error_too() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ema = Ema(model, 0.5)
    first = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    model(torch.randn(8, 3))
    trained = copy.deepcopy(model.state_dict())
    with suppress(KeyError), ema.swapped_in() as averaged:
        assert averaged is model
        assert torch.equal(model[0].weight, first)
        assert torch.equal(model[1].running_mean, trained["1.running_mean"])
        raise KeyError
    assert same(dict(model.state_dict()), trained)
    with ema.swapped_in():
        assert torch.equal(model[0].weight, first)
        with ema.swapped_in():
            assert torch.equal(model[0].weight, first)
        assert torch.equal(model[0].weight, first)
    assert same(dict(model.state_dict()), trained)


def test_tied_weights_are_averaged_once_and_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.other.weight = self.one.weight

    model = Tied()
    ema = Ema(model, 0.5)
    start = model.one.weight.detach().clone()
    with torch.no_grad():
        model.one.weight.add_(1)
    ema.update(NO)
    with ema.swapped_in():
        torch.testing.assert_close(model.one.weight, start + 0.5)
        assert model.one.weight is model.other.weight


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with refused(ValueError, "train.ema_decay", "got", "[0, 1)"):
        Ema(nn.Linear(1, 1), decay)
