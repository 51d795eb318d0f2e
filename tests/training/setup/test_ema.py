from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.training.setup import ema as module
from dtrain.training.setup.ema import Ema
from tests.refusals import refused
from tests.training.setup.test_buffers import same

YES, NO = torch.tensor(True), torch.tensor(False)


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
