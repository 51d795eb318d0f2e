"""torch's private operators, replaced where they fail the self-test, and fused SGD before its first step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.precision import CrossRankGradScaler, fused_optimizers
from dtrain.precision.fused_optimizers import prefill_momentum
from tests.precision.skips import Case, assert_equals_reference, ours, train


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Lets the self-test run again, and forgets what it saw of a broken torch."""
    fused_optimizers.self_test.cache_clear()
    yield
    fused_optimizers.self_test.cache_clear()


def gone(*args: Any) -> None:
    raise AttributeError("no such operator")


def found_inf_ignored(update: Any) -> Any:
    """A fused optimizer that does not know ``found_inf``."""
    return lambda *args, **options: update(*args, **options | {"found_inf": None})


def test_this_torch_passes_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused_optimizers.self_test("cpu") == fused_optimizers.Kernels(True, True, True)


@pytest.mark.parametrize(
    ("name", "replacement", "failing"),
    [
        ("_amp_foreach_non_finite_check_and_unscale_", gone, "check_and_unscale"),
        ("_amp_foreach_non_finite_check_and_unscale_", lambda *args: None, "check_and_unscale"),
        ("_amp_update_scale_", gone, "update_scale"),
        ("_fused_adamw_", None, "fused_skip"),
    ],
)
def test_a_changed_operator_is_named_in_a_warning_and_the_result_is_the_same(
    name: str, replacement: Any, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("AdamW", "fused", {1: (0,)})
    monkeypatch.setattr(torch, name, replacement or found_inf_ignored(getattr(torch, name)))
    with pytest.warns(UserWarning, match=failing) as messages:
        assert_equals_reference([train(0, ours(), case)], case, exact=True)
    assert len(messages) == 1


# -- fused SGD's momentum


@pytest.fixture
def dirty_memory() -> Iterator[None]:
    """Fills all uninitialised memory with NaN, which shows what a kernel does not write."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


def train_sgd(scaler: Any, skipped: set[int], steps: int = 4, **options: Any) -> Tensor:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, **options)
    for step in range(steps):
        scaler.scale((weight * torch.arange(1.0, 4.0)).square().sum()).backward()
        assert weight.grad is not None
        if step in skipped:
            weight.grad[1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weight.detach()


def sgd_reference(skipped: set[int], steps: int = 4, **options: Any) -> Tensor:
    """The same without a scaler, leaving out the skipped steps."""
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False, **options)
    for step in range(steps):
        (weight * torch.arange(1.0, 4.0)).square().sum().backward()
        if step not in skipped:
            optimizer.step()
        optimizer.zero_grad()
    return weight.detach()


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": True}, {"dampening": 0.3}, {"weight_decay": 0.1, "maximize": True}]
)
@pytest.mark.parametrize("skipped", [set(), {0}, {0, 1}, {2}])
def test_fused_sgd_first_step_overflow_leaves_momentum_zero(
    skipped: set[int], options: dict[str, Any], dirty_memory: None
) -> None:
    trained = train_sgd(CrossRankGradScaler("cpu", init_scale=64.0), skipped, fused=True, **options)
    torch.testing.assert_close(trained, sgd_reference(skipped, **options), rtol=1e-6, atol=1e-6)


def test_torchs_scaler_trains_on_uninitialised_momentum(dirty_memory: None) -> None:
    assert train_sgd(torch.amp.GradScaler("cpu", init_scale=64.0), {0}, fused=True).isnan().any()


def test_a_parameter_that_joins_later_starts_from_zero(dirty_memory: None) -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9, fused=True)
    first.grad = torch.ones(1)
    assert prefill_momentum(optimizer)
    assert second not in optimizer.state
    optimizer.step()
    second.grad = torch.ones(1)
    assert prefill_momentum(optimizer)
    assert optimizer.state[first]["momentum_buffer"].item() == 1.0
    assert optimizer.state[second]["momentum_buffer"].item() == 0.0


def test_only_fused_sgd_with_momentum_is_touched() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    for optimizer in (
        torch.optim.SGD([weight], lr=0.1, momentum=0.9),
        torch.optim.SGD([weight], lr=0.1, fused=True),
        torch.optim.AdamW([weight], fused=True),
    ):
        assert prefill_momentum(optimizer)
        assert not optimizer.state[weight]


def test_dampening_leaves_the_first_step_to_the_host() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    assert not prefill_momentum(optimizer)
    optimizer.step()
    assert prefill_momentum(optimizer)
