"""Image files to pixels: whatever the file holds, uint8 RGB ``[height, width, 3]`` comes out.

* JPEG goes through libjpeg-turbo (simplejpeg), straight into the batch buffer where its size fits: no copy, no Python
  object but the array. What that strict decoder objects to, and every other format, is Pillow's to judge.
* The format is told by the first bytes, never by the extension.
* Nothing is decompressed before its header said how large it is.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import simplejpeg
import torch
from PIL import Image

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
    size: tuple[int, int] | None = None,
    out: np.ndarray | None = None,
    exif: bool = False,
) -> np.ndarray:
    """The pixels of an image file.

    Grey and palette images are spread to three channels; alpha is dropped, not composited (what ``convert("RGB")``,
    torchvision and webdataset's ``rgb8`` do); CMYK is converted as Pillow does; of 16-bit samples the high byte is
    kept, which scales them. The first frame of an animation counts. Flaws that libjpeg only warns of (stray bytes
    between segments are common in collections from the web) are accepted, as by everyone else; missing data is not.

    Args:
        payload: The file: JPEG, PNG, WebP, BMP, GIF, TIFF, PPM or AVIF.
        size: Height and width of the result, see ``resize``; None keeps the image's own.
        out: uint8, ``[height, width, 3]``. If the result has its shape it is written there, else ``out`` holds nothing
            of use afterwards.
        exif: Turn the image as its EXIF orientation says, before it is resized.

    Returns:
        uint8, ``[height, width, 3]``, writable and contiguous: ``out`` itself if the shape fits, else a new array.

    Raises:
        SampleError: If the file is damaged, cut short, of no known format or larger than ``MAX_PIXELS``.
        TypeError: If ``out`` is not uint8.
    """
    if out is not None and out.dtype != np.uint8:
        raise TypeError(f"out has dtype {out.dtype}, images are uint8.")
    turn = _exif_turn(payload) if exif else None
    as_stored = size is None and turn is None
    pixels = _decode_jpeg(payload, out if as_stored else None) if payload[:3] == _JPEG else None
    if pixels is None:
        pixels = _decode_other(payload)
    if turn is not None:
        pixels = turn(pixels)
    if size is not None:
        pixels = resize(pixels, size)
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
        _open(payload).close()
    except _DAMAGE as error:
        raise _not_an_image(error, payload) from error


def resize(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pixels at another size, bilinear and antialiased, aspect ratio disregarded.

    torch's kernel follows Pillow's ``BILINEAR`` to within one grey level, in integers, so that every CPU gives the same
    bits; it needs half of the time.

    Args:
        pixels: uint8, ``[height, width, 3]``.
        size: New height and width.

    Returns:
        uint8, ``[size[0], size[1], 3]``; ``pixels`` itself if it has that size.
    """
    if pixels.shape[:2] == size:
        return pixels
    # [1, 3, height, width] in channels_last layout is what the fast kernel takes.
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).unsqueeze(0)
    scaled = torch.nn.functional.interpolate(image, size, mode="bilinear", antialias=True)
    return np.ascontiguousarray(scaled[0].permute(1, 2, 0).numpy())


def _decode_jpeg(payload: bytes | memoryview, out: np.ndarray | None) -> np.ndarray | None:
    """RGB pixels, in ``out`` if they fit there; None if libjpeg-turbo objects to anything, be it a warning."""
    try:
        if out is None or not out.flags.c_contiguous:
            height, width, _, _ = simplejpeg.decode_jpeg_header(payload)
            if int(height) * int(width) > MAX_PIXELS:
                return None
            return simplejpeg.decode_jpeg(payload, "RGB")
        # The buffer bounds the size of what is decompressed: no need to read the header twice.
        pixels = simplejpeg.decode_jpeg(payload, "RGB", buffer=out)
    except ValueError:
        return None
    return out if pixels.shape == out.shape else pixels.copy()


def _decode_other(payload: bytes | memoryview) -> np.ndarray:
    try:
        with _open(payload) as image:
            image.load()
            return np.array(_to_rgb(image))
    except _DAMAGE as error:
        raise _not_an_image(error, payload) from error


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
    if image.mode == "P" and "transparency" in image.info:
        # The same colours as a direct conversion, without its warning.
        image = image.convert("RGBA")
    return image.convert("RGB")


def _exif_turn(payload: bytes | memoryview) -> Callable[[np.ndarray], np.ndarray] | None:
    # Most files have no EXIF at all; asking Pillow costs several times the decoding of a small image.
    if payload[:3] == _JPEG and b"Exif\0\0" not in bytes(payload[:65_536]):
        return None
    try:
        with _open(payload) as image:
            return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except _DAMAGE as error:
        raise _not_an_image(error, payload) from error


def _not_an_image(error: Exception, payload: bytes | memoryview) -> SampleError:
    if isinstance(error, SampleError):
        return error
    return SampleError(f"not a readable image ({len(payload)} bytes, starting {bytes(payload[:8])!r}): {error}")
