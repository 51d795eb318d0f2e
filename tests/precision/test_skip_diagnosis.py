"""A streak of skipped steps ends the run on all ranks with one message that names its origin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch
from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.skip_diagnosis import SkipDiagnosis
from dtrain.training.step import TooManySkips, TrainStep
from dtrain.training.task import Output
from tests.ranks import run_ranks
from tests.refusals import refused

ROWS = 4
PRECISIONS = ("fp32", "bf16", "fp16")


class GradientInf(torch.autograd.Function):
    """The identity, with an infinite gradient for inputs above 4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0].masked_fill((x > 4).any(), torch.inf)


class Net(nn.Module):
    """Two layers; with ``steep`` an infinite gradient between them where a row has a large value."""

    def __init__(self, steep: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.head = nn.Linear(3, 2)
        self.steep = steep

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.steep:
            hidden = GradientInf.apply(hidden * x.abs().amax())
        return self.head(hidden)


def summed_squares(model: nn.Module, batch: Batch) -> Output:
    losses = model(batch["x"]).float().square().sum(dim=1)
    return Output(losses[batch.valid].sum(), batch.valid.sum())


def micro_batch(step: int, number: int, rank: int = 0, bad: float | None = None) -> Batch:
    """Rows of small numbers, the last one masked; with ``bad`` in row 2."""
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank))
    if bad is not None:
        x[2, 1] = bad
    keys = [f"shard-{rank}/{step}-{number}-{row}" for row in range(ROWS - 1)]
    return Batch({"x": x}, [*keys, ""], torch.tensor([True] * (ROWS - 1) + [False]))


def make_step(
    model: nn.Module,
    precision: str = "fp32",
    task: Any = summed_squares,
    nominal: int = 2 * ROWS,
    max_consecutive_skips: int | None = None,
) -> TrainStep:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    world = World(rank, size, rank, size, torch.device("cpu"), "gloo", size > 1)
    policy = Precision(precision)
    return TrainStep(
        DistributedDataParallel(model) if size > 1 else model,
        task,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        world=world,
        precision=policy,
        loss_scale=LossScale(world.device, init=2.0) if policy.scales_gradients else None,
        nominal=nominal * size,
        schedule=lambda applied: 1.0,
        max_consecutive_skips=max_consecutive_skips,
    )


def train(step: TrainStep, steps: int, batch: Callable[[int, int], Batch]) -> None:
    """So many steps of two micro-batches, in the order of the training loop."""
    for number in range(step.step + 1, step.step + steps + 1):
        step.accumulate((batch(number, micro) for micro in range(2)), 2)
        step.settle()
        step.apply()


def abort(step: TrainStep, batch: Callable[[int, int], Batch]) -> tuple[int, str]:
    """The step after which it is aborted, and the text."""
    with pytest.raises(TooManySkips) as aborted:
        train(step, 20, batch)
    return step.step, str(aborted.value)


def hooks(model: nn.Module) -> int:
    """Hooks on modules and parameters; DDP's own are none of these."""
    return sum(len(module._forward_hooks) for module in model.modules()) + sum(
        len(parameter._backward_hooks or ()) for parameter in model.parameters()
    )


def test_one_bad_sample_on_one_rank_is_named_by_all_ranks_with_module_and_parameters_in_every_precision() -> None:
    def rank_of_two(rank: int) -> list[tuple[int, str]]:
        def batch(number: int, micro: int) -> Batch:
            return micro_batch(number, micro, rank, torch.nan if (rank, micro) == (1, 1) else None)

        aborted = []
        for precision in PRECISIONS:
            step = make_step(Net(), precision, max_consecutive_skips=4)
            train(step, 2, lambda number, micro: micro_batch(number, micro, rank))
            aborted.append(abort(step, batch))
        return aborted

    first, second = run_ranks(2, rank_of_two)
    assert first == second
    for at, text in first:
        assert at == 6
        assert "4 steps in a row were skipped, the last one is step 6: " in text
        assert "rank 1, step 6, micro-batch 1: first not finite: the output of body.0 (Linear)" in text
        assert "whose input is not finite either" in text
        assert "the gradient of head." in text
        assert "in 1 of 3 samples: shard-1/6-1-2\n" in text
        assert "rank 0" not in text


def test_an_infinity_born_in_the_backward_names_the_first_parameters_behind_it_in_every_precision() -> None:
    def rank_of_two(rank: int) -> list[tuple[int, str]]:
        bad = 20.0 if rank == 0 else None
        return [
            abort(
                make_step(Net(steep=True), precision, max_consecutive_skips=3),
                lambda number, micro: micro_batch(number, micro, rank, bad),
            )
            for precision in PRECISIONS
        ]

    first, second = run_ranks(2, rank_of_two)
    assert first == second
    for at, text in first:
        assert at == 3
        assert "rank 0, step 3, micro-batch 0: first not finite: the gradient of body.0." in text
        assert "head." not in text
        assert "in 3 of 3 samples: shard-0/3-0-0, shard-0/3-0-1, shard-0/3-0-2\n" in text
        assert "rank 1" not in text


def test_a_loss_that_the_task_makes_infinite_is_not_blamed_on_the_model() -> None:
    def logarithm(model: nn.Module, batch: Batch) -> Output:
        return Output((summed_squares(model, batch).loss_sum * 0).log(), batch.valid.sum())

    _, text = abort(make_step(Net(), task=logarithm, max_consecutive_skips=3), micro_batch)
    assert "first not finite: the loss, though the output of every module is finite" in text


def test_gradients_that_overflow_only_in_their_sum_are_reported_as_such() -> None:
    def huge(model: nn.Module, batch: Batch) -> Output:
        count = batch.valid.sum()
        spread = summed_squares(model, batch).loss_sum * 0  # so that every parameter has a gradient
        return Output(spread + count * (model.get_parameter("head.bias")[0] * 7e37), count)

    _, text = abort(make_step(Net(), task=huge, nominal=1, max_consecutive_skips=3), micro_batch)
    assert "the sum of the gradients over micro-batches and ranks, or its norm, is not" in text


def test_a_buffer_that_is_spoilt_while_all_else_is_finite_is_named() -> None:
    class Statistic(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

        def forward(self, x: Tensor) -> Tensor:
            self.largest.add_(x.detach().abs().amax() * 1e38 * 1e38)
            return super().forward(x)

    _, text = abort(make_step(Statistic(), max_consecutive_skips=3), micro_batch)
    assert "first not finite: the buffer largest; in 3 of 3 samples" in text


def test_hooks_are_on_the_model_only_during_a_streak() -> None:
    model = Net()
    step = make_step(model)
    train(step, 2, micro_batch)
    assert hooks(model) == 0
    train(step, 2, lambda number, micro: micro_batch(number, micro, bad=torch.nan))
    assert hooks(model) == len(list(model.modules())) + len(list(model.parameters()))
    train(step, 2, micro_batch)
    assert hooks(model) == 0


def test_a_streak_is_still_diagnosed_after_a_resume() -> None:
    model = Net()
    make_step(model).load_state_dict({"step": 7, "applied_steps": 6, "consecutive_skips": 1})
    assert hooks(model) > 0


def test_a_compiled_model_is_diagnosed_by_the_names_of_the_bare_one() -> None:
    model = torch.compile(Net(), backend="eager")
    assert isinstance(model, nn.Module)
    step = make_step(model, max_consecutive_skips=3)
    train(step, 1, micro_batch)
    _, text = abort(step, lambda number, micro: micro_batch(number, micro, bad=torch.nan))
    assert "first not finite: the output of body.0 (Linear)" in text
    assert "_orig_mod" not in text


def test_the_third_skip_in_a_row_leaves_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    step = make_step(Net())
    with caplog.at_level(logging.WARNING, "dtrain"):
        train(step, 3, lambda number, micro: micro_batch(number, micro, bad=torch.nan))
        assert not caplog.messages
        train(step, 3, lambda number, micro: micro_batch(number, micro, bad=torch.nan))
    (line,) = caplog.messages
    assert line.startswith("3 steps in a row were skipped; on this rank: step 3, micro-batch 0: first not finite: ")


def test_by_default_50_skips_end_a_run_that_scales_its_loss_and_10_any_other() -> None:
    for precision, limit in (("fp32", 10), ("bf16", 10)):
        at, text = abort(make_step(Net(), precision), lambda number, micro: micro_batch(number, micro, bad=torch.nan))
        assert at == limit
        assert "bf16" not in text
    step = make_step(Net(), "fp16")
    step.load_state_dict({"step": 40, "applied_steps": 0, "consecutive_skips": 40})
    at, text = abort(step, lambda number, micro: micro_batch(number, micro, bad=torch.nan))
    assert at == 50
    assert "or try precision=bf16" in text
    with refused(ConfigError, "max_consecutive_skips", "got 0"):
        make_step(Net(), max_consecutive_skips=0)


def test_after_one_skip_the_origin_is_unknown_and_the_remedy_is_named() -> None:
    step = make_step(Net(), max_consecutive_skips=1)
    _, text = abort(step, lambda number, micro: micro_batch(number, micro, bad=torch.nan))
    assert "The origin is not known" in text
    assert "Raise train.max_consecutive_skips" in text


def test_a_streak_without_a_valid_row_is_not_reported_as_an_overflow() -> None:
    def masked(number: int, micro: int) -> Batch:
        batch = micro_batch(number, micro)
        return Batch(batch, [""] * ROWS, torch.zeros(ROWS, dtype=torch.bool))

    _, text = abort(make_step(Net(), max_consecutive_skips=2), masked)
    assert "none had a valid row" in text


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def test_an_armed_window_does_not_wait_for_the_device(fake_cuda: None) -> None:
    model = nn.Sequential(nn.Tanh(), nn.Softplus())
    diagnosis = SkipDiagnosis(model)
    diagnosis.follow(1)
    with diagnosis.micro_batch(2, 0, ["a", "b"]):
        diagnosis.loss(model(torch.ones(2, 3, device="cuda")).sum())
    with pytest.raises(DataDependentOutputException):
        diagnosis.finding()
