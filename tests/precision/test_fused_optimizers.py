"""What fused optimizers do where ``found_inf`` is 1, and fused SGD before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.precision import CrossRankGradScaler
from dtrain.precision.fused_optimizers import prefill_momentum, reads_found_inf


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_fused_optimizer_changes_nothing_where_found_inf_is_1(name: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = getattr(torch.optim, name)([weight], lr=0.5, fused=True)
    if name == "Adagrad" and not reads_found_inf(optimizer):
        pytest.skip("torch 2.9: fused Adagrad ignores found_inf, so the host decides")
    assert reads_found_inf(optimizer)
    for found_inf, unchanged in ((1.0, True), (0.0, False)):
        optimizer.found_inf = torch.tensor(found_inf)
        optimizer.step()
        assert (weight == 1).all().item() is unchanged
        assert optimizer.state[weight].get("step", torch.tensor(1.0 - unchanged)).item() == 1.0 - unchanged


def test_an_optimizer_with_a_group_that_is_not_fused_is_decided_by_the_host() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert not reads_found_inf(
        torch.optim.AdamW([{"params": [first]}, {"params": [second], "fused": False}], fused=True)
    )
    assert not reads_found_inf(torch.optim.AdamW([first]))
    assert not reads_found_inf(torch.optim.RMSprop([first]))


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
