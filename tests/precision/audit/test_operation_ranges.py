"""Per-operation ranges of `dtrain doctor numerics`: what overflows or becomes zero inside a forward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dtrain.doctor import __main__ as doctor
from dtrain.models import SmallCNN
from dtrain.precision.audit import Report
from dtrain.precision.audit.operation_ranges import BACKWARD, OperationRange, OperationSite
from dtrain.precision.audit.summary import flushed, modules_to_keep, overflows, summary
from tests.precision.audit.audits import audited, source_line

FP16, BF16 = torch.float16, torch.bfloat16


class NaiveSoftmax(nn.Module):
    """Correct in fp32 for logits up to 88, in fp16 up to 11."""

    def forward(self, logits: Tensor) -> Tensor:
        powers = logits.exp()  # powers
        return powers / powers.sum(dim=-1, keepdim=True)


class Large(nn.Linear):
    """Logits of 1 to 14."""

    def __init__(self) -> None:
        super().__init__(4, 14, bias=False)
        with torch.no_grad():
            self.weight.copy_(torch.arange(1.0, 15.0)[:, None].expand(14, 4) / 4)


def found_at(report: Report, where: str) -> tuple[OperationSite, OperationRange]:
    return next((place, found) for place, found in report.operations.items() if place.where == where)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_an_exp_inside_a_forward_that_overflows_in_fp16_is_named_with_its_line(precision: str) -> None:
    model = nn.Sequential(Large(), NaiveSoftmax())
    report = audited(model, torch.ones(2, 4), precision, loss=lambda out: out.float().sum())
    where = source_line(NaiveSoftmax.forward, "# powers")
    place, found = overflows(report, FP16)[0]
    assert place == OperationSite("1", "exp", where)
    assert found.inputs.smallest == 1.0
    assert found.inputs.largest == 14.0
    assert found.outputs.largest == pytest.approx(torch.tensor(14.0).exp().item(), rel=1e-2)
    # exp(12), exp(13) and exp(14) of two rows, in one fp32 pass.
    assert found.infinite == {FP16: 6, BF16: 0}
    assert found.overflowed == (6 if precision == "fp16" else 0)
    assert not overflows(report, BF16)
    shown = summary(report)
    assert f"exp, {where}, in 1: results up to 1.2e6 from inputs 1 .. 14" in shown["overflow in fp16"]
    assert "log_softmax" in shown["overflow in fp16"]
    assert "nothing overflows" not in shown["fp16"]
    assert "precision.keep_fp32=[1]" in shown["fp16"]
    assert "nothing overflows" in shown["bf16"]


def test_softmax_overflows_nowhere_and_a_kept_module_is_left_out() -> None:
    stable = audited(
        nn.Sequential(Large(), nn.Softmax(-1)), torch.ones(2, 4), "fp16", loss=lambda out: out.float().sum()
    )
    kept = audited(
        nn.Sequential(Large(), NaiveSoftmax()), torch.ones(2, 4), "fp16", ["1"], loss=lambda out: out.float().sum()
    )
    for report in (stable, kept):
        assert overflows(report, FP16) == []
        assert modules_to_keep(report, FP16) == []
        assert "nothing overflows" in summary(report)["fp16"]


class InPlace(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.clone().exp_()  # in place


def test_an_operation_that_overwrites_its_input_is_the_origin_too() -> None:
    report = audited(
        nn.Sequential(Large(), InPlace()), torch.ones(2, 4), "fp16", loss=lambda out: out.float().sum() * 0
    )
    place, found = overflows(report, FP16)[0]
    assert place == OperationSite("1", "exp_", source_line(InPlace.forward, "# in place"))
    assert found.inputs.largest == 14.0


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_results_that_become_zero_are_counted_and_their_logarithm_is_an_overflow(precision: str) -> None:
    # softmax of 0, 4, 8 and so on: those more than 17.3 below the largest are less than half of fp16's smallest number.
    model = nn.Sequential(nn.Linear(4, 11, bias=False), nn.Softmax(-1))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(0.0, 44.0, 4.0)[:, None].expand(11, 4) / 4)
    report = audited(model, torch.ones(2, 4), precision, loss=lambda out: -out.log().sum().float())
    (place, found), *_ = flushed(report, FP16)
    assert (place.owner, place.operation) == ("1", "_softmax")
    assert found.lost[FP16] == 2 * 6
    assert found.lost_share(FP16) == pytest.approx(6 / 11)
    assert found.lost[BF16] == 0
    assert "54.5% of results" in summary(report)["zero in fp16"]
    if precision == "fp16":
        (logarithm,) = [place for place, _ in overflows(report, FP16)]
        assert (logarithm.owner, logarithm.operation) == ("(task)", "log")
        assert "not finite" in summary(report)["overflow in fp16"]
        assert "nothing overflows" not in summary(report)["fp16"]


def test_code_of_the_task_has_no_module_to_keep() -> None:
    def loss(out: Tensor) -> Tensor:
        return out.float().sum() + 0 * out.detach().exp().float().sum()

    report = audited(nn.Sequential(Large()), torch.ones(2, 4), "fp16", loss=loss)
    ((place, _),) = overflows(report, FP16)
    assert (place.owner, place.operation) == ("(task)", "exp")
    assert modules_to_keep(report, FP16) == []
    assert "task's own code" in summary(report)["fp16"]


def test_a_loss_scale_that_is_too_large_is_told_from_an_overflow_of_the_forward() -> None:
    report = audited(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.ones(2, 4), "fp16", loss=scaled)
    origins = [place for place, found in overflows(report, FP16)]
    assert {place.where for place in origins} == {BACKWARD}
    shown = summary(report, skipped=(5, 5))
    assert shown["skipped"].startswith("5 of 5 steps: ")
    assert "loss scale" in shown["skipped"]
    assert "nothing overflows" not in shown["fp16"]


def scaled(out: Tensor) -> Tensor:
    # Below fp16's range in the fp32 pass and beyond it in the configured one, as with a loss scale.
    factor = 1e6 if out.dtype == FP16 else 1.0
    return out.float().sum() * factor


class NotFinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)  # zero


def test_what_is_not_finite_in_fp32_either_is_not_blamed_on_the_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 4), NotFinite())
    report = audited(model, torch.ones(2, 4), "fp16", loss=lambda out: out.float().sum())
    assert overflows(report, FP16) == []
    assert "in fp32 either" in summary(report, skipped=(1, 1))["skipped"]


def test_a_mask_of_minus_infinity_is_no_overflow() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.eye(4, dtype=torch.bool)
            x = x.masked_fill(hidden, float("-inf"))
            return torch.where(hidden, x.new_full((), float("-inf")), x).softmax(-1)

    report = audited(nn.Sequential(nn.Linear(4, 4), Masked()), torch.ones(4, 4), "fp16", loss=lambda o: o.float().sum())
    assert overflows(report, FP16) == []


# -- ScriptModules


def traced() -> nn.Module:
    return torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(2, 4))


def half_traced() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), traced())


@pytest.mark.parametrize(("build", "name", "products"), [(traced, "(model)", 2), (half_traced, "1", 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_script_module_is_measured_as_one_module(
    build: Callable[[], nn.Module], name: str, products: int, precision: str
) -> None:
    report = audited(build(), torch.ones(2, 4), precision, loss=lambda out: out.float().sum())
    module = next(module for module in report.modules if module.name == name)
    assert module.flops == 2 * 2 * (4 * 4 + 4 * 2)
    assert module.ranges.parameter_gradients.count == 4 * 4 + 4 + 2 * 4 + 2
    assert f"{name}: measured as one module" in summary(report)["ScriptModule"]


# -- the command


class Naive(SmallCNN):
    """Returns probabilities that were computed by hand."""

    def forward(self, images: Tensor) -> Tensor:
        powers = (super().forward(images) * 40 + 20).exp()  # overflows
        return powers / powers.sum(dim=-1, keepdim=True)


SMALL = ("experiment=digits", "data.num_workers=0", "model.width=4", "train.global_batch_size=8", "steps=2")


def test_the_command_names_the_line_for_which_all_steps_are_skipped(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "numerics.json"
    naive = ("precision=fp16", f"model._target_={__name__}.Naive", f"--json={out}")
    assert doctor.main(["numerics", *SMALL, *naive]) == 0
    shown = capsys.readouterr().out
    assert "0 of 2 steps applied" in shown
    where = source_line(Naive.forward, "# overflows")
    assert f"2 of 2 steps: exp, {where}, in (model) overflows in the forward" in " ".join(shown.split())
    assert "move that code into a submodule" in shown
    (operation,) = [one for one in json.loads(out.read_text())["operations"] if one["operation"] == "exp"]
    assert operation["dtypes"] == ["fp16"]
    assert operation["overflowed"] > 0


def test_the_command_examines_a_script_module(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["numerics", *SMALL, "model._target_=tests.precision.test_modules.scripted"]) == 0
    assert "(model): measured as one module" in capsys.readouterr().out
