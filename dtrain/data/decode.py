"""The bytes of a member to a value, by the kind of its field. A closed table: nothing here can run what it reads.

Arrays keep the type they were stored in; what travels in which dtype is decided by ``dtrain.data.wire``.
"""

from __future__ import annotations

import functools
import io
import json
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dtrain.data.crop import Crop
from dtrain.data.fields import DataError, Field, SampleError
from dtrain.data.image import decode_image

__all__ = ["MAX_ARRAY_BYTES", "SampleError", "decode"]

#: A compressed array may not unpack to more.
MAX_ARRAY_BYTES = 2**30
_DTYPES = frozenset("?bBhHiIlLqQefdFD")
# What numpy writes for bf16 (of ml_dtypes, or a tensor's .view(torch.int16).numpy().view("V2")): two bytes without a name.
_BF16 = np.dtype("V2")
_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# What numpy and zipfile raise on damaged files.
_DAMAGE = (
    ValueError,
    OSError,
    EOFError,
    KeyError,
    RuntimeError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
)
_INT64 = range(-(2**63), 2**63)


def decode(
    field: Field,
    payload: bytes | memoryview,
    out: np.ndarray | None = None,
    crop: Callable[[int, int], Crop] | None = None,
) -> Any:
    """The value of one member.

    Args:
        field: Says how to read it.
        payload: The member's bytes.
        out: uint8, ``[height, width, 3]``: where an image goes if it has that shape.
        crop: ``crop(height, width)`` of an image, in place of the field's own.

    Returns:
        By kind: image, uint8 ``[height, width, 3]`` (``out`` itself if it fits); integer, an int in the range of int64;
        text, a str; json, what it says; array, a writable array of native byte order in its stored type; raw, the same,
        ``[length]``; bytes, a copy; custom, what the field's decoder returns. Arrays and custom values of the role image
        are cropped too.

    Raises:
        SampleError: If the bytes are not what the field says. ``ValueError``, ``OSError`` and ``EOFError`` of a field's
            own decoder count as that; anything else it raises passes through.
        DataError: If a field's own decoder returns no pixels for the role image.
    """
    crop = crop or field.crop
    if field.kind == "image":
        try:
            return decode_image(payload, crop, out, field.exif, field.decode == "reduced")
        except SampleError as error:
            raise SampleError(f"field {field.name!r}: {error}") from error
    value = _READERS[field.kind](field, payload)
    if field.role == "image" and crop is not None:
        return np.ascontiguousarray(crop(*value.shape[:2]).cut(value))
    return value


def _integer(field: Field, payload: bytes | memoryview) -> int:
    try:
        value = int(bytes(payload))
    except ValueError:
        raise SampleError(f"field {field.name!r}: {_excerpt(payload)} is not an integer") from None
    if value not in _INT64:
        raise SampleError(f"field {field.name!r}: {_excerpt(payload)} does not fit into 64 bits")
    return value


def _text(field: Field, payload: bytes | memoryview) -> str:
    try:
        return str(payload, "utf-8")
    except UnicodeDecodeError as error:
        raise SampleError(f"field {field.name!r}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _json(field: Field, payload: bytes | memoryview) -> Any:
    try:
        return json.loads(bytes(payload))
    # Brackets nested by the thousand end in a RecursionError.
    except (ValueError, RecursionError) as error:
        raise SampleError(f"field {field.name!r}: not JSON: {error}") from None


def _bytes(field: Field, payload: bytes | memoryview) -> bytes:
    return bytes(payload)


def _array(field: Field, payload: bytes | memoryview) -> np.ndarray | torch.Tensor:
    try:
        array = _npz(payload) if payload[:2] == b"PK" else _npy(payload)
    except _DAMAGE as error:
        raise SampleError(f"field {field.name!r}: not a readable array: {error}") from error
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if field.role == "image" and not _is_pixels(array):
        raise SampleError(
            f"field {field.name!r}: an image is uint8 [height, width, 3], this is {array.dtype} {list(array.shape)}"
        )
    return array


def _raw(field: Field, payload: bytes | memoryview) -> np.ndarray:
    dtype = np.dtype(field.dtype).newbyteorder("<")
    numbers, rest = divmod(len(payload), dtype.itemsize)
    if rest or field.length not in (None, numbers):
        wanted = "whole numbers" if field.length is None else f"{field.length} numbers"
        raise SampleError(f"field {field.name!r}: {len(payload)} bytes are not {wanted} of {field.dtype}")
    # A copy, for the payload is read-only and may be a piece of something larger.
    return np.frombuffer(payload, dtype).astype(dtype.newbyteorder("="))


def _custom(field: Field, payload: bytes | memoryview) -> Any:
    if field.decoder is None:
        raise TypeError(f"field {field.name!r} has no decoder.")
    try:
        value = field.decoder(bytes(payload))
    except SampleError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise SampleError(f"field {field.name!r}: {type(error).__name__}: {error}") from error
    if field.role == "image" and not _is_pixels(value):
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise DataError(f"field {field.name!r}: its decoder returned {got}, an image is uint8 [height, width, 3].")
    return value


_READERS: dict[str, Callable[[Field, bytes | memoryview], Any]] = {
    "integer": _integer,
    "text": _text,
    "json": _json,
    "array": _array,
    "raw": _raw,
    "bytes": _bytes,
    "custom": _custom,
}


def _npy(payload: bytes | memoryview) -> np.ndarray:
    """An array in numpy's format; like ``np.load(allow_pickle=False)``, which parses every header anew."""
    head = bytes(payload[:12])
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise ValueError(f"starts with {head[:8]!r}, not as npy does")
    # Version 1 has two bytes of header length, the later ones four.
    start = 10 if head[6] == 1 else 12
    end = start + int.from_bytes(head[8:start], "little")
    shape, fortran, dtype = _npy_header(bytes(payload[:end]))
    count = math.prod(shape)
    if len(payload) - end < count * dtype.itemsize:
        raise ValueError(f"{dtype} {list(shape)} takes {count * dtype.itemsize} bytes, {len(payload) - end} are there")
    flat = np.frombuffer(payload, dtype, count, end)
    # A copy, for the payload is read-only and may be a piece of something larger. Only the byte order is made ours.
    return flat.reshape(shape, order="F" if fortran else "C").astype(dtype.newbyteorder("="), order="C")


@functools.lru_cache(maxsize=1024)
def _npy_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    # Shards hold few different headers, and parsing one takes longer than reading a small array.
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    if version not in _HEADER_READERS:
        raise ValueError(f"npy version {version[0]}.{version[1]} is for records with named columns, not for tensors")
    try:
        shape, fortran, dtype = _HEADER_READERS[version](stream)
    except (SyntaxError, TypeError, tokenize.TokenError, RecursionError) as error:
        raise ValueError(f"damaged header: {error}") from error
    if dtype.char not in _DTYPES and dtype != _BF16:
        raise ValueError(f"dtype {dtype} is none of a tensor; store numbers")
    return shape, fortran, dtype


def _npz(payload: bytes | memoryview) -> np.ndarray:
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        members = archive.infolist()
        if len(members) != 1:
            raise ValueError(
                f"{len(members)} arrays ({', '.join(member.filename for member in members[:8])}), want one; store each "
                "as its own npy member, or give the field a decoder"
            )
        if members[0].file_size > MAX_ARRAY_BYTES:
            raise ValueError(f"unpacks to {members[0].file_size} bytes, more than the limit of {MAX_ARRAY_BYTES}")
        return _npy(archive.read(members[0]))


def _is_pixels(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def _excerpt(payload: bytes | memoryview) -> str:
    text = bytes(payload[:24])
    return repr(text.decode("ascii", "backslashreplace")) + ("..." if len(payload) > 24 else "")
