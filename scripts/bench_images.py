"""Shards of JPEGs for benchmarks, made on the spot: pieces of scikit-learn's two sample photographs, no two alike.

Every image is another piece of a photograph, of another size, mirrored or not, brighter or darker, so that neither the
decoder nor a cache meets the same bytes twice. Sizes of files are those of photographs: about 60 KB at 500x375.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dtrain.data.writer import write_shards

CLASSES = 10


def jpeg_shards(folder: Path, *, number: int, width: int, height: int, shards: int, quality: int = 90) -> list[str]:
    """Writes shards of ``jpg`` and ``cls`` members; the same bytes on every run.

    Args:
        folder: Where to; what is there from another time is used again.
        number: Images.
        width: Of every image, in pixels.
        height: Of every image, in pixels.
        shards: How many shards they are spread over.
        quality: As Pillow counts it.

    Returns:
        The shards.
    """
    paths = sorted(map(str, folder.glob("train-*.tar")))
    if len(paths) == shards:
        return paths
    samples = _samples(number, (width, height), quality)
    return [str(path) for path in write_shards(samples, folder, shards=shards, total=number)]


def _samples(number: int, size: tuple[int, int], quality: int) -> Iterator[dict[str, Any]]:
    photographs = _photographs()
    rng = np.random.default_rng(0)
    for place in range(number):
        stream = io.BytesIO()
        _piece(photographs[place % len(photographs)], size, rng).save(stream, "JPEG", quality=quality)
        yield {"__key__": f"{place:08d}", "jpg": stream.getvalue(), "cls": int(rng.integers(CLASSES))}


def _photographs() -> list[Image.Image]:
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise SystemExit(
            "the images are made from scikit-learn's sample photographs: pip install 'dtrain[demo]'"
        ) from error
    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def _piece(photograph: Image.Image, size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    aspect = size[0] / size[1]
    widest = min(photograph.width, photograph.height * aspect)
    width = widest * rng.uniform(0.6, 1)
    left = rng.uniform(0, photograph.width - width)
    top = rng.uniform(0, photograph.height - width / aspect)
    piece = photograph.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + width / aspect))
    pixels = np.asarray(piece, np.float32) * rng.uniform(0.7, 1.2)
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    # As much noise as a camera's, else files would be smaller than those of photographs.
    pixels = pixels + rng.normal(0, 3, (*pixels.shape[:2], 1))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
