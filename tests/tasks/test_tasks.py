"""Sums and counts of each task against a float64 loop over the valid rows, and what each refuses."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from dtrain.data import Batch
from dtrain.tasks import Classification, ImageFitting, Regression, classification
from dtrain.training.task import Output
from tests.fake_cuda import on_fake_cuda
from tests.refusals import refused

VALID = torch.tensor([True, False, True, True])


class Answers(nn.Module):
    """Returns what it was built with, whatever it is asked."""

    def __init__(self, answers: Tensor) -> None:
        super().__init__()
        self.answers = answers

    def forward(self, inputs: Any) -> Tensor:
        return self.answers


def batch(**columns: Tensor) -> Batch:
    return Batch(columns, ["a", "", "b", "c"], VALID)


def ratio(output: Output, name: str) -> float:
    total, count = output.metrics[name]
    return float(total) / float(count)


def test_top5_accuracy_counts_labels_among_the_five_most_probable() -> None:
    logits = torch.arange(7.0).repeat(4, 1)  # class 6 is the most probable, 2 the fifth
    output = Classification(top5=True)(Answers(logits), batch(image=logits, label=torch.tensor([6, 6, 2, 1])))
    assert ratio(output, "accuracy") == pytest.approx(1 / 3)
    assert ratio(output, "top5_accuracy") == pytest.approx(2 / 3)
    with refused(ValueError, "task.top5", "3 classes"):
        Classification(top5=True)(Answers(logits[:, :3]), batch(image=logits, label=torch.zeros(4, dtype=torch.long)))


@pytest.mark.parametrize("label", [-1, 7])
def test_a_label_that_the_model_has_no_class_for_is_named(label: int) -> None:
    logits = torch.zeros(4, 7)
    with refused(ValueError, "label", label, "0 to 6"):
        Classification()(Answers(logits), batch(image=logits, label=torch.tensor([6, label, 0, 0])))


def test_mixed_labels_cost_what_their_parts_do() -> None:
    torch.manual_seed(0)
    logits, first, second = torch.randn(4, 5), torch.tensor([0, 1, 2, 3]), torch.tensor([4, 4, 4, 0])
    one_hot = nn.functional.one_hot
    mixed = 0.7 * one_hot(first, 5) + 0.3 * one_hot(second, 5)
    task, model = Classification(label_smoothing=0.1), Answers(logits)
    soft = task(model, batch(image=logits, label=mixed))
    parts = [float(task(model, batch(image=logits, label=label)).loss_sum) for label in (first, second)]
    assert float(soft.loss_sum) == pytest.approx(0.7 * parts[0] + 0.3 * parts[1], rel=1e-5)
    assert ratio(soft, "accuracy") == ratio(task(model, batch(image=logits, label=first)), "accuracy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("as_distribution", [False, True])
def test_an_evaluation_counts_which_class_is_taken_for_which(dtype: torch.dtype, as_distribution: bool) -> None:
    torch.manual_seed(0)
    logits, labels, valid = torch.randn(60, 4).to(dtype), torch.randint(0, 4, (60,)), torch.rand(60) < 0.7
    counted = [[0] * 4 for _ in range(4)]
    for row in range(60):
        if valid[row]:
            counted[int(labels[row])][logits[row].tolist().index(max(logits[row].tolist()))] += 1
    label = 0.9 * nn.functional.one_hot(labels, 4).float() if as_distribution else labels
    rows = Batch({"image": logits, "label": label}, [""] * 60, valid)
    output = Classification()(Answers(logits).eval(), rows)
    assert output.tables["confusion"].dtype == torch.int64
    assert output.tables["confusion"].tolist() == counted
    assert ratio(output, "accuracy") == pytest.approx(sum(counted[n][n] for n in range(4)) / int(valid.sum()))


def test_training_and_very_many_classes_go_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 7)
    rows = batch(image=logits, label=torch.zeros(4, dtype=torch.long))
    assert Classification()(Answers(logits), rows).tables == {}
    monkeypatch.setattr(classification, "MOST_CLASSES", 6)
    assert Classification()(Answers(logits).eval(), rows).tables == {}


def test_counting_the_confusions_never_waits_for_the_device() -> None:
    def work() -> list[int]:
        numbers = torch.zeros(4, dtype=torch.long, device="cuda")
        table = classification._confusion(numbers, numbers, torch.ones(4, dtype=torch.bool, device="cuda"), 7)
        with pytest.raises(DynamicOutputShapeException):  # the obvious way
            torch.bincount(numbers)
        return list(table.shape)

    assert on_fake_cuda(work) == [7, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_regression_is_the_mean_over_a_rows_values_and_the_sum_over_valid_rows(dtype: torch.dtype) -> None:
    predicted = torch.tensor([[1.0, 3.0], [1e9, 1e9], [0.0, 0.0], [2.0, 2.0]], dtype=dtype)
    target = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    output = Regression()(Answers(predicted), batch(x=target, y=target))
    assert float(output.loss_sum) == pytest.approx((1 + 9) / 2 + (0 + 1) / 2)
    assert int(output.count) == 3
    assert ratio(output, "mae") == pytest.approx(((1 + 3) / 2 + 1 / 2) / 3)


def test_image_fitting_counts_pixels() -> None:
    predicted = torch.tensor([[0.0, 1.0, 0.2], [9.0, 9.0, 9.0], [1.0, 1.0, 1.0], [0.4, 0.6, 0.4]]).view(4, 1, 1, 3)
    pixels = torch.tensor([0.0, 1.0, 1.0]).expand(4, 1, 1, 3)
    output = ImageFitting()(Answers(predicted), batch(coordinates=pixels, pixels=pixels))
    assert float(output.loss_sum) == pytest.approx(0.64 + 1 + (0.16 + 0.16 + 0.36))
    assert int(output.count) == 9
    assert ratio(output, "accuracy") == pytest.approx(6 / 9)


def test_image_fitting_shows_the_picture_and_the_fitted_one_beside_it() -> None:
    rows = torch.arange(8.0).view(4, 1, 1, 2) / 8

    class Inverts(nn.Module):
        def forward(self, coordinates: Tensor) -> Tensor:
            return 1 - coordinates

    one = batch(coordinates=rows, pixels=rows)
    shown = ImageFitting().illustrate(Inverts(), {}, [one, one])
    picture = np.asarray(Image.open(io.BytesIO(shown["fit"])))
    lines = [rows[row, 0, 0].tolist() for row in range(4) if VALID[row]] * 2
    expected = [[*line, *(1 - value for value in line)] for line in lines]
    assert picture.tolist() == [[round(255 * value) for value in line] for line in expected]
    assert ImageFitting().illustrate(Inverts(), {}, ()) == {}
    four_channels = torch.zeros(4, 4, 1, 2)
    assert ImageFitting().illustrate(Inverts(), {}, [batch(coordinates=four_channels, pixels=four_channels)]) == {}


@pytest.mark.parametrize(
    ("task", "columns"),
    [(Regression(), ("x", "y")), (ImageFitting(), ("coordinates", "pixels"))],
    ids=["regression", "image fitting"],
)
def test_a_prediction_of_another_shape_is_refused_with_both(task: Any, columns: tuple[str, str]) -> None:
    given = dict.fromkeys(columns, torch.zeros(4, 3))
    with refused(ValueError, "[4, 1]", "[4, 3]"):
        task(Answers(torch.zeros(4, 1)), batch(**given))


def test_regression_compares_one_output_with_one_number_for_each_row() -> None:
    predicted = torch.tensor([[1.0], [1e9], [0.0], [2.0]])
    target = torch.tensor([0.0, 0.0, 3.0, 2.0])
    output = Regression()(Answers(predicted), batch(x=target, y=target))
    assert float(output.loss_sum) == pytest.approx(1 + 9)
    assert ratio(output, "mae") == pytest.approx((1 + 3) / 3)
