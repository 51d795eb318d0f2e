from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.data import Batch
from dtrain.errors import ConfigError
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.vote import Vote
from dtrain.training.schedule import WarmupCosine
from dtrain.training.setup.ema import Ema
from dtrain.training.step import StepOutcome, TooManySkips, TrainStep
from dtrain.training.task import Output
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import refused
from tests.toys import (
    CPU,
    Net,
    NetWithBatchNorm,
    averages,
    micro_batches,
    run_steps,
    samples,
    squared_error,
    train_step,
    world,
)

INF = float("inf")


def decide_on_device(step: TrainStep) -> None:
    """As on a GPU: the host queues the step and does not look at the vote."""
    step._decides_on_device, step._vote = True, Vote(CPU, step.world.size)


# -- loss, gradients and parameters are those of the mean over all valid samples

SCHEDULE = WarmupCosine(horizon=8, warmup=2)


@dataclass
class Trained:
    """What came out of a few steps."""

    losses: list[float]
    norms: list[float]
    lrs: list[float]
    applied: list[int]
    positives: list[tuple[float, float]]
    weights: Tensor


def masked_samples(count: int) -> list[set[int]]:
    """For each step, what is masked: nothing, a few, the first rank's (for any number of ranks), all, the last ones."""
    return [set(), {1, count - 2}, set(range(-(-count // 2))), set(range(count)), {count - 1, count - 2}, set()]


def in_float64(count: int, clip_norm: float | None) -> Trained:
    """The reference: one process, one batch, the mean of the valid rows."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
    done = Trained([], [], [], [], [], torch.empty(0))
    applied = 0
    for step, masked in enumerate(masked_samples(count)):
        valid = [number for number in range(count) if number not in masked]
        lr = 0.5 * SCHEDULE(applied)
        if valid:
            x, y = samples(step, count)
            predicted = model(x[valid]).squeeze(1)
            loss = (predicted - y[valid]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= 1 if clip_norm is None else min(1, clip_norm / norm)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            applied += 1
            done.losses.append(loss.item())
            done.norms.append(norm)
            done.positives.append(((predicted > 0).sum().item(), len(valid)))
        done.lrs.append(lr)
        done.applied.append(applied)
    done.weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return done


def by_ranks(rank: int, ranks: int, count: int, rows: int | None, clip_norm: float | None, scaled: bool) -> Trained:
    bare = Net()
    model = DistributedDataParallel(bare) if ranks > 1 else bare
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.5, momentum=0.9)
    step = train_step(
        model,
        optimizer,
        world=world(rank, ranks),
        nominal=count,
        schedule=SCHEDULE,
        clip_norm=clip_norm,
        loss_scale=LossScale(CPU, init=1024.0, growth_interval=2) if scaled else None,
    )
    windows = [
        micro_batches(number, count, ranks=ranks, rank=rank, rows=rows, masked=masked)
        for number, masked in enumerate(masked_samples(count))
    ]
    outcomes = run_steps(step, windows)
    applied = [outcome for outcome in outcomes if outcome.stats.applied]
    return Trained(
        losses=[outcome.stats.loss_sum / outcome.stats.count for outcome in applied],
        norms=[outcome.grad_norm for outcome in applied],
        lrs=[outcome.lr for outcome in outcomes],
        applied=[outcome.applied_steps for outcome in outcomes],
        positives=[outcome.stats.metrics["positive"] for outcome in applied],
        weights=torch.cat([p.detach().flatten() for p in bare.parameters()]),
    )


@pytest.mark.parametrize(
    ("ranks", "count", "rows"),
    [(1, 12, None), (1, 12, 4), (2, 12, None), (2, 12, 2), (2, 13, 3), (3, 12, 1), (3, 13, 2), (3, 13, None)],
    ids=str,
)
@pytest.mark.parametrize(("clip_norm", "scaled"), [(None, False), (0.4, True)], ids=["plain", "clipped and scaled"])
def test_any_split_gives_the_mean_over_all_valid_samples(
    ranks: int, count: int, rows: int | None, clip_norm: float | None, scaled: bool
) -> None:
    want = in_float64(count, clip_norm)
    results = run_ranks(ranks, by_ranks, ranks, count, rows, clip_norm, scaled)
    for got in results:
        assert got.losses == pytest.approx(want.losses, rel=1e-5)
        assert got.norms == pytest.approx(want.norms, rel=1e-5)
        assert got.lrs == want.lrs
        assert got.applied == want.applied == [1, 2, 3, 3, 4, 5]
        assert got.positives == want.positives
        torch.testing.assert_close(got.weights.double(), want.weights, rtol=1e-5, atol=1e-6)
        assert torch.equal(got.weights, results[0].weights)


def test_parameters_of_several_dtypes_are_clipped_by_one_norm() -> None:
    def task(model: nn.Module, batch: Batch) -> Output:
        return Output(sum((p.double() * 3).sum() for p in model.parameters()).float(), 1)  # type: ignore[union-attr]

    model = nn.ParameterList([torch.zeros(4, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)])
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), task=task, nominal=1, clip_norm=1.0)
    (outcome,) = run_steps(step, [micro_batches(0, 1)])
    assert outcome.grad_norm == pytest.approx(3 * 12**0.5, rel=1e-2)
    for parameter in model:
        assert parameter.double().tolist() == pytest.approx([-(12**-0.5)] * 4, rel=1e-2)


def test_a_count_below_one_divides_like_any_other() -> None:
    def weighted(model: nn.Module, batch: Batch) -> Output:
        return Output(0.25 * model(batch["x"]).sum().float(), torch.tensor(0.25))

    model = nn.Linear(3, 1)
    before = model.bias.item()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), task=weighted, nominal=1)
    run_steps(step, [micro_batches(0, 1)])
    assert model.bias.item() == pytest.approx(before - 1.0)


# -- skips: parameters, state, averages, buffers and schedule as if the step had not been

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, **o),
    "SGD+momentum": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **o),
    "SGD+nesterov": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **o),
    "SGD+dampening": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=0.1, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=0.1, amsgrad=True, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, lr=0.1, **o),
}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
STEPS = 5


def everything(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None = None
) -> dict[str, Tensor]:
    """Parameters, buffers, optimizer state and averaged parameters by name."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, parameter in enumerate(model.parameters()):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer {number} {key}"] = value.clone()
    if average is not None:
        tensors |= {f"average {name}": tensor.clone() for name, tensor in average.named_parameters()}
    return tensors


def with_skips(optimizer: str, overflows: Collection[int], clip_norm: float | None) -> dict[str, Tensor]:
    """The reference: a plain loop, plain optimizer, that does not do those steps at all."""
    model, average = NetWithBatchNorm(), NetWithBatchNorm()
    plain = OPTIMIZERS[optimizer](model.parameters(), foreach=False)
    applied = 0
    for step in range(STEPS):
        if step in overflows:
            continue
        (batch,) = micro_batches(step, 12)
        plain.zero_grad()
        (squared_error(model, batch).loss_sum / 12).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm, foreach=False)
        plain.param_groups[0]["lr"] = 0.1 * SCHEDULE(applied)
        plain.step()
        applied += 1
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.copy_(0.75 * mean + 0.25 * parameter)
    return everything(model, plain, average)


def guarded(
    optimizer: str, implementation: str, overflows: Collection[int], clip_norm: float | None, on_device: bool
) -> tuple[dict[str, Tensor], list[StepOutcome], float]:
    """dtrain's step, whose data hold an infinity where it shall overflow: the forward spoils the buffers, too."""
    model = NetWithBatchNorm()
    ours = OPTIMIZERS[optimizer](model.parameters(), **IMPLEMENTATIONS[implementation])
    ema, scale = Ema(model, 0.75), LossScale(CPU, init=1024.0)
    step = train_step(model, ours, schedule=SCHEDULE, ema=ema, loss_scale=scale, clip_norm=clip_norm)
    if on_device:
        decide_on_device(step)
    windows = [micro_batches(number, 12) for number in range(STEPS)]
    for number in overflows:
        windows[number][0]["x"][0, 0] = INF
    # What a recycled allocation holds must not matter: torch's fused SGD begins with uninitialised momentum.
    with DirtyMemory():
        outcomes = run_steps(step, windows)
    average = copy.deepcopy(model)
    average.load_state_dict(averages(ema))
    return everything(model, ours, average), outcomes, float(scale.scale)


class DirtyMemory(TorchDispatchMode):
    """Fills what ``empty_like`` gives with NaN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty_like.default and result.is_floating_point():
            result.fill_(torch.nan)
        return result


# Every place of a skipped step for an optimizer of each kind of state, and the first and the last step for all of them.
@pytest.mark.parametrize(
    ("optimizer", "overflows"),
    [
        (name, steps)
        for name in OPTIMIZERS
        for steps in ([{0}, {1}, {3}, {0, 1}, {2, 4}] if name in ("SGD+momentum", "AdamW") else [{0}, {2, 4}])
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_skipped_step_leaves_no_trace(optimizer: str, implementation: str, overflows: set[int]) -> None:
    for clip_norm in (None, 0.1):
        want = with_skips(optimizer, overflows, clip_norm)
        on_host, outcomes, scale = guarded(optimizer, implementation, overflows, clip_norm, on_device=False)
        assert on_host.keys() == want.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(on_host[name], tensor, rtol=2e-5, atol=2e-6, msg=name)
        assert [outcome.stats.applied for outcome in outcomes] == [number not in overflows for number in range(STEPS)]
        assert outcomes[-1].applied_steps == STEPS - len(overflows)
        assert scale == 1024.0 / 2 ** len(overflows)
        if implementation == "fused":
            on_device, *rest = guarded(optimizer, implementation, overflows, clip_norm, on_device=True)
            assert on_device.keys() >= on_host.keys()
            for name, tensor in on_host.items():
                assert torch.equal(on_device[name], tensor), name
            assert repr(rest) == repr([outcomes, scale])  # repr: a NaN norm equals itself there


@pytest.mark.parametrize("on_device", [False, True])
def test_finite_gradients_with_an_infinite_norm_are_an_overflow(on_device: bool) -> None:
    model = Net()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), clip_norm=1.0)
    if on_device:
        decide_on_device(step)
    before = everything(model, step.optimizer)

    def spoil(number: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e30)

    (outcome,) = run_steps(step, [micro_batches(0, 12)], spoil)
    assert not outcome.stats.applied
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_count_that_is_not_finite_is_an_overflow() -> None:
    def task(model: nn.Module, batch: Batch) -> Output:
        return Output(model(batch["x"]).sum().float(), torch.tensor(torch.nan))

    model = Net()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), task=task)
    (outcome,) = run_steps(step, [micro_batches(0, 12)])
    assert not outcome.stats.applied
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("on_device", [False, True])
def test_a_step_of_masked_rows_is_skipped_without_lowering_the_loss_scale(on_device: bool) -> None:
    model = Net()
    scale = LossScale(CPU, init=1024.0)
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), loss_scale=scale)
    if on_device:
        decide_on_device(step)
    (outcome,) = run_steps(step, [micro_batches(0, 4, masked=range(4))])
    assert not outcome.stats.applied
    assert scale.scale.item() == 1024.0


def test_the_average_stays_in_a_step_without_a_valid_row() -> None:
    model = Net()
    ema = Ema(model, 0.5)
    with torch.no_grad():
        model.trunk.weight.add_(1.0)
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=ema)
    before = averages(ema)
    run_steps(step, [micro_batches(0, 4, masked=range(4))])
    assert all(torch.equal(tensor, before[name]) for name, tensor in averages(ema).items())


def test_an_abandoned_window_leaves_the_buffers_of_the_step_before() -> None:
    def broken(window: list[Batch]) -> Iterator[Batch]:
        yield window[0]
        raise RuntimeError("a rank was lost")

    model = NetWithBatchNorm()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run_steps(step, [micro_batches(0, 12, rows=6)])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(RuntimeError, match="a rank was lost"):
        step.accumulate(broken(micro_batches(1, 12, rows=6)), 2)
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])  # type: ignore[arg-type]
    step.abandon()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_the_loss_scale_survives_170_bad_steps_and_the_run_goes_on() -> None:
    model = Net()
    scale = LossScale(CPU, init=65536.0)
    step = train_step(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), loss_scale=scale, max_consecutive_skips=1000
    )
    windows = [micro_batches(number, 12) for number in range(172)]
    for window in windows[:170]:
        window[0]["y"][:] = torch.nan
    outcomes = run_steps(step, windows)
    assert [outcome.stats.applied for outcome in outcomes] == [False] * 170 + [True] * 2
    assert float(scale.scale) == 1.0
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_schedule_of_a_step_knows_the_outcome_of_the_one_before() -> None:
    asked: list[int] = []

    def schedule(applied_steps: int) -> float:
        asked.append(applied_steps)
        return 1.0

    model = Net()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=schedule)
    windows = [micro_batches(number, 12) for number in range(6)]
    for number in (0, 2, 3):
        windows[number][0]["x"][0] = INF
    run_steps(step, windows)
    assert asked == [0, 0, 1, 1, 1, 2]


# -- several ranks skip together


@dataclass
class Skips:
    """A rank's view of a few steps, and what it ended with."""

    applied: list[bool]
    overflowed: list[int]
    scales: list[float]
    norms: list[float]
    counters: dict[str, int]
    trunk: list[Tensor]
    optimizer_steps: list[float]
    finite: bool


def skip_together(rank: int, ranks: int, where: str, precision: str, fused: bool) -> Skips:
    model = Net()
    outside = [f"head.{name}" for name, _ in model.head.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, outside)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scale = LossScale(CPU, init=1024.0, growth_interval=3) if precision == "fp16" else None
    step = train_step(
        DistributedDataParallel(model), optimizer, world=world(rank, ranks), precision=precision, loss_scale=scale
    )
    if fused:
        decide_on_device(step)
    windows = [micro_batches(number, 12, ranks=ranks, rank=rank, rows=3) for number in range(7)]
    bad = {0: ranks - 1, 2: 0, 3: ranks - 1}  # step to rank
    for number, culprit in bad.items():
        if where == "loss" and rank == culprit:
            windows[number][0]["y"][0] = torch.nan
    trunks, scales = [], []

    def spoil(number: int) -> None:
        scales.append(float(scale.scale) if scale else 1.0)
        trunks.append(torch.cat([p.detach().flatten() for p in model.trunk.parameters()]))
        if bad.get(number) == rank and where != "loss":
            gradient = (model.head if where == "outside DDP" else model.trunk).weight.grad
            assert gradient is not None
            gradient[0, 0] = INF if number else torch.nan

    outcomes = run_steps(step, windows, spoil)
    return Skips(
        [outcome.stats.applied for outcome in outcomes],
        [outcome.stats.overflowed_ranks for outcome in outcomes],
        scales,
        [outcome.grad_norm for outcome in outcomes if outcome.stats.applied],
        step.state_dict(),
        trunks,
        [float(state["step"]) for state in optimizer.state.values()],
        all(bool(p.isfinite().all()) for p in model.parameters()),
    )


@pytest.mark.parametrize("fused", [False, True], ids=["host decides", "device decides"])
@pytest.mark.parametrize(
    ("where", "ranks", "precision"),
    [
        ("outside DDP", 2, "fp16"),
        ("outside DDP", 3, "fp32"),
        ("one rank's gradient", 2, "bf16"),
        ("loss", 2, "fp16"),
        ("loss", 3, "fp32"),
    ],
)
def test_ranks_skip_together_whoever_overflowed(where: str, ranks: int, precision: str, fused: bool) -> None:
    first, *others = run_ranks(ranks, skip_together, ranks, where, precision, fused)
    assert first.applied == [False, True, False, False, True, True, True]
    assert first.counters == {"step": 7, "applied_steps": 4, "consecutive_skips": 0}
    assert first.optimizer_steps == [4.0] * 4
    assert first.finite
    if precision == "fp16":
        assert first.scales == [1024.0, 512.0, 512.0, 256.0, 128.0, 128.0, 128.0]
    for before, after, applied in zip(first.trunk, first.trunk[1:], first.applied, strict=False):
        assert torch.equal(before, after) != applied
    for other in others:
        assert other.finite
        assert other.applied == first.applied
        assert other.overflowed == first.overflowed
        assert other.scales == first.scales
        assert other.norms == first.norms
        assert other.counters == first.counters
        assert other.optimizer_steps == first.optimizer_steps
        assert all(map(torch.equal, other.trunk, first.trunk))


class RunningLargest(Net):
    """Has a statistic that becomes infinite or NaN where an input is, which changes neither loss nor gradients."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax(0)))
        return super().forward(x.nan_to_num(nan=0.0))


@pytest.mark.parametrize("fused", [False, True], ids=["host decides", "device decides"])
def test_ranks_skip_together_where_only_a_buffer_of_one_is_not_finite(fused: bool) -> None:
    def rank(number: int) -> tuple[list[bool], list[float], list[float]]:
        model = RunningLargest()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
        step = train_step(wrapped, optimizer, world=world(number, 2))
        if fused:
            decide_on_device(step)
        windows = [micro_batches(n, 12, ranks=2, rank=number, rows=3) for n in range(4)]
        if number == 1:
            windows[1][0]["x"][0, 0] = torch.nan
        outcomes = run_steps(step, windows)
        return (
            [outcome.stats.applied for outcome in outcomes],
            [outcome.stats.overflowed_ranks for outcome in outcomes],
            model.largest.tolist(),
        )

    for number, (applied, overflows, largest) in enumerate(run_ranks(2, rank)):
        assert applied == [True, False, True, True]
        assert overflows == [0, 1, 0, 0]
        mine = [samples(n, 12)[0][6 * number : 6 * number + 6] for n in (0, 2, 3)]
        assert largest == torch.cat(mine).amax(0).float().clamp(min=0).tolist()


def test_too_many_skips_end_all_ranks_at_the_same_step_with_the_same_text() -> None:
    def rank(number: int) -> str:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = train_step(
            DistributedDataParallel(model), optimizer, world=world(number, 2), max_consecutive_skips=3, nominal=8
        )
        windows = [micro_batches(n, 8, ranks=2, rank=number) for n in range(9)]
        for n in (0, 1, 3, 4, 5, 6):
            if number == 1:
                windows[n][0]["x"][2, 1] = INF
        with pytest.raises(TooManySkips) as raised:
            run_steps(step, windows)
        return f"{step.step} {raised.value}"

    first, second = run_ranks(2, rank)
    assert first == second
    # The loop learns it after the next window's backward, and all ranks alike.
    assert first.startswith("6 3 steps in a row were skipped, the last one is step 6: a loss, gradient or buffer")
    assert "rank 1" in first
    assert "dtrain doctor numerics" in first


def test_steps_without_a_valid_row_are_not_blamed_on_overflows() -> None:
    model = Net()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), max_consecutive_skips=2)
    with pytest.raises(TooManySkips, match="valid row"):
        run_steps(step, [micro_batches(n, 4, masked=range(4)) for n in range(2)])


def test_a_scale_that_was_changed_on_one_rank_is_found_out_by_all() -> None:
    def rank(number: int) -> str:
        model = Net()
        scale = LossScale(CPU, init=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = train_step(DistributedDataParallel(model), optimizer, world=world(number, 2), loss_scale=scale)

        def spoil(n: int) -> None:
            if n == 1 and number == 1:
                scale.scale *= 2

        with refused(ConfigError, "loss scales", "2 ranks") as raised:
            run_steps(step, [micro_batches(n, 12, ranks=2, rank=number) for n in range(4)], spoil)
        return f"{step.step} {raised.value}"

    first, second = run_ranks(2, rank)
    assert first == second
    assert first.startswith("2 ")


# -- what a step costs, and its protocol


class Collectives(TorchDispatchMode):
    """The collectives that run inside it, each with the number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.calls.append((func.name(), sum(t.numel() for t in tensors if isinstance(t, Tensor))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("micro_batches_per_step", [1, 3])
def test_a_step_has_one_small_all_reduce_beside_those_of_ddp(micro_batches_per_step: int) -> None:
    def rank(number: int) -> list[list[tuple[str, int]]]:
        model = Net()
        bucket_elements = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        step = train_step(
            DistributedDataParallel(model),
            optimizer,
            world=world(number, 2),
            clip_norm=1.0,
            loss_scale=LossScale(CPU, init=16.0),
            ema=Ema(model, 0.5),
        )
        seen = []
        for n in range(4):
            window = micro_batches(n, 12, ranks=2, rank=number, rows=6 // micro_batches_per_step)
            with Collectives() as collectives:
                run_steps(step, [window])
            seen.append([call for call in collectives.calls if call[1] != bucket_elements])
        return seen

    for seen in run_ranks(2, rank):
        for calls in seen[2:]:  # DDP lays out its buckets in the first two
            assert [name for name, _ in calls] == ["c10d::allreduce_"]
            assert calls[0][1] <= 16


@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_of_a_window_are_accumulated_in_the_buckets_of_ddp(as_views: bool) -> None:
    def rank(number: int) -> tuple[list[set[int]], list[Tensor]]:
        model = Net()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_views)
        step = train_step(wrapped, torch.optim.AdamW(model.parameters(), lr=0.1), world=world(number, 2))
        places: list[set[int]] = []

        def observed(window: Sequence[Batch]) -> Any:
            for batch in window:
                yield batch
                assert all(p.grad is not None for p in model.parameters())
                places.append({p.grad.untyped_storage().data_ptr() for p in model.parameters()})  # type: ignore[union-attr]

        for n in range(4):
            windows = micro_batches(n, 12, ranks=2, rank=number, rows=2)
            step.accumulate(observed(windows), 3)
            step.settle()
            step.apply()
        return places, [p.detach() for p in model.parameters()]

    for places, weights in run_ranks(2, rank):
        # DDP lays out its buckets in the first two steps.
        buckets = {frozenset(place) for place in places[6:]}
        assert (len(buckets) == 1 and all(len(bucket) == 1 for bucket in buckets)) == as_views
        single = Net()
        alone = train_step(single, torch.optim.AdamW(single.parameters(), lr=0.1))
        run_steps(alone, [micro_batches(n, 12, rows=2) for n in range(4)])
        for weight, want in zip(weights, single.parameters(), strict=True):
            torch.testing.assert_close(weight, want.detach(), rtol=1e-4, atol=1e-5)


def test_a_skipped_window_leaves_nothing_in_the_buckets_of_ddp() -> None:
    def rank(number: int) -> list[float]:
        model = Net()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        step = train_step(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), world=world(number, 2))
        windows = [micro_batches(n, 12, ranks=2, rank=number, rows=2) for n in range(4)]
        windows[2][1]["x"][0] = INF
        return [outcome.grad_norm for outcome in run_steps(step, windows)]

    def without_the_skip(rank: int) -> list[float]:
        model = Net()
        step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [outcome.grad_norm for outcome in run_steps(step, [micro_batches(n, 12) for n in (0, 1, 3)])]

    for norms in run_ranks(2, rank):
        assert [norm for norm in norms if norm == norm] == pytest.approx(without_the_skip(0), rel=1e-4)


def test_parameters_whose_gradients_are_the_same_memory_are_updated_as_any_others() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.ones(2, 2))
            self.vector = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            # autograd gives both the same gradient, which each of them then keeps a view of
            return (self.matrix.view(4) + self.vector.view(4)) * x.mean()

    def sum_of_outputs(model: nn.Module, batch: Batch) -> Output:
        return Output(model(batch["x"]).sum().float(), len(batch["x"]))

    model, shared = Sum(), []

    def look(number: int) -> None:
        shared.append(model.matrix.grad.untyped_storage()._cdata == model.vector.grad.untyped_storage()._cdata)

    windows = [micro_batches(number, 4) for number in range(2)]
    run_steps(train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), task=sum_of_outputs), windows, look)
    assert all(shared)
    means = [float(torch.cat([batch["x"] for batch in window]).mean()) for window in windows]
    expected = 1 - 0.1 * sum(means) / 4
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected))


def test_settling_and_applying_out_of_turn_is_refused() -> None:
    model = Net()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert step.settle() is None
    for _ in range(2):
        with pytest.raises(RuntimeError, match="without a window"):
            step.apply()
        step.accumulate([], 0)  # is none
    window = micro_batches(0, 12)
    step.accumulate(window, 1)
    step.apply()
    step.accumulate(window, 1)
    with pytest.raises(RuntimeError, match="settle"):
        step.apply()
    assert step.settle() is not None
    assert step.settle() is None
    step.apply()


@pytest.mark.parametrize("told", [1, 3])
def test_a_window_of_another_length_is_refused(told: int) -> None:
    model = Net()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with refused(RuntimeError, "2 micro-batches", told):
        step.accumulate(micro_batches(0, 12, rows=6), told)


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).mean()


def vector(model: nn.Module, batch: Batch) -> Output:
    return Output(model(batch["x"]).squeeze(1), 12)


def half(model: nn.Module, batch: Batch) -> Output:
    return Output(model(batch["x"]).sum().half(), 12)


@pytest.mark.parametrize(
    ("task", "names"),
    [(mean, ["returned Tensor", "dtrain.training.task.Output"]), (vector, ["shape [12]"]), (half, ["torch.float16"])],
    ids=["a mean", "a loss for each row", "a sum in fp16"],
)
def test_a_task_that_returns_something_else_is_refused_in_the_first_step(
    task: Callable[..., Any], names: list[str]
) -> None:
    model = Net()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), task=task)
    with refused(TypeError, *names):
        step.accumulate(micro_batches(0, 12), 1)


def test_metrics_that_come_and_go_are_refused_with_both_lists() -> None:
    def task(model: nn.Module, batch: Batch) -> Output:
        output = squared_error(model, batch)
        return Output(output.loss_sum, output.count, {"a" if "s/0" in batch.sample_keys else "b": (1.0, 1)})

    model = Net()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), task=task)
    with refused(ValueError, "metrics", "['b']", "['a']"):
        step.accumulate(micro_batches(0, 12, rows=6), 2)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"clip_norm": 0.0}, ["train.clip_norm", "got 0.0"]),
        ({"clip_norm": float("nan")}, ["train.clip_norm", "got nan"]),
        ({"max_consecutive_skips": 0}, ["train.max_consecutive_skips", "got 0"]),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], names: list[str]) -> None:
    model = Net()
    with refused(ConfigError, *names):
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_an_optimizer_in_the_backward_is_refused_where_gradients_are_scaled() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="inside the backward pass"):
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=LossScale(CPU))


def test_a_step_on_a_counted_seed_draws_the_same_dropout_again() -> None:
    def after(steps: Sequence[int]) -> list[Tensor]:
        drawn: list[Tensor] = []

        def task(model: nn.Module, batch: Batch) -> Output:
            drawn.append(torch.rand(2))
            return squared_error(model, batch)

        model = Net()
        step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), task=task, seed=7)
        step.load_state_dict({"step": steps[0], "applied_steps": steps[0], "consecutive_skips": 0})
        run_steps(step, [micro_batches(n, 12, rows=6) for n in steps])
        return drawn[-2 * len(steps) :]  # a run's first step tries its task out before

    whole, resumed = after(range(4)), after(range(2, 4))
    assert all(map(torch.equal, whole[4:], resumed))
    assert len({tuple(numbers.tolist()) for numbers in whole}) == 8


def test_each_rank_draws_other_random_numbers() -> None:
    drawn: list[Tensor] = []

    def task(model: nn.Module, batch: Batch) -> Output:
        drawn.append(torch.rand(2))
        return squared_error(model, batch)

    for number in range(2):
        model = Net()
        step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), task=task, world=world(number, 2), seed=7)
        step.accumulate(micro_batches(0, 12), 1)
    assert not torch.equal(*drawn)


def test_a_rank_that_fails_in_its_task_does_not_leave_the_others_waiting() -> None:
    def rank(number: int) -> None:
        def task(model: nn.Module, batch: Batch) -> Output:
            if number == 1:
                raise ZeroDivisionError("the culprit")
            return squared_error(model, batch)

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = train_step(DistributedDataParallel(model), optimizer, world=world(number, 2), task=task)
        run_steps(step, [micro_batches(0, 12, ranks=2, rank=number)])

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank)
    assert set(failed.value.reports) == {0, 1}
    assert not failed.value.hung
    assert "the culprit" in failed.value.reports[1]


def test_a_loss_without_a_gradient_is_refused_with_the_name_of_its_task() -> None:
    def detached(model: nn.Module, batch: Batch) -> Output:
        output = squared_error(model, batch)
        return Output(output.loss_sum.detach(), output.count)

    model = Net()
    step = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), task=detached)
    with refused(TypeError, f"task: {__name__}", "Output.loss_sum", "no_grad"):
        step.accumulate(micro_batches(0, 12), 1)
