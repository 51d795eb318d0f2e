"""The fp32 reference: rows, outputs and metrics that an artefact is compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.errors import ConfigError
from dtrain.export.reference import NotComparable, ReferenceRows, reference_rows
from dtrain.tasks import Classification, LanguageModelling
from dtrain.training.task import Output, Task
from tests.export.helpers import CPU
from tests.refusals import refused


def run(model: nn.Module, task: Task, *batches: Batch, limit: int = 2) -> ReferenceRows:
    loader: Any = SimpleNamespace(epoch=lambda number: iter(batches))
    return reference_rows(model, task, loader, {}, CPU, limit)


def batch(images: Tensor, labels: Tensor, valid: list[bool]) -> Batch:
    return Batch({"image": images, "label": labels}, [f"a/{n}" for n in range(len(valid))], torch.tensor(valid))


def test_the_metrics_of_both_models_are_those_of_the_first_valid_rows() -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3), torch.randint(0, 5, (8,))
    model = nn.Linear(3, 5)
    first = batch(images[:4], labels[:4], [True, False, True, True])
    second = batch(images[4:], labels[4:], [False, True, True, True])
    found = run(model, Classification(), first, second, limit=5)
    rows, targets = images[[0, 2, 3, 5, 6]], labels[[0, 2, 3, 5, 6]]
    assert torch.equal(found.inputs, rows)
    other = torch.randn(5, 5)
    for metrics, outputs in ((found.metrics, model(rows)), (found.metrics_of(other), other)):
        assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item())
        assert metrics["accuracy"] == pytest.approx((outputs.argmax(1) == targets).double().mean().item())


def test_the_inputs_of_a_language_model_are_what_its_task_passes_to_it() -> None:
    tokens = torch.randint(0, 257, (3, 9))
    model = nn.Embedding(257, 257)
    found = run(
        model,
        LanguageModelling(),
        Batch({"tokens": tokens}, ["a/0", "a/1", "a/2"], torch.ones(3, dtype=torch.bool)),
    )
    assert found.image is None
    assert torch.equal(found.inputs, tokens[:2, :-1])
    logits = model(tokens[:2, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:2, 1:].flatten()).item()
    assert found.metrics["loss"] == pytest.approx(loss)
    assert found.metrics_of(logits)["loss"] == pytest.approx(loss)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda model, x: model(x) + model(x), ["2 times"]),
        (lambda model, x: model(input=x), ["1 arguments"]),
        (lambda model, x: model(x, None), ["2 arguments"]),
        (lambda model, x: model(x[:1]), ["a row for each sample"]),
    ],
)
def test_a_task_that_calls_the_model_in_another_way_is_not_comparable(call: Any, names: list[str]) -> None:
    class Takes(nn.Linear):
        def forward(self, input: Tensor, mask: None = None) -> Tensor:
            return super().forward(input)

    def task(model: nn.Module, batch: Batch) -> Output:
        return Output(call(model, batch["image"]).sum(), 2)

    rows = batch(torch.zeros(2, 3), torch.zeros(2), [True, True])
    with refused(NotComparable, *names):
        run(Takes(3, 2), task, rows)


def test_inputs_that_the_task_computes_are_recorded() -> None:
    def task(model: nn.Module, batch: Batch) -> Output:
        return Output(model(batch["image"] + 1).sum(), 2)

    found = run(nn.Linear(3, 2), task, batch(torch.zeros(2, 3), torch.zeros(2), [True, True]))
    assert found.image is None
    assert torch.equal(found.inputs, torch.ones(2, 3))


def test_a_metric_that_is_not_finite_and_a_set_without_samples_are_refused() -> None:
    labels = torch.zeros(2, dtype=torch.int64)
    with refused(ConfigError, "loss nan", "2 rows of data.eval", "checkpoint=STEP"):
        run(nn.Linear(3, 2), Classification(), batch(torch.full((2, 3), float("nan")), labels, [True, True]))
    with refused(ConfigError, "data.eval", "no sample could be read", "data.eval=null"):
        run(nn.Linear(3, 2), Classification(), batch(torch.zeros(2, 3), labels, [False, False]))
