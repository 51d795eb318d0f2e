"""The loaders that ``bench_loader.py`` compares, each made to do the same work on the same images.

* The *work*: shuffled batches of images, whole or a random resized crop of each, with their integer labels.
* A *recipe* is the decoder and what the workers hand over: ``uint8`` pixels ``[batch, height, width, 3]``, or ``fp32``,
  normalised, ``[batch, 3, height, width]``, as the documentation of the peers has it (torchvision's ToTensor and
  Normalize).
* A *contender* iterates over the numbers of valid samples in its batches. dtrain goes on from epoch to epoch; the others
  stop after one, so that what it costs them to begin the next is not counted.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from bench_common import declare_torchvision_operators
from PIL import Image

from dtrain.data import ShardLoader
from dtrain.data.augment import RandomResizedCrop
from dtrain.data.dataset_index import DatasetIndex
from dtrain.data.storage import ShardReader


class Recipe(NamedTuple):
    """How a batch is made.

    Attributes:
        decoder: ``Pillow``, ``simplejpeg``, or ``simplejpeg, reduced``: at less than full size where a crop allows.
        hands_over: ``uint8`` or ``fp32``.
    """

    decoder: str
    hands_over: str


@dataclass(frozen=True)
class Work:
    """What all contenders do.

    Attributes:
        name: For the title of a table.
        shards: Tars with ``jpg`` and ``cls`` members.
        copies: Folder for what peers make of them in their own formats.
        batch: Samples of a batch.
        crop: Height and width of the random resized crop, bilinear and antialiased; None leaves images as they are.
    """

    name: str
    shards: list[str]
    copies: Path
    batch: int
    crop: int | None

    def transform(self, recipe: Recipe) -> Callable[[bytes], Any]:
        """What a peer does with each JPEG."""
        decode = DECODERS[recipe.decoder]
        cropped = decode if self.crop is None else _Cropped(decode, self.crop)
        return cropped if recipe.hands_over == "uint8" else lambda payload: _normalised(cropped(payload))


def _pillow(payload: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(payload)).convert("RGB"))


DECODERS: dict[str, Callable[[bytes], np.ndarray]] = {"Pillow": _pillow, "simplejpeg": simplejpeg.decode_jpeg}


class _Cropped:
    """A decoder, and a random resized crop by Pillow."""

    def __init__(self, decode: Callable[[bytes], np.ndarray], size: int) -> None:
        self._decode = decode
        self._crop = RandomResizedCrop(size).crop  # where to; all contenders draw from the same windows
        self._rng = np.random.default_rng()

    def __call__(self, payload: bytes) -> np.ndarray:
        pixels = self._decode(payload)
        window = self._crop(pixels.shape[0], pixels.shape[1], self._rng)
        box = (window.left, window.top, window.left + window.width, window.top + window.height)
        return np.asarray(Image.fromarray(pixels).resize(window.size[::-1], Image.Resampling.BILINEAR, box=box))


_HALF = torch.full((3, 1, 1), 0.5)


def _normalised(pixels: np.ndarray) -> torch.Tensor:
    """torchvision's ToTensor and Normalize."""
    tensor = torch.from_numpy(np.require(pixels, requirements="W")).permute(2, 0, 1).contiguous()
    return tensor.to(torch.float32).div(255).sub_(_HALF).div_(_HALF)


# -- contenders: (work, workers, recipe) to an iterator over samples in each batch


def dtrain(work: Work, workers: int, recipe: Recipe) -> Iterator[int]:
    """ShardLoader as it is by default. It always sends uint8; where fp32 is wanted, this process normalises, as a GPU would."""
    image = {"name": "image", "role": "image", "decode": "reduced" if "reduced" in recipe.decoder else "full"}
    fields = {"jpg": image, "cls": {"name": "label", "role": "label"}}
    augment = None if work.crop is None else RandomResizedCrop(work.crop)
    loader = ShardLoader(work.shards, fields, global_batch_size=work.batch, num_workers=workers, augment=augment)
    for epoch in itertools.count():
        for batch in loader.epoch(epoch):
            batch = batch.to("cpu") if recipe.hands_over == "fp32" else batch
            _check(work, recipe, batch["image"], batch["label"])
            yield int(batch.valid.sum())
            loader.commit()


def webdataset(work: Work, workers: int, recipe: Recipe) -> Iterator[int]:
    """The pipeline of webdataset's documentation: shuffle, decode, tuples, batches, a WebLoader."""
    import webdataset as wds

    decode = work.transform(recipe)
    pipeline = (
        wds.WebDataset(work.shards, shardshuffle=len(work.shards), seed=0, empty_check=False)
        .shuffle(1000)
        .decode(lambda key, data: decode(data) if key.endswith("jpg") else None)
        .to_tuple("jpg", "cls")
        .batched(work.batch, partial=False)
    )
    for images, labels in wds.WebLoader(pipeline, batch_size=None, num_workers=workers):
        yield _check(work, recipe, images, labels)


def litdata(work: Work, workers: int, recipe: Recipe) -> Iterator[int]:
    """StreamingDataset and StreamingDataLoader over its own chunks on the local disk."""
    declare_torchvision_operators()
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.cache import Cache

    chunks = work.copies / "litdata"
    if not (chunks / "index.json").exists():
        cache = Cache(str(chunks), chunk_bytes="64MB")
        for number, (jpg, label) in enumerate(stored_samples(work)):
            cache[number] = {"jpg": jpg, "cls": label}
        cache.done()
        cache.merge()
    decode = work.transform(recipe)

    class Images(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[np.ndarray, int]:
            sample = super().__getitem__(index)
            return decode(sample["jpg"]), sample["cls"]

    dataset = Images(str(chunks), shuffle=True, seed=0)
    for images, labels in StreamingDataLoader(dataset, batch_size=work.batch, num_workers=workers, drop_last=True):
        yield _check(work, recipe, images, labels)


def streaming(work: Work, workers: int, recipe: Recipe) -> Iterator[int]:
    """mosaicml-streaming's StreamingDataset over its own shards on the local disk, in torch's DataLoader."""
    declare_torchvision_operators()
    import streaming as mosaicml

    shards = work.copies / "mds"
    if not (shards / "index.json").exists():
        with mosaicml.MDSWriter(out=str(shards), columns={"jpg": "bytes", "cls": "int"}) as writer:
            for jpg, label in stored_samples(work):
                writer.write({"jpg": jpg, "cls": label})
    mosaicml.base.util.clean_stale_shared_memory()
    decode = work.transform(recipe)

    class Images(mosaicml.StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[np.ndarray, int]:
            sample = super().__getitem__(index)
            return decode(sample["jpg"]), sample["cls"]

    dataset = Images(local=str(shards), shuffle=True, batch_size=work.batch)
    for images, labels in torch.utils.data.DataLoader(dataset, work.batch, num_workers=workers, drop_last=True):
        yield _check(work, recipe, images, labels)


def decoding(work: Work, workers: int, recipe: Recipe) -> Iterator[int]:
    """No loader: one process decodes (and does not crop) files that it has in memory."""
    payloads = itertools.cycle([jpg for jpg, _ in itertools.islice(stored_samples(work), 2000)])
    decode = DECODERS[recipe.decoder]
    while True:
        for payload in itertools.islice(payloads, work.batch):
            decode(payload)
        yield work.batch


#: By the name of the package that does it.
CONTENDERS: dict[str, Callable[[Work, int, Recipe], Iterator[int]]] = {
    "dtrain": dtrain,
    "webdataset": webdataset,
    "litdata": litdata,
    "mosaicml-streaming": streaming,
    "decoding alone": decoding,
}


# -- what they have in common


def stored_samples(work: Work) -> Iterator[tuple[bytes, int]]:
    """JPEG and label of every sample, in stored order."""
    index = DatasetIndex.build(work.shards, ["jpg", "cls"])
    reader = ShardReader(index.shards)
    for sample in range(index.num_samples):
        spans = zip(index.offsets[sample].tolist(), index.sizes[sample].tolist(), strict=True)
        jpg, label = (reader.read(int(index.shards_of(sample)), *span) for span in spans)
        yield bytes(jpg), int(bytes(label))


def _check(work: Work, recipe: Recipe, images: Any, labels: Any) -> int:
    """The samples of a batch that is what everybody has to make."""
    size = work.crop or images.shape[2]
    dtype, shape = torch.uint8, (size, size, 3)
    if recipe.hands_over == "fp32":
        dtype, shape = torch.float32, (3, size, size)
    images = torch.as_tensor(images)
    if images.dtype != dtype or tuple(images.shape[1:]) != shape or len(labels) != len(images):
        got = f"{len(labels)} labels and {images.dtype} {list(images.shape)}"
        raise TypeError(f"a batch of {got}, want as many images, {dtype} [batch, {str(shape)[1:-1]}]")
    return len(images)
