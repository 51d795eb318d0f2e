"""What the encoders make of values, read by the libraries of the formats."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dtrain.data.encode import check_key, encode


def test_values_are_encoded_by_extension() -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    row = {
        "__key__": "folder.x/key",
        "__url__": "not a member",
        "cls": np.int64(7),
        "txt": "ä",
        "json": {"a": [1, None]},
        "npy": np.arange(3, dtype=np.float16),
        "png": pixels,
        "left.png": pixels[..., 0],
        "jpg": b"as it is",
        "mp3": memoryview(b"as it is"),
    }
    value = encode(row)
    assert value.pop("__key__") == "folder.x/key"
    assert set(value) == {ext for ext in row if not ext.startswith("_")}
    assert value["cls"] == b"7"
    assert value["txt"].decode() == "ä"
    assert json.loads(value["json"]) == {"a": [1, None]}
    array = np.load(io.BytesIO(value["npy"]))
    assert (array.dtype, array.tolist()) == (np.float16, [0, 1, 2])
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(value["png"]))), pixels)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(value["left.png"]))), pixels[..., 0])
    assert value["jpg"] == value["mp3"] == b"as it is"


def stored(sample: dict[str, Any]) -> dict[str, Any]:
    """As the writer does it."""
    check_key(sample.get("__key__"), set())
    return encode(sample)


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ({"cls": 1}, "__key__ None"),
        ({"__key__": "", "cls": 1}, "__key__ ''"),
        ({"__key__": 3, "cls": 1}, "__key__ 3"),
        ({"__key__": "img_0.5", "cls": 1}, "has a dot"),
        ({"__key__": "/etc/passwd", "cls": 1}, "relative name"),
        ({"__key__": "../up", "cls": 1}, "relative name"),
        ({"__key__": "a//b", "cls": 1}, "relative name"),
        ({"__key__": "__meta__/x", "cls": 1}, "skips them"),
        ({"__key__": "x"}, "no field"),
        ({"__key__": "x", "CLS": 1}, "lower case"),
        ({"__key__": "x", ".cls": 1}, "leading dot"),
        ({"__key__": "x", "pyd": {}}, "pickle"),
        ({"__key__": "x", "meta.pkl": b"\x80\x04."}, "pickle"),
        ({"__key__": "x", "pth": b""}, "pickle"),
        ({"__key__": "x", "npy": np.array([{}])}, "'x': .npy cannot be written"),
        ({"__key__": "x", "cls": 1.5}, "not an integer"),
        ({"__key__": "x", "cls": [1]}, "'x': .cls cannot be written"),
        ({"__key__": "x", "json": {1, 2}}, "'x': .json cannot be written"),
        ({"__key__": "x", "png": np.ones((2, 2))}, "float64"),
        ({"__key__": "x", "jpg": np.ones((2, 2, 3), np.uint8)}, "no encoder for .jpg"),
    ],
)
def test_what_cannot_be_read_again_is_refused(sample: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        stored(sample)


def test_the_second_of_two_equal_keys_is_refused() -> None:
    seen: set[str] = set()
    check_key("x", seen)
    with pytest.raises(ValueError, match="two samples of one shard have the key 'x'"):
        check_key("x", seen)
    check_key("y", seen)
