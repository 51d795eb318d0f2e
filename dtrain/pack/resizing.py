"""``pack imagefolder --max-side``: image files made smaller before they are packed.

* The *longer side* of an image decides: an image whose longer side has more pixels than ``max_side`` is resized to
  ``max_side`` there, the other side in proportion, by Pillow's Lanczos filter.
* A resized image has the pixels that the loader would decode from the original (RGB without alpha, 8 bits, upright),
  resized. It is stored as JPEG if the original was compressed with a loss (JPEG, WebP, AVIF), else as PNG.
* An image that is small enough is copied byte for byte, unless its EXIF data rotates it: then it is stored upright, too.
* The colour profile is kept, because the values of the pixels have no meaning without it; EXIF data and other metadata,
  such as the place where a photo was taken, are not.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image

from dtrain.data.fields.decode import check_image, decode_image, exif_turn

#: Quality of resized JPEG files, as Pillow counts it. At 90 the loss is invisible at the size of the image.
QUALITY = 90
_LOSSY = ("JPEG", "MPO", "WEBP", "AVIF")  # MPO: a JPEG with further pictures behind it, as phones write them
_PROFILE_OF = {"RGB": b"RGB ", "L": b"GRAY"}  # the colour space that an ICC profile names at byte 16


@dataclass(frozen=True)
class Resizing:
    """The options ``--max-side`` and ``--quality``.

    Attributes:
        max_side: Largest number of pixels of a side.
        quality: Quality of the JPEG files written, 1 to 100.

    Raises:
        ValueError: If an option is out of range.
    """

    max_side: int
    quality: int = QUALITY

    def __post_init__(self) -> None:
        if self.max_side < 1:
            raise ValueError(f"--max-side {self.max_side}: want at least 1 pixel, such as 512.")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"--quality {self.quality}: want a quality of JPEG files, 1 to 100.")

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image of ``height`` and ``width`` when it is packed."""
        longer = max(height, width)
        if longer <= self.max_side:
            return height, width
        return max(1, round(height * self.max_side / longer)), max(1, round(width * self.max_side / longer))

    def apply(self, payload: bytes) -> tuple[bytes, str] | None:
        """The image file to pack and its extension, ``jpg`` or ``png``; None if the file is packed unchanged.

        Raises:
            SampleError: If the file is not an image, is too large, or of a kind without a fixed range of values.
        """
        before = check_image(payload, exif=True)
        after = self.size(*before)
        if after == before and exif_turn(payload) is None:
            return None
        pixels = decode_image(payload, exif=True)
        # From the pixels: Pillow turns some formats while it loads them.
        before, after = pixels.shape[:2], self.size(*pixels.shape[:2])
        is_grey = bool((pixels == pixels[..., :1]).all())
        image = Image.fromarray(pixels[..., 0] if is_grey else pixels)
        if after != before:
            image = image.resize(after[::-1], Image.Resampling.LANCZOS)
        with Image.open(io.BytesIO(payload)) as original:
            is_lossy, profile = original.format in _LOSSY, original.info.get("icc_profile") or b""
        if profile[16:20] != _PROFILE_OF[image.mode]:  # of CMYK, or of colours in an image that has none
            profile = None
        stream = io.BytesIO()
        if is_lossy:
            image.save(stream, "JPEG", quality=self.quality, icc_profile=profile)
        else:
            image.save(stream, "PNG", icc_profile=profile)
        return stream.getvalue(), "jpg" if is_lossy else "png"
