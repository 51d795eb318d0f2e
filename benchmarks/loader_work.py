"""What the loaders of ``benchmarks.loader`` have to do: sets of samples, the rows of the tables, and the batches to make.

* A *work* is a set of samples in tar shards and the batches that every loader makes of it: shuffled, of the same size, dtype
  and shape. ``check`` refuses any other batch.
* A *row* is a loader, its decoder and the dtype of its batches.
* ``Transform`` is what a user of a loader without a decoder writes for one sample.
"""

from __future__ import annotations

import glob
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from benchmarks import harness
from dtrain.data.augment import RandomResizedCrop
from dtrain.data.fields.crop import Crop
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.sources.shard_reader import ShardReader
from dtrain.data.writer import write_shards

CROP = 224
TOKENS = 1025  # of a row: a context of 1024
VOCABULARY = 50_257
ARRAY = (3, 64, 64)
#: Number of samples, number with --quick, batch size.
SIZES = {
    "32x32": (20_000, 800, 256),
    "500x375": (4_000, 200, 64),
    "1600x1200": (600, 200, 16),
    "tokens": (100_000, 800, 64),
    "npy": (8_000, 200, 64),
}
#: Members of each sample in the shards: its data, then its label, if any.
MEMBERS = {"images": ("jpg", "cls"), "tokens": ("tok",), "npy": ("npy", "cls")}
_DTYPES = {"fp32": "float32"}


class Row(NamedTuple):
    """A loader, its decoder and the dtype of its batches."""

    loader: str
    decoder: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.loader} ({self.decoder})" if self.decoder else self.loader


@dataclass(frozen=True)
class Work:
    """The work of every loader: shuffled batches of these samples with their integer labels.

    Attributes:
        kind: ``images``, ``tokens`` or ``npy``.
        name: Title of the table.
        shards: Tars with the ``members`` of the kind.
        copies: Folder for the same samples in the formats of other loaders.
        batch: Samples of a batch.
        crop: Height and width of a random resized crop, bilinear and antialiased; None for whole images.
    """

    kind: str
    name: str
    shards: list[str]
    copies: str
    batch: int
    crop: int | None

    @property
    def members(self) -> tuple[str, ...]:
        """Extensions of a sample's members: its data, then its label, if any."""
        return MEMBERS[self.kind]

    @property
    def dtrain(self) -> Row:
        """The row of dtrain with its defaults."""
        return Row("dtrain", "simplejpeg", "uint8") if self.kind == "images" else Row("dtrain", "", self.dtype)

    @property
    def base(self) -> Row:
        """The row that the ratios of the table refer to."""
        return Row("webdataset", "Pillow", "uint8") if self.kind == "images" else Row("webdataset", "", self.dtype)

    @property
    def dtype(self) -> str:
        """The dtype of all batches, of tokens and arrays; the dtype that dtrain transfers, of images."""
        return {"images": "uint8", "tokens": "uint16", "npy": "fp32"}[self.kind]

    def samples(self) -> Iterator[tuple[bytes, int]]:
        """Data, as stored, and label of every sample, in stored order; the label is 0 if there is none."""
        index = DatasetIndex.build(self.shards, list(self.members))
        reader = ShardReader(index.shards)
        for sample in range(index.num_samples):
            spans = zip(index.offsets[sample].tolist(), index.sizes[sample].tolist(), strict=True)
            data, *label = (bytes(reader.read(int(index.shards_of(sample)), *span)) for span in spans)
            yield data, int(label[0]) if label else 0

    def stored(self) -> Iterator[tuple[Any, int]]:
        """The same as other formats store it: tokens and arrays as arrays, images as bytes."""
        read = bytes if self.kind == "images" else Transform(self, self.dtrain)
        for data, label in self.samples():
            yield read(data), label


def make_work(size: str, folder: Path, cifar10: Path | None, quick: bool) -> Work:
    """A set of samples, generated if need be.

    Args:
        size: Key of ``SIZES``.
        folder: Where to write shards.
        cifar10: Folder with the shards of CIFAR-10, which are then the images of 32x32.
        quick: Few samples, in small batches.
    """
    number, few, batch = SIZES[size]
    number, batch = (few, 8) if quick else (number, batch)
    copies = folder / f"of-{size}"
    copies.mkdir(parents=True, exist_ok=True)
    if size in MEMBERS:
        what = f"{TOKENS:,} uint16" if size == "tokens" else f"fp32 {'x'.join(map(str, ARRAY))}"
        shards = _array_shards(folder / size, size, number)
        return Work(size, f"{size}, {what}", shards, str(copies), batch, None)
    width, height = map(int, size.split("x"))
    small = size == "32x32"
    if small and cifar10 is not None:
        shards, name = sorted(glob.glob(f"{cifar10}/train-*.tar")), "32x32 JPEG (CIFAR-10)"
    else:
        shards = harness.jpeg_shards(folder / size, number=number, width=width, height=height, shards=8)
        name = f"{size} JPEG"
    name += "" if small else f" -> {CROP}x{CROP}"
    return Work("images", name, shards, str(copies), batch, None if small else CROP)


def _array_shards(folder: Path, kind: str, number: int) -> list[str]:
    """Shards of random tokens, as ``dtrain pack text`` stores them, or of random arrays; reuses those that are there."""
    if paths := sorted(map(str, folder.glob("train-*.tar"))):
        return paths
    rng = np.random.default_rng(0)

    def samples() -> Iterator[dict[str, Any]]:
        for place in range(number):
            if kind == "tokens":
                data: dict[str, Any] = {"tok": rng.integers(VOCABULARY, size=TOKENS, dtype=np.uint16).tobytes()}
            else:
                data = {"npy": rng.standard_normal(ARRAY, np.float32), "cls": int(rng.integers(harness.CLASSES))}
            yield {"__key__": f"{place:08d}", **data}

    return [str(path) for path in write_shards(samples(), folder, shards=8, total=number)]


# -- decoders and transforms of the other loaders


def _pillow(payload: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(payload)).convert("RGB"))


DECODERS: dict[str, Callable[..., np.ndarray]] = {"Pillow": _pillow, "simplejpeg": simplejpeg.decode_jpeg}
_HALF = torch.full((3, 1, 1), 0.5)


class Transform:
    """Transform of the other loaders for the data of each sample, as stored.

    Images are decoded, cropped with Pillow and normalised; tokens and arrays become arrays.
    """

    def __init__(self, work: Work, row: Row) -> None:
        self._kind = work.kind
        self._decode = DECODERS.get(row.decoder, _pillow)
        # All loaders draw their crops from the same distribution.
        self._crop = None if work.crop is None else RandomResizedCrop(work.crop)
        self._rng = np.random.default_rng()
        self._normalise = row.dtype == "fp32"

    def __call__(self, payload: Any) -> Any:
        if self._kind == "tokens":
            return np.frombuffer(payload, np.uint16)
        if self._kind == "npy":
            return np.lib.format.read_array(io.BytesIO(payload))
        pixels = self.pixels(payload)
        return normalised(pixels) if self._normalise else pixels

    def pixels(self, payload: Any) -> np.ndarray:
        """The image, cropped and not normalised."""
        pixels = self._decode(payload)
        if self._crop is None:
            return pixels
        crop = self.crop(pixels.shape[0], pixels.shape[1])
        box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
        return np.asarray(Image.fromarray(pixels).resize(crop.size[::-1], Image.Resampling.BILINEAR, box=box))

    def crop(self, height: int, width: int) -> Crop:
        """A random rectangle of an image of this size; only of a work with crops."""
        assert self._crop is not None
        return self._crop.crop(height, width, self._rng)


def normalised(pixels: np.ndarray) -> Tensor:
    """torchvision's ToTensor and Normalize: uint8 ``[..., height, width, 3]`` as fp32 ``[..., 3, height, width]``."""
    tensor = torch.from_numpy(np.require(pixels, requirements="W")).movedim(-1, -3).contiguous()
    return tensor.to(torch.float32).div(255).sub_(_HALF).div_(_HALF)


def check(work: Work, row: Row, data: Any, labels: Any) -> None:
    """Checks a batch, an array or a tensor, and its labels; tokens have none.

    Raises:
        TypeError: If the batch has a different dtype or shape than all loaders have to make.
    """
    if work.kind == "images":
        size = work.crop or int(data.shape[2])
        shape = [3, size, size] if row.dtype == "fp32" else [size, size, 3]
    else:
        shape = [TOKENS] if work.kind == "tokens" else [*ARRAY]
    want = [_DTYPES.get(row.dtype, row.dtype), *shape, len(data) if len(work.members) > 1 else 0]
    got = [str(data.dtype).removeprefix("torch."), *data.shape[1:], 0 if labels is None else len(labels)]
    if got != want:
        raise TypeError(f"{row}: dtype, shape of a sample and number of labels are {got}, want {want}")
