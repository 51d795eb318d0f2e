"""What travels in which dtype, and what arrives. The oracle computes in float64 and rounds once."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dtrain.data.field_options import parse_fields
from dtrain.data.wire import Wire
from dtrain.precision import Precision
from dtrain.precision.policy import ROLES

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FLOATS = (torch.float16, torch.float32, torch.float64)
COMPUTE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def wire_of(precision: str, role: str | None = "feature", **options: str) -> Wire:
    fields = parse_fields({"npy": {"name": "x", "role": role}})
    return Wire(fields, Precision(precision), **options)


def image_wire(precision: str, **options: Any) -> Wire:
    field = {"name": "image", "role": "image", "mean": MEAN, "std": STD}
    return Wire(parse_fields({"jpg": field}), Precision(precision), **options)


def sent(wire: Wire, source: Tensor) -> Tensor:
    out = torch.empty(source.shape, dtype=wire.dtype("x", source.dtype))
    wire.cast("x", "shard.tar/sample", source, out)
    return out


@pytest.mark.parametrize("precision", list(COMPUTE))
def test_only_floats_of_features_follow_the_precision(precision: str) -> None:
    for role in (None, *ROLES):
        if role in ("image", "text", "bytes"):
            continue
        wire = wire_of(precision, role)
        for own in FLOATS:
            assert wire.dtype("x", own) == (COMPUTE[precision] if role == "feature" else own)
        for own in (torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64):
            assert wire.dtype("x", own) == own


@pytest.mark.parametrize("precision", list(COMPUTE))
def test_a_feature_is_rounded_once_and_to_nearest(precision: str) -> None:
    source = torch.from_numpy(np.random.default_rng(0).normal(0, 100, 5000)).float()
    got = sent(wire_of(precision), source)
    assert got.dtype == COMPUTE[precision]
    bits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[got.dtype]
    fraction, exponent = torch.frexp(source.double())
    assert torch.equal(
        got.double(), torch.ldexp(torch.round(torch.ldexp(fraction, torch.tensor(bits))), exponent - bits)
    )


def test_labels_boxes_and_times_arrive_bit_for_bit() -> None:
    for role in ("label", "id", "coord", "target", "weight", None):
        for source in (
            torch.tensor([50257, 2**62 + 1]),
            torch.tensor([1333.3, 1e30, -0.0, math.inf]),
            torch.tensor([1.7e9 + 1e-7], dtype=torch.float64),
            torch.tensor([6.1e-5], dtype=torch.float16),
        ):
            got = sent(wire_of("bf16", role), source)
            assert got.dtype == source.dtype
            assert got.numpy().tobytes() == source.numpy().tobytes()


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("beside", [[], [math.nan], [math.inf, -math.inf]], ids=["alone", "by nan", "by infinities"])
def test_what_fp16_cannot_hold_is_named(own: torch.dtype, beside: list[float]) -> None:
    for value, told in ((2.0**17, "131072"), (-(2.0**20), "-1.04858e+06")):
        source = torch.tensor([1.0, value, *beside], dtype=own)
        message = f"sample 'shard.tar/sample': field 'x' holds {told}, outside the range of float16, +-65504"
        with pytest.raises(ValueError, match=re.escape(message)):
            sent(wire_of("fp16"), source)


def test_what_fp16_can_hold_passes() -> None:
    for values in ([65504.0, -65504.0], [math.nan, math.inf, -math.inf, 1e-9], []):
        source = torch.tensor(values, dtype=torch.float32)
        assert sent(wire_of("fp16"), source).numpy().tobytes() == source.half().numpy().tobytes()


def test_a_double_that_the_wire_cannot_hold_is_named_in_every_precision() -> None:
    for precision in COMPUTE:
        with pytest.raises(ValueError, match=r"field 'x' holds 1e\+300"):
            sent(wire_of(precision), torch.tensor([1e300], dtype=torch.float64))


def test_clamping_moves_what_is_too_large_to_the_edge_and_nothing_else() -> None:
    source = torch.tensor([1e6, -1e6, 3.0, math.nan, math.inf, -math.inf])
    got = sent(wire_of("fp16", on_overflow="clamp"), source)
    assert got.dtype == torch.float16
    assert got[[0, 1, 2, 4, 5]].tolist() == [65504.0, -65504.0, 3.0, math.inf, -math.inf]
    assert got[3].isnan()


def test_features_travel_in_fp32_where_that_was_asked_for() -> None:
    source = torch.tensor([1e6, 1.000001])
    for wire in (wire_of("fp16", on_overflow="fp32"), wire_of("fp16", mode="fp32"), wire_of("bf16", mode="fp32")):
        assert torch.equal(sent(wire, source), source)
    # There is nothing to widen where nothing can overflow.
    assert wire_of("bf16", on_overflow="fp32").dtype("x", torch.float32) == torch.bfloat16


def test_images_arrive_contiguous_where_channels_last_is_not_wanted() -> None:
    pixels = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).view(2, 4, 5, 3)
    got = image_wire("bf16", channels_last=False).arrive("image", pixels)
    assert got.is_contiguous()
    assert torch.equal(got, image_wire("bf16").arrive("image", pixels))


@pytest.mark.parametrize("precision", list(COMPUTE))
def test_images_arrive_normalised_in_the_compute_dtype_and_channels_last(precision: str) -> None:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 16, 12, 3), dtype=np.uint8))
    pixels[0, 0, :, :] = torch.arange(12).view(12, 1)
    got = image_wire(precision).arrive("image", pixels)
    exact = (pixels.double() / 255 - torch.tensor(MEAN).double()) / torch.tensor(STD).double()
    exact = exact.permute(0, 3, 1, 2)
    assert got.dtype == COMPUTE[precision]
    assert got.shape == (6, 3, 16, 12)
    assert got.is_contiguous(memory_format=torch.channels_last)
    if got.dtype == torch.float32:
        # The largest is 2.6: two roundings, each of half a unit in the last place.
        assert (got.double() - exact).abs().max() < 2.5e-7
    else:
        assert torch.equal(got, exact.to(got.dtype))


def test_every_grey_level_is_exact_where_mean_and_deviation_are_one_half() -> None:
    wire = Wire(parse_fields({"jpg": {"name": "image", "role": "image"}}), Precision("fp32"))
    levels = torch.arange(256, dtype=torch.uint8).view(1, 256, 1, 1).expand(1, 256, 1, 3)
    exact = (levels.double() - 127.5) / 127.5
    assert torch.equal(wire.arrive("image", levels), exact.float().permute(0, 3, 1, 2))


def test_other_fields_arrive_as_they_are() -> None:
    tensor = torch.tensor([1.5, 2.5])
    assert wire_of("bf16", "target").arrive("x", tensor) is tensor


def test_images_that_an_evaluation_normalised_first_can_be_trained_on() -> None:
    wire = image_wire("fp32")
    with torch.inference_mode():
        wire.arrive("image", torch.zeros(1, 2, 2, 3, dtype=torch.uint8))
    image = wire.arrive("image", torch.ones(1, 2, 2, 3, dtype=torch.uint8)).requires_grad_()
    (image**2).sum().backward()
    assert image.grad is not None


def test_the_banner_tells_what_travels() -> None:
    fields = parse_fields(
        {
            "jpg": {"name": "image", "role": "image"},
            "npy": {"name": "sound", "role": "feature"},
            "cls": {"name": "label"},
        }
    )
    assert Wire(fields, Precision("bf16")).describe() == "image uint8, sound bfloat16, label as stored"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fp8"}, "data.wire: got 'fp8', want auto or fp32"),
        ({"on_overflow": "ignore"}, "data.on_overflow: got 'ignore', want one of error, clamp, fp32"),
    ],
)
def test_unknown_modes_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wire_of("fp16", **options)


@pytest.mark.parametrize(
    ("precision", "dtype", "role", "saved"),
    [
        ("bf16", torch.float32, None, "2,000"),
        ("fp16", torch.float32, "label", "2,000"),
        ("bf16", torch.float64, None, "6,000"),
        ("fp32", torch.float64, None, "4,000"),
        ("fp32", torch.float32, None, None),
        ("bf16", torch.float32, "coord", None),
        ("bf16", torch.float32, "target", None),
        ("bf16", torch.bfloat16, None, None),
        ("bf16", torch.int64, None, None),
    ],
)
def test_floats_that_nobody_declared_are_told_with_the_bytes_that_a_role_would_save(
    precision: str, dtype: torch.dtype, role: str | None, saved: str | None
) -> None:
    told = wire_of(precision, role).suggestions({"x": torch.zeros(4, 10, 100, dtype=dtype)})
    assert len(told) == (saved is not None)
    if saved is not None:
        kind = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
        assert f"[10, 100], for it has {f'role {role}' if role else 'no role'}." in told[0]
        assert f"data.fields.npy.role=feature sends {kind}: {saved} bytes a sample less" in told[0]


def test_a_few_floats_or_a_wire_of_fp32_are_worth_no_line() -> None:
    assert wire_of("bf16", None).suggestions({"x": torch.zeros(4, 100)}) == []
    assert wire_of("bf16", None).suggestions({"x": ["text"]}) == []
    for options in ({"mode": "fp32"}, {"on_overflow": "fp32"}):
        assert wire_of("fp16", None, **options).suggestions({"x": torch.zeros(4, 1000)}) == []
