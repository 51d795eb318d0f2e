"""Folding leaves the outputs unchanged; casting keeps ties, and refuses values that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.export.fold_cast import cast, check_fits_dtype, fold, foldable, pairs_outside
from tests.export.helpers import Branching
from tests.refusals import refused


class Awkward(nn.Module):
    """One pair that can be folded, and convolutions whose BatchNorm must stay, each for another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.plain_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.seen, self.seen_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.twice, self.twice_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.batch, self.batch_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)
        self.first_norm, self.after = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain_norm(self.plain(x))
        seen = self.seen(x)
        x = self.seen_norm(seen) + seen
        x = self.twice_norm(self.twice(self.twice(x)))
        x = self.batch_norm(self.batch(x))
        return self.after(self.first_norm(x))


def test_only_a_norm_that_is_the_only_user_of_its_convolution_is_folded() -> None:
    torch.manual_seed(0)
    model = Awkward()
    model(torch.randn(16, 3, 4, 4))  # fills the running statistics
    model.eval()
    rows = torch.randn(5, 3, 4, 4)
    with torch.no_grad():
        before = model(rows)
        pairs, reason = foldable(model)
        fold(model, pairs)
        torch.testing.assert_close(model(rows), before)
    assert pairs == [("plain", "plain_norm")]
    assert reason is None


def test_pairs_inside_a_module_that_stays_in_fp32_are_not_folded() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    pairs, _ = foldable(nn.Sequential(block(), block(), block(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval())
    assert pairs == [("0.0", "0.1"), ("1.0", "1.1"), ("2.0", "2.1"), ("3", "4")]
    assert pairs_outside(["0", "1.1"], pairs) == [("2.0", "2.1"), ("3", "4")]
    assert pairs_outside([], pairs) == pairs


def test_a_model_that_cannot_be_traced_is_not_folded_and_the_reason_names_it() -> None:
    pairs, reason = foldable(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), Branching()).eval())
    assert pairs == []
    assert reason is not None
    assert "cannot trace Sequential" in reason


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((3,), float("-inf")), persistent=False)
        self.register_buffer("small", torch.tensor([1e-9, 0.0, 1.0]))


def test_tied_weights_stay_tied_and_masks_of_infinity_are_accepted() -> None:
    model = Tied()
    assert check_fits_dtype(model, torch.float16, [], {}) == {"small": 1}
    cast(model, torch.float16, [])
    assert model.head.weight is model.embed.weight
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.float16}


@pytest.mark.parametrize(
    ("key", "value", "dtype", "parts"),
    [
        ("0.weight", 1e5, torch.float16, ["100000", "fp16", "65504", "bf16 or fp32", "'precision.keep_fp32=[0]'"]),
        ("0.weight", 3.4e38, torch.bfloat16, ["3.4e+38", "bf16", "export.dtype=fp32", "'precision.keep_fp32=[0]'"]),
        ("1.bias", 1e5, torch.float16, ["BatchNorm 2", "100000", "'precision.keep_fp32=[1,2]'"]),
        ("0.bias", float("nan"), torch.float16, ["1 values", "not finite", "checkpoint=STEP"]),
        ("0.bias", float("inf"), torch.float32, ["1 values", "not finite", "weights=raw"]),
        ("buffer", float("nan"), torch.float16, ["1 values", "not finite", "checkpoint=STEP"]),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_the_name_of_its_tensor(
    key: str, value: float, dtype: torch.dtype, parts: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("buffer", torch.zeros(2))
    model.state_dict()[key].view(-1)[0] = value
    with refused(ConfigError, f"{key} ", *parts):
        check_fits_dtype(model, dtype, [], {"1": "2"})
    if "." in key:
        assert check_fits_dtype(model, dtype, [key[0]], {"1": "2"}) == {}
