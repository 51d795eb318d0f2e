"""Shards for tests, and the oracles that indexes and loaders are compared with: ``tarfile`` and webdataset."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import webdataset
from webdataset.tariterators import group_by_keys, tar_file_expander

from dtrain.data import Batch, ShardLoader

LABEL = {"cls": {"name": "label", "role": "label"}}
IMAGE = {"jpg": {"name": "image", "role": "image"}}
#: Uneven, a prime number of samples (47), with an empty shard, one of a single sample, and none that a batch divides.
UNEVEN = (5, 0, 13, 1, 17, 11)


def write_tar(path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> str:
    """A shard of samples: a key, and the bytes of each extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for extension, payload in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
    return str(path)


def write_numbered(folder: Path, counts: Sequence[int], image: bool = False) -> list[str]:
    """Shards of so many samples each; ``cls`` counts them over all shards, ``jpg`` differs for each."""
    paths, number = [], 0
    for shard, count in enumerate(counts):
        samples = []
        for _ in range(count):
            members = {"jpg": jpeg(number)} if image else {}
            samples.append((f"sample{number:05d}", {**members, "cls": str(number).encode()}))
            number += 1
        paths.append(write_tar(folder / f"shard-{shard:03d}.tar", samples))
    return paths


#: The fields of ``write_vectors``.
VECTOR_FIELDS = {"npy": {"name": "x", "role": "feature"}, "cls": {"name": "number", "role": "label"}}


def vector(sample: int) -> np.ndarray:
    """The array of a sample of ``write_vectors``: float32, shape ``[3]``."""
    return np.random.default_rng(sample).standard_normal(3).astype(np.float32)


def write_vectors(folder: Path, count: int, shards: int = 3) -> str:
    """Writes ``count`` samples, each a vector and its number, to a few shards; returns their pattern."""
    for shard, numbers in enumerate(np.array_split(np.arange(count), shards)):
        samples = [(f"{n:06d}", {"npy": npy(vector(n)), "cls": str(n).encode()}) for n in numbers.tolist()]
        write_tar(folder / f"part-{shard}.tar", samples)
    return str(folder / "part-*.tar")


def write_patterns(folder: Path, count: int, size: int) -> list[str]:
    """Files of ``size`` bytes that are no tars, for what reads ranges: byte *n* of file *k* is ``(k + n) % 251``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.tar" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes((number + place) % 251 for place in range(size)))
    return [str(path) for path in paths]


def jpeg(seed: int, height: int = 8, width: int = 8) -> bytes:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return simplejpeg.encode_jpeg(pixels, quality=90)


def npy(array: np.ndarray) -> bytes:
    """An array as a file."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def stored_members(paths: Iterable[str]) -> dict[str, dict[str, tuple[bytes, int]]]:
    """Payload and offset of each extension of each sample, by ``<shard>/<key>``, in stored order."""
    found: dict[str, dict[str, tuple[bytes, int]]] = {}
    for path in paths:
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                stem, _, extension = member.name.partition(".")
                stream = tar.extractfile(member)
                assert stream is not None
                key = f"{Path(path).name}/{stem}"
                found.setdefault(key, {})[extension] = stream.read(), member.offset_data
    return found


def stored_keys(paths: Iterable[str]) -> list[str]:
    """``<shard>/<key>`` of all samples, in stored order."""
    return list(stored_members(paths))


def make_loader(shards: Sequence[str], fields: dict[str, Any] = LABEL, **options: Any) -> ShardLoader:
    """A loader of batches of six in this process, unless told otherwise."""
    given = {"global_batch_size": 6, "num_workers": 0, **options}
    return ShardLoader(shards, fields, **given)


def make_ranks(shards: Sequence[str], world: int, **options: Any) -> list[ShardLoader]:
    """The loaders of all ranks."""
    return [make_loader(shards, rank=rank, world_size=world, **options) for rank in range(world)]


def close(loaders: Iterable[ShardLoader]) -> None:
    """Ends their workers."""
    for loader in loaders:
        loader.close()


def read_epoch(loader: ShardLoader, epoch: int | None = None, commit: bool = True) -> list[list[Batch]]:
    """What is left of an epoch: the micro-batches of each step, each step committed."""
    steps: list[list[Batch]] = [[]]
    for batch in loader if epoch is None else loader.epoch(epoch):
        steps[-1].append(batch)
        if len(steps[-1]) == loader.micro_batches_per_step:
            if commit:
                loader.commit()
            steps.append([])
    assert not steps.pop(), "the epoch ended in the middle of a step"
    return steps


def valid_keys(batches: Iterable[Batch]) -> list[str]:
    """Keys of the valid rows, in order."""
    return [key for batch in batches for key in batch.sample_keys if key]


def global_batches(ranks: Sequence[ShardLoader], epoch: int | None = None) -> list[list[str]]:
    """Keys of each global batch, in the order of its slots: rank after rank, micro-batch after micro-batch."""
    by_rank = [read_epoch(loader, epoch) for loader in ranks]
    assert len({len(steps) for steps in by_rank}) == 1, "ranks disagree about the number of steps"
    return [[key for steps in by_rank for key in valid_keys(steps[step])] for step in range(len(by_rank[0]))]


def tar_bytes(files: Mapping[str, bytes] | Iterable[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar of regular files, given as a mapping or as pairs."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for name, payload in files.items() if isinstance(files, Mapping) else files:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return out.getvalue()


def write_shard(path: Path, count: int, *, first: int = 0, extensions: Iterable[str] = ("jpg", "cls")) -> Path:
    """A shard of ``count`` samples with keys 000000, ...; every payload differs."""
    names = [f"{number:06d}.{extension}" for number in range(first, first + count) for extension in extensions]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes((name, name.encode() * (1 + index % 5)) for index, name in enumerate(names)))
    return path


def tarfile_files(content: bytes) -> list[tuple[str, int, int]]:
    """Name, offset and size of each regular file, as ``tarfile`` reads them."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
        return [(info.name, info.offset_data, info.size) for info in tar if info.isreg()]


def webdataset_samples(content: bytes) -> list[dict[str, Any]]:
    """The samples that webdataset makes of a tar: ``__key__`` and the payload of each extension."""
    samples = group_by_keys(tar_file_expander([{"url": "", "stream": io.BytesIO(content)}]))
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


def webdataset_reads(*shards: Path) -> Any:
    """A pipeline of webdataset over these shards, in order; any version of it that dtrain accepts."""
    urls = [str(shard) for shard in shards]
    return webdataset.DataPipeline(webdataset.SimpleShardList(urls), webdataset.tarfile_to_samples())
