"""Shards for tests, written with ``tarfile``, and what ``tarfile`` says is in them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

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


def loader_of(shards: Sequence[str], fields: dict[str, Any] = LABEL, **options: Any) -> ShardLoader:
    """A loader of batches of six in this process, unless told otherwise."""
    given = {"global_batch_size": 6, "num_workers": 0, **options}
    return ShardLoader(shards, fields, **given)


def ranks_of(shards: Sequence[str], world: int, **options: Any) -> list[ShardLoader]:
    """The loaders of all ranks."""
    return [loader_of(shards, rank=rank, world_size=world, **options) for rank in range(world)]


def close(loaders: Iterable[ShardLoader]) -> None:
    """Ends their workers."""
    for loader in loaders:
        loader.close()


def epoch_of(loader: ShardLoader, epoch: int | None = None, commit: bool = True) -> list[list[Batch]]:
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


def keys_of(batches: Iterable[Batch]) -> list[str]:
    """Keys of the valid rows, in order."""
    return [key for batch in batches for key in batch.sample_keys if key]


def global_batches(ranks: Sequence[ShardLoader], epoch: int | None = None) -> list[list[str]]:
    """Keys of each global batch, in the order of its slots: rank after rank, micro-batch after micro-batch."""
    by_rank = [epoch_of(loader, epoch) for loader in ranks]
    assert len({len(steps) for steps in by_rank}) == 1, "ranks disagree about the number of steps"
    return [[key for steps in by_rank for key in keys_of(steps[step])] for step in range(len(by_rank[0]))]
