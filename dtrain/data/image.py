"""Image files to pixels: whatever the file holds, uint8 RGB ``[height, width, 3]`` comes out.

* JPEG goes through libjpeg-turbo (simplejpeg), straight into the batch buffer where its size fits: no copy, no Python
  object but the array. What that strict decoder objects to, and every other format, is Pillow's to judge.
* The format is told by the first bytes, never by the extension.
* Nothing is decompressed before its header said how large it is.
* A crop is chosen between header and pixels, so that a large JPEG need not be decoded at full size.
"""

from __future__ import annotations

import functools
import io
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from dtrain.data.crop import Crop
from dtrain.data.fields import SampleError

#: Larger images are taken for decompression bombs: a quarter GiB of RGB, where Pillow starts to warn.
MAX_PIXELS = 89_478_485
_JPEG = b"\xff\xd8\xff"
# A short list, because some of Pillow's formats start other programs (EPS) or read other files.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
# What each value of the EXIF tag asks for.
_ORIENTATION = 0x0112
_TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels),
}
# What Pillow and the libraries under it were seen to raise on damaged files.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


def decode_image(
    payload: bytes | memoryview,
    crop: Callable[[int, int], Crop] | None = None,
    out: np.ndarray | None = None,
    exif: bool = False,
    reduced: bool = False,
) -> np.ndarray:
    """The pixels of an image file.

    Grey and palette images are spread to three channels; alpha is dropped, not composited (what ``convert("RGB")``,
    torchvision and webdataset's ``rgb8`` do); CMYK is converted as Pillow does; of 16-bit samples the high byte is
    kept, which scales them. The first frame of an animation counts. Flaws that libjpeg only warns of (stray bytes
    between segments are common in collections from the web) are accepted, as by everyone else; missing data is not.

    Args:
        payload: The file: JPEG, PNG, WebP, BMP, GIF, TIFF, PPM or AVIF.
        crop: ``crop(height, width) -> Crop`` of the image, called once; None keeps all of it at its own size.
        out: uint8, ``[height, width, 3]``. If the result has its shape it is written there, else ``out`` holds nothing
            of use afterwards.
        exif: Turn the image as its EXIF orientation says, before it is cropped.
        reduced: Decode a JPEG at 1/2, 1/4 or 1/8 of its size where its crop allows (``Crop.reduction``) and it need not
            be turned.

    Returns:
        uint8, ``[height, width, 3]``, writable and contiguous: ``out`` itself if the shape fits, else a new array.

    Raises:
        SampleError: If the file is damaged, cut short, of no known format or larger than ``MAX_PIXELS``.
        TypeError: If ``out`` is not uint8.
    """
    if out is not None and out.dtype != np.uint8:
        raise TypeError(f"out has dtype {out.dtype}, images are uint8.")
    turn = _exif_turn(payload) if exif else None
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


def check_image(payload: bytes | memoryview) -> None:
    """Looks at the header only: a known format, of reasonable size.

    Raises:
        SampleError: If it is not so.
    """
    try:
        with _quiet():
            _open(payload).close()
    except _DAMAGE as error:
        raise _not_an_image(error, payload) from error


def _decode_jpeg(payload: bytes | memoryview, out: np.ndarray | None) -> np.ndarray | None:
    """RGB pixels, in ``out`` if they fit there; None if libjpeg-turbo objects to anything, be it a warning."""
    try:
        if out is None or not out.flags.c_contiguous:
            return simplejpeg.decode_jpeg(payload, "RGB") if _jpeg_shape(payload) else None
        # The buffer bounds the size of what is decompressed: no need to read the header twice.
        pixels = simplejpeg.decode_jpeg(payload, "RGB", buffer=out)
    except ValueError:
        return None
    return out if pixels.shape == out.shape else pixels.copy()


def _decode_reduced(payload: bytes | memoryview, shape: tuple[int, int], factor: int) -> np.ndarray | None:
    """RGB pixels of a JPEG of ``shape`` at 1 / ``factor`` of its size, rounded up; None as above."""
    height, width = (-(-side // factor) for side in shape)
    try:
        return simplejpeg.decode_jpeg(payload, "RGB", min_height=height, min_width=width, min_factor=factor)
    except ValueError:
        return None


def _jpeg_shape(payload: bytes | memoryview) -> tuple[int, int] | None:
    """Height and width; None if libjpeg-turbo objects, or the image is too large."""
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
    except _DAMAGE as error:
        raise _not_an_image(error, payload) from error


@contextmanager
def _quiet() -> Iterator[None]:
    # Pillow warns of odd metadata and of large images, once for each worker and never naming the sample.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _open(payload: bytes | memoryview) -> Image.Image:
    """A lazily opened image whose header is in order."""
    image = Image.open(io.BytesIO(payload), formats=_formats())
    if image.width * image.height > MAX_PIXELS:
        raise SampleError(f"{image.width} x {image.height} pixels, more than the limit of {MAX_PIXELS}")
    return image


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or (image.mode == "I" and image.format != "PNG"):
        raise SampleError(f"Pillow mode {image.mode!r} has no fixed range to scale to 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        # convert() would clip at 255. PNG has 16 bits at most, also where Pillow holds them in 32.
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _exif_turn(payload: bytes | memoryview) -> Callable[[np.ndarray], np.ndarray] | None:
    # Most files have no EXIF at all; asking Pillow costs several times the decoding of a small image.
    if payload[:3] == _JPEG and b"Exif\0\0" not in bytes(payload[:65_536]):
        return None
    try:
        with _quiet(), _open(payload) as image:
            return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except _DAMAGE as error:
        raise _not_an_image(error, payload) from error


def _not_an_image(error: Exception, payload: bytes | memoryview) -> SampleError:
    if isinstance(error, SampleError):
        return error
    # Pillow's own words have the address of an object in them, another one each time.
    reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
    return SampleError(f"not a readable image ({len(payload)} bytes, starting {bytes(payload[:8])!r}): {reason}")
