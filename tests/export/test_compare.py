"""An artefact that is too far from fp32 is refused, with the module at fault and the remedies."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.schema import ExportConfig
from dtrain.errors import ConfigError
from dtrain.export.compare import Comparison, ModuleError, Tolerance, compare_modules, require_close
from dtrain.export.fold_cast import cast, fold, foldable
from dtrain.export.program import Program
from tests.export.helpers import CPU, described
from tests.refusals import refused

TOLERANCE = Tolerance(outputs=0.1, metrics=0.02)
NAN, INF = float("nan"), float("inf")
EXPECTED = torch.tensor([[1.0, 10.0]])


def compared(expected: Tensor, outputs: Tensor, accuracy: float = 0.9) -> Comparison:
    """Compares outputs where the fp32 model has an accuracy of 0.9 and the artefact has ``accuracy``."""
    reference: Any = SimpleNamespace(
        outputs=expected, metrics={"accuracy": 0.9}, metrics_of=lambda outputs: {"accuracy": accuracy}
    )
    return Comparison.measure(outputs, reference, CPU)


def require(
    comparison: Comparison, errors: list[ModuleError] | None = None, dtype: str = "bf16", stored_as: str = "pt2"
) -> None:
    description = described(stored_as, dtype, folded=[("conv", "norm")])
    require_close(comparison, TOLERANCE, description, lambda rows: errors or [])


def test_errors_within_tolerance_are_accepted_and_equal_infinities_are_no_error() -> None:
    expected = torch.tensor([[1.0, -10.0, -INF], [2.0, 3.0, -INF]])
    outputs = torch.tensor([[1.9, -10.0, -INF], [2.0, 3.5, -INF]])
    comparison = compared(expected, outputs, 0.9 + 0.019)
    require(comparison)
    report = comparison.report(TOLERANCE)
    assert report["max_abs_error"] == pytest.approx(0.9)
    assert report["mean_abs_error"] == pytest.approx(1.4 / 6)
    assert report["max_abs_output"] == 10
    assert report["relative_error"] == pytest.approx(0.09)
    assert report["top1_agreement"] == 1
    assert report["metrics"]["accuracy"]["difference"] == pytest.approx(0.019)


STEM, NORM, HEAD = ModuleError("stem", 0.01), ModuleError("norm", 0.2), ModuleError("head", 0.05)


@pytest.mark.parametrize(
    ("outputs", "accuracy", "errors", "dtype", "stored_as", "parts"),
    [
        (
            [[1.0, 8.9]],
            0.87,
            [STEM, NORM, ModuleError("head", 0.9)],
            "bf16",
            "pt2",
            [
                *("max error 1.1", "up to 10", "export.tolerance=0.1"),
                *("accuracy 0.87, 0.9 in fp32", "export.max_metric_difference=0.02"),
                # The convolution of a folded pair must stay in fp32 as well.
                *("norm: an error of 0.2", "'precision.keep_fp32=[conv,norm]'", "use export.dtype=fp32;"),
            ],
        ),
        ([[NAN, INF]], 0.9, [], "fp16", "pt2", ["2 of 2 outputs are not finite", "use export.dtype=bf16 or fp32"]),
        ([[6.0, 15.0]], 0.9, [], "fp16", "onnx", ["use export.dtype=fp32;"]),  # onnx has no bf16
        ([[6.0, 15.0]], 0.9, [], "fp32", "pt2", ["No weight was rounded", "export.format=safetensors", "or raise"]),
        (
            [[6.0, 15.0]],
            0.9,
            [],
            "fp32",
            "safetensors",
            ["No weight was rounded", "buffers", "export.fold=false", "or raise"],
        ),
        # Torch itself is within the tolerance: the conversion to the format is wrong.
        (
            [[INF, INF]],
            0.9,
            [STEM, HEAD, ModuleError("", 0.03)],
            "fp16",
            "onnx",
            ["conversion to onnx", "a constant above 65,504", "use export.format=safetensors", "export.dtype=fp32."],
        ),
        ([[6.0, 15.0]], 0.9, [STEM, ModuleError("", 0.03)], "bf16", "pt2", ["conversion to pt2", "or raise"]),
        (
            [[6.0, 15.0]],
            0.9,
            [STEM, ModuleError("", 0.3)],
            "fp16",
            "onnx",
            ["No module is beyond", "stem is the worst"],
        ),
        # Only a metric differs.
        ([[1.0, 10.0]], 0.8, [STEM, ModuleError("", 0.03)], "fp16", "onnx", ["stem is the worst"]),
        ([[1.0, 10.0]], NAN, [STEM, HEAD], "bf16", "pt2", ["accuracy nan, 0.9", "head is the worst", "=[head]'"]),
        ([[6.0, 15.0]], 0.9, [ModuleError("a", INF)], "bf16", "pt2", ["a: its outputs overflow"]),
    ],
)
def test_an_artefact_beyond_the_tolerance_is_refused_with_the_module_at_fault_and_the_remedies(
    outputs: list[list[float]],
    accuracy: float,
    errors: list[ModuleError],
    dtype: str,
    stored_as: str,
    parts: list[str],
) -> None:
    with refused(ConfigError, f"in {dtype}", "1 samples", *parts):
        require(compared(EXPECTED, torch.tensor(outputs), accuracy), errors, dtype, stored_as)


def test_outputs_of_another_shape_are_refused() -> None:
    with refused(ConfigError, "[1, 1]", "[1, 2]", "export.dtype=fp32"):
        compared(EXPECTED, EXPECTED[:, :1])


def test_the_worst_rows_are_those_with_the_largest_errors_for_outputs_of_any_shape() -> None:
    expected, outputs = torch.zeros(4), torch.tensor([0.1, 0.3, 0.0, NAN])
    assert compared(expected, outputs).worst(2).tolist() == [3, 1]
    assert compared(expected.view(4, 1, 1), outputs.view(4, 1, 1)).worst(9).tolist() == [3, 1, 0, 2]


class Net(nn.Module):
    """A module that is declared first and runs last, a pair to fold, and an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.conv, self.norm, self.relu = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.middle = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.relu(self.norm(self.conv(rows)) - 0.1).mean((2, 3))
        return self.last(self.middle(hidden))


def test_modules_are_compared_in_order_of_execution_and_the_first_wrong_one_is_found() -> None:
    torch.manual_seed(0)
    original = Net()
    original(torch.randn(64, 3, 4, 4))  # fills the running statistics
    original.eval()
    exported = copy.deepcopy(original)
    pairs, _ = foldable(exported)
    fold(exported, pairs)
    cast(exported, torch.float16, [])
    rows = torch.randn(5, 3, 4, 4)

    def found() -> list[ModuleError]:
        programs = (Program(original, None, torch.float32), Program(exported, None, torch.float16))
        return compare_modules(*programs, rows, pairs)

    correct = found()
    assert [error.module for error in correct] == ["norm", "relu", "middle.0", "middle.1", "middle", "last", ""]
    assert max(error.error for error in correct) < 0.01
    with torch.no_grad():
        exported.get_parameter("middle.0.weight").add_(0.5)
    assert next(error.module for error in found() if error.error > 0.1) == "middle.0"
    with torch.no_grad():
        exported.get_parameter("middle.0.bias").fill_(INF)
    assert next(error for error in found() if error.error > 0.1) == ModuleError("middle.0", INF)


def test_limits_follow_the_dtype_and_the_number_of_samples_unless_they_are_set() -> None:
    assert Tolerance.from_config(ExportConfig(dtype="fp32"), 2000) == Tolerance(1e-3, 1e-3)
    assert Tolerance.from_config(ExportConfig(dtype="fp16"), 20) == Tolerance(0.01, 0.1)
    assert Tolerance.from_config(ExportConfig(tolerance=0.5, max_metric_difference=0.0), 20) == Tolerance(0.5, 0.0)


@pytest.mark.parametrize("key", ["tolerance", "max_metric_difference"])
@pytest.mark.parametrize("value", [-1.0, NAN, INF])
def test_impossible_limits_are_refused(key: str, value: float) -> None:
    with refused(ConfigError, f"export.{key}", f"got {value}", "from 0 on", "null"):
        Tolerance.from_config(ExportConfig(**{key: value}), 20)
