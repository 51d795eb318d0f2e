"""The loaders of ``benchmarks.loader``: dtrain, and each peer in the format and in the way of its own documentation.

* A loader yields, for every batch, its data, its labels (None for tokens) and its number of valid samples.
* webdataset, litdata and mosaicml-streaming stop after an epoch, so that the start of their next epoch is not counted. The
  others continue with the next one.
* Workers are processes, but threads of SPDL, tf.data and DALI.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from benchmarks.loader_work import ARRAY, CROP, DECODERS, TOKENS, Row, Transform, Work, normalised
from dtrain.data import ShardLoader
from dtrain.data.augment import RandomResizedCrop

CEILING = "decoding alone"
#: Decoder and dtype: as documented, with dtrain's transfer dtype, with its decoder too.
RECIPES = (("Pillow", "fp32"), ("Pillow", "uint8"), ("simplejpeg", "uint8"))
#: Peers that decode with a function of the user, and those with a decoder of their own.
PEERS = ("webdataset", "litdata", "mosaicml-streaming", "Grain", "SPDL")
DECODING_PEERS = {"tf.data": "TensorFlow", "DALI": "DALI"}
#: Peers that always have threads.
THREADS = ("SPDL", "DALI")

Batches = Iterator[tuple[Any, Any, int]]


def rows(work: Work, workers: int) -> list[Row]:
    """The rows that are measured with so many workers."""
    if work.kind != "images":
        return [work.dtrain, *(Row(peer, "", work.dtype) for peer in (*PEERS, *DECODING_PEERS))]
    found = [work.dtrain, Row("dtrain", "simplejpeg", "fp32")]
    if work.crop is not None:
        found.append(Row("dtrain", "simplejpeg, reduced", "uint8"))
    for decoder, dtype in RECIPES:
        of_spdl = spdl_decoder() if decoder == "Pillow" else decoder
        found += [Row(peer, of_spdl if peer == "SPDL" else decoder, dtype) for peer in PEERS]
    found += [Row(peer, decoder, dtype) for dtype in ("fp32", "uint8") for peer, decoder in DECODING_PEERS.items()]
    return found if workers else [*found, *(Row(CEILING, decoder, "") for decoder in DECODERS)]


@functools.cache
def spdl_decoder() -> str:
    """The decoder of SPDL's documentation if FFmpeg's libraries are there, else Pillow."""
    try:
        from spdl.io.utils import get_ffmpeg_versions

        get_ffmpeg_versions()
    except (ImportError, RuntimeError):
        return "Pillow"
    return "FFmpeg"


def dtrain(work: Work, workers: int, row: Row) -> Batches:
    """ShardLoader with its defaults. Its workers always transfer uint8; for fp32 this process normalises, as a GPU would."""
    known: dict[str, dict[str, Any]] = {
        "jpg": {"name": "image", "role": "image", "decode": "reduced" if "reduced" in row.decoder else "full"},
        "tok": {"name": "tokens", "dtype": "uint16", "length": TOKENS},
        "npy": {"name": "array", "role": "feature"},
        "cls": harness.IMAGE_FIELDS["cls"],
    }
    fields = {member: known[member] for member in work.members}
    name = fields[work.members[0]]["name"]
    augment = None if work.crop is None else RandomResizedCrop(work.crop)
    loader = ShardLoader(work.shards, fields, global_batch_size=work.batch, num_workers=workers, augment=augment)
    for epoch in itertools.count():
        for batch in loader.epoch(epoch):
            batch = batch.to("cpu") if work.kind == "images" and row.dtype == "fp32" else batch
            yield batch[name], batch["label"] if "cls" in fields else None, int(batch.valid.sum())
            loader.commit()


def webdataset(work: Work, workers: int, row: Row) -> Batches:
    """The pipeline of webdataset's documentation: shuffle, decode, tuples, batches, a WebLoader."""
    import webdataset as wds

    transform, (data, *_) = Transform(work, row), work.members
    # Its own decoders know npy and cls.
    handlers = [] if data == "npy" else [lambda key, value: transform(value) if key.endswith(data) else None]
    pipeline = (
        wds.WebDataset(work.shards, shardshuffle=len(work.shards), seed=0, empty_check=False)
        .shuffle(1000)
        .decode(*handlers)
        .to_tuple(*work.members)
        .batched(work.batch, partial=False)
    )
    for values, *labels in wds.WebLoader(pipeline, batch_size=None, num_workers=workers):
        yield values, *(labels or [None]), len(values)


def litdata(work: Work, workers: int, row: Row) -> Batches:
    """StreamingDataset and StreamingDataLoader over litdata's chunks on the local disk, with its TokensLoader for tokens."""
    harness.declare_torchvision_operators()
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.cache import Cache

    def item_loader() -> Any:
        return TokensLoader(block_size=TOKENS) if work.kind == "tokens" else None

    def write(folder: Path) -> None:
        cache = Cache(str(folder), chunk_bytes="64MB", item_loader=item_loader())
        for number, (data, label) in enumerate(work.stored()):
            cache[number] = torch.tensor(data) if work.kind == "tokens" else {"data": data, "cls": label}
        cache.done()
        cache.merge()

    chunks = _copied(work, "litdata", write)
    dataset = _with_transform(StreamingDataset, work, row)(chunks, item_loader=item_loader(), shuffle=True, seed=0)
    for batch in StreamingDataLoader(dataset, batch_size=work.batch, num_workers=workers, drop_last=True):
        data, labels = (batch, None) if work.kind == "tokens" else batch
        yield data, labels, len(data)


def streaming(work: Work, workers: int, row: Row) -> Batches:
    """mosaicml-streaming's StreamingDataset over its shards on the local disk, in torch's DataLoader."""
    harness.declare_torchvision_operators()
    import streaming as mosaicml

    encoding = {"images": "bytes", "tokens": f"ndarray:uint16:{TOKENS}", "npy": f"ndarray:float32:{str(ARRAY)[1:-1]}"}

    def write(folder: Path) -> None:
        columns = {"data": encoding[work.kind].replace(" ", "")} | ({} if work.kind == "tokens" else {"cls": "int"})
        with mosaicml.MDSWriter(out=str(folder), columns=columns) as writer:
            for data, label in work.stored():
                writer.write({"data": data, "cls": label})

    shards = _copied(work, "mds", write)
    mosaicml.base.util.clean_stale_shared_memory()
    dataset = _with_transform(mosaicml.StreamingDataset, work, row)(local=shards, shuffle=True, batch_size=work.batch)
    for batch in torch.utils.data.DataLoader(dataset, work.batch, num_workers=workers, drop_last=True):
        data, labels = (batch, None) if work.kind == "tokens" else batch
        yield data, labels, len(data)


def grain(work: Work, workers: int, row: Row) -> Batches:
    """Grain's Dataset over ArrayRecord files: shuffle, map, batch, and a prefetch in worker processes.

    A read of ArrayRecord costs 3 us more CPU time for every 1,000 records of the file, so files are small.
    """
    import grain as google
    from array_record.python.array_record_module import ArrayRecordWriter

    def write(folder: Path) -> None:
        writers: list[ArrayRecordWriter] = []
        for number, (data, label) in enumerate(work.stored()):
            if number % 1000 == 0:
                writers.append(ArrayRecordWriter(str(folder / f"{number:09d}.array_record"), "group_size:1"))
            writers[-1].write(label.to_bytes(8, "little") + bytes(data))
        for writer in writers:
            writer.close()

    transform = Transform(work, row)

    def parse(record: bytes) -> tuple[np.ndarray, int]:
        label = int.from_bytes(record[:8], "little")
        if work.kind == "images":
            return np.asarray(transform(memoryview(record)[8:])), label
        array = np.frombuffer(record, np.uint16 if work.kind == "tokens" else np.float32, offset=8)
        return array.reshape(ARRAY) if work.kind == "npy" else array, label

    files = sorted(map(str, Path(_copied(work, "array_record", write)).iterdir()))
    source = google.sources.ArrayRecordDataSource(files)
    dataset = google.MapDataset.source(source).shuffle(seed=0).map(parse).repeat()
    # As its documentation advises for data in memory, here in the page cache: its 16 threads contend for the GIL.
    read = google.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = dataset.to_iter_dataset(read).batch(work.batch, drop_remainder=True)
    if workers:
        batches = batches.mp_prefetch(google.MultiprocessingOptions(num_workers=workers))
    for data, labels in batches:
        yield data, None if work.kind == "tokens" else labels, len(data)


def spdl(work: Work, workers: int, row: Row) -> Batches:
    """SPDL's PipelineBuilder: a source that reads tars and shuffles each, and threads that decode batches.

    The source yields batches, because SPDL's queues cost 100 us of CPU time for each item.
    """
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    rng, shards, transform = random.Random(0), list(work.shards), Transform(work, row)

    def batches() -> Iterator[list[list[memoryview]]]:
        batch: list[list[memoryview]] = []
        while True:
            rng.shuffle(shards)
            for shard in shards:
                by_key: dict[str, dict[str, memoryview]] = {}
                for name, content in spdl.io.iter_tarfile(Path(shard).read_bytes()):
                    key, _, extension = name.partition(".")
                    by_key.setdefault(key, {})[extension] = content
                stored = [[sample[member] for member in work.members] for sample in by_key.values()]
                rng.shuffle(stored)
                for sample in stored:
                    batch.append(sample)
                    if len(batch) == work.batch:
                        yield batch
                        batch = []

    def frames(payload: memoryview) -> Any:
        packets = spdl.io.demux_image(payload)
        crop = transform.crop(packets.height, packets.width)
        window = f"crop={crop.width}:{crop.height}:{crop.left}:{crop.top},scale={CROP}:{CROP}:flags=bilinear"
        return spdl.io.decode_packets(packets, filter_desc=f"{window},format=pix_fmts=rgb24")

    def pixels(payloads: list[memoryview]) -> np.ndarray:
        if row.decoder != "FFmpeg":
            return np.stack([transform.pixels(payload) for payload in payloads])
        if work.crop is None:
            return spdl.io.to_numpy(spdl.io.load_image_batch(payloads, width=None, height=None))
        return spdl.io.to_numpy(spdl.io.convert_frames([frames(payload) for payload in payloads]))

    def decode(batch: list[list[memoryview]]) -> tuple[Any, Any]:
        payloads = [sample[0] for sample in batch]
        labels = None if work.kind == "tokens" else np.array([int(bytes(sample[1])) for sample in batch])
        if work.kind == "images":
            return normalised(pixels(payloads)) if row.dtype == "fp32" else pixels(payloads), labels
        load = spdl.io.load_npy if work.kind == "npy" else transform
        return np.stack([load(payload) for payload in payloads]), labels

    threads = max(1, workers)
    builder = PipelineBuilder().add_source(batches()).pipe(decode, concurrency=threads)
    pipeline = builder.add_sink(2 * threads).build(num_threads=threads)
    with pipeline.auto_stop():
        for data, labels in pipeline:
            yield data, labels, len(data)


def tf_data(work: Work, workers: int, row: Row) -> Batches:
    """tf.data over TFRecord files of tf.train.Example, with as many threads as workers; without any, in this thread."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    labelled = len(work.members) > 1

    def write(folder: Path) -> None:
        writers = [tf.io.TFRecordWriter(str(folder / f"train-{number}.tfrecord")) for number in range(8)]
        for number, (data, label) in enumerate(work.stored()):
            feature = {"data": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes(data)]))}
            if labelled:
                feature["cls"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writers[number % len(writers)].write(example.SerializeToString())
        for writer in writers:
            writer.close()

    features = {"data": tf.io.FixedLenFeature([], tf.string)}
    if labelled:
        features["cls"] = tf.io.FixedLenFeature([], tf.int64)

    def image(record: Any) -> Any:
        example = tf.io.parse_single_example(record, features)
        if work.crop is None:
            pixels = tf.io.decode_jpeg(example["data"], channels=3)
        else:
            begin, size, _ = tf.image.sample_distorted_bounding_box(
                tf.io.extract_jpeg_shape(example["data"]),
                tf.zeros([1, 0, 4]),
                area_range=(0.08, 1.0),
                aspect_ratio_range=(3 / 4, 4 / 3),
                use_image_if_no_bounding_boxes=True,
            )
            window = tf.concat([begin[:2], size[:2]], 0)
            pixels = tf.image.decode_and_crop_jpeg(example["data"], window, channels=3)
            pixels = tf.image.resize(pixels, [work.crop, work.crop], antialias=True)
        if row.dtype == "fp32":
            return tf.transpose(tf.cast(pixels, tf.float32) / 127.5 - 1, [2, 0, 1]), example["cls"]
        return tf.cast(pixels, tf.uint8), example["cls"]

    def arrays(records: Any) -> Any:
        examples = tf.io.parse_example(records, features)
        if work.kind == "tokens":
            return tf.io.decode_raw(examples["data"], tf.uint16), 0
        return tf.reshape(tf.io.decode_raw(examples["data"], tf.float32), [-1, *ARRAY]), examples["cls"]

    files = tf.data.Dataset.list_files(f"{_copied(work, 'tfrecord', write)}/*", shuffle=True)
    records = tf.data.TFRecordDataset(files).shuffle(1000).repeat()
    parallel = workers or None
    if work.kind == "images":
        batches = records.map(image, num_parallel_calls=parallel).batch(work.batch, drop_remainder=True)
    else:
        batches = records.batch(work.batch, drop_remainder=True).map(arrays, num_parallel_calls=parallel)
    options = tf.data.Options()
    options.threading.private_threadpool_size = max(1, workers)
    options.threading.max_intra_op_parallelism = 1
    batches = (batches.prefetch(2) if workers else batches).with_options(options)
    for data, labels in batches.as_numpy_iterator():
        yield data, labels if labelled else None, len(data)


def dali(work: Work, workers: int, row: Row) -> Batches:
    """A pipeline of NVIDIA DALI on the CPU over the same shards, with as many threads as workers, at least one."""
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    pipeline = Pipeline(batch_size=work.batch, num_threads=max(1, workers), device_id=None, prefetch_queue_depth=2)
    with pipeline:
        members = fn.readers.webdataset(
            paths=work.shards,
            ext=list(work.members),
            dtypes=[types.UINT16] if work.kind == "tokens" else [types.UINT8] * len(work.members),
            random_shuffle=True,
            initial_fill=1000,
            missing_component_behavior="error",
        )
        data, *labels = members if isinstance(members, list | tuple) else [members]
        if work.kind == "npy":
            data = fn.decoders.numpy(data)
        elif work.kind == "images" and work.crop is None:
            data = fn.decoders.image(data, device="cpu", output_type=types.RGB)
        elif work.kind == "images":
            # Decodes only the window, which is DALI's advice for training.
            data = fn.decoders.image_random_crop(data, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0])
            data = fn.resize(data, resize_x=work.crop, resize_y=work.crop, antialias=True)
        if work.kind == "images" and row.dtype == "fp32":
            half = [127.5] * 3
            data = fn.crop_mirror_normalize(data, dtype=types.FLOAT, output_layout="CHW", mean=half, std=half)
        pipeline.set_outputs(data, *labels)
    pipeline.build()
    while True:
        data, *labels = pipeline.run()
        numbers = [int(bytes(np.asarray(labels[0].at(n), np.uint8))) for n in range(len(labels[0]))] if labels else None
        batch = np.array(data.as_array())
        yield batch, numbers, len(batch)


def decoding(work: Work, workers: int, row: Row) -> Batches:
    """No loader: one process decodes (and does not crop) files in memory."""
    jpegs = [jpg for jpg, _ in itertools.islice(work.samples(), 2000)]
    payloads, shape = itertools.cycle(jpegs), DECODERS["simplejpeg"](jpegs[0]).shape
    # As dtrain allocates them; see its collator.
    memory = torch.empty(work.batch * math.prod(shape) + 16, dtype=torch.uint8).numpy()[16:].reshape(work.batch, *shape)
    decode, images = DECODERS[row.decoder], list(memory)
    options = [{"buffer": one} for one in images] if row.decoder == "simplejpeg" else [{}] * work.batch
    while True:
        for payload, option in zip(itertools.islice(payloads, work.batch), options, strict=True):
            decode(payload, **option)
        yield memory, None, work.batch


LOADERS: dict[str, Callable[[Work, int, Row], Batches]] = {
    "dtrain": dtrain,
    "webdataset": webdataset,
    "litdata": litdata,
    "mosaicml-streaming": streaming,
    "Grain": grain,
    "SPDL": spdl,
    "tf.data": tf_data,
    "DALI": dali,
    CEILING: decoding,
}
#: Modules of loaders that are not called like them.
MODULES = {
    **{CEILING: "simplejpeg", "mosaicml-streaming": "streaming", "Grain": "grain", "SPDL": "spdl"},
    **{"tf.data": "tensorflow", "DALI": "nvidia.dali"},
}
#: Their packages, whose versions are printed.
PACKAGES = (
    *("webdataset", "litdata", "mosaicml-streaming", "grain", "array_record", "spdl", "tensorflow-cpu"),
    *("nvidia-dali-cuda120", "torch", "Pillow", "simplejpeg"),
)


def _copied(work: Work, name: str, write: Callable[[Path], None]) -> str:
    """The folder of the samples in another format, written by the first process that needs it."""
    folder = Path(work.copies, name)
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(partial)
        partial.rename(folder)
    return str(folder)


def _with_transform(base: type, work: Work, row: Row) -> type:
    """A dataset class of litdata or mosaicml-streaming whose samples are data and label, or tokens."""
    transform = Transform(work, row)

    class Samples(base):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            if work.kind == "tokens":
                return sample["data"] if isinstance(sample, dict) else sample
            return transform(sample["data"]) if work.kind == "images" else sample["data"], sample["cls"]

    return Samples
