"""What data sets return, made fit for a batch. Pillow and plain indexing say what the pixels are."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dtrain.data.fields import DataError, Field, SampleError
from dtrain.data.sample_source import value_fields
from dtrain.data.values import value_of

RGB = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
GREY = RGB[:, :, 0]
SPREAD = np.stack([GREY] * 3, axis=2)


def field_of(role: str | None = "image", **options: Any) -> Field:
    (field,) = value_fields({"x": {"name": "x", "role": role, **options}})
    return field


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(RGB, RGB, id="array"),
        pytest.param(RGB.transpose(2, 0, 1), RGB, id="channels first"),
        pytest.param(torch.from_numpy(RGB), RGB, id="tensor"),
        pytest.param(
            torch.from_numpy(RGB).permute(2, 0, 1), RGB, id="tensor, channels first, as torchvision reads files"
        ),
        pytest.param(GREY, SPREAD, id="grey"),
        pytest.param(torch.from_numpy(GREY)[None], SPREAD, id="grey tensor, channel first"),
        pytest.param(GREY[:, :, None], SPREAD, id="grey, channel last"),
        pytest.param(np.dstack([RGB, GREY]), RGB, id="alpha is dropped"),
        pytest.param(Image.fromarray(RGB), RGB, id="picture"),
        pytest.param(Image.fromarray(GREY), SPREAD, id="grey picture"),
        pytest.param(Image.fromarray(np.dstack([RGB, GREY])), RGB, id="picture with alpha"),
        pytest.param(png(RGB), RGB, id="an encoded image"),
    ],
)
def test_whatever_holds_pixels_becomes_three_channels_of_bytes(raw: Any, expected: np.ndarray) -> None:
    got = value_of(field_of(), raw)
    assert (got.dtype, got.shape) == (np.uint8, (6, 5, 3))
    assert np.array_equal(got, expected)


def test_images_are_brought_to_the_size_of_their_field() -> None:
    for raw in (RGB, png(RGB), Image.fromarray(RGB)):
        assert np.array_equal(value_of(field_of(size=[3, 4]), raw), value_of(field_of(size=[3, 4]), png(RGB)))
        assert value_of(field_of(size=[3, 4]), raw).shape == (3, 4, 3)


def test_a_picture_is_turned_as_its_exif_says_where_that_is_asked_for() -> None:
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 3
    Image.fromarray(RGB).save(stream, "PNG", exif=exif)
    picture = Image.open(stream)
    assert np.array_equal(value_of(field_of(), picture), RGB)
    assert np.array_equal(value_of(field_of(exif=True), picture), RGB[::-1, ::-1])


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (torch.zeros(3, 6, 5), "torch.float32 [3, 6, 5]"),
        (np.zeros((6, 5, 3)), "float64 [6, 5, 3]"),
        (np.zeros((6, 5, 2), np.uint8), "uint8 [6, 5, 2]"),
        ("path/to.jpg", "str"),
    ],
)
def test_what_holds_no_pixels_is_refused_with_the_remedy(raw: Any, told: str) -> None:
    with pytest.raises(DataError, match=rf"returns {re.escape(told)}, .*Leave out ToTensor.*role: feature"):
        value_of(field_of(), raw)


def test_everything_else_keeps_its_type() -> None:
    mask = Image.fromarray(np.array([[0, 7]], np.uint8), "P")
    assert value_of(field_of(None), mask).tolist() == [[0, 7]]
    for raw in (3, "text", b"bytes", np.int16(4), {"a": 1}):
        assert value_of(field_of(None), raw) is raw
    weight = torch.ones(2, requires_grad=True)
    assert not value_of(field_of("feature"), weight).requires_grad


def broken(value: Any) -> Any:
    raise {"value": ValueError, "file": OSError, "sample": SampleError, "bug": KeyError}[value](value)


def test_a_decoder_is_given_the_value_and_may_find_it_bad() -> None:
    assert value_of(field_of(None, decoder=str.upper), "a") == "A"
    for raw, told in (("value", "field 'x': ValueError: value"), ("file", "OSError: file"), ("sample", "^sample$")):
        with pytest.raises(SampleError, match=told):
            value_of(field_of(None, decoder=broken), raw)
    with pytest.raises(KeyError):
        value_of(field_of(None, decoder=broken), "bug")
    with pytest.raises(SampleError, match="not a readable image"):
        value_of(field_of(), png(RGB)[:40])
