"""What a sample becomes in a shard: bytes by extension, under a key that readers find again.

Nothing is ever pickled, and nothing compressed with a loss that nobody asked for: a ``jpg`` comes as bytes.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from dtrain.data.fields import PICKLES

# ``skip_meta`` of webdataset/tariterators.py.
_SKIPPED = re.compile(r"__[^/]*__($|/)")


def check_key(key: Any, seen: set[str]) -> None:
    """Refuses a ``__key__`` under which a sample could not be read again.

    Args:
        key: What the sample has.
        seen: The keys of the shard so far; gets this one.

    Raises:
        ValueError: If it is no text, no relative name, has a dot where the extension would begin, or was there before.
    """
    if not isinstance(key, str) or not key:
        raise ValueError(f"a sample has the __key__ {key!r}, want a text.")
    if "." in key.rpartition("/")[2]:
        raise ValueError(
            f"key {key!r}: its last part has a dot, where readers of shards take the extension to begin; samples would "
            "be merged. Write an underscore instead."
        )
    if {"", ".", ".."} & set(key.split("/")) or "\0" in key:
        raise ValueError(f"key {key!r}: want a relative name without empty parts, '.' and '..'.")
    if _SKIPPED.match(key):
        raise ValueError(
            f"key {key!r}: webdataset takes __names__ like its first part for its own and skips them. Rename it."
        )
    if key in seen:
        raise ValueError(f"two samples of one shard have the key {key!r}. Each needs its own.")
    seen.add(key)


def encode(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Values to bytes, by extension, as webdataset's ``TarWriter`` wants its ``encoder``.

    Args:
        sample: As ``write_shards`` takes it; what starts with an underscore is webdataset's own and stays out of the tar.

    Returns:
        ``__key__``, and the bytes of each member by its extension.

    Raises:
        ValueError: If there is no member, or one that cannot be stored; names the key.
    """
    key = sample["__key__"]
    members = {ext: _encode_member(key, ext, value) for ext, value in sample.items() if not ext.startswith("_")}
    if not members:
        raise ValueError(f"sample {key!r} has no field.")
    return {"__key__": key, **members}


def _encode_member(key: str, ext: str, value: Any) -> bytes:
    if not ext or ext != ext.lower() or ext.startswith(".") or set(ext) & set("/\0"):
        raise ValueError(f"sample {key!r}: extension {ext!r}, want lower case without the leading dot, such as jpg.")
    last = ext.rpartition(".")[2]
    if last in PICKLES:
        raise ValueError(f"sample {key!r}: .{ext} is a pickle, which dtrain never writes or reads. Use npy or json.")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        return value.encode("utf-8")
    if last not in _ENCODERS:
        raise ValueError(f"sample {key!r}: no encoder for .{ext}. Pass bytes, or use one of {', '.join(_ENCODERS)}.")
    try:
        return _ENCODERS[last](value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"sample {key!r}: .{ext} cannot be written: {error}") from error


def _integer(value: Any) -> bytes:
    if int(value) != value:
        raise ValueError(f"{value!r} is not an integer")
    return str(int(value)).encode()


def _npy(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(value), allow_pickle=False)
    return stream.getvalue()


def _png(value: Any) -> bytes:
    pixels = np.asarray(value)
    if pixels.dtype != np.uint8:
        raise ValueError(f"pixels of dtype {pixels.dtype}, want uint8")
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


# webdataset's own encoders would pickle arrays of objects, and compress jpg in a way that nobody asked for.
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "class", "count"), _integer),
    "json": lambda value: json.dumps(value).encode(),
    "npy": _npy,
    "png": _png,
}
