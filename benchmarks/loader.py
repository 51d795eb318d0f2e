"""Valid samples a second of dtrain, webdataset, litdata, mosaicml-streaming and DALI on the CPU, in one run.

    python -m benchmarks.loader [--images 32x32 500x375 1600x1200] [--workers 0 1 2] [--rounds 5] [--json FILE]
    python -m benchmarks.loader --stages [--images 32x32 500x375]

* Images: 32x32 (CIFAR-10 shards where ``--cifar10`` or ``$DTRAIN_TEST_CIFAR10`` names their folder, else generated) in
  batches of 256; photographs of 500x375 and 1600x1200, cropped at random to 224x224, in batches of 64 and 16.
* A row names the loader, its decoder and the dtype of its batches: ``uint8`` pixels ``[batch, height, width, 3]``, or
  ``fp32``, normalised, ``[batch, 3, height, width]``, which is torchvision's ToTensor and Normalize. The other loaders are
  measured as their documentation uses them (Pillow, fp32), then with uint8, then with dtrain's decoder too.
* ``decoding alone`` is the ceiling: one process that decodes files in memory; simplejpeg writes into the rows of a batch.
* DALI decodes and crops with its own operators, in so many threads of this process.
* ``--stages`` shows in which stage of dtrain's loader, without workers, the CPU time of a sample is spent.

Each measurement is a process of its own with files in the page cache and one thread a process; the first batches are not
counted. CPU time covers loader and workers; other load of the machine changes it little, and samples a second a lot.

litdata and mosaicml-streaming need older versions of numpy than dtrain is tested with, so install them without
constraints.txt in an environment of their own: ``pip install -e . --group bench nvidia-dali-cuda120``. Rows of missing packages
say so.
"""

from __future__ import annotations

import argparse
import functools
import glob
import importlib.util
import io
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from PIL import Image

from benchmarks import harness
from dtrain.data import ShardLoader
from dtrain.data.augment import RandomResizedCrop
from dtrain.data.loading.collate import Collator
from dtrain.data.loading.field_buffer import FieldBuffer
from dtrain.data.order.epoch_order import EpochOrder
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.sources.shard_source import ShardReader

CROP = 224
CEILING = "decoding alone"
PEERS = ("litdata", "mosaicml-streaming")
#: Decoder and dtype: as documented, with dtrain's transfer dtype, with its decoder too.
RECIPES = (("Pillow", "fp32"), ("Pillow", "uint8"), ("simplejpeg", "uint8"))
#: Number of images, number with --quick, batch size.
SIZES = {"32x32": (20_000, 800, 256), "500x375": (4_000, 200, 64), "1600x1200": (600, 200, 16)}


class Row(NamedTuple):
    """A loader, its decoder and the dtype of its batches."""

    loader: str
    decoder: str
    dtype: str

    def __str__(self) -> str:
        return self.loader


DTRAIN, BASE = Row("dtrain", "simplejpeg", "uint8"), Row("webdataset", "Pillow", "uint8")


@dataclass(frozen=True)
class Work:
    """The work of every loader: shuffled batches of these images with their integer labels.

    Attributes:
        name: Title of the table.
        shards: Tars with ``jpg`` and ``cls`` members.
        copies: Folder for the same images in the formats of other loaders.
        batch: Samples of a batch.
        crop: Height and width of a random resized crop, bilinear and antialiased; None for whole images.
    """

    name: str
    shards: list[str]
    copies: str
    batch: int
    crop: int | None

    def rows(self, workers: int) -> list[Row]:
        """The rows that are measured with so many workers."""
        rows = [DTRAIN, Row("dtrain", "simplejpeg", "fp32")]
        if self.crop is not None:
            rows.append(Row("dtrain", "simplejpeg, reduced", "uint8"))
        rows += [Row(loader, *recipe) for recipe in RECIPES for loader in ("webdataset", *PEERS)]
        rows.append(Row("DALI", "DALI", "uint8"))
        return rows if workers else [*rows, *(Row(CEILING, decoder, "") for decoder in DECODERS)]

    def samples(self) -> Iterator[tuple[bytes, int]]:
        """JPEG and label of every sample, in stored order."""
        index = DatasetIndex.build(self.shards, ["jpg", "cls"])
        reader = ShardReader(index.shards)
        for sample in range(index.num_samples):
            spans = zip(index.offsets[sample].tolist(), index.sizes[sample].tolist(), strict=True)
            jpg, label = (reader.read(int(index.shards_of(sample)), *span) for span in spans)
            yield bytes(jpg), int(bytes(label))


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=5)
    parser.add_argument("--images", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--cifar10", type=Path, default=os.environ.get("DTRAIN_TEST_CIFAR10"), metavar="FOLDER")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=2.5, help="measured in each process (default %(default)s)")
    parser.add_argument(
        "--stages", action="store_true", help="where dtrain's own CPU time is spent, instead of the tables"
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where to keep the generated data")
    arguments = harness.parse(parser, rounds=1, seconds=0.2)
    report: dict[str, Any] = {}
    with harness.scratch(arguments.data) as folder:
        for size in arguments.images:
            work = make_work(size, folder, arguments.cifar10, arguments.quick)
            if arguments.stages:
                report[work.name] = costs = harness.in_new_process(stages, vars(work), arguments.rounds)
                table = harness.Table(f"{work.name}, stage", costs)
                table.text("CPU us a sample", {stage: f"{cost:.2f}" for stage, cost in costs.items()})
                table.text(
                    "of decoding alone", {stage: f"{cost / costs[CEILING]:.2f}" for stage, cost in costs.items()}
                )
                table.show(f"least of {arguments.rounds} rounds each")
                continue
            results = measure_all(work, arguments)
            for workers in arguments.workers:
                show(
                    work, workers, {row: found for (n, row), found in results.items() if n == workers}, arguments.rounds
                )
            report[work.name] = [
                {**row._asdict(), "workers": workers, "rounds": found} for (workers, row), found in results.items()
            ]
    packages = ("webdataset", *PEERS, "torch", "Pillow", "simplejpeg")
    harness.finish(arguments, {"measured": report}, packages)


def make_work(size: str, folder: Path, cifar10: Path | None, quick: bool) -> Work:
    """A set of images, generated if need be."""
    (number, few, batch), (width, height) = SIZES[size], map(int, size.split("x"))
    small = size == "32x32"
    if small and cifar10 is not None:
        shards, name = sorted(glob.glob(f"{cifar10}/train-*.tar")), "32x32 JPEG (CIFAR-10)"
    else:
        number = few if quick else number
        shards = harness.jpeg_shards(folder / size, number=number, width=width, height=height, shards=8)
        name = f"{size} JPEG"
    copies = folder / f"of-{size}"
    copies.mkdir(exist_ok=True)
    name += "" if small else f" -> {CROP}x{CROP}"
    return Work(name, shards, str(copies), 8 if quick else batch, None if small else CROP)


def measure_all(work: Work, arguments: argparse.Namespace) -> dict[tuple[int, Row], list[dict[str, float]]]:
    """Measurements by number of workers and row; an empty list where a package is missing."""
    for path in work.shards:
        Path(path).read_bytes()  # into the page cache
    cases = [(workers, row) for workers in arguments.workers for row in work.rows(workers)]
    modules = {CEILING: "simplejpeg", "mosaicml-streaming": "streaming", "DALI": "nvidia.dali"}
    there = [case for case in cases if is_installed(modules.get(case[1].loader, case[1].loader))]

    def measure_case(case: tuple[int, Row]) -> dict[str, float]:
        return harness.in_new_process(measure, vars(work), case[1], case[0], arguments.seconds)

    results = harness.interleaved(arguments.rounds, there, measure_case)
    return {case: results.get(case, []) for case in cases}


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False


def measure(work_fields: dict[str, Any], row_fields: list[str], workers: int, seconds: float) -> dict[str, float]:
    """Samples a second and microseconds of CPU time a sample of one row; in a process of its own."""
    multiprocessing.set_start_method("fork")  # the datasets of other loaders cannot all be pickled
    work, row = Work(**work_fields), Row(*row_fields)
    batches = LOADERS[row.loader](work, workers, row)
    # Not measured: the start, and the batches that workers prefetched during it, two each, and as many again.
    for _ in range(2 + 4 * workers):
        next(batches)
    samples, cpu, started = 0, harness.cpu_seconds(), time.perf_counter()
    for valid in batches:
        samples += valid
        ended = time.perf_counter()
        if ended - started >= seconds:
            break
    cpu = harness.cpu_seconds_since(cpu)
    return {"samples/s": samples / (ended - started), "us/sample": cpu / samples * 1e6}


def show(work: Work, workers: int, results: dict[Row, list[dict[str, float]]], rounds: int) -> None:
    """Prints the table of one set of images and one number of workers."""
    rates, costs = harness.column(results, "samples/s"), harness.column(results, "us/sample")
    table = harness.Table(f"{work.name}, {workers} workers, batch {work.batch}", results)
    table.text("decoder", {row: row.decoder for row in results})
    table.text("dtype", {row: row.dtype for row in results})
    table.medians("valid samples/s", rates)
    table.ratios("ratio", rates, rates[BASE])
    table.medians("CPU us a sample", costs, 1)
    table.ratios("ratio", {row: costs[BASE] for row in results if costs[row]}, costs)
    base = f"; ratios to {BASE.loader} with {BASE.decoder} and {BASE.dtype} are medians over the rounds"
    notes = [harness.rounds_note(rounds, base)]
    for recipe, peers in itertools.product(RECIPES, (("webdataset",), PEERS)):
        there = [row for row in (Row(peer, *recipe) for peer in peers) if rates[row]]
        if there:
            best = max(there, key=lambda row: statistics.median(rates[row]))
            name = peers[0] if len(peers) == 1 else f"the best of {' and '.join(peers)}"
            faster = harness.ratio(rates[DTRAIN], rates[best])
            cheaper = harness.ratio(costs[best], costs[DTRAIN])
            notes.append(
                f"dtrain is {faster:.2f} times as fast as {name} with {' and '.join(recipe)} ({cheaper:.2f} by CPU time)"
            )
    alone = costs.get(Row(CEILING, "simplejpeg", ""))
    if alone:
        notes.append(
            f"dtrain needs {min(costs[DTRAIN]) / min(alone):.2f} times the CPU time of simplejpeg alone, by minima"
        )
    table.show(*notes)


def stages(work_fields: dict[str, Any], rounds: int) -> dict[str, float]:
    """Least CPU time over the rounds of the stages of dtrain's loader, without workers, in microseconds a sample.

    A stage is timed around its function, so the rest includes what timing costs: a microsecond for each call.
    """
    work = Work(**work_fields)
    spent: dict[str, float] = {}
    depth: list[float] = []

    def timed(owner: Any, name: str, stage: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            depth.append(0.0)
            started = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                took = time.process_time() - started
                spent[stage] = spent.get(stage, 0.0) + took - depth.pop()
                if depth:
                    depth[-1] += took

        setattr(owner, name, call)

    for owner, name, stage in (
        (ShardLoader, "_take", "take, and the iterators"),
        (EpochOrder, "locate", "order"),
        (Collator, "build", "micro-batch: the rest"),
        (ShardReader, "read_all", "read"),
        (FieldBuffer, "write", "decode and write"),
        (FieldBuffer, "data", "finish the fields"),
    ):
        timed(owner, name, stage)
    batches, limit = dtrain(work, 0, DTRAIN), decoding(work, 0, Row(CEILING, "simplejpeg", ""))
    many = max(2, 4096 // work.batch)
    results: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        spent.clear()
        started = time.process_time()
        samples = sum(itertools.islice(batches, many))
        whole = (time.process_time() - started) / samples * 1e6
        started = time.process_time()
        decoded = sum(itertools.islice(limit, many))
        alone = (time.process_time() - started) / decoded * 1e6
        of_stage = {stage: seconds / samples * 1e6 for stage, seconds in spent.items()}
        results.append(of_stage | {"whole loader": whole, CEILING: alone})
    return {stage: min(result.get(stage, 0.0) for result in results[1:]) for stage in results[-1]}


# -- decoders and transforms of the other loaders


def _pillow(payload: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(payload)).convert("RGB"))


DECODERS: dict[str, Callable[..., np.ndarray]] = {"Pillow": _pillow, "simplejpeg": simplejpeg.decode_jpeg}
_HALF = torch.full((3, 1, 1), 0.5)


class Transform:
    """Transform of the other loaders for each JPEG: decode, crop with Pillow, normalise."""

    def __init__(self, work: Work, row: Row) -> None:
        self._decode = DECODERS[row.decoder]
        # All loaders draw their crops from the same distribution.
        self._crop = RandomResizedCrop(work.crop).crop if work.crop is not None else None
        self._rng = np.random.default_rng()
        self._normalise = row.dtype == "fp32"

    def __call__(self, payload: bytes) -> Any:
        pixels = self._decode(payload)
        if self._crop is not None:
            crop = self._crop(pixels.shape[0], pixels.shape[1], self._rng)
            box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
            image = Image.fromarray(pixels).resize(crop.size[::-1], Image.Resampling.BILINEAR, box=box)
            pixels = np.asarray(image)
        if not self._normalise:
            return pixels
        tensor = torch.from_numpy(np.require(pixels, requirements="W")).permute(2, 0, 1).contiguous()
        return tensor.to(torch.float32).div(255).sub_(_HALF).div_(_HALF)


# -- loaders: each yields the number of valid samples of every batch. dtrain continues with the next epoch; the others stop
#    after one, so the cost of starting their next epoch is not counted.


def dtrain(work: Work, workers: int, row: Row) -> Iterator[int]:
    """ShardLoader with its defaults. Its workers always transfer uint8; for fp32 this process normalises, as a GPU would."""
    image = {"name": "image", "role": "image", "decode": "reduced" if "reduced" in row.decoder else "full"}
    fields = {**harness.IMAGE_FIELDS, "jpg": image}
    augment = None if work.crop is None else RandomResizedCrop(work.crop)
    loader = ShardLoader(work.shards, fields, global_batch_size=work.batch, num_workers=workers, augment=augment)
    for epoch in itertools.count():
        for batch in loader.epoch(epoch):
            batch = batch.to("cpu") if row.dtype == "fp32" else batch
            _check(work, row, batch["image"], batch["label"])
            yield int(batch.valid.sum())
            loader.commit()


def webdataset(work: Work, workers: int, row: Row) -> Iterator[int]:
    """The pipeline of webdataset's documentation: shuffle, decode, tuples, batches, a WebLoader."""
    import webdataset as wds

    transform = Transform(work, row)
    pipeline = (
        wds.WebDataset(work.shards, shardshuffle=len(work.shards), seed=0, empty_check=False)
        .shuffle(1000)
        .decode(lambda key, data: transform(data) if key.endswith("jpg") else None)
        .to_tuple("jpg", "cls")
        .batched(work.batch, partial=False)
    )
    for images, labels in wds.WebLoader(pipeline, batch_size=None, num_workers=workers):
        yield _check(work, row, images, labels)


def litdata(work: Work, workers: int, row: Row) -> Iterator[int]:
    """StreamingDataset and StreamingDataLoader over litdata's chunks on the local disk."""
    harness.declare_torchvision_operators()
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.cache import Cache

    chunks = Path(work.copies, "litdata")
    if not (chunks / "index.json").exists():
        cache = Cache(str(chunks), chunk_bytes="64MB")
        for number, (jpg, label) in enumerate(work.samples()):
            cache[number] = {"jpg": jpg, "cls": label}
        cache.done()
        cache.merge()
    dataset = _with_transform(StreamingDataset, work, row)(str(chunks), shuffle=True, seed=0)
    for images, labels in StreamingDataLoader(dataset, batch_size=work.batch, num_workers=workers, drop_last=True):
        yield _check(work, row, images, labels)


def streaming(work: Work, workers: int, row: Row) -> Iterator[int]:
    """mosaicml-streaming's StreamingDataset over its shards on the local disk, in torch's DataLoader."""
    harness.declare_torchvision_operators()
    import streaming as mosaicml

    shards = Path(work.copies, "mds")
    if not (shards / "index.json").exists():
        with mosaicml.MDSWriter(out=str(shards), columns={"jpg": "bytes", "cls": "int"}) as writer:
            for jpg, label in work.samples():
                writer.write({"jpg": jpg, "cls": label})
    mosaicml.base.util.clean_stale_shared_memory()
    images_of = _with_transform(mosaicml.StreamingDataset, work, row)
    dataset = images_of(local=str(shards), shuffle=True, batch_size=work.batch)
    for images, labels in torch.utils.data.DataLoader(dataset, work.batch, num_workers=workers, drop_last=True):
        yield _check(work, row, images, labels)


def decoding(work: Work, workers: int, row: Row) -> Iterator[int]:
    """No loader: one process decodes (and does not crop) files in memory."""
    jpegs = [jpg for jpg, _ in itertools.islice(work.samples(), 2000)]
    payloads, shape = itertools.cycle(jpegs), DECODERS["simplejpeg"](jpegs[0]).shape
    # As dtrain allocates them; see its collator.
    memory = torch.empty(work.batch * math.prod(shape) + 16, dtype=torch.uint8).numpy()[16:].reshape(work.batch, *shape)
    decode, rows = DECODERS[row.decoder], list(memory)
    options = [{"buffer": one} for one in rows] if row.decoder == "simplejpeg" else [{}] * work.batch
    while True:
        for payload, option in zip(itertools.islice(payloads, work.batch), options, strict=True):
            decode(payload, **option)
        yield work.batch


def dali(work: Work, workers: int, row: Row) -> Iterator[int]:
    """A pipeline of NVIDIA DALI on the CPU over the same shards, with as many threads as workers, at least one."""
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    pipeline = Pipeline(batch_size=work.batch, num_threads=max(1, workers), device_id=None, prefetch_queue_depth=2)
    with pipeline:
        jpegs, labels = fn.readers.webdataset(
            paths=work.shards,
            ext=["jpg", "cls"],
            random_shuffle=True,
            initial_fill=1000,
            missing_component_behavior="error",
        )
        if work.crop is None:
            images = fn.decoders.image(jpegs, device="cpu", output_type=types.RGB)
        else:
            # Decodes only the window, which is DALI's advice for training.
            images = fn.decoders.image_random_crop(jpegs, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0])
            images = fn.resize(images, resize_x=work.crop, resize_y=work.crop, antialias=True)
        pipeline.set_outputs(images, labels)
    pipeline.build()
    while True:
        images, labels = pipeline.run()
        numbers = [int(bytes(np.asarray(labels.at(n)))) for n in range(len(labels))]
        yield _check(work, row, np.array(images.as_array()), numbers)


LOADERS: dict[str, Callable[[Work, int, Row], Iterator[int]]] = {
    "dtrain": dtrain,
    "webdataset": webdataset,
    "litdata": litdata,
    "mosaicml-streaming": streaming,
    "DALI": dali,
    CEILING: decoding,
}


def _with_transform(base: type, work: Work, row: Row) -> type:
    """A dataset class of litdata or mosaicml-streaming whose samples are image and label."""
    transform = Transform(work, row)

    class Images(base):
        def __getitem__(self, index: Any) -> tuple[np.ndarray, int]:
            sample = super().__getitem__(index)
            return transform(sample["jpg"]), sample["cls"]

    return Images


def _check(work: Work, row: Row, images: Any, labels: Any) -> int:
    """The number of samples of a batch.

    Raises:
        TypeError: If the batch has another dtype or shape than all loaders have to make.
    """
    size = work.crop or images.shape[2]
    dtype, shape = (torch.float32, (3, size, size)) if row.dtype == "fp32" else (torch.uint8, (size, size, 3))
    images = torch.as_tensor(images)
    if images.dtype != dtype or tuple(images.shape[1:]) != shape or len(labels) != len(images):
        got = f"{len(labels)} labels and {images.dtype} {list(images.shape)}"
        raise TypeError(f"a batch of {got}, want as many images, {dtype} [batch, {str(shape)[1:-1]}]")
    return len(images)


if __name__ == "__main__":
    main()
