from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dtrain.training.ema import Ema

YES, NO = torch.tensor(True), torch.tensor(False)


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
    for average, expected in zip(ema.averaged().parameters(), want, strict=True):
        torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_averaged_model_has_the_present_buffers_and_needs_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ema = Ema(model, 0.9)
    model(torch.randn(8, 3))
    averaged = ema.averaged()
    for ours, theirs in zip(averaged.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert not any(parameter.requires_grad for parameter in averaged.parameters())


def test_the_model_is_not_touched() -> None:
    model = nn.Linear(3, 4)
    before = copy.deepcopy(model.state_dict())
    ema = Ema(model, 0.5)
    ema.update(NO)
    with torch.no_grad():
        ema.module.weight.add_(1)  # type: ignore[operator]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert model.weight.requires_grad


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
    averaged = ema.averaged()
    torch.testing.assert_close(averaged.one.weight, start + 0.5)  # type: ignore[union-attr]
    assert averaged.one.weight is averaged.other.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"train.ema_decay: got .*want a number in \[0, 1\)"):
        Ema(nn.Linear(1, 1), decay)
