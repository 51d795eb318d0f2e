"""Decoders: the bytes of a member to a value, by the kind of its field.

* The table of decoders is closed: none of them can run code from the data (no pickle).
* Arrays keep the dtype they were stored in; ``dtrain.data.loading.batch`` decides the transfer dtype.
* Every image file becomes uint8 RGB ``[height, width, 3]``. The format is recognised by the first bytes, never by the
  extension, and the size in the header is checked before anything is decompressed.
* JPEG is decoded by libjpeg-turbo (simplejpeg), directly into the batch where the size fits. Pillow decodes every other
  format, and files that libjpeg-turbo rejects or warns about.
* A crop is chosen between header and pixels, so that a large JPEG need not be decoded at full size.
"""

from __future__ import annotations

import ctypes
import functools
import io
import json
import lzma
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError, _imaging
from torch import Tensor

from dtrain.data.fields.crop import Crop
from dtrain.data.fields.field import INT64, MEDIA, DataError, Field, SampleError
from dtrain.data.fields.media import MAX_PIXELS, Unreadable, audio_and_mask, decode_media
from dtrain.data.fields.regions import boxes_and_count
from dtrain.data.fields.tokenizers import tokenizer_of

#: Largest size in bytes of a compressed array after decompression.
MAX_ARRAY_BYTES = 2**30
_DTYPES = frozenset("?bBhHiIlLqQefdFD")
# numpy writes bf16 (of ml_dtypes, or a tensor's .view(torch.int16).numpy().view("V2")) as two bytes without a type
# name.
_BF16 = np.dtype("V2")
_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# Observed errors of numpy, zipfile, Pillow and its libraries on damaged files.
_DAMAGE = (ValueError, OSError, EOFError, LookupError, RuntimeError, struct.error, zlib.error)
_TORCH_ALLOCATOR = "DefaultCPUAllocator"  # in the RuntimeError of an allocation that fails
_ARRAY_DAMAGE = (*_DAMAGE, lzma.LZMAError, zipfile.BadZipFile)
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_IMAGE_DAMAGE = (*_DAMAGE, SyntaxError, TypeError, ArithmeticError, *_BOMBS)
_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PN"
_TIFF = (b"II*", b"MM\0")
# Pillow modes of a PNG with one number for each pixel.
_MASK_MODES = ("1", "L", "P", "I;16", "I")
_GREY = 0  # colour type of a PNG
# A short list, because some of Pillow's formats start other programs (EPS) or read other files.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
# EXIF orientation: its tag, bytes without which a file has none, and its values.
_ORIENTATION = 0x0112
_EXIF_MARKS = {_JPEG: (b"Exif\0\0",), _PNG: (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")}
_TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels),
}


def decode(
    field: Field,
    payload: bytes | memoryview,
    out: np.ndarray | None = None,
    crop: Callable[[int, int], Crop] | None = None,
    at: float = 0.5,
) -> Any:
    """The value of one member.

    Args:
        field: Declares how to read it.
        payload: The member's bytes.
        out: uint8, ``[height, width, 3]``: where an image is written if it has that shape.
        crop: ``crop(height, width)`` of an image or of each frame, in place of the field's own.
        at: Which part of a recording is taken, from 0 to 1; 0.5: the middle.

    Returns:
        By kind: image, uint8 ``[height, width, 3]`` (``out`` itself if it fits); mask, as ``decode_mask``; integer, an int in
        the range of int64; text, a str; json, the parsed value without a role, else the value at the field's key (see
        ``Field``); array, a writable array of native byte order in its stored dtype; raw, the same, ``[length]``; bytes, a
        copy; custom, the result of the field's decoder. Arrays and custom values of the role image are cropped too, masks and
        boxes are not: see ``dtrain.data.fields.regions``. With a tokenizer, tokens (see ``tokens_of``). With the roles audio
        and video, a part of the recording (see ``decode_media``).

    Raises:
        SampleError: If the bytes do not fit the field, or memory cannot be allocated. ``ValueError``, ``OSError`` and
            ``EOFError`` of a field's own decoder become this; its other errors are passed on.
        DataError: If a field's own decoder returns no pixels for the role image.
    """
    try:
        return _decode(field, payload, out, crop or field.crop, at)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _TORCH_ALLOCATOR not in str(error):
            raise
        raise SampleError(f"field {field.name!r}: not enough memory for {len(payload)} bytes: {error}") from error


def _decode(
    field: Field,
    payload: bytes | memoryview,
    out: np.ndarray | None,
    crop: Callable[[int, int], Crop] | None,
    at: float,
) -> Any:
    if field.kind == "image":
        try:
            return decode_image(payload, crop, out, field.exif, field.decode == "reduced")
        except SampleError as error:
            raise SampleError(f"field {field.name!r}: {error}") from error
    value: Any = payload if field.kind in MEDIA else _READERS[field.kind](field, payload)
    if field.role in MEDIA:
        return part_of(field, value, at, crop)
    if field.role == "image" and crop is not None:
        return np.ascontiguousarray(crop(*value.shape[:2]).cut(value))
    return value if field.tokenizer is None else tokens_of(field, value)


def part_of(field: Field, recording: Any, at: float, crop: Callable[[int, int], Crop] | None) -> np.ndarray:
    """``decode_media``, whose errors become ``SampleError``."""
    try:
        return decode_media(field, recording, at, crop)
    except Unreadable as error:
        raise SampleError(f"field {field.name!r}: {error}") from error


def tokens_of(field: Field, text: Any) -> np.ndarray:
    """The tokens of a text, int64, ``[field.length]``: cut, followed by the end-of-text token, padded with -1.

    Raises:
        SampleError: If ``text`` is not a string.
    """
    assert field.tokenizer is not None
    assert field.length is not None
    if not isinstance(text, str):
        raise SampleError(f"field {field.name!r}: {_described(text)}, want text")
    tokenizer = tokenizer_of(field.tokenizer)
    tokens = tokenizer.encode(_checked_text(field, text))[: field.length - 1]
    row = np.full(field.length, -1, np.int64)
    assert tokenizer.end_of_text is not None  # checked by Field
    row[: len(tokens)] = tokens
    row[len(tokens)] = tokenizer.end_of_text
    return row


def values_and_mask(field: Field, padded: Any) -> tuple[Tensor, Tensor]:
    """Padded rows of a field with two columns, with zeros as padding; and a mask, bool, false there, or the count of boxes.

    Args:
        field: Tokens, audio or boxes.
        padded: A row or rows of ``tokens_of``, ``decode_media`` or ``padded_boxes``, a tensor or an array.
    """
    rows = torch.as_tensor(padded)
    if field.role == "boxes":
        return boxes_and_count(rows)
    return audio_and_mask(rows) if field.role == "audio" else (rows.clip(min=0), rows >= 0)


def _integer(field: Field, payload: bytes | memoryview) -> int:
    try:
        value = int(bytes(payload))
    except ValueError:
        raise SampleError(f"field {field.name!r}: {_excerpt(payload)} is not an integer") from None
    if value not in INT64:
        raise SampleError(f"field {field.name!r}: {_excerpt(payload)} does not fit into 64 bits")
    return value


def _text(field: Field, payload: bytes | memoryview) -> str:
    try:
        return str(payload, "utf-8")
    except UnicodeDecodeError as error:
        raise SampleError(f"field {field.name!r}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _checked_text(field: Field, text: str) -> str:
    """The text itself; refuses half of a surrogate pair, which JSON can hold and no tokenizer or file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SampleError(f"field {field.name!r}: not Unicode text: {error.reason} (character {error.start})") from None
    return text


def _json(field: Field, payload: bytes | memoryview) -> Any:
    try:
        if field.role is None:
            return json.loads(bytes(payload))
        value = _last_json(bytes(payload))
    # Thousands of nested brackets raise a RecursionError.
    except (ValueError, RecursionError) as error:
        raise SampleError(f"field {field.name!r}: not JSON: {error}") from None
    path = field.key.split(".") if field.key else []
    for depth, name in enumerate(path):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            inside = repr(".".join(path[:depth])) if depth else "the JSON"
            raise SampleError(f"field {field.name!r}: no value at key {field.key!r}; {inside} is {_described(value)}")
    if field.role == "text":
        if not isinstance(value, str):
            raise SampleError(f"field {field.name!r}: {_described(value)} at key {field.key!r}, want text")
        return _checked_text(field, value)
    return _json_numbers(field, value)


# The fields of one sample are often in the same member. Callers do not modify the value, nor pass it on.
_last_json = functools.lru_cache(maxsize=1)(json.loads)


def _json_numbers(field: Field, value: Any) -> int | np.ndarray:
    whole = field.role in ("label", "id")
    if whole and isinstance(value, int) and value in INT64:
        return int(value)
    try:
        array = np.array(value)
    except ValueError:  # lists of different lengths
        array = np.array(None)
    if array.dtype.kind not in ("bi" if whole else "biuf"):
        wanted = "integers" if whole else "numbers"
        place = f"at key {field.key!r}" if field.key else "in the JSON"
        raise SampleError(
            f"field {field.name!r}: {_described(value)} {place}, role {field.role} wants {wanted} or lists of equal length"
        )
    if whole:
        return array.astype(np.int64)
    with np.errstate(over="ignore"):
        result = array.astype(np.float32)
    if not np.array_equal(np.isfinite(array), np.isfinite(result)):
        raise SampleError(f"field {field.name!r}: a number at key {field.key!r} is outside the range of fp32")
    return result


def _described(value: Any) -> str:
    """A parsed JSON value in an error message."""
    if isinstance(value, dict):
        names = ", ".join(map(repr, list(value)[:8])) or "nothing"
        return f"an object with {names}{' and others' if len(value) > 8 else ''}"
    kind = "a list" if isinstance(value, list) else "null" if value is None else type(value).__name__
    return kind if value is None else f"{kind} {_excerpt(json.dumps(value).encode())}"


def _array(field: Field, payload: bytes | memoryview) -> np.ndarray | torch.Tensor:
    try:
        array = _npz(payload) if payload[:2] == b"PK" else _npy(payload)
    except _ARRAY_DAMAGE as error:
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
    # A copy, because the payload is read-only and may be a view of a larger buffer.
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
    "mask": lambda field, payload: decode_mask(payload, field.name),
    "bytes": lambda field, payload: bytes(payload),
    "custom": _custom,
}


def _npy(payload: bytes | memoryview) -> np.ndarray:
    """An array in numpy's format; like ``np.load(allow_pickle=False)``, but repeated headers are parsed only once."""
    head = bytes(payload[:12])
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise ValueError(f"starts with {head[:8]!r}, which is not an npy header")
    # Version 1 has two bytes of header length, the later ones four.
    start = 10 if head[6] == 1 else 12
    end = start + int.from_bytes(head[8:start], "little")
    shape, fortran, dtype = _npy_header(bytes(payload[:end]))
    count = math.prod(shape)
    if len(payload) - end < count * dtype.itemsize:
        raise ValueError(f"{dtype} {list(shape)} needs {count * dtype.itemsize} bytes, got {len(payload) - end}")
    flat = np.frombuffer(payload, dtype, count, end)
    # A copy, because the payload is read-only and may be a view of a larger buffer; in native byte order.
    return flat.reshape(shape, order="F" if fortran else "C").astype(dtype.newbyteorder("="), order="C")


@functools.lru_cache(maxsize=1024)
def _npy_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    # Cached: shards contain few different headers, and parsing one takes longer than reading a small array.
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    if version not in _HEADER_READERS:
        raise ValueError(f"npy version {version[0]}.{version[1]} is for records with named columns, not for tensors")
    try:
        shape, fortran, dtype = _HEADER_READERS[version](stream)
    except (SyntaxError, TypeError, tokenize.TokenError, RecursionError) as error:
        raise ValueError(f"damaged header: {error}") from error
    if dtype.char not in _DTYPES and dtype != _BF16:
        raise ValueError(f"dtype {dtype} is not a dtype of tensors; store numbers")
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


def decode_image(
    payload: bytes | memoryview,
    crop: Callable[[int, int], Crop] | None = None,
    out: np.ndarray | None = None,
    exif: bool = False,
    reduced: bool = False,
) -> np.ndarray:
    """The pixels of an image file.

    Grey and palette images are expanded to three channels; alpha is dropped, not composited (as ``convert("RGB")``,
    torchvision and webdataset's ``rgb8`` do); CMYK of a JPEG is converted by libjpeg-turbo, which differs from Pillow
    by one grey level; 16-bit samples keep their high byte. Of an animation the first frame is taken. Flaws that libjpeg
    only warns of are accepted, as by other loaders (stray bytes between segments are common in collections from the
    web); missing data is not.

    Args:
        payload: The file: JPEG, PNG, WebP, BMP, GIF, TIFF, PPM or AVIF.
        crop: ``crop(height, width) -> Crop`` of the image, called once; None keeps all of it at its own size.
        out: uint8, ``[height, width, 3]``. If the result has this shape it is written there; otherwise the content of
            ``out`` is undefined afterwards.
        exif: Rotate the image as its EXIF orientation says, before it is cropped.
        reduced: Decode a JPEG that is not rotated at 1/2, 1/4 or 1/8 of its size if its crop allows that
            (``Crop.reduction``).

    Returns:
        uint8, ``[height, width, 3]``, writable and contiguous: ``out`` itself if the shape fits, else a new array.

    Raises:
        SampleError: If the file is damaged, incomplete, of no known format or larger than ``MAX_PIXELS``.
        TypeError: If ``out`` is not uint8.
    """
    if out is not None and out.dtype != np.uint8:
        raise TypeError(f"out has dtype {out.dtype}, images are uint8.")
    turn = exif_turn(payload) if exif else None
    is_jpeg = payload[:3] == _JPEG
    shape = _jpeg_shape(payload) if reduced and is_jpeg and crop is not None and turn is None else None
    chosen = crop(*shape) if crop is not None and shape is not None else None
    factor = chosen.reduction if chosen is not None else 1
    pixels = None
    if shape is not None and factor > 1:
        pixels = _decode_reduced(payload, shape, factor)
    elif is_jpeg:
        pixels = _decode_jpeg(payload, out if crop is None and turn is None else None)
    if pixels is None:
        pixels, factor = _decode_other(payload), 1
        if shape not in (None, pixels.shape[:2]):
            raise SampleError(f"not a readable image: its header says {shape}, the pixels are {pixels.shape[:2]}")
    if turn is not None:
        pixels = turn(pixels)
    if crop is not None:
        pixels = (chosen or crop(*pixels.shape[:2])).reduced(factor).cut(pixels)
    if out is None or pixels is out or pixels.shape != out.shape:
        return np.ascontiguousarray(pixels)
    out[...] = pixels
    return out


def decode_mask(payload: bytes | memoryview, name: str) -> np.ndarray:
    """The numbers of a PNG: grey values, or indices of its palette, exactly as stored.

    Args:
        payload: The file.
        name: Name of the field, for messages.

    Returns:
        ``[height, width]``: uint8, or int32 for 16 bits.

    Raises:
        SampleError: If the file is damaged, too large, no PNG, or has colours or transparency.
    """
    try:
        with _quiet(), _open(payload) as image:
            if image.format != "PNG":  # others are lossy, or are scaled when they are read
                raise SampleError(f"a mask is a PNG, this is {image.format}")
            if image.mode not in _MASK_MODES:
                raise SampleError(f"a mask is grey or has a palette, this is {image.mode}: use a decoder for colours")
            image.load()
            numbers = np.array(image)
    except _IMAGE_DAMAGE as error:
        raise SampleError(f"field {name!r}: {_not_an_image(error, payload)}") from error
    if numbers.dtype.itemsize > 1:
        return numbers.astype(np.int32)
    depth, colour_type = payload[24], payload[25]  # of the header, which comes first
    if colour_type == _GREY and 1 < depth < 8:
        numbers //= 255 // (2**depth - 1)  # Pillow scales 2 and 4 bits of grey to 8
    return numbers.astype(np.uint8)


def check_image(payload: bytes | memoryview, exif: bool = False) -> tuple[int, int]:
    """Height and width of an image file, from its header.

    Args:
        payload: The file.
        exif: Height and width after the rotation that the EXIF orientation says.

    Raises:
        SampleError: If the header is of no known format, or the image is larger than ``MAX_PIXELS``.
    """
    try:
        with _quiet(), _open(payload) as image:
            height, width = image.height, image.width
    except _IMAGE_DAMAGE as error:
        raise _not_an_image(error, payload) from error
    turn = exif_turn(payload) if exif else None
    return (height, width) if turn is None else turn(np.empty((height, width, 0), np.uint8)).shape[:2]


def _decode_jpeg(payload: bytes | memoryview, out: np.ndarray | None) -> np.ndarray | None:
    """RGB pixels, in ``out`` if they fit there; None if libjpeg-turbo reports an error or a warning."""
    try:
        if out is None or not out.flags.c_contiguous:
            return simplejpeg.decode_jpeg(payload, "RGB") if _jpeg_shape(payload) else None
        # The buffer's size limits the decompression, so the header need not be read first.
        pixels = simplejpeg.decode_jpeg(payload, "RGB", buffer=out)
    except ValueError:
        return None
    return out if pixels.shape == out.shape else pixels.copy()


def _decode_reduced(payload: bytes | memoryview, shape: tuple[int, int], factor: int) -> np.ndarray | None:
    """RGB pixels of a JPEG of ``shape`` at 1 / ``factor`` of its size, rounded up; None as ``_decode_jpeg``."""
    height, width = (-(-side // factor) for side in shape)
    try:
        pixels: np.ndarray = simplejpeg.decode_jpeg(
            payload, "RGB", min_height=height, min_width=width, min_factor=factor
        )
    except ValueError:
        return None
    return pixels


def _jpeg_shape(payload: bytes | memoryview) -> tuple[int, int] | None:
    """Height and width; None if libjpeg-turbo rejects the header, or the image is too large."""
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(payload)
    except ValueError:
        return None
    return (int(height), int(width)) if int(height) * int(width) <= MAX_PIXELS else None


def _decode_other(payload: bytes | memoryview) -> np.ndarray:
    try:
        with _quiet(), _open(payload) as image:
            image.load()
            return np.array(_to_rgb(image))
    except _IMAGE_DAMAGE as error:
        raise _not_an_image(error, payload) from error


@contextmanager
def _quiet() -> Iterator[None]:
    # Pillow warns of unusual metadata and of large images, once per worker and without naming the sample.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _open(payload: bytes | memoryview) -> Image.Image:
    """An image, opened but not decoded, whose size was checked."""
    image = Image.open(io.BytesIO(payload), formats=_formats())
    if image.width * image.height > MAX_PIXELS:
        raise SampleError(f"{image.width} x {image.height} pixels, more than the limit of {MAX_PIXELS}")
    return image


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    # libtiff writes its warnings to stderr, without the sample. Its functions are found through Pillow, which is linked to it.
    with suppress(OSError, AttributeError):
        libtiff = ctypes.CDLL(_imaging.__file__)
        libtiff.TIFFSetErrorHandler(None)
        libtiff.TIFFSetWarningHandler(None)
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise SampleError(f"Pillow mode {image.mode!r} has no fixed range to scale to 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        # convert() would clip at 255. PNG has at most 16 bits, even where Pillow holds them in 32.
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def exif_turn(payload: bytes | memoryview) -> Callable[[np.ndarray], np.ndarray] | None:
    """The rotation of ``[height, width, 3]`` pixels that the EXIF orientation of an image file says; None without one.

    Raises:
        SampleError: If the EXIF data, or the image around it, cannot be read.
    """
    # Most files have no EXIF data. Opening a file with Pillow takes several times as long as decoding a small JPEG, and for
    # its EXIF data a PNG is decoded completely.
    start = bytes(payload[:3])
    if start in _TIFF:
        return None  # Pillow rotates a TIFF when it loads the pixels
    marks = _EXIF_MARKS.get(start)
    if marks is not None:
        head = bytes(payload[:65_536] if start == _JPEG else payload)
        if not any(mark in head for mark in marks):
            return None
    try:
        with _quiet(), _open(payload) as image:
            return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except _IMAGE_DAMAGE as error:
        raise _not_an_image(error, payload) from error


def _not_an_image(error: Exception, payload: bytes | memoryview) -> SampleError:
    if isinstance(error, SampleError):
        return error
    # Pillow's own message contains the address of an object, which differs each time.
    reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
    return SampleError(f"not a readable image ({len(payload)} bytes, starting {bytes(payload[:8])!r}): {reason}")
