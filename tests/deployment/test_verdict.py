"""``dtrain.deployment.verdict``: an artefact that is too far from fp32 is refused, with the place where it went wrong."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.config.schema import ExportConfig
from dtrain.deployment.casting import cast
from dtrain.deployment.comparison import Comparison
from dtrain.deployment.divergence import Departure, departures
from dtrain.deployment.folding import fold, foldable
from dtrain.deployment.program import Program
from dtrain.deployment.tolerance import Tolerance
from dtrain.deployment.verdict import require_close
from tests.deployment.described import described

CPU = torch.device("cpu")
TOLERANCE = Tolerance(outputs=0.1, metrics=0.02)


def compared(wanted: Tensor, got: Tensor, fp32: float = 0.9, exported: float = 0.9) -> Comparison:
    samples: Any = SimpleNamespace(
        outputs=wanted, metrics={"accuracy": fp32}, metrics_of=lambda outputs: {"accuracy": exported}
    )
    return Comparison.of(got, samples, CPU)


def verdict(
    comparison: Comparison, found: list[Departure] | None = None, dtype: str = "bf16", stored_as: str = "pt2"
) -> None:
    description = dataclasses.replace(described(stored_as, dtype), folded=[("conv", "norm")])
    require_close(comparison, TOLERANCE, description, lambda rows: found or [])


def test_what_is_within_tolerance_is_accepted_and_an_equal_infinity_is_no_error() -> None:
    wanted = torch.tensor([[1.0, -10.0, float("-inf")], [2.0, 3.0, float("-inf")]])
    got = torch.tensor([[1.9, -10.0, float("-inf")], [2.0, 3.5, float("-inf")]])
    comparison = compared(wanted, got, 0.9, 0.9 + 0.019)
    verdict(comparison)
    report = comparison.report(TOLERANCE)
    assert report["max_abs_error"] == pytest.approx(0.9)
    assert report["mean_abs_error"] == pytest.approx(1.4 / 6)
    assert report["max_abs_output"] == 10
    assert report["relative_error"] == pytest.approx(0.09)
    assert report["top1_agreement"] == 1
    assert report["metrics"]["accuracy"]["difference"] == pytest.approx(0.019)


def test_what_is_beyond_tolerance_is_refused_with_the_first_module_that_is() -> None:
    wanted = torch.tensor([[1.0, 10.0]])
    found = [Departure("stem", 0.01), Departure("norm", 0.2), Departure("head", 0.9)]
    with pytest.raises(ConfigError) as caught:
        verdict(compared(wanted, torch.tensor([[1.0, 8.9]]), 0.9, 0.87), found)
    for part in ("max error 1.1", "export.tolerance=0.1", "accuracy 0.87, 0.9 in fp32", "max_metric_difference=0.02"):
        assert part in str(caught.value)
    # The convolution that the BatchNorm is folded into goes with it.
    assert "first module beyond is norm: an error of 0.2" in str(caught.value)
    assert "'precision.keep_fp32=[conv,norm]'" in str(caught.value)


def test_the_worst_rows_are_those_with_the_largest_errors_whatever_an_output_is() -> None:
    wanted = torch.zeros(4)
    got = torch.tensor([0.1, 0.3, 0.0, float("nan")])
    assert compared(wanted, got).worst(2).tolist() == [3, 1]
    assert compared(wanted.view(4, 1, 1), got.view(4, 1, 1)).worst(9).tolist() == [3, 1, 0, 2]


def test_an_overflow_and_a_metric_that_is_nan_are_refused() -> None:
    wanted = torch.tensor([[1.0, 10.0]])
    with pytest.raises(ConfigError, match=r"(?s)2 of 2 outputs are not finite.*export\.dtype=bf16 or fp32"):
        verdict(compared(wanted, torch.tensor([[float("nan"), float("inf")]])), dtype="fp16")
    with pytest.raises(ConfigError, match=r"use export\.dtype=fp32;"):  # it has no bf16
        verdict(compared(wanted, wanted + 5), dtype="fp16", stored_as="onnx")
    with pytest.raises(
        ConfigError, match=r"finer than sums in fp32\.\n  Remedies: use export\.format=safetensors; or raise"
    ):
        verdict(compared(wanted, wanted + 5), dtype="fp32")
    with pytest.raises(ConfigError, match=r"Remedies: raise the tolerance"):  # it is the safest format already
        verdict(compared(wanted, wanted + 5), dtype="fp32", stored_as="safetensors")
    with pytest.raises(ConfigError, match=r"(?s)accuracy nan, 0\.9 in fp32.*No module is beyond .* head is the worst"):
        verdict(compared(wanted, wanted, 0.9, float("nan")), [Departure("stem", 0.01), Departure("head", 0.05)])
    with pytest.raises(ConfigError, match=r"outputs are \[1, 1\], those of the fp32 model \[1, 2\]"):
        compared(wanted, wanted[:, :1])


class Net(nn.Module):
    """A part that is done last although it comes first, a folded pair, and an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.conv, self.norm, self.relu = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.relu(self.norm(self.conv(rows)) - 0.1).mean((2, 3))
        return self.last(self.middle(hidden))


def test_modules_are_compared_in_the_order_in_which_they_ran_and_the_first_wrong_one_is_found() -> None:
    torch.manual_seed(0)
    original = Net()
    original(torch.randn(64, 3, 4, 4))  # gives the statistics some values
    original.eval()
    exported = copy.deepcopy(original)
    pairs, _ = foldable(exported)
    fold(exported, pairs)
    cast(exported, torch.float16, [])
    rows = torch.randn(5, 3, 4, 4)

    def found() -> list[Departure]:
        programs = (Program(original, None, torch.float32), Program(exported, None, torch.float16))
        return departures(*programs, rows, pairs)

    sound = found()
    assert [departure.module for departure in sound] == ["norm", "relu", "middle.0", "middle.1", "middle", "last"]
    assert max(departure.error for departure in sound) < 0.01
    with torch.no_grad():
        exported.get_parameter("middle.0.weight").add_(0.5)
    assert next(departure.module for departure in found() if departure.error > 0.1) == "middle.0"
    with torch.no_grad():
        exported.get_parameter("middle.0.bias").fill_(float("inf"))
    assert next(departure for departure in found() if departure.error > 0.1) == Departure("middle.0", float("inf"))


def test_limits_follow_the_dtype_and_the_number_of_samples_unless_they_are_set() -> None:
    assert Tolerance.of(ExportConfig(dtype="fp32"), 2000) == Tolerance(1e-3, 1e-3)
    assert Tolerance.of(ExportConfig(dtype="fp16"), 20) == Tolerance(0.01, 0.1)
    assert Tolerance.of(ExportConfig(tolerance=0.5, max_metric_difference=0.0), 20) == Tolerance(0.5, 0.0)
    with pytest.raises(ConfigError, match=r"export\.tolerance: got nan"):
        Tolerance.of(ExportConfig(tolerance=float("nan")), 20)
