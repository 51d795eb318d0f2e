from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtrain.config.errors import ConfigError
from dtrain.data import Batch, ShardLoader
from dtrain.precision import Precision
from dtrain.training.evaluation import evaluate
from dtrain.training.task import Output
from tests.ranks import run_ranks
from tests.training.shards import FIELDS, numbered_shards, numbers_of
from tests.training.toys import Net, world

FP32 = Precision("fp32")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered_shards(tmp_path_factory.mktemp("shards"), 50)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered_shards(tmp_path_factory.mktemp("few"), 4, shards=2)


def loader(shards: str, rank: int = 0, ranks: int = 1, **given: Any) -> ShardLoader:
    options: dict[str, Any] = {"global_batch_size": 12, "num_workers": 0, "shuffle": "none"} | given
    return ShardLoader(shards, FIELDS, rank=rank, world_size=ranks, **options)


def squares(model: nn.Module, batch: Batch) -> Output:
    """The square of the prediction, and two metrics whose counts are not that of the rows."""
    predicted = model(batch["x"]).squeeze(1)
    losses = predicted.float().square().masked_fill(~batch.valid, 0)
    odd = batch.valid & (batch["number"] % 2 == 1)
    metrics = {"odd": (odd.sum(), batch.valid.sum()), "of_odd": ((predicted > 0)[odd].sum(), odd.sum())}
    return Output(losses.sum(), batch.valid.sum(), metrics)


def one_by_one(samples: range) -> dict[str, float]:
    """The reference: float64, one process, one sample after the other."""
    model = Net().double()
    with torch.no_grad():
        predicted = {n: model(torch.from_numpy(numbers_of(n)).double()).item() for n in samples}
    odd = [n for n in samples if n % 2 == 1]
    return {
        "loss": float(np.mean([value**2 for value in predicted.values()])),
        "odd": len(odd) / len(samples),
        "of_odd": sum(predicted[n] > 0 for n in odd) / len(odd),
        "samples": len(samples),
        "bad_samples": 0,
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_any_split_counts_each_sample_once(shards: str, ranks: int, micro_batch_size: int | None) -> None:
    def rank(number: int) -> list[dict[str, float]]:
        data = loader(shards, number, ranks, micro_batch_size=micro_batch_size)
        here = world(number, ranks)
        return [evaluate(Net(), squares, data, world=here, precision=FP32, epoch=epoch) for epoch in (0, 1)]

    want = one_by_one(range(50))
    for results in run_ranks(ranks, rank):
        for result in results:
            assert result["loss"] == pytest.approx(want["loss"], rel=1e-6)
            assert {**result, "loss": 0} == {**want, "loss": 0}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_set_smaller_than_a_global_batch_is_evaluated_all_the_same(few: str, ranks: int) -> None:
    def rank(number: int) -> dict[str, float]:
        data = loader(few, number, ranks)
        return evaluate(Net(), squares, data, world=world(number, ranks), precision=FP32)

    want = one_by_one(range(4))
    for result in run_ranks(ranks, rank):
        assert result["loss"] == pytest.approx(want["loss"], rel=1e-6)
        assert {**result, "loss": 0} == {**want, "loss": 0}


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_no_graph_is_kept_and_the_model_computes_as_in_evaluation(shards: str) -> None:
    model = nn.Sequential(Net(), nn.Dropout(0.9))
    seen: list[tuple[bool, bool, bool]] = []

    def task(model: nn.Module, batch: Batch) -> Output:
        output = squares(model, batch)
        seen.append((torch.is_inference_mode_enabled(), output.loss_sum.requires_grad, model.training))
        return output

    result = evaluate(model, task, loader(shards), world=world(), precision=FP32)
    assert set(seen) == {(True, False, False)}
    assert result["loss"] == pytest.approx(one_by_one(range(50))["loss"], rel=1e-6)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_put_back_even_after_an_error(shards: str, training: bool) -> None:
    def broken(model: nn.Module, batch: Batch) -> Output:
        raise ZeroDivisionError

    model = nn.Sequential(Net(), nn.Dropout()).train(training)
    evaluate(model, squares, loader(shards), world=world(), precision=FP32)
    assert {module.training for module in model.modules()} == {training}
    with pytest.raises(ZeroDivisionError):
        evaluate(model, broken, loader(shards), world=world(), precision=FP32)
    assert {module.training for module in model.modules()} == {training}


@pytest.mark.usefixtures("alone")
def test_evaluating_between_two_steps_does_not_disturb_training(shards: str) -> None:
    def trained(evaluated: bool) -> torch.Tensor:
        model = nn.Sequential(Net(), nn.BatchNorm1d(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.from_numpy(np.stack([numbers_of(n) for n in range(8)]))).square().sum().backward()
            optimizer.step()
            if evaluated:
                evaluate(model, squares, loader(shards), world=world(), precision=FP32)
        return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])

    assert torch.equal(trained(True), trained(False))


@pytest.mark.usefixtures("alone")
def test_half_precision_computes_the_forward_and_not_the_sums(shards: str) -> None:
    dtypes = set()

    def task(model: nn.Module, batch: Batch) -> Output:
        dtypes.add(model(batch["x"]).dtype)
        return squares(model, batch)

    result = evaluate(Net(), task, loader(shards), world=world(), precision=Precision("bf16"))
    assert dtypes == {torch.bfloat16}
    assert result["loss"] == pytest.approx(one_by_one(range(50))["loss"], rel=2e-2)
    assert result["samples"] == 50


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_on_one_rank_is_an_error_on_all(shards: str, value: float) -> None:
    def task(model: nn.Module, batch: Batch) -> Output:
        output = squares(model, batch)
        spoilt = (batch.valid & (batch["number"] == 17)).any()
        return Output(torch.where(spoilt, value, output.loss_sum), output.count, output.metrics)

    def rank(number: int) -> str:
        with pytest.raises(ConfigError, match=rf"the loss is {value} over 50 samples") as raised:
            evaluate(Net(), task, loader(shards, number, 3), world=world(number, 3), precision=FP32)
        return str(raised.value)

    assert len(set(run_ranks(3, rank))) == 1


@pytest.mark.usefixtures("alone")
def test_a_task_that_counts_nothing_is_an_error_and_a_metric_that_does_is_not_a_number(shards: str) -> None:
    def nothing(model: nn.Module, batch: Batch) -> Output:
        return Output(torch.zeros(()), 0)

    def no_metric(model: nn.Module, batch: Batch) -> Output:
        return Output(torch.ones(()), 1, {"rare": (0.0, 0)})

    with pytest.raises(ConfigError, match="no valid rows"):
        evaluate(Net(), nothing, loader(shards), world=world(), precision=FP32)
    result = evaluate(Net(), no_metric, loader(shards), world=world(), precision=FP32)
    assert result["loss"] == 1.0
    assert math.isnan(result["rare"])


@pytest.mark.usefixtures("alone")
def test_a_task_that_returns_a_mean_is_refused(shards: str) -> None:
    with pytest.raises(TypeError, match=r"returned Tensor, want a dtrain.training.task.Output"):
        evaluate(Net(), lambda model, batch: model(batch["x"]).mean(), loader(shards), world=world(), precision=FP32)


@pytest.mark.usefixtures("alone")
def test_progress_is_told_of_every_micro_batch(shards: str) -> None:
    told: list[tuple[int, int]] = []
    data = loader(shards, micro_batch_size=4)
    evaluate(Net(), squares, data, world=world(), precision=FP32, progress=lambda done, all: told.append((done, all)))
    assert told == [(number + 1, 15) for number in range(15)]
