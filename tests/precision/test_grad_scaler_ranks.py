"""CrossRankGradScaler on real ranks, and torch's scaler where its ranks disagree. S numbers: ``scenarios/test_table.py``.

Ranks must be equal, finite, and equal to the single-process reference that skips the same steps.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.precision.skips import (
    IMPLEMENTATIONS,
    OPTIMIZERS,
    SCALE,
    Case,
    assert_equals_reference,
    ours,
    scale_after,
    scales,
    stock,
    train,
    with_ours,
    with_stock,
)
from tests.ranks import RanksFailed, run_ranks


@pytest.mark.parametrize("fused", [False, True])
def test_s02_parameters_outside_ddps_buckets(fused: bool) -> None:
    case = Case("AdamW", "fused" if fused else "plain", {1: (1,)}, own_data=True)
    assert_equals_reference(with_ours(2, train, case), case, exact=False)
    apart = with_stock(2, train, case)
    assert scales(apart)[0] != scales(apart)[1]
    assert not torch.equal(apart[0].weights, apart[1].weights)


@pytest.mark.parametrize("fused", [False, True])
def test_s03_two_optimizers_of_which_the_ranks_own_overflows(fused: bool) -> None:
    case = Case("AdamW", "fused" if fused else "plain", {1: (1,), 2: (0,)}, separate=True, own_data=True)
    assert_equals_reference(with_ours(2, train, case), case, exact=False)
    apart = with_stock(2, train, Case("AdamW", "plain", {1: (1,)}, separate=True, own_data=True))
    assert scales(apart)[0] != scales(apart)[1]


def test_s16_two_overflowing_ranks_of_three_are_one_skip() -> None:
    case = Case("AdamW", "fused", {0: (0, 2), 3: (0, 1, 2)}, own_data=True)
    assert_equals_reference(with_ours(3, train, case), case, exact=False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_on_two_ranks_equals_the_reference(optimizer: str) -> None:
    cases = [
        Case(optimizer, implementation, {step: (1,)}, clip, separate)
        for implementation in IMPLEMENTATIONS
        for step, clip, separate in ((0, False, False), (1, True, False), (3, False, True), (1, True, True))
    ]
    by_rank = run_ranks(2, lambda rank: [train(rank, ours(), case) for case in cases])
    for case, *results in zip(cases, *by_rank, strict=True):
        assert_equals_reference(results, case, exact=True)


# -- one rank only: no gradient, no state, another scale


def partly_without_gradient(rank: int, scaler: Any, users: tuple[int, ...], fused: bool) -> tuple[list[float], float]:
    """Trains a shared weight and an expert that only some ranks use, each with its own optimizer."""
    shared, expert = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.AdamW([parameter], lr=0.1, fused=fused) for parameter in (shared, expert)]
    for step in range(4):
        loss = shared.sum() + (expert.sum() if rank in users else 0)
        scaler.scale(loss).backward()
        if step == 2 and rank == 1:
            assert shared.grad is not None
            shared.grad.fill_(torch.nan)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return [shared.item(), expert.item()], scaler.get_scale()


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("users", [(0,), ()])
def test_s12_an_optimizer_without_gradients_on_some_ranks_or_all(users: tuple[int, ...], fused: bool) -> None:
    (first, first_scale), (second, second_scale) = run_ranks(
        2, lambda rank: partly_without_gradient(rank, ours(), users, fused)
    )
    assert first[0] == second[0] == pytest.approx(0.7, abs=0.02)
    assert first[1] == (pytest.approx(0.6, abs=0.02) if 0 in users else 1.0)
    assert second[1] == 1.0
    assert first_scale == second_scale == scale_after({2}, 4)
    if not fused:
        with pytest.raises(RanksFailed, match="No inf checks were recorded"):
            run_ranks(2, lambda rank: partly_without_gradient(rank, stock(), users, fused))


def test_s13_a_state_on_rank_0_only_is_loaded_by_all() -> None:
    state = {**ours().state_dict(), "scale": 512.0, "_growth_tracker": 1, "growth_interval": 7}

    def work(rank: int) -> dict[str, Any]:
        # What another rank passes does not matter: rank 0 wins.
        scaler = ours()
        scaler.load_state_dict([state, None, {"scale": 3.0}][rank])
        return scaler.state_dict()

    assert run_ranks(3, work) == [state] * 3


def test_all_ranks_load_a_hysteresis_that_is_used_up() -> None:
    state = {**ours(hysteresis=2).state_dict(), "_hysteresis_tracker": 0}

    def work(rank: int) -> dict[str, Any]:
        scaler = ours(hysteresis=2)
        scaler.load_state_dict(state if rank == 0 else None)
        return scaler.state_dict()

    assert run_ranks(2, work) == [state] * 2


@pytest.mark.parametrize("state", [None, {}, {"model": 1}, {**ours().state_dict(), "scale": -1.0}])
def test_what_is_no_state_is_an_error_on_every_rank(state: Any) -> None:
    def work(rank: int) -> str:
        scaler = ours()
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the two texts are compared below
            scaler.load_state_dict(state if rank == 0 else scaler.state_dict())
        # The ranks are still together.
        scaler.load_state_dict(scaler.state_dict())
        return str(error.value)

    first, second = run_ranks(2, work)
    assert "scale" in first
    assert first == second


@pytest.mark.slow
def test_a_rank_that_loads_a_state_alone_fails_within_the_timeout(tmp_path: Path) -> None:
    failed = tmp_path / "failed"

    def work(rank: int) -> None:
        if rank == 0:
            try:
                ours().load_state_dict(ours().state_dict())
            finally:
                failed.touch()
        while not failed.exists():  # this rank is alive, but elsewhere
            time.sleep(0.02)

    with pytest.raises(RanksFailed, match="collective over 2 ranks and not all of them took part"):
        run_ranks(2, work, group_timeout=1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_different_scales_are_an_error_on_every_rank_at_the_same_step(fused: bool) -> None:
    def work(rank: int) -> str:
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.AdamW([weight], fused=fused)
        scaler = ours()
        for step in range(3):
            scaler.scale(weight.sum()).backward()
            if step < 2:
                scaler.step(optimizer)
                scaler.update(new_scale=1024.0 + 0.25 * rank * step)
        with pytest.raises(RuntimeError, match="the ranks' loss scales differ"):
            scaler.step(optimizer)
        return "raised"

    assert run_ranks(3, work) == ["raised"] * 3


def test_ranks_of_another_group_do_not_vote() -> None:
    def work(rank: int) -> tuple[float, float]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        with pytest.raises(ValueError, match="does not contain this rank"):
            ours(process_group=groups[1 - rank // 2])
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler = ours(process_group=groups[rank // 2])
        scaler.load_state_dict(ours().state_dict() if rank % 2 == 0 else None)
        scaler.scale(weight.sum()).backward()
        if rank == 1:
            assert weight.grad is not None
            weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        return weight.item(), scaler.get_scale()

    skipped, stepped = (1.0, SCALE / 2), (0.5, SCALE)
    assert run_ranks(4, work) == [skipped, skipped, stepped, stepped]


# -- sharded and hand-written


def hand_written(rank: int, scaler: Any) -> tuple[Tensor, float]:
    """S15: gradients are all-reduced after unscaling, as in a hand-written data-parallel loop."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(3):
        scaler.scale(weight.square().sum()).backward()
        assert weight.grad is not None
        if step == 1 and rank == 0:
            weight.grad[0] = torch.inf
        scaler.unscale_(optimizer)
        dist.all_reduce(weight.grad)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weight.detach(), scaler.get_scale()


def test_s15_gradients_reduced_after_unscaling() -> None:
    (first, scale), (second, other) = run_ranks(2, lambda rank: hand_written(rank, ours()))
    assert first.equal(second)
    # Two clean steps with the sum of two ranks' gradients, 2 * 2w.
    torch.testing.assert_close(first, torch.full((2,), 0.6**2))
    assert scale == other == SCALE / 2
    frequent = {"init_scale": SCALE, "growth_interval": 2}
    (_, scale), (second, other) = run_ranks(2, lambda rank: hand_written(rank, torch.amp.GradScaler("cpu", **frequent)))
    assert scale != other
    assert second.isnan().any() or second.isinf().any()


def sharded(rank: int, scaler: Any, names: tuple[str, ...]) -> tuple[dict[str, Tensor], float]:
    """S05, S07: one optimizer over DTensors and plain tensors; rank 1's shard overflows in the second step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(1.0, 5.0)
    parameters = {
        "replicated": nn.Parameter(distribute_tensor(full, mesh, [Replicate()])),
        "sharded": nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])),
        "plain": nn.Parameter(full.clone()),
    }
    optimizer = torch.optim.SGD([parameters[name] for name in names], lr=0.1, foreach=False)
    for step in range(3):
        for name in names:
            loss = parameters[name].square().sum()
            scaler.scale(loss.full_tensor() if hasattr(loss, "full_tensor") else loss).backward()
        if step == 1 and rank == 1:
            gradient: Any = parameters["sharded"].grad
            gradient.to_local()[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    values: dict[str, Any] = {name: parameters[name].detach() for name in names}
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in values.items()}, scaler.get_scale()


@pytest.mark.parametrize("names", [("replicated", "sharded"), ("replicated", "sharded", "plain")])
def test_s05_s07_dtensors_and_plain_tensors_in_one_optimizer(names: tuple[str, ...]) -> None:
    for values, scale in run_ranks(2, lambda rank: sharded(rank, ours(), names)):
        assert scale == SCALE / 2
        for value in values.values():
            # Two clean steps of w -= 0.1 * 2w; the one between is skipped whole, the other rank's shard too.
            torch.testing.assert_close(value, torch.arange(1.0, 5.0) * 0.8**2)


def test_s07_torchs_dispatch_looks_at_the_first_placement_only() -> None:
    (_, first), (_, second) = run_ranks(2, lambda rank: sharded(rank, stock(), ("replicated", "sharded")))
    assert first != second
    with pytest.raises(RanksFailed, match=r"mixed torch\.Tensor and DTensor"):
        run_ranks(2, lambda rank: sharded(rank, stock(), ("replicated", "sharded", "plain")))


# -- fp16


def fp16(rank: int) -> dict[str, Any]:
    """A model with a head that DDP ignores, in fp16 autocast; an inf in rank 1's head gradient in the third step."""
    head = nn.Linear(4, 2)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), head)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "2.bias"])
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = ours()
    before, moved = [p.detach().clone() for p in model.parameters()], []
    for step in range(5):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * rank + step))
        with torch.autocast("cpu", dtype=torch.float16):
            logits = ddp(x)
            assert logits.dtype == torch.float16
            loss = logits.float().square().mean()
        scaler.scale(loss).backward()
        if step == 2 and rank == 1:
            assert head.weight.grad is not None
            head.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        now = [p.detach().clone() for p in model.parameters()]
        moved.append([not torch.equal(a, b) for a, b in zip(before, now, strict=True)])
        before = now
    return {
        "moved": moved,
        "scaler": scaler.state_dict(),
        "steps": [state["step"].item() for state in optimizer.state.values()],
        "replicated": before[:2],
        "all": before,
    }


def test_fp16_an_inf_outside_ddps_buckets_is_one_skip_on_both_ranks() -> None:
    first, second = run_ranks(2, fp16)
    for rank in (first, second):
        assert rank["moved"] == [[True] * 4, [True] * 4, [False] * 4, [True] * 4, [True] * 4]
        assert rank["steps"] == [4.0] * 4
        assert all(tensor.isfinite().all() for tensor in rank["all"])
        assert rank["scaler"]["scale"] == scale_after({2}, 5)
    assert first["scaler"] == second["scaler"]
    assert all(torch.equal(a, b) for a, b in zip(first["replicated"], second["replicated"], strict=True))
