"""``dtrain.deployment.samples``: what an artefact is compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.data import Batch
from dtrain.deployment.samples import NotComparable, sample
from dtrain.tasks import Classification, LanguageModelling
from dtrain.training.task import Output

CPU = torch.device("cpu")


def loader(*batches: Batch) -> Any:
    return SimpleNamespace(epoch=lambda n: iter(batches))


def batch(images: Tensor, labels: Tensor, valid: list[bool]) -> Batch:
    return Batch({"image": images, "label": labels}, [f"a/{n}" for n in range(len(valid))], torch.tensor(valid))


def test_the_metrics_of_both_are_those_of_the_first_valid_rows() -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3), torch.randint(0, 5, (8,))
    model = nn.Linear(3, 5)
    batches = [
        batch(images[:4], labels[:4], [True, False, True, True]),
        batch(images[4:], labels[4:], [False, True, True, True]),
    ]
    found = sample(model, Classification(), loader(*batches), {}, CPU, 5)
    rows, targets = images[[0, 2, 3, 5, 6]], labels[[0, 2, 3, 5, 6]]
    assert torch.equal(found.rows, rows)
    answers = torch.randn(5, 5)
    for metrics, outputs in ((found.metrics, model(rows)), (found.metrics_of(answers), answers)):
        assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item())
        assert metrics["accuracy"] == pytest.approx((outputs.argmax(1) == targets).double().mean().item())


def test_a_model_of_tokens_is_called_with_what_its_task_hands_it() -> None:
    tokens = torch.randint(0, 257, (3, 9))
    model = nn.Embedding(257, 257)
    rows = Batch({"tokens": tokens}, ["a/0", "a/1", "a/2"], torch.ones(3, dtype=torch.bool))
    found = sample(model, LanguageModelling(), loader(rows), {}, CPU, 2)
    assert found.image is None
    assert torch.equal(found.rows, tokens[:2, :-1])
    logits = model(tokens[:2, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:2, 1:].flatten()).item()
    assert found.metrics["loss"] == pytest.approx(loss)
    assert found.metrics_of(logits)["loss"] == pytest.approx(loss)


def test_a_task_that_calls_the_model_in_another_way_is_said_and_not_guessed() -> None:
    images = torch.zeros(2, 3)
    model = nn.Linear(3, 2)

    def run(call: Any) -> Any:
        def task(model: nn.Module, batch: Batch) -> Output:
            return Output(torch.as_tensor(call(model, batch["image"])).sum(), 2)

        return sample(model, task, loader(batch(images, torch.zeros(2), [True, True])), {}, CPU, 2)

    with pytest.raises(NotComparable, match="2 times"):
        run(lambda m, x: m(x) + m(x))
    with pytest.raises(NotComparable, match="1 arguments"):
        run(lambda m, x: m(input=x))
    found = run(lambda m, x: m(x + 1))
    assert found.image is None
    assert torch.equal(found.rows, torch.ones(2, 3))


def test_a_metric_that_is_not_finite_in_fp32_is_refused() -> None:
    rows = batch(torch.full((2, 3), float("nan")), torch.zeros(2, dtype=torch.int64), [True, True])
    with pytest.raises(ConfigError, match=r"loss nan on 2 rows.*checkpoint=STEP"):
        sample(nn.Linear(3, 2), Classification(), loader(rows), {}, CPU, 2)
    rows = batch(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), [False, False])
    with pytest.raises(ConfigError, match="no sample could be read"):
        sample(nn.Linear(3, 2), Classification(), loader(rows), {}, CPU, 2)
