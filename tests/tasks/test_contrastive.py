"""The contrastive task against a float64 loop in one process, on one and on two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch
from dtrain.data.fields.field import DataError
from dtrain.tasks import Contrastive
from tests.ranks import run_ranks
from tests.refusals import refused

VALID = torch.tensor([True, True, False, True, True, True, False, False])
GENERATOR = torch.Generator().manual_seed(0)
IMAGES, TEXTS = torch.randn(8, 6, generator=GENERATOR), torch.randn(8, 3, generator=GENERATOR)


class TwoTowers(nn.Module):
    def __init__(self, log_scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.image, self.text = nn.Linear(6, 4), nn.Linear(3, 4)
        self.log_scale = nn.Parameter(torch.tensor(log_scale))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(images), self.text(texts), self.log_scale.exp()


def batch(rows: slice) -> Batch:
    return Batch({"image": IMAGES[rows], "caption": TEXTS[rows]}, [""] * len(VALID[rows]), VALID[rows])


def expected(model: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss sum over the valid rows, pair by pair in float64, and its gradients."""
    model = model.double()
    images, texts, scale = model(IMAGES[VALID].double(), TEXTS[VALID].double())
    similarity = [[scale * torch.cosine_similarity(image, text, dim=0) for text in texts] for image in images]
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(images)):
        for others in (similarity[row], [line[row] for line in similarity]):
            loss = loss + (torch.logsumexp(torch.stack(others), dim=0) - similarity[row][row]) / 2
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_and_gradient_are_those_of_the_global_batch_on_any_number_of_ranks(ranks: int) -> None:
    def on_rank(rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        rows = len(VALID) // ranks
        # find_unused_parameters: as train.deterministic wraps the model.
        model = DistributedDataParallel(TwoTowers(), find_unused_parameters=ranks == 2)
        output = Contrastive()(model, batch(slice(rank * rows, (rank + 1) * rows)))
        (output.loss_sum * ranks).backward()  # DDP divides by it
        return output.loss_sum.detach(), torch.as_tensor(output.count), [p.grad for p in model.parameters()]  # type: ignore[misc]

    results = run_ranks(ranks, on_rank)
    loss, gradients = expected(TwoTowers())
    assert float(sum(result[0] for result in results)) == pytest.approx(float(loss), rel=1e-5)
    assert sum(int(result[1]) for result in results) == 5
    for _, _, found in results:
        for one, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_a_rank_without_valid_rows_adds_nothing_and_no_nan() -> None:
    def on_rank(rank: int) -> tuple[float, bool]:
        part = Batch({"image": IMAGES[:2], "caption": TEXTS[:2]}, [""] * 2, torch.tensor([rank == 0, False]))
        model = DistributedDataParallel(TwoTowers())
        output = Contrastive()(model, part)
        output.loss_sum.backward()
        return float(output.loss_sum), all(bool(p.grad.isfinite().all()) for p in model.parameters())  # type: ignore[union-attr]

    assert run_ranks(2, on_rank) == [(0.0, True), (0.0, True)]  # one pair without negatives costs nothing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_loss_of_equal_embeddings_is_that_of_fp32(dtype: torch.dtype) -> None:
    class Embeddings(nn.Module):
        def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
            return images.to(dtype), texts.to(dtype), torch.tensor(100.0)

    same = Batch({"image": IMAGES.to(dtype), "caption": IMAGES.to(dtype)}, [""] * 8, VALID)
    plain = Contrastive()(Embeddings(), Batch({"image": same["image"], "caption": same["image"]}, [""] * 8, VALID))
    with torch.autocast("cpu", dtype=dtype):
        lowered = Contrastive()(Embeddings(), same)
    assert lowered.loss_sum.dtype == torch.float32
    assert float(lowered.loss_sum) == float(plain.loss_sum)


def test_the_scale_is_limited() -> None:
    task = Contrastive(max_scale=10)
    one, other = (float(task(TwoTowers(log), batch(slice(None))).loss_sum.detach()) for log in (3.0, 9.0))
    assert one == other
    assert one == pytest.approx(float(expected(TwoTowers(math.log(10)))[0]), rel=1e-5)


def test_metrics_count_the_rows_that_find_their_partner() -> None:
    class Crossed(nn.Module):
        def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
            return torch.eye(8), torch.eye(8)[[0, 3, 2, 1, 4, 5, 6, 7]], torch.tensor(3.0)

    output = Contrastive()(Crossed(), batch(slice(None)))
    for name in ("first_to_second", "second_to_first"):
        total, count = output.metrics[name]
        assert (int(total), int(count)) == (3, 5)  # of the five valid rows two are crossed


def test_a_model_of_another_kind_is_refused() -> None:
    class OnlyLogits(nn.Module):
        def forward(self, images: Tensor, texts: Tensor) -> Tensor:
            return images

    with refused(DataError, "task", "Tensor", "return image_embeddings"):
        Contrastive()(OnlyLogits(), batch(slice(None)))
    with refused(ValueError, "task.max_scale", 0, "positive"):
        Contrastive(max_scale=0)
