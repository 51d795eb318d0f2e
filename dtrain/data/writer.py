"""Writes shards: all shards of a set or none, with the same bytes on every run.

* A *set* is the shards of one prefix in one folder: ``train-000000.tar``, ``train-000001.tar``, ...
* A set is written into a hidden folder inside its folder and moved at the end, so that after an exception no file
  matches a pattern. If the process is killed, the hidden folder remains and can be deleted.
* The tars have the same bytes as those of webdataset's ``TarWriter``, with fixed owner and time, and with the encoders
  below. The encoders never pickle, and never compress lossily: a ``jpg`` has to be given as bytes.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dtrain.data.fields.field import PICKLES
from dtrain.data.shards.shard_index import load_or_build
from dtrain.files import fsync_path, replace_file

Sample = Mapping[str, Any]
# ``skip_meta`` of webdataset/tariterators.py.
_SKIPPED = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True)
class RowBlock:
    """Samples of one member each, all of the same size: ``write_shard`` writes them faster than single samples.

    Nothing of it is checked.

    Attributes:
        first: Number of the first row; the key of a sample is its row's number in nine digits or more.
        extension: Extension of the members, ASCII.
        values: The members, little-endian, shape ``[rows, values]``.
    """

    first: int
    extension: str
    values: np.ndarray

    def tar_bytes(self) -> np.ndarray:
        """The headers and the padded payloads, uint8, shape ``[rows, bytes]``."""
        payloads = np.ascontiguousarray(self.values).view(np.uint8)
        count, size = payloads.shape
        block = np.zeros((count, tarfile.BLOCKSIZE + size + -size % tarfile.BLOCKSIZE), np.uint8)
        numbers = range(self.first, self.first + count)
        headers = b"".join(_header(f"{number:09d}.{self.extension}", size) for number in numbers)
        block[:, : tarfile.BLOCKSIZE] = np.frombuffer(headers, np.uint8).reshape(count, tarfile.BLOCKSIZE)
        block[:, tarfile.BLOCKSIZE : tarfile.BLOCKSIZE + size] = payloads
        return block


def write_shards(
    samples: Iterable[Sample],
    directory: str | os.PathLike[str],
    *,
    prefix: str = "train",
    shards: int | None = None,
    per_shard: int | None = None,
    total: int | None = None,
) -> list[Path]:
    """Writes samples as balanced shards, whose sizes differ by one sample at most, and indexes them.

    Args:
        samples: Dicts with ``__key__`` and, by extension, bytes or one of: ``cls`` an int, ``txt`` a str, ``json``
            values that JSON can hold, ``npy`` an array of numbers, ``png`` uint8 pixels ``[height, width]`` or
            ``[height, width, 3]``. Other entries that start with an underscore are left out.
        directory: Folder of the set; created if missing.
        prefix: First part of the shards' names.
        shards: Number of shards.
        per_shard: Largest number of samples in a shard; give this or ``shards``.
        total: Number of samples; needed for ``shards`` if ``samples`` has no length. Without it, ``per_shard`` fills
            one shard after the other and leaves the last one short.

    Returns:
        The shards, in order.

    Raises:
        ValueError: If sizes do not fit, ``prefix`` cannot be part of a file name, or a sample cannot be stored; names its
            key.
        FileExistsError: If the folder has shards of that prefix.

    Example:
        >>> import tempfile
        >>> from dtrain.data import write_shards
        >>> samples = [{"__key__": f"{n:03}", "txt": "a text", "cls": n % 2} for n in range(10)]
        >>> [path.name for path in write_shards(samples, tempfile.mkdtemp(), per_shard=4, total=10)]
        ['train-000000.tar', 'train-000001.tar', 'train-000002.tar']
    """
    if total is None and isinstance(samples, Sized):
        total = len(samples)
    if total is None and shards is not None:
        raise ValueError("shards= needs the number of samples: pass total= as well, or per_shard= instead.")
    sizes = balanced_sizes(total or 0, shards=shards, per_shard=per_shard)
    check_prefix(prefix)
    folder = Path(directory)
    refuse_mixing(folder, prefix)
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{prefix}-", suffix=".partial", dir=folder))
    try:
        if total is None and per_shard is not None:
            number_of = _write_stream(staging, prefix, iter(samples), per_shard)
        else:
            number_of = _write_planned(staging, prefix, iter(samples), sizes)
        refuse_mixing(folder, prefix)
        paths = [folder / shard_name(prefix, number) for number in range(number_of)]
        for path in paths:
            os.replace(staging / path.name, path)
        fsync_path(folder)
        for path in paths:
            load_or_build(str(path))
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return paths


def balanced_sizes(total: int, *, shards: int | None = None, per_shard: int | None = None) -> list[int]:
    """The number of samples of each shard; they differ by one at most.

    Raises:
        ValueError: If not exactly one of ``shards`` and ``per_shard`` is given, or there are too few samples for it.
    """
    if (shards is None) == (per_shard is None) or (shards or per_shard or 0) < 1:
        raise ValueError(f"got shards={shards} and per_shard={per_shard}, want one of them, at least 1.")
    if per_shard is not None:
        shards = max(-(-total // per_shard), 1)
    number_of = shards or 1
    if number_of > max(total, 1):
        raise ValueError(f"{total} samples do not fill {number_of} shards. Ask for {max(total, 1)} or fewer.")
    return [total * (number + 1) // number_of - total * number // number_of for number in range(number_of)]


def write_shard(path: Path, samples: Iterable[Sample | RowBlock]) -> int:
    """Writes one shard; after a failure ``path`` is as it was before.

    Args:
        path: Path of the shard; its folder must exist. An existing file is replaced.
        samples: As for ``write_shards``, or blocks of rows, whose numbers no other sample has as its key.

    Returns:
        Number of samples written.

    Raises:
        ValueError: If a sample cannot be stored; names its key.
        OSError: On a write failure.
    """
    import webdataset  # readers of shards do not need it

    keys: set[str] = set()
    rows = 0
    with replace_file(path) as file, webdataset.TarWriter(file) as tar:
        for sample in samples:
            if isinstance(sample, RowBlock):
                file.write(sample.tar_bytes().data)
                rows += len(sample.values)
            else:
                check_key(sample.get("__key__"), keys)
                file.writelines(_members(sample))
        tar.tarstream.offset = file.tell()  # tar writes the end of the file
    return len(keys) + rows


def encode(sample: Mapping[str, Any]) -> dict[str, Any]:
    """``__key__`` and the bytes of each member, by extension.

    Raises:
        ValueError: If there is no member, or one that cannot be stored; names the key.
    """
    key = sample["__key__"]
    members = {ext: _encode_member(key, ext, value) for ext, value in sample.items() if not ext.startswith("_")}
    if not members:
        raise ValueError(f"sample {key!r} has no field.")
    return {"__key__": key, **members}


def _members(sample: Sample) -> Iterator[bytes]:
    """The headers and the padded payloads of a sample."""
    encoded = encode(sample)
    key = encoded.pop("__key__")
    for extension in sorted(encoded):
        payload = encoded[extension]
        yield _header(f"{key}.{extension}", len(payload))
        yield payload
        yield bytes(-len(payload) % tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    """What ``TarWriter`` writes before a member."""
    if not name.isascii() or len(name) > _NAME_BYTES or size > _MAX_SIZE:
        info = _tar_info(name)
        info.size = size
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    # tarfile takes 20 times as long, longer than all else that writing a row of tokens needs.
    start, digits = name.encode().ljust(_NAME_BYTES, b"\0"), b"%011o" % size
    checksum = _PLAIN_SUM + sum(start) + sum(digits)
    return b"%b%b%b%b%06o\0%b" % (start, _PLAIN[:24], digits, _PLAIN[35:48], checksum, _PLAIN[55:])


def _tar_info(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    # Owner and mode as of TarWriter. The time is fixed: the bytes must not depend on when they were written.
    info.mode, info.uname, info.gname, info.mtime = 0o444, "bigdata", "bigdata", 0
    return info


def shard_name(prefix: str, number: int) -> str:
    """``train-000000.tar``."""
    return f"{prefix}-{number:06d}.tar"


def check_prefix(prefix: str) -> None:
    """Raises ``ValueError`` for a prefix that cannot be part of a file name."""
    if not prefix or prefix.startswith(".") or set(prefix) & set("/\\\0*?[]{}"):
        raise ValueError(f"prefix {prefix!r}: want a plain name such as train.")


def refuse_mixing(folder: Path, prefix: str) -> None:
    """Raises ``FileExistsError`` if a folder already has shards of this prefix."""
    # A smaller new set would leave the last shards of an older one in place, and patterns would match both.
    old = sorted(folder.glob(f"{prefix}-*.tar"))
    if old:
        raise FileExistsError(
            f"{folder} already has {len(old)} shard{'s' * (len(old) > 1)} of that name, such as {old[0].name}. Delete "
            "them or choose a different folder."
        )


def _write_stream(folder: Path, prefix: str, samples: Iterator[Sample], per_shard: int) -> int:
    """Fills one shard after the other; returns their number."""
    for number in count():
        first = list(islice(samples, 1))
        if number and not first:
            break
        write_shard(folder / shard_name(prefix, number), chain(first, islice(samples, per_shard - 1)))
    return number


def _write_planned(folder: Path, prefix: str, samples: Iterator[Sample], sizes: Sequence[int]) -> int:
    """Writes shards of these sizes; returns their number."""
    for number, size in enumerate(sizes):
        written = write_shard(folder / shard_name(prefix, number), islice(samples, size))
        if written != size:
            raise ValueError(
                f"shard {number} got {written} of {size} samples: there are fewer than total={sum(sizes)}."
            )
    if next(samples, None) is not None:
        raise ValueError(f"there are more samples than total={sum(sizes)}.")
    return len(sizes)


def check_key(key: Any, seen: set[str]) -> None:
    """Raises ``ValueError`` for a ``__key__`` under which a sample could not be read again; adds it to ``seen``."""
    if not isinstance(key, str) or not key:
        raise ValueError(f"a sample has the __key__ {key!r}, want a non-empty string.")
    if "." in key.rpartition("/")[2]:
        raise ValueError(
            f"key {key!r}: its last part has a dot, after which readers of shards expect the extension; samples would "
            "be merged. Use an underscore instead."
        )
    if {"", ".", ".."} & set(key.split("/")) or "\0" in key:
        raise ValueError(f"key {key!r}: want a relative name without empty parts, '.' and '..'.")
    if _SKIPPED.match(key):
        raise ValueError(f"key {key!r}: webdataset reserves names such as __name__ and skips them. Rename it.")
    if key in seen:
        raise ValueError(f"two samples of one shard have the key {key!r}. Keys must be unique.")
    seen.add(key)


def _encode_member(key: str, ext: str, value: Any) -> bytes:
    if not ext or ext != ext.lower() or ext.startswith(".") or set(ext) & set("/\0"):
        raise ValueError(f"sample {key!r}: extension {ext!r}, want lower case without the leading dot, such as jpg.")
    last = ext.rpartition(".")[2]
    if last in PICKLES:
        raise ValueError(f"sample {key!r}: .{ext} is a pickle, which dtrain never writes or reads. Use npy or json.")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        return value.encode("utf-8")
    if last not in _ENCODERS:
        raise ValueError(f"sample {key!r}: no encoder for .{ext}. Pass bytes, or use one of {', '.join(_ENCODERS)}.")
    try:
        return _ENCODERS[last](value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"sample {key!r}: .{ext} cannot be written: {error}") from error


def _integer(value: Any) -> bytes:
    if int(value) != value:
        raise ValueError(f"{value!r} is not an integer")
    return str(int(value)).encode()


def _npy(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(value), allow_pickle=False)
    return stream.getvalue()


def _png(value: Any) -> bytes:
    pixels = np.asarray(value)
    if pixels.dtype != np.uint8:
        raise ValueError(f"pixels of dtype {pixels.dtype}, want uint8")
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


# A header without a name: what follows the name, in which 11 digits of the size are at 24 and 6 of the checksum at 48.
_NAME_BYTES, _MAX_SIZE = 100, 8**11 - 1
_PLAIN = _tar_info("").tobuf(tarfile.PAX_FORMAT)[_NAME_BYTES:]
# The checksum counts its own field as spaces.
_PLAIN_SUM = sum(_PLAIN[:24]) + sum(_PLAIN[35:48]) + sum(_PLAIN[56:]) + 8 * ord(" ")
# webdataset's own encoders would pickle arrays of objects and compress jpg with a loss.
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "class", "count"), _integer),
    "json": lambda value: json.dumps(value).encode(),
    "npy": _npy,
    "png": _png,
}
