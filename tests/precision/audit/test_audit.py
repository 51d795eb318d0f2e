"""The numerics audit: `dtrain doctor numerics experiment=...`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtrain.doctor import __main__ as doctor
from dtrain.precision import Precision
from dtrain.precision.audit import ModuleReport, NumericsAudit, Report
from dtrain.precision.audit.recorders import Magnitudes
from dtrain.precision.audit.summary import (
    advise_scale,
    keep_line,
    magnitude,
    modules_to_keep,
    percent,
    print_tables,
    rows,
    summary,
)
from tests.config.command_lines import compose
from tests.precision.audit.audits import audited, findings, source_line
from tests.refusals import assert_refused

CPU = torch.device("cpu")


def fill(parameter: Any, value: float) -> None:
    with torch.no_grad():
        parameter.fill_(value)


def row(report: Report, name: str) -> ModuleReport:
    return next(module for module in report.modules if module.name == name)


def names(report: Report) -> list[str]:
    return [module.name for module in report.modules]


def spread_values(count: int = 20_000) -> np.ndarray:
    """Magnitudes from 2**-149 to 2**128, log-uniform, with zeros, signs and the exact limits of both types; float64."""
    generator = np.random.default_rng(0)
    values = 2.0 ** generator.uniform(-140, 127.99, count)
    dense = 2.0 ** generator.uniform(-30, 20, count)  # around fp16's range
    limits = [2.0**-149, 2.0**-134, 2.0**-133, 2.0**-126, 2.0**-25, 2.0**-24, 2.0**-14, 65504.0, 65519.0, 65520.0]
    limits += [(2 - 2.0**-7) * 2.0**127, (2 - 2.0**-8) * 2.0**127]
    signs = generator.choice([-1.0, 1.0], 2 * count)
    exact = np.concatenate([signs * np.concatenate([values, dense]), limits, np.zeros(7)])
    return exact.astype(np.float32).astype(np.float64)


# -- how large values are


def test_rates_of_both_casts_equal_a_count_in_float64() -> None:
    values = spread_values()
    magnitudes = Magnitudes()
    magnitudes.add(torch.from_numpy(values).float().reshape(-1, 1))
    size = np.abs(values[values != 0])
    # Rounding to nearest, ties to even: a type's largest lost, first normal and first infinite fp32 magnitude.
    limits = {
        torch.float16: (2.0**-25, 2.0**-14 - 2.0**-25, 65520.0),
        torch.bfloat16: (2.0**-134, 2.0**-126 - 2.0**-134, (2 - 2.0**-8) * 2.0**127),
    }
    for dtype, (lost, normal, infinite) in limits.items():
        cast = magnitudes.casts[dtype]
        assert cast["lost"] == int((size <= lost).sum()) > 0
        assert cast["subnormal"] == int(((size > lost) & (size < normal)).sum()) > 0
        assert cast["overflow"] == int((size >= infinite).sum()) > 0
    assert magnitudes.count == values.size
    assert magnitudes.zeros == 7
    assert magnitudes.nonzero == size.size
    assert magnitudes.largest == size.max()
    assert magnitudes.smallest == size.min()


@pytest.mark.parametrize("scale", [2.0**-3, 1.0, 2.0**16, 2.0**40])
def test_what_a_scale_would_rescue_equals_a_count_of_the_scaled_values(scale: float) -> None:
    values = np.abs(spread_values())
    magnitudes = Magnitudes()
    magnitudes.add(torch.from_numpy(values).float())
    scaled = values[values > 0] * scale
    assert magnitudes.lost_in_fp16(scale) == int((scaled <= 2.0**-25).sum())
    assert magnitudes.small_in_fp16(scale) == int(((scaled > 2.0**-25) & (scaled <= 2.0**-14)).sum())


def test_infinities_nan_and_nothing_are_counted_apart() -> None:
    magnitudes = Magnitudes()
    magnitudes.add(torch.zeros(0))
    assert magnitudes.scale_for_fp16(8.0) is None
    magnitudes.add(torch.tensor([0.0, -torch.inf, torch.nan, 3.0, torch.inf]))
    assert (magnitudes.count, magnitudes.zeros, magnitudes.infinite, magnitudes.nan) == (5, 1, 2, 1)
    assert magnitudes.nonzero == 1
    assert magnitudes.largest == magnitudes.smallest == 3.0
    assert not magnitudes.casts[torch.float16]["overflow"]


def test_the_total_equals_adding_everything_to_one() -> None:
    parts = torch.from_numpy(spread_values(500)).float().chunk(3)
    together, separate = Magnitudes(), [Magnitudes() for _ in parts]
    for part, one in zip(parts, separate, strict=True):
        together.add(part)
        one.add(part)
    merged = Magnitudes.total(separate)
    assert merged.to_json() == together.to_json()
    assert torch.equal(merged.histogram, together.histogram)


def test_the_advised_scale_is_the_largest_power_of_two_that_fits() -> None:
    for largest in (1e-9, 0.3, 1.0, 65504.0, 1e8):
        magnitudes = Magnitudes()
        magnitudes.add(torch.tensor([largest, largest / 1000]))
        scale = magnitudes.scale_for_fp16(8.0)
        assert scale is not None
        assert np.log2(scale).is_integer()
        assert magnitudes.largest * scale * 8 <= 65504 < magnitudes.largest * scale * 16


# -- gradients


class Weighted(nn.Module):
    """``x * factor``, so that the gradient of the output is known."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(count))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradient_rates_of_a_known_distribution_equal_a_float64_count(precision: str) -> None:
    gradients = 2.0 ** np.random.default_rng(1).uniform(-40, 2, 5000)
    wanted = torch.from_numpy(gradients).float()
    exact = wanted.double().numpy()
    # The gradient of sum(wanted * output) is `wanted`; the factor's is that times its input, 4.
    model = nn.Sequential(Weighted(5000))
    report = audited(model, torch.full((5000,), 4.0), precision, loss=lambda out: (wanted * out.float()).sum())
    ranges = row(report, "0").ranges
    for magnitudes, values in ((ranges.output_gradients, exact), (ranges.parameter_gradients, 4 * exact)):
        assert magnitudes.count == 5000
        assert magnitudes.casts[torch.float16]["lost"] == int((values <= 2.0**-25).sum())
        assert magnitudes.largest == values.max()
    both = np.concatenate([exact, 4 * exact])
    advice = advise_scale(report)
    assert advice is not None
    assert advice.largest == both.max()
    assert advice.owner == "0"
    assert advice.scale == 2.0 ** np.floor(np.log2(65504 / 8 / both.max()))
    assert advice.lost == pytest.approx((both <= 2.0**-25).mean())
    assert advice.lost_scaled == pytest.approx((both * advice.scale <= 2.0**-25).mean())
    assert advice.rescued == pytest.approx(1 - advice.lost_scaled / advice.lost)
    assert 0 < advice.rescued < 1


def test_the_advised_scale_stays_within_the_bounds_of_the_config() -> None:
    report = audited(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4), loss=lambda out: 1e-20 * out.float().sum())
    for bounds in ((1.0, 1000.0), (2.0**30 + 1, 2.0**32)):
        advice = advise_scale(report, *bounds)
        assert advice is not None
        assert bounds[0] <= advice.scale <= bounds[1]
        assert np.log2(advice.scale).is_integer()
    assert advise_scale(audited(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4), loss=lambda o: 0 * o.sum())) is None


def test_a_gradient_is_seen_although_its_activation_is_changed_in_place() -> None:
    # Of three dimensions, a Linear returns a view.
    for shape in ((5, 4), (2, 5, 4)):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        fill(model[0].weight, 1.0)
        report = audited(model, torch.ones(shape), loss=lambda out: (2 * out.float()).sum())
        gradients = row(report, "0").ranges.output_gradients
        assert gradients.count == torch.Size(shape).numel()
        assert gradients.largest == gradients.smallest == 2.0
        assert row(report, "0").operations.gradients.keys() == {torch.bfloat16}


# -- what to keep in fp32


def growing() -> nn.Sequential:
    """The second layer makes 1e6 of ones, the third takes it in and makes 1 of it; the fourth is harmless."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    for layer, gain in zip(model, (1.0, 1e6, 1e-6, 1.0), strict=True):
        fill(layer.weight, gain / 4)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_activations_of_a_million_are_flagged_and_named(precision: str) -> None:
    report = audited(growing(), torch.ones(3, 4), precision)
    keep = modules_to_keep(report, torch.float16)
    assert [one.name for one in keep] == ["1", "2"]
    assert "activations up to 1.0e6; the largest fp16 number is 65504" in keep[0].reason
    assert "inputs of its products up to 1.0e6" in keep[1].reason
    assert row(report, "1").ranges.activations.casts[torch.float16]["overflow"] == 12
    assert modules_to_keep(report, torch.bfloat16) == []
    assert "precision.keep_fp32=[1,2]" in summary(report)["fp16"]


def test_keeping_what_was_named_cures_it_and_the_line_is_one_that_hydra_takes() -> None:
    line = keep_line(before := audited(growing(), torch.ones(3, 4), "fp16"), modules_to_keep(before, torch.float16))
    assert line is not None
    patterns = list(compose("experiment=digits", "precision=fp16", line.strip("'")).cfg.precision.keep_fp32)
    report = audited(model := growing(), torch.ones(3, 4), "fp16", patterns)
    assert modules_to_keep(report, torch.float16) == []
    with Precision("fp16").autocast("cpu"):
        assert model(torch.ones(3, 4)).isfinite().all()


def test_the_line_keeps_what_was_kept_before_and_leaves_out_what_lies_inside() -> None:
    outer = nn.Sequential(nn.Linear(4, 4), growing())
    fill(outer[0].weight, 0.25)
    fill(outer[0].bias, 0.0)
    report = audited(outer, torch.ones(3, 4), "fp16", ["0", "1.3"])
    assert keep_line(report, modules_to_keep(report, torch.float16)) == "'precision.keep_fp32=[0,1.3,1.1,1.2]'"


class OwnSum(nn.Module):
    """Code of the outermost module itself makes the values too large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 1e7


def test_the_outermost_module_has_no_pattern_and_the_advice_names_another_remedy() -> None:
    fill((model := OwnSum()).inner.weight, 1.0)
    report = audited(model, torch.ones(1, 4), "fp16", loss=lambda out: 1e-6 * out.float().sum())
    shown = summary(report)["fp16"]
    assert "(model): activations up to" in shown
    assert "move that code into a submodule" in shown
    assert "precision.keep_fp32=[" not in shown


def test_activations_below_all_normal_numbers_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    fill(model[0].weight, 1e-6)
    report = audited(model, torch.ones(1, 4), "fp16")
    (keep,) = modules_to_keep(report, torch.float16)
    assert keep.name == "0"
    assert "no activation is above 4.0e-6" in keep.reason


# -- what computes in what


class Mixed(nn.Module):
    """A convolution, a linear layer kept in fp32, a region without autocast, a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.kept = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.kept(self.conv(x).mean((2, 3))))
        with torch.autocast("cpu", enabled=False):
            return x.float() @ x.float().t()  # own product


def test_dtypes_and_flops_of_every_module_in_the_order_they_run() -> None:
    report = audited(Mixed(), torch.randn(2, 3, 8, 8), keep_fp32=["kept"])
    assert names(report) == ["conv", "(model)", "kept", "norm", "(task)"]
    bf16, fp32 = torch.bfloat16, torch.float32
    conv = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    linear, own = 2 * 2 * 4 * 6, 2 * 2 * 6 * 2
    expected = {
        "conv": (bf16, bf16, bf16, conv),
        "kept": (fp32, fp32, fp32, linear),
        "(model)": (fp32, fp32, fp32, own),
    }
    for name, (compute, output, gradient, flops) in expected.items():
        module = row(report, name)
        assert module.compute == [compute], name
        assert [*module.operations.outputs] == [output], name
        assert [*module.operations.gradients] == [gradient], name
        assert module.flops == flops, name
    assert row(report, "kept").kept
    assert report.flops == conv + linear + own
    assert report.low_share == conv / report.flops
    # The config asked for one of the two fp32 products, the code for the other.
    (product,) = findings(report, "product")
    assert (product.owner, product.operation) == ("(model)", "mm")
    assert product.where == source_line(Mixed.forward, "# own product")
    assert product.note == "autocast is off here"


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (nn.ConvTranspose1d(3, 4, 3), (2, 3, 8), 2 * 2 * 8 * 3 * 4 * 3),
        (nn.LSTM(3, 4, num_layers=2, bidirectional=True), (5, 2, 3), 2 * 10 * (2 * 16 * (3 + 4) + 2 * 16 * (8 + 4))),
        (nn.GRU(3, 4), (5, 2, 3), 2 * 10 * 12 * (3 + 4)),
        (nn.MultiheadAttention(8, 2, batch_first=True), (2, 5, 8), 2 * 2 * 5 * 8 * 8 * 4 + 2 * 2 * 2 * 5 * 5 * 8),
    ],
)
def test_flops_equal_the_formulas_of_a_textbook(model: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    several = isinstance(model, nn.MultiheadAttention)

    def loss(out: Any) -> Tensor:
        return (out[0] if isinstance(out, tuple) else out).float().sum()

    x = torch.randn(shape)
    report = audited(model, [x, x, x] if several else x, loss=loss)
    assert report.flops == expected


def test_a_module_that_only_moves_data_has_no_row_and_an_unused_one_neither() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Flatten(), nn.Linear(4, 2))
    model[0].add_module("unused", nn.Linear(4, 4))
    assert names(audited(model, torch.ones(3, 4))) == ["0", "3", "(task)"]


class Shared(nn.Module):
    """A layer that is used twice, and weights that are read by another module than their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.read = nn.Linear(4, 4)
        self.again = self.layer

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.again(self.layer(x)), self.read.weight)


def test_weights_used_twice_or_by_others_are_counted_once_and_under_their_own_name() -> None:
    report = audited(Shared(), torch.randn(2, 4))
    assert names(report) == ["layer", "(model)", "read", "(task)"]
    assert row(report, "layer").ranges.parameter_gradients.count == 16 + 4
    assert row(report, "layer").ranges.activations.count == 2 * 2 * 4
    assert row(report, "read").ranges.parameter_gradients.count == 16
    assert row(report, "read").flops == 0


# -- unintended fp32


class Table(nn.Module):
    """Makes tensors of its own in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rnn = nn.LSTM(4, 4)  # makes zeros itself, which is torch's business

    def forward(self, x: Tensor) -> Tensor:
        x = self.rnn(self.linear(x).unsqueeze(0))[0].squeeze(0)
        x = x + torch.zeros(4)  # wide
        x = x.to(torch.bfloat16) + x.new_zeros(4) + torch.ones(4, dtype=x.dtype)
        x = x + torch.zeros_like(x)
        mask = torch.arange(4) > 1
        with torch.autocast("cpu", enabled=False):
            torch.zeros(4)  # here fp32 was asked for
        return x * mask.float() * torch.full((4,), 2.0, dtype=torch.float32)  # three


def test_a_tensor_made_in_fp32_is_named_with_module_file_and_line() -> None:
    report = audited(nn.Sequential(Table()), torch.ones(2, 4), loss=lambda out: (out + torch.zeros(4)).sum())
    wide, three = source_line(Table.forward, "# wide"), source_line(Table.forward, "# three")
    seen = {(finding.operation, finding.where, finding.shape) for finding in findings(report, "created")}
    assert {("zeros", wide, (4,)), ("float", three, (4,)), ("full", three, (4,))} <= seen
    # `ones(dtype=x.dtype)`: x is fp32 by then, because of the zeros.
    assert {where for _, where, _ in seen} == {wide, three, source_line(Table.forward, "new_zeros")}
    assert {finding.owner for finding in findings(report, "created")} == {"0"}
    notes = {finding.operation: finding.note for finding in findings(report, "created")}
    assert notes["full"] == "dtype=float32"
    assert notes["zeros"] == ""
    shown = summary(report)["made in fp32"]
    assert f"zeros [4], {wide}: 0, 1 times" in shown


def test_an_operation_that_a_wide_operand_makes_fp32_is_named() -> None:
    report = audited(nn.Sequential(Table()), torch.ones(2, 4))
    promoted = {(finding.operation, finding.where) for finding in findings(report, "promoted")}
    # The second because `x.new_zeros` is fp32 after the first; from there on all operands are.
    assert promoted == {("add", source_line(Table.forward, "# wide")), ("add", source_line(Table.forward, "new_zeros"))}


def test_an_fp32_run_reports_only_tensors_whose_dtype_was_left_open() -> None:
    report = audited(nn.Sequential(Table()), torch.ones(2, 4), "fp32", loss=lambda out: out.float().sum())
    assert {finding.operation for finding in findings(report, "created")} == {"zeros", "float"}
    assert not findings(report, "promoted") + findings(report, "product")


# -- leaves no trace


def test_the_fp32_pass_leaves_parameters_buffers_and_gradients_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).bfloat16())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    audit = NumericsAudit(model, precision=Precision("bf16"), device=CPU)
    with audit.fp32_pass():
        audit.watched(lambda: model(torch.randn(8, 4)).sum())().backward()
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        assert (parameter.grad == 3).all()
        assert not parameter._backward_hooks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_values_are_those_of_fp32_even_where_a_parameter_is_16_bit() -> None:
    layer = nn.Linear(1, 1, bias=False).bfloat16()
    fill(layer.weight, 1.0)
    report = audited(nn.Sequential(layer), torch.full((1, 1), 1.001))
    assert row(report, "0").ranges.activations.largest == pytest.approx(1.001, rel=1e-6)


# -- run in other ways


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_not_counted_again(reentrant: bool) -> None:
    torch.manual_seed(0)
    plain, model = Checkpointed(None), Checkpointed(reentrant)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4)
    expected = {module.name: module.to_json() for module in audited(plain, x).modules}
    assert {module.name: module.to_json() for module in audited(model, x).modules} == expected


def test_operations_of_other_hooks_have_no_owner() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten())
    x = torch.randn(3, 4)
    expected = {module.name: module.to_json() for module in audited(model, x).modules}
    for module in model.modules():
        module.register_forward_pre_hook(lambda _module, inputs: (inputs[0].abs() @ torch.ones(4, 4), None)[1])
        module.register_forward_hook(lambda _module, _inputs, output: (output.float() @ torch.ones(4, 4), None)[1])
    report = audited(model, x)
    assert {module.name: module.to_json() for module in report.modules} == expected
    assert not report.findings


def test_a_compiled_module_is_audited_as_it_was_written() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    compiled: Any = torch.compile(plain, backend="eager")
    x = torch.randn(3, 4)
    expected = [module.to_json() for module in audited(plain, x).modules]
    got = [module.to_json() for module in audited(compiled, x).modules]
    assert [module | {"name": module["name"].removeprefix("_orig_mod.")} for module in got] == expected


# -- what a person sees


def printed(report: Report, width: int, every_module: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_tables(report, console, every_module)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_layers_that_differ_in_their_number_share_a_row_when_there_are_many() -> None:
    torch.manual_seed(0)
    deep = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(30)], nn.Linear(4, 2))
    report = audited(deep, torch.randn(3, 4))
    grouped = rows(report)
    assert [one.label for one in grouped] == ["*.0 x30", "*.1 x30", "30", "(task)"]
    assert sum(one.flops() for one in grouped) == report.flops
    assert grouped[0].merged(lambda module: module.ranges.activations).count == 30 * 12
    assert [one.label for one in rows(report, every_module=True)] == names(report)
    deeper = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(30)])
    assert [one.label for one in rows(audited(deeper, torch.randn(3, 4)))] == ["*.0 x30", "*.1 x30", "(task)"]
    assert "29.0" in printed(report, 200, every_module=True)
    assert "29.0" not in printed(report, 200)


def test_tables_show_bf16_only_where_it_would_change_something() -> None:
    small = audited(growing(), torch.ones(3, 4))
    assert "bf16" not in printed(small, 200).split("Activations, in fp32")[1]
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    fill(model[0].weight, 1.0)
    large = audited(model, torch.full((1, 1), 3.4e38), loss=lambda out: out.sum() * 0)
    assert "bf16" in printed(large, 300).split("Activations, in fp32")[1]
    assert [one.name for one in modules_to_keep(large, torch.bfloat16)] == ["0"]


def test_numbers_are_short_and_never_round_to_nothing_or_all() -> None:
    assert [magnitude(value) for value in (0.0, 0.0123, 3.14159, 1234.5, 65504.0, 1.2e-5, 3.4e38)] == [
        *("0", "0.0123", "3.14", "1.23e+03"),
        *("6.6e4", "1.2e-5", "3.4e38"),
    ]
    assert [percent(share) for share in (0, 1e-7, 0.0005, 0.1234, 0.99999, 1)] == [
        *("", "<.01%", "0.05%", "12.3%", ">99.9%", "100%"),
    ]


# -- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert doctor.main(["numerics", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_command_trains_a_few_steps_and_writes_nothing_but_what_was_asked_for(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "numerics.json"
    small = ("experiment=digits", "data.num_workers=0", "model.width=4", "train.global_batch_size=16", "steps=2")
    shown = run(capsys, *small, f"precision={precision}", f"run.dir={run_dir}", "--json", str(out))
    assert not run_dir.exists()
    assert "2 of 2 steps applied" in shown
    for part in ("Dtypes and FLOPs", "Conv2d", "Linear", "precision.loss_scale.init=", "nothing overflows"):
        assert part in shown
    content = json.loads(out.read_text())
    assert content["precision"] == precision
    assert [module["name"] for module in content["modules"]] == ["0", "1", "2", "3", "4", "5", "6", "8", "(task)"]
    assert content["low_precision_share"] == (0.0 if precision == "fp32" else 1.0)
    # Two steps of 16 images of 8x8: the first convolution of 3 to 4 channels, 3x3.
    assert content["modules"][0]["flops"] == {precision: 2 * 2 * 16 * 64 * 4 * 27}
    assert content["modules"][0]["activations"]["count"] == 2 * 16 * 64 * 4
    assert content["modules"][-1]["compute"] == ["fp32"]
    scale = content["advice"]["loss_scale"]["scale"]
    assert f"precision.loss_scale.init={scale:g}," in shown
    assert content["advice"]["keep_fp32"] == {"fp16": [], "bf16": []}
    assert len(content["losses"]) == 2


@pytest.mark.slow
def test_one_of_several_ranks_sees_its_share_of_the_batch_and_larger_gradients(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "numerics.json"
    small = ("experiment=digits", "data.num_workers=0", "model.width=4", "train.global_batch_size=16", "steps=1")
    seen = []
    for ranks in (1, 4):
        run(capsys, *small, f"ranks={ranks}", "data.shuffle=none", "data.lanes=1", f"--json={out}")
        seen.append(json.loads(out.read_text())["modules"][7])
    alone, one_of_four = seen
    assert alone["activations"]["count"] == 4 * one_of_four["activations"]["count"]
    # Each row's gradient is divided by the rows of the rank, not by those of the global batch.
    assert one_of_four["output_gradients"]["largest"] == pytest.approx(
        4 * alone["output_gradients"]["largest"], rel=0.5
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["experiment=digits", "steps=0"], "steps=0, want a whole number"),
        (["experiment=digits", "ranks=two"], "ranks=two, want a whole number"),
        ([], "Choose an experiment"),
        (["experiment=digits", "--json=no/such/folder/numerics.json"], "no/such/folder: is not a folder"),
        (["experiment=digits", "precision.keep_fp32=[nothing]"], "'nothing' matches no submodule"),
    ],
)
def test_what_cannot_work_is_refused(
    digits: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["numerics", *arguments])
    assert ended.value.code != 0
    assert part in capsys.readouterr().err


@pytest.mark.slow
def test_several_processes_are_refused(digits: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit):
        doctor.main(["numerics", "experiment=digits"])
    assert_refused(capsys.readouterr().err, "doctor numerics", "2 processes", "ranks=N measures one of N ranks")
