"""What would train on something else than the gradient of the mean loss is refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from dtrain.data import Batch
from dtrain.errors import ConfigError
from dtrain.precision import CrossRankGradScaler, Precision
from dtrain.training.checks import UnusedParameters, check_mean_loss, unused_parameters_explained
from dtrain.training.task import Output
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import refused
from tests.toys import (
    CPU,
    Net,
    NetWithBatchNorm,
    micro_batches,
    run_steps,
    squared_error,
    train_step,
    world,
)
from tests.whole_runs import train_on


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- at construction


def refused_on_two(build: Callable[[], nn.Module]) -> str:
    """The text with which a step refuses the model that each of two ranks builds."""

    def rank(number: int) -> str:
        model = build()
        with pytest.raises(ConfigError) as raised:
            train_step(model, sgd(model), world=world(number, 2))
        return str(raised.value)

    first, second = run_ranks(2, rank)
    assert first == second
    return first


def test_a_model_under_no_sync_is_refused() -> None:
    def build() -> nn.Module:
        model = DistributedDataParallel(Net())
        model.require_backward_grad_sync = False  # what no_sync() does
        return model

    assert "under no_sync()" in refused_on_two(build)


@pytest.mark.skipif(
    bool(torch.version.cuda) and not torch.cuda.is_available(),
    reason="a torch with CUDA needs a driver for DDP's stream",
)
def test_ddps_private_mixed_precision_is_refused() -> None:
    def build() -> nn.Module:
        return DistributedDataParallel(Net(), mixed_precision=_MixedPrecision(param_dtype=torch.float16))

    assert "mixed_precision=..." in refused_on_two(build)


@pytest.mark.parametrize("inside", ["at the top", "'1'"])
def test_a_model_that_wraps_itself_is_refused(inside: str) -> None:
    def build() -> nn.Module:
        wrapped = DistributedDataParallel(Net())
        return DistributedDataParallel(wrapped) if inside == "at the top" else nn.Sequential(nn.ReLU(), wrapped)

    message = refused_on_two(build)
    assert inside in message
    assert "would average gradients twice" in message


@pytest.mark.parametrize("make", [torch.amp.GradScaler, CrossRankGradScaler])
def test_a_gradient_scaler_beside_the_steps_own_scale_is_refused(make: Callable[[str], Any]) -> None:
    model = Net()
    with refused(ConfigError, key="", got=make.__name__):
        train_step(model, sgd(model), loss_scale=make("cpu"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_optimizer_in_the_backward_is_refused_without_a_scale_too(precision: str) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match="inside the backward pass"):
        train_step(model, sgd(model), precision=precision)


def test_pure_fp16_parameters_are_refused() -> None:
    model = Net().half()
    with refused(ConfigError, key="", got="fp16", remedy="Keep parameters in fp32"):
        train_step(model, sgd(model))


# -- in the first step: the backward that averages


def round_ddp(model: Any, batch: Batch) -> Output:
    return squared_error(model.module, batch)


def unsynchronised(model: Any, batch: Batch) -> Output:
    with model.no_sync():
        return squared_error(model, batch)


def twice(model: nn.Module, batch: Batch) -> Output:
    with torch.no_grad():
        model(batch["x"])
    return squared_error(model, batch)


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("task", [round_ddp, unsynchronised])
def test_a_task_that_goes_round_ddp_is_refused_in_its_first_step(task: Any, rows: int | None) -> None:
    def rank(number: int) -> str:
        model = Net()
        step = train_step(DistributedDataParallel(model), sgd(model), task=task, world=world(number, 2))
        with refused(RuntimeError, "model.module", remedy="no_sync") as raised:
            run_steps(step, [micro_batches(0, 8, ranks=2, rank=number, rows=rows)])
        return str(raised.value)

    first, second = run_ranks(2, rank)
    assert first == second


def test_a_task_that_runs_the_model_twice_is_not() -> None:
    def rank(number: int) -> int:
        model = Net()
        step = train_step(DistributedDataParallel(model), sgd(model), task=twice, world=world(number, 2))
        return run_steps(step, [micro_batches(0, 8, ranks=2, rank=number)])[0].applied_steps

    assert run_ranks(2, rank) == [1, 1]


def test_in_a_world_of_one_a_task_may_call_what_it_likes() -> None:
    model = nn.Sequential(Net())
    step = train_step(model, sgd(model), task=lambda model, batch: squared_error(model[0], batch))
    assert run_steps(step, [micro_batches(0, 8)])[0].applied_steps == 1


# -- before the first step: a mean


def errors(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]).squeeze(1).float() - batch["y"]).square()


def mean_over_valid(model: nn.Module, batch: Batch) -> Output:
    return Output(errors(model, batch)[batch.valid].mean(), batch.valid.sum())


def mean_over_all(model: nn.Module, batch: Batch) -> Output:
    return Output(errors(model, batch).mean(), batch.valid.sum())


def sum_over_all(model: nn.Module, batch: Batch) -> Output:
    return Output(errors(model, batch).sum(), batch.valid.sum())


def mean_counted_once(model: nn.Module, batch: Batch) -> Output:
    return Output(errors(model, batch)[batch.valid].mean(), 1)


def all_rows_counted(model: nn.Module, batch: Batch) -> Output:
    return Output(errors(model, batch)[batch.valid].sum(), len(batch.valid))


def mean_of_tokens(model: nn.Module, batch: Batch) -> Output:
    """Rows of 1, 2, 3 ... tokens."""
    tokens = torch.arange(1, len(batch.valid) + 1)[batch.valid]
    return Output((errors(model, batch)[batch.valid] * tokens).sum() / tokens.sum(), tokens.sum())


def valid_rows_first(model: nn.Module, batch: Batch) -> Output:
    """Selects rows before the model, so that BatchNorm sees others."""
    rows = Batch(
        {"x": batch["x"][batch.valid], "y": batch["y"][batch.valid]},
        [key for key in batch.sample_keys if key],
        batch.valid[batch.valid],
    )
    return Output(errors(model, rows).sum(), batch.valid.sum())


def contrastive(model: nn.Module, batch: Batch) -> Output:
    """Each valid row against all other valid ones: half of the rows have fewer negatives."""
    features = model(batch["x"])[batch.valid].float()
    similar = features @ features.T
    return Output(nn.functional.cross_entropy(similar, torch.arange(len(similar)), reduction="sum"), batch.valid.sum())


def noisy(model: nn.Module, batch: Batch) -> Output:
    """Draws numbers of its own for each row."""
    losses = errors(model, batch) * torch.rand(len(batch.valid))
    return Output(losses[batch.valid].sum(), batch.valid.sum())


def zero(model: nn.Module, batch: Batch) -> Output:
    return Output(errors(model, batch)[batch.valid].sum() * 0, batch.valid.sum())


def looked_at(task: Any, batch: Batch, model: nn.Module | None = None, precision: str = "fp32") -> None:
    check_mean_loss(task, model or NetWithBatchNorm(), batch, Precision(precision), CPU)


@pytest.mark.parametrize("samples", [2, 5, 8])
@pytest.mark.parametrize("task", [mean_over_valid, mean_over_all, sum_over_all, mean_of_tokens])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mean_and_a_sum_that_includes_masked_rows_are_refused_with_the_numbers(
    task: Any, samples: int, precision: str
) -> None:
    (batch,) = micro_batches(0, samples)
    with refused(ConfigError, "loss", f"{samples} valid rows", "the sum over the valid rows"):
        looked_at(task, batch, precision=precision)


def test_a_task_that_works_in_place_is_looked_at_on_copies() -> None:
    def doubling(model: nn.Module, batch: Batch) -> Output:
        batch["x"].mul_(2)
        return Output(errors(model, batch)[batch.valid].sum(), batch.valid.sum())

    (batch,) = micro_batches(0, 8)
    before = batch["x"].clone()
    looked_at(doubling, batch)
    assert torch.equal(batch["x"], before)


@pytest.mark.parametrize("task", [mean_counted_once, all_rows_counted])
def test_a_count_that_does_not_follow_the_valid_rows_is_refused(task: Any) -> None:
    (batch,) = micro_batches(0, 8)
    with refused(ConfigError, "count is", "8 rows", "batch.valid"):
        looked_at(task, batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("masked", [(), (1, 6)])
@pytest.mark.parametrize("task", [squared_error, valid_rows_first, contrastive, noisy, zero])
def test_sums_and_losses_that_are_neither_are_let_through(task: Any, masked: tuple[int, ...], precision: str) -> None:
    (batch,) = micro_batches(0, 8, masked=masked)
    looked_at(task, batch, precision=precision)


@pytest.mark.parametrize("masked", [(0, 2), (0, 1, 2), ()])
def test_fewer_than_two_valid_rows_say_nothing_but_a_task_is_called_equally_often_everywhere(masked: Any) -> None:
    calls = []

    def counted(model: nn.Module, batch: Batch) -> Output:
        calls.append(batch.valid.sum())
        return squared_error(model, batch)

    (batch,) = micro_batches(0, 3, masked=masked)
    looked_at(counted, batch)
    assert len(calls) == 3
    if masked:
        looked_at(mean_over_all, batch)


def test_looking_leaves_no_trace_in_the_model_and_its_batch() -> None:
    model = NetWithBatchNorm()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (batch,) = micro_batches(0, 8)
    looked_at(squared_error, batch, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert batch.valid.all()


def test_dropout_is_the_same_three_times() -> None:
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    for samples in (2, 8):
        (batch,) = micro_batches(0, samples)
        with pytest.raises(ConfigError, match="That is a mean"):
            looked_at(mean_over_valid, batch, model)
        looked_at(squared_error, batch, model)


class MeanOverValid:
    """As a config names it."""

    def __init__(self, **options: Any) -> None:
        pass

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        losses = nn.functional.cross_entropy(model(batch["image"]).float(), batch["label"], reduction="none")
        return Output(losses[batch.valid].mean(), batch.valid.sum())


@pytest.mark.usefixtures("digits")
def test_the_trainer_refuses_a_mean_before_its_first_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task = f"{__name__}.{MeanOverValid.__name__}"
    with pytest.raises(RanksFailed):
        train_on(2, tmp_path, f"task._target_={task}", "train.max_steps=2", "data.num_workers=0", "model.width=4")
    message = capfd.readouterr().err
    assert message.count("dtrain: error: task: its loss is") == 1
    assert not list(tmp_path.glob("checkpoints/step-*"))


# -- parameters that a step does not use


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen = nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)
        self.idle = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_unused_parameters_are_named_with_the_key_that_allows_them() -> None:
    def rank(number: int) -> str:
        model = DistributedDataParallel(HalfUsed())
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(UnusedParameters) as raised, unused_parameters_explained(lambda: model):
            model(torch.ones(1, 1))
        return str(raised.value)

    for number, message in enumerate(run_ranks(2, rank)):
        for part in ("idle.weight, idle.bias", f"rank {number}", "parallel.find_unused_parameters=true"):
            assert part in message


def test_unused_parameters_are_named_after_a_new_ddp_has_taken_the_place_of_the_first() -> None:
    def rank(number: int) -> str:
        models = [DistributedDataParallel(HalfUsed())]

        def step_again() -> None:
            vars(models[0]).clear()
            models.append(DistributedDataParallel(HalfUsed()))
            models[-1](torch.ones(1, 1)).sum().backward()
            models[-1](torch.ones(1, 1))

        with pytest.raises(UnusedParameters) as raised, unused_parameters_explained(lambda: models[-1]):
            step_again()
        return str(raised.value)

    for message in run_ranks(2, rank):
        assert "idle.weight, idle.bias" in message


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="of the model"), unused_parameters_explained(Net):
        raise RuntimeError("of the model")
