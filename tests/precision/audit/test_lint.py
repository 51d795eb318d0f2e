"""The lint of `dtrain doctor numerics`: each offender by module and line, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dtrain.doctor import __main__ as doctor
from dtrain.models import GPT, CoordinateNet, ResNet, SmallCNN, ViT
from dtrain.precision.audit import Report
from dtrain.precision.audit.module_stack import PrecisionFinding
from dtrain.precision.audit.summary import summary
from tests.precision.audit.audits import audited, findings, source_line

LOWEST: Any = np.float32(-1e9)
LINT = ("created", "constant", "fixed", "raised", "in place", "naive")


def linted(report: Report) -> list[PrecisionFinding]:
    return [finding for finding in report.findings if finding.kind in LINT]


def to_scalar(out: Tensor) -> Tensor:
    return out.float().square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (lambda: ResNet(18, classes=4, stem="cifar", width=4), torch.rand(2, 3, 8, 8)),
        (lambda: ViT([16, 2, 2], classes=4, image_size=16, patch=8), torch.rand(2, 3, 16, 16)),
        (lambda: GPT(vocabulary=16, width=16, depth=2, heads=2, context=8), torch.randint(16, (2, 8))),
        (
            lambda: GPT(16, 16, 2, 2, 8, kv_heads=1, qk_norm=True, mlp="swiglu", norm="rms", bias=False),
            torch.randint(16, (2, 8)),
        ),
        (lambda: SmallCNN(classes=4, width=4), torch.rand(2, 3, 8, 8)),
        (lambda: CoordinateNet(width=4), torch.rand(2, 2, 4, 4)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), torch.rand(2, 3, 8)),
    ],
    ids=["ResNet", "ViT", "GPT", "modern GPT", "SmallCNN", "CoordinateNet", "torch's transformer"],
)
def test_models_that_follow_the_precision_are_clean(
    build: Callable[[], nn.Module], inputs: Tensor, precision: str
) -> None:
    assert linted(audited(build(), inputs, precision, loss=to_scalar)) == []


class Masks(nn.Module):
    """Attention with masks of every kind: those with a comment of one word overflow in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x)
        hidden = scores > 0
        scores = scores.masked_fill(hidden, -1e9)  # filled
        scores = scores + (1.0 - hidden.to(scores.dtype)) * -1e9  # multiplied
        scores = scores - 1e5 * hidden.to(scores.dtype)  # subtracted
        scores = torch.where(hidden, scores, torch.finfo(torch.float32).min)  # chosen
        scores[hidden] = -100_000  # assigned
        scores = torch.masked_fill(input=scores, mask=hidden, value=-1e9)  # named
        scores = scores.masked_fill(hidden, LOWEST)  # numpy
        scores = scores.masked_fill(hidden, float("-inf")).masked_fill(hidden, torch.finfo(scores.dtype).min)
        scores = scores + torch.where(hidden, 0.0, -1e4).to(scores.dtype)
        wide = (scores.float() * 1e6).masked_fill(hidden, -1e9)  # here it is known to be fp32
        ids = torch.full((2,), 100_000).masked_fill(torch.tensor([True, False]), 200_000)
        return wide.softmax(-1).nan_to_num().to(scores.dtype) + 0 * ids.sum().to(scores.dtype)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_masks_that_fp16_cannot_hold_are_named_with_their_lines_and_others_are_not(precision: str) -> None:
    report = audited(nn.Sequential(Masks()), torch.randn(2, 4), precision, loss=to_scalar)
    constants = {finding.where: finding for finding in findings(report, "constant")}
    marks = ["# filled", "# multiplied", "# subtracted", "# assigned", "# named", "# numpy"]
    if precision != "fp32":  # where `scores.dtype` might be written as well
        marks.append("# chosen")
    assert constants.keys() == {source_line(Masks.forward, mark) for mark in marks}
    assert {finding.owner for finding in constants.values()} == {"0"}
    first = constants[source_line(Masks.forward, "# filled")]
    assert (first.operation, first.note, first.shape) == ("masked_fill", "-1e+09", (2, 4))
    assert "torch.finfo(x.dtype).min" in summary(report)["beyond fp16"]
    assert f"masked_fill [2, 4], {first.where}, -1e+09: 0, 1 times" in summary(report)["beyond fp16"]


class Fixed(nn.Module):
    """Dtypes written into the code, and those that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).half().to(x.dtype)  # halved
        x = x + x.to(torch.bfloat16).to(x.dtype)  # to
        x = x * torch.ones(4, dtype=torch.float16).to(x.dtype)  # made
        with torch.autocast("cpu", torch.bfloat16):
            x = self.linear(x).to(self.scale.dtype)
        return x + self.linear(x) * self.scale.to(x.dtype)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_16_bit_dtype_that_is_written_in_the_code_is_named(precision: str) -> None:
    report = audited(nn.Sequential(Fixed()), torch.randn(2, 4), precision, loss=to_scalar)
    seen = {(finding.operation, finding.where, finding.note) for finding in findings(report, "fixed")}
    assert seen == {
        ("half", source_line(Fixed.forward, "# halved"), "float16"),
        ("to", source_line(Fixed.forward, "# to"), "bfloat16"),
        ("ones", source_line(Fixed.forward, "# made"), "float16"),
    }
    assert not findings(report, "in place")
    assert "x.to(other.dtype)" in summary(report)["fixed 16 bits"]


class Norm(nn.Module):
    """A root mean square in fp32, which is right; some cast back."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()  # up
        wide = wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        return wide.to(x.dtype) if self.back else wide


def test_a_module_that_casts_up_and_hands_that_on_is_named_unless_its_output_is_the_models() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Norm(back=False), nn.Linear(4, 4), Norm(back=True), nn.Linear(4, 4))
    (finding,) = linted(audited(model, torch.randn(2, 4), loss=to_scalar))
    assert (finding.kind, finding.owner, finding.operation) == ("raised", "1", "float")
    assert finding.where == source_line(Norm.forward, "# up")
    last = nn.Sequential(nn.Linear(4, 4), Norm(back=False))
    assert linted(audited(last, torch.randn(2, 4), loss=to_scalar)) == []
    kept = nn.Sequential(nn.Linear(4, 4), Norm(back=False), nn.Linear(4, 4))
    assert linted(audited(kept, torch.randn(2, 4), keep_fp32=["1"], loss=to_scalar)) == []


class InPlace(nn.Module):
    """Changes its weights, in three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.way == "data":
            self.linear.bias.data = self.linear.bias.data.to(hidden.dtype)  # data
        elif self.way == "module":
            self.linear.to(hidden.dtype)  # module
        else:
            self.linear.bfloat16()  # hard
        return hidden


@pytest.mark.parametrize(("way", "changed"), [("data", 1), ("module", 2), ("hard", 2)])
def test_weights_that_change_their_dtype_in_the_forward_are_named(way: str, changed: int) -> None:
    report = audited(nn.Sequential(InPlace(way)), torch.randn(2, 4), loss=to_scalar)
    places = findings(report, "in place")
    assert {finding.where for finding in places} == {source_line(InPlace.forward, f"# {way}")}
    assert {(finding.owner, finding.operation, finding.note) for finding in places} == {
        ("0", ".data =", "float32 becomes bfloat16")
    }
    assert len(places) == changed
    fixed = {finding.where for finding in findings(report, "fixed")}
    assert fixed == ({source_line(InPlace.forward, "# hard")} if way == "hard" else set())


# -- forms that need fp32, or another formula


def log_of_softmax(x: Tensor) -> Tensor:
    return -x.softmax(-1).log().mean()  # form


def log_of_clamped_softmax(x: Tensor) -> Tensor:
    probabilities = torch.softmax(x, -1) + 1e-8
    return -torch.log(probabilities).float().gather(-1, torch.zeros(2, 1, dtype=torch.long)).mean()  # form


def log_of_sigmoid(x: Tensor) -> Tensor:
    return -torch.log(torch.sigmoid(x)).mean()  # form


def log_of_the_other_class(x: Tensor) -> Tensor:
    return -(1 - x.sigmoid()).log().mean()  # form


def exp_and_sum(x: Tensor) -> Tensor:
    return (x.exp() / x.exp().sum(-1, keepdim=True)).square().mean()  # form


def log_of_sum_of_exp(x: Tensor) -> Tensor:
    return x.exp().sum(-1).log().mean()  # form


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("loss", "form", "instead"),
    [
        (log_of_softmax, "log of softmax", "log_softmax"),
        (log_of_clamped_softmax, "log of softmax", "cross_entropy"),
        (log_of_sigmoid, "log of sigmoid", "logsigmoid"),
        (log_of_the_other_class, "log of 1 - sigmoid", "binary_cross_entropy_with_logits"),
        (exp_and_sum, "div of exp", "softmax"),
        (log_of_sum_of_exp, "log of sum of exp", "logsumexp"),
    ],
)
def test_a_naive_loss_is_named_with_its_line_and_the_stable_form(
    loss: Callable[[Tensor], Tensor], form: str, instead: str, precision: str
) -> None:
    report = audited(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), precision, loss=lambda out: loss(out).float())
    (finding,) = findings(report, "naive")
    assert finding.owner == "(task)"
    assert finding.operation.replace("truediv", "div") == form
    shown = summary(report)["unstable form"]
    marked = "probabilities)" if loss is log_of_clamped_softmax else "# form"
    assert source_line(loss, marked) in shown
    assert instead in shown


def stable(x: Tensor) -> Tensor:
    shifted = (x - x.amax(-1, keepdim=True)).exp()
    by_hand = shifted / shifted.sum(-1, keepdim=True)
    gate = x.sigmoid() * x.softmax(-1)
    return (by_hand + gate + x.log_softmax(-1) + nn.functional.logsigmoid(x)).square().mean() + x.abs().add(
        1
    ).log().mean()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_stable_forms_are_not_named(precision: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert not findings(audited(model, torch.randn(2, 4), precision, loss=lambda out: stable(out).float()), "naive")


class Filled(SmallCNN):
    """Works in fp32 alone."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out.masked_fill(out < -1e9, -1e9)  # overflows


def test_a_run_that_fails_shows_what_was_found_before(digits: object, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["experiment=digits", "data.num_workers=0", "model.width=4", "train.global_batch_size=8", "steps=1"]
    with pytest.raises(SystemExit):
        doctor.main(["numerics", *small, "precision=fp16", "model._target_=tests.precision.audit.test_lint.Filled"])
    message = capsys.readouterr().err
    assert "numerics: found before the error" in message
    assert f"{source_line(Filled.forward, '# overflows')}, -1e+09: (model), 1 times" in message
    assert "without overflow" in message  # torch's own message
