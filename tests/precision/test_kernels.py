"""torch's private operators: trusted because they passed, replaced where they do not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dtrain.precision import CrossRankGradScaler, kernels


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Lets the self-test run again, and forgets what it saw of a broken torch."""
    kernels.self_test.cache_clear()
    yield
    kernels.self_test.cache_clear()


def gone(*args: Any) -> None:
    raise AttributeError("no such operator")


def found_inf_ignored(update: Any) -> Any:
    """A fused optimizer that does not know ``found_inf``."""
    return lambda *args, **options: update(*args, **options | {"found_inf": None})


def train() -> tuple[list[float], list[float]]:
    """Losses scaled, the second step overflowing; the parameters and scales on the way."""
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = CrossRankGradScaler("cpu", init_scale=8.0, growth_interval=2)
    weights, scales = [], []
    for step in range(5):
        scaler.scale(weight.square().sum()).backward()
        assert weight.grad is not None
        if step == 1:
            weight.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(weight.sum().item())
        scales.append(scaler.get_scale())
    return weights, scales


def test_this_torch_passes_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.self_test("cpu") == kernels.Kernels(True, True, True)


@pytest.mark.parametrize(
    ("name", "replacement", "said"),
    [
        ("_amp_foreach_non_finite_check_and_unscale_", gone, "check_and_unscale"),
        ("_amp_foreach_non_finite_check_and_unscale_", lambda *args: None, "check_and_unscale"),
        ("_amp_update_scale_", gone, "update_scale"),
        ("_fused_adamw_", None, "fused_skip"),
    ],
)
def test_a_changed_operator_is_said_and_the_result_is_the_same(
    name: str, replacement: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train()
    kernels.self_test.cache_clear()
    monkeypatch.setattr(torch, name, replacement or found_inf_ignored(getattr(torch, name)))
    with pytest.warns(UserWarning, match=said) as messages:
        assert train() == expected
    assert len(messages) == 1
