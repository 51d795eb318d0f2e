"""The trainer's step. S00 to S02, S11, S12, S17, S18, S20, S21, S26; its oracle is a plain loop in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.precision import Precision
from dtrain.precision.loss_scale import LossScale
from dtrain.training.step import TrainStep
from tests.precision.skips import INTERVAL, SCALE, STEPS, flat, ours, scale_after, spoil, stock
from tests.ranks import RanksFailed, run_ranks
from tests.toys import CPU, Net, NetWithBatchNorm, micro_batches, run_steps, squared_error, train_step, world

SKIP = 2
SAMPLES = 8  # of a global batch; powers of two, so that every factor is exact


class Wide(nn.Sequential):
    """A toy whose second layer overflows in fp16 for an input of a million, in forward and loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass
class Trained:
    """A rank's outcome: replicated weights, buffers, scale, and the counters of step, schedule and optimizer."""

    weights: Tensor
    buffers: Tensor
    scale: float
    applied: list[bool]
    lrs: list[float]
    optimizer_steps: set[float]


def windows_of(
    rank: int, ranks: int, bad: Collection[tuple[int, int, int]], value: float, rows: int | None
) -> list[Any]:
    """This rank's windows; ``bad`` are (step, rank, micro-batch) that have a row of ``value``."""
    windows = [micro_batches(step, SAMPLES, ranks=ranks, rank=rank, rows=rows) for step in range(STEPS)]
    for step, culprit, number in bad:
        if rank == culprit:
            windows[step][number]["x"][0] = value
    return windows


def schedule(applied_steps: int) -> float:
    return 0.9**applied_steps


def by_trainer(
    rank: int,
    make: Callable[[], nn.Module],
    precision: str,
    bad: Collection[tuple[int, int, int]],
    value: float,
    *,
    rows: int | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    **ddp_options: Any,
) -> Trained:
    model = make()
    ours = optimizer(model.parameters())
    scale = LossScale(CPU, init=SCALE, growth_interval=INTERVAL) if precision == "fp16" else None
    step = train_step(
        DistributedDataParallel(model, **ddp_options),
        ours,
        world=world(rank, 2),
        precision=precision,
        nominal=SAMPLES,
        loss_scale=scale,
        schedule=schedule,
    )
    outcomes = run_steps(step, windows_of(rank, 2, bad, value, rows))
    return Trained(
        flat(model.parameters()),
        flat(b for b in model.buffers() if b.is_floating_point()) if list(model.buffers()) else torch.zeros(0),
        float(scale.scale) if scale else scale_after({step for step, *_ in bad}),
        [outcome.stats.applied for outcome in outcomes],
        [outcome.lr for outcome in outcomes],
        {float(state["step"]) for state in ours.state.values() if "step" in state},
    )


def by_one_process(
    make: Callable[[], nn.Module],
    precision: str,
    skips: Collection[int],
    *,
    rows: int | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
) -> list[nn.Module]:
    """Both ranks' models side by side, gradients added by hand; the skipped steps are not done at all."""
    models = [make(), make()]
    optimizers = [optimizer(model.parameters()) for model in models]
    for applied, step in enumerate(step for step in range(STEPS) if step not in skips):
        scale = scale_after([skip for skip in skips if skip < step], step) if precision == "fp16" else 1.0
        for rank, model in enumerate(models):
            for batch in micro_batches(step, SAMPLES, ranks=2, rank=rank, rows=rows):
                with Precision(precision).autocast("cpu"):
                    loss = squared_error(model, batch).loss_sum
                (loss * (2 / SAMPLES * scale)).backward()
        for pair in zip(*(model.parameters() for model in models), strict=True):
            summed = sum(parameter.grad for parameter in pair if parameter.grad is not None)
            for parameter in pair:
                parameter.grad = summed / 2 / scale if isinstance(summed, Tensor) else None
        for one in optimizers:
            one.param_groups[0]["lr"] = 0.05 * schedule(applied)
            one.step()
            one.zero_grad()
    return models


def assert_right(results: Sequence[Trained], models: Sequence[nn.Module], skips: Collection[int]) -> None:
    applied = [step not in skips for step in range(STEPS)]
    for result, model in zip(results, models, strict=True):
        assert torch.equal(result.weights, results[0].weights)
        assert result.weights.isfinite().all()
        assert result.buffers.isfinite().all()
        torch.testing.assert_close(result.weights, flat(model.parameters()), rtol=1e-4, atol=1e-5)
        assert result.scale == scale_after(skips)
        assert result.applied == applied
        assert result.lrs == [0.05 * schedule(sum(applied[:step])) for step in range(STEPS)]
        assert result.optimizer_steps <= {float(sum(applied))}


def by_torch(
    rank: int,
    make: Callable[[], nn.Module],
    precision: str,
    bad: Collection[tuple[int, int, int]],
    value: float,
    scaler: Any,
    *,
    rows: int | None = None,
    synchronised: bool = True,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    **ddp_options: Any,
) -> Trained:
    """A hand-written loop with DDP, autocast, accumulation and ``scaler`` (None: without one)."""
    model = make()
    ddp = DistributedDataParallel(model, **ddp_options)
    theirs = optimizer(model.parameters())
    applied = []
    for window in windows_of(rank, 2, bad, value, rows):
        before = flat(model.parameters())
        for number, batch in enumerate(window):
            local = number < len(window) - 1 or not synchronised
            with ddp.no_sync() if local else nullcontext():
                with Precision(precision).autocast("cpu"):
                    loss = squared_error(ddp, batch).loss_sum * (2 / SAMPLES)
                (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(theirs)
            scaler.update()
        else:
            theirs.step()
        theirs.zero_grad()
        applied.append(not torch.equal(before, flat(model.parameters())))
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    return Trained(
        flat(model.parameters()),
        flat(buffers) if buffers else torch.zeros(0),
        scaler.get_scale() if scaler else 1.0,
        applied,
        [],
        {float(state["step"]) for state in theirs.state.values() if "step" in state},
    )


# -- controls


@pytest.mark.parametrize(
    ("optimizer"), [sgd, lambda p: torch.optim.AdamW(p, lr=0.05, fused=True)], ids=["SGD", "fused AdamW"]
)
def test_s00_plain_ddp_agrees_with_both_scalers(optimizer: Any) -> None:
    case = (Wide, "fp16", {(SKIP, 1, 0)}, 1e6)
    models = by_one_process(Wide, "fp16", {SKIP}, optimizer=optimizer)
    trained, theirs = zip(
        *run_ranks(
            2,
            lambda rank: (
                by_trainer(rank, *case, optimizer=optimizer),
                by_torch(rank, *case, stock(), optimizer=optimizer),
            ),
        ),
        strict=True,
    )
    assert_right(trained, models, {SKIP})
    for result in theirs:
        assert result.applied == trained[0].applied
        assert result.scale == trained[0].scale
        assert torch.equal(result.weights, theirs[0].weights)


class Partly(nn.Module):
    """A branch that only windows' first micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 1)
        self.branch = nn.Linear(3, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) + self.branch(x) if self.calls % 2 else self.body(x)


@pytest.mark.parametrize(
    ("make", "options"),
    [(Wide, {}), (Partly, {"find_unused_parameters": True})],
    ids=["no_sync", "a parameter unused in the synchronised backward"],
)
def test_s26_an_overflow_in_the_micro_batch_that_is_not_synchronised_agrees_with_both_scalers(
    make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    case = (make, "fp16", {(SKIP, 1, 0)}, 1e6)
    results = run_ranks(
        2,
        lambda rank: (
            by_trainer(rank, *case, rows=2, **options),
            by_torch(rank, *case, stock(), rows=2, **options),
        ),
    )
    assert_right([ours for ours, _ in results], by_one_process(make, "fp16", {SKIP}, rows=2), {SKIP})
    assert results[0][1].scale == results[1][1].scale == scale_after({SKIP})
    assert torch.equal(results[0][1].weights, results[1][1].weights)


def test_s26_a_static_graph_accumulates_here_and_asserts_in_torch() -> None:
    case, options = (Wide, "fp16", {(SKIP, 1, 0)}, 1e6), {"rows": 2, "static_graph": True}
    results = run_ranks(2, lambda rank: by_trainer(rank, *case, **options))
    assert_right(results, by_one_process(Wide, "fp16", {SKIP}, rows=2), {SKIP})
    # Its first backward has to synchronise, and under no_sync() it does not.
    with pytest.raises(RanksFailed, match="INTERNAL ASSERT"):
        run_ranks(2, lambda rank: by_torch(rank, *case, stock(), **options))


class OneRankOnly(nn.Module):
    """A branch that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 1)
        self.branch = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.branch(x) if dist.get_rank() == 0 else self.body(x)


def test_s12_a_parameter_unused_on_one_rank_agrees_with_both_scalers() -> None:
    case, options = (OneRankOnly, "fp16", {(SKIP, 1, 0)}, 1e6), {"find_unused_parameters": True}
    results = run_ranks(2, lambda rank: (by_trainer(rank, *case, **options), by_torch(rank, *case, stock(), **options)))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first.weights, second.weights)
        assert first.weights.isfinite().all()
        assert first.scale == second.scale == scale_after({SKIP})
        assert first.applied == second.applied == [step != SKIP for step in range(STEPS)]


# -- S01: the last backward of a window


def test_s01_a_window_that_never_synchronised_diverges_with_any_scaler() -> None:
    case = (Wide, "fp16", {(SKIP, 1, 0)}, 1e6)

    def rank_of_two(rank: int) -> list[Trained]:
        return [by_torch(rank, *case, make(), rows=2, synchronised=False) for make in (stock, ours)]

    (apart, voted), (other_apart, other_voted) = run_ranks(2, rank_of_two)
    assert apart.scale != other_apart.scale
    # A vote makes scales agree, and not weights.
    assert voted.scale == other_voted.scale
    assert not torch.equal(voted.weights, other_voted.weights)


def test_s01_the_last_backward_of_every_window_synchronises() -> None:
    models = by_one_process(Wide, "fp32", {SKIP}, rows=2)

    def of_two(rank: int) -> Trained:
        return by_trainer(rank, Wide, "fp32", {(SKIP, 0, 1)}, torch.inf, rows=2)

    assert_right(run_ranks(2, of_two), models, {SKIP})


# -- S02 and S11: parameters that DDP does not know, in one model with those it does


def trunk_and_head() -> tuple[nn.Module, DistributedDataParallel]:
    model = Net()
    outside = [f"head.{name}" for name, _ in model.head.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, outside)
    return model, DistributedDataParallel(model)


def held_back(rank: int, scaler: Any) -> tuple[float, float]:
    """S02c: the schedule is held back when the scale dropped, as Accelerate does; the learning rate and the scale."""
    model, ddp = trunk_and_head()
    optimizer = sgd(model.parameters())
    lr = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number in range(STEPS):
        (batch,) = micro_batches(number, SAMPLES, ranks=2, rank=rank)
        scaler.scale(squared_error(ddp, batch).loss_sum).backward()
        if rank == 1 and number == SKIP:
            spoil(model.head.weight)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= before:
            lr.step()
    return lr.get_last_lr()[0], scaler.get_scale()


def test_s02c_a_schedule_that_looks_at_the_scale_stays_in_step() -> None:
    (apart, together), (other_apart, other_together) = run_ranks(
        2, lambda rank: [held_back(rank, make()) for make in (stock, ours)]
    )
    assert apart[0] != other_apart[0]
    assert together == other_together == (pytest.approx(0.05 * 0.9 ** (STEPS - 1)), scale_after({SKIP}))


CLIP = 0.5


def clipped_by_torch(rank: int) -> Tensor:
    """S11: each rank clips by the norm of what it holds."""
    model, ddp = trunk_and_head()
    optimizer = sgd(model.parameters())
    for number in range(STEPS):
        (batch,) = micro_batches(number, SAMPLES, ranks=2, rank=rank)
        (squared_error(ddp, batch).loss_sum * (2 / SAMPLES)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model.trunk.parameters())


def clipped_by_trainer(rank: int) -> tuple[Tensor, Tensor, list[float]]:
    model, ddp = trunk_and_head()
    step = train_step(ddp, sgd(model.parameters()), world=world(rank, 2), nominal=SAMPLES, clip_norm=CLIP)
    outcomes = run_steps(step, windows_of(rank, 2, (), 0.0, None))
    return flat(model.trunk.parameters()), flat(model.head.parameters()), [outcome.grad_norm for outcome in outcomes]


def clipped_alone() -> tuple[list[tuple[Tensor, Tensor]], list[float]]:
    """Trunk and head of each rank, clipped by the norm of the one trunk and both heads."""
    models, norms = [Net(), Net()], []
    optimizers = [sgd(model.parameters()) for model in models]
    for number in range(STEPS):
        for rank, model in enumerate(models):
            (batch,) = micro_batches(number, SAMPLES, ranks=2, rank=rank)
            (squared_error(model, batch).loss_sum * (2 / SAMPLES)).backward()
        for pair in zip(*(model.trunk.parameters() for model in models), strict=True):
            mean = (pair[0].grad + pair[1].grad) / 2
            pair[0].grad, pair[1].grad = mean, mean.clone()
        parts = [models[0].trunk, models[0].head, models[1].head]
        norm = flat(p.grad for part in parts for p in part.parameters()).norm().item()
        norms.append(norm)
        for model, optimizer in zip(models, optimizers, strict=True):
            for parameter in model.parameters():
                parameter.grad *= min(1.0, CLIP / (norm + 1e-6))
            optimizer.step()
            optimizer.zero_grad()
    return [(flat(model.trunk.parameters()), flat(model.head.parameters())) for model in models], norms


def test_s11_all_ranks_clip_by_one_norm() -> None:
    first, second = run_ranks(2, clipped_by_torch)
    assert not torch.equal(first, second)
    results = run_ranks(2, clipped_by_trainer)
    expected, norms = clipped_alone()
    for (trunk, head, seen), (own_trunk, own_head) in zip(results, expected, strict=True):
        assert torch.equal(trunk, results[0][0])
        assert seen == results[0][2] == pytest.approx(norms, rel=1e-4)
        torch.testing.assert_close(trunk, own_trunk, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(head, own_head, rtol=1e-4, atol=1e-5)


# -- S17, S18: what a skipped step leaves behind


class recycled_memory(TorchDispatchMode):
    """Fills what ``empty_like`` gives with what another rank would not find there."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty_like.default and result.is_floating_point():
            result.fill_(1e30 * (self.rank + 1))
        return result


def fused_sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def test_s17_fused_sgd_whose_first_step_is_skipped_starts_from_zero() -> None:
    case = (Wide, "fp16", {(0, 1, 0)}, 1e6)

    def rank_of_two(rank: int) -> tuple[Trained, Trained]:
        with recycled_memory(rank):
            return by_trainer(rank, *case, optimizer=fused_sgd), by_torch(rank, *case, stock(), optimizer=fused_sgd)

    results = run_ranks(2, rank_of_two)
    assert_right([ours for ours, _ in results], by_one_process(Wide, "fp16", {0}), {0})
    first, second = (theirs for _, theirs in results)
    assert first.scale == second.scale
    assert not torch.equal(first.weights, second.weights)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_s18_batchnorm_forgets_a_skipped_forward(broadcast_buffers: bool) -> None:
    # Rank 0 gives its buffers to all before each forward, or each rank keeps its own.
    culprit = 0 if broadcast_buffers else 1
    case = (NetWithBatchNorm, "fp16", {(SKIP, culprit, 0)}, 1e6)
    options = {"broadcast_buffers": broadcast_buffers}
    results = run_ranks(2, lambda rank: (by_trainer(rank, *case, **options), by_torch(rank, *case, stock(), **options)))
    models = by_one_process(NetWithBatchNorm, "fp16", {SKIP})
    assert_right([ours for ours, _ in results], models, {SKIP})
    if not broadcast_buffers:
        for (result, _), model in zip(results, models, strict=True):
            statistics = flat(b for b in model.buffers() if b.is_floating_point())
            torch.testing.assert_close(result.buffers, statistics, rtol=1e-3, atol=1e-3)
    # torch: the weights agree, and the statistics never recover.
    first, second = (theirs for _, theirs in results)
    assert torch.equal(first.weights, second.weights)
    assert first.weights.isfinite().all()
    assert bool(first.buffers.isfinite().all()) == (not broadcast_buffers)
    assert not second.buffers.isfinite().all()


# -- S20, S21: non-finite samples


def test_s20_after_the_all_reduce_every_rank_shows_the_same_gradients_so_hooks_look_before() -> None:
    def rank_of_two(rank: int) -> tuple[bool, bool]:
        model = Net()
        local: list[bool] = []
        model.head.weight.register_hook(lambda gradient: local.append(bool(gradient.isfinite().all())))
        (batch,) = micro_batches(0, SAMPLES, ranks=2, rank=rank)
        batch["x"][0, 0] = torch.nan if rank == 1 else 0
        ddp = DistributedDataParallel(model)
        squared_error(ddp, batch).loss_sum.backward()
        assert model.head.weight.grad is not None
        return local[0], bool(model.head.weight.grad.isfinite().all())

    assert run_ranks(2, rank_of_two) == [(True, False), (False, False)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_s21_without_a_scaler_one_nan_is_one_skip(precision: str) -> None:
    case = (Net, precision, {(SKIP, 1, 0)}, torch.nan)
    results = run_ranks(2, lambda rank: (by_trainer(rank, *case), by_torch(rank, *case, None)))
    assert_right([ours for ours, _ in results], by_one_process(Net, precision, {SKIP}), {SKIP})
    assert all(theirs.weights.isnan().all() for _, theirs in results)


# -- S14: uneven inputs


def test_s14_a_rank_with_fewer_samples_has_masked_rows_and_the_same_number_of_steps() -> None:
    def rank_of_two(rank: int) -> Tensor:
        model = Net()
        step: TrainStep = train_step(
            DistributedDataParallel(model), sgd(model.parameters()), world=world(rank, 2), nominal=SAMPLES
        )
        run_steps(step, [micro_batches(0, SAMPLES, ranks=2, rank=rank), micro_batches(1, 5, ranks=2, rank=rank)])
        return flat(model.parameters())

    first, second = run_ranks(2, rank_of_two)
    model = Net()
    optimizer = sgd(model.parameters())
    for number, samples in enumerate((SAMPLES, 5)):
        (batch,) = micro_batches(number, samples)
        (squared_error(model, batch).loss_sum / samples).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(first, second)
    torch.testing.assert_close(first, flat(model.parameters()), rtol=1e-5, atol=1e-6)
