"""Shard indexes that outlive the process: beside their shards, or in the cache where nothing can be written there.

* An index is *fresh* while the shard has the size and the modification time that are noted in it.
* It is published by a rename, so that any number of processes may build the same one at once: a reader sees a whole file.

The file is a safetensors file (a table of contents and plain arrays, aligned, no pickle) with a checksum over everything.
Reading it whole, rather than mapping it, keeps a reader safe from a network file system on which another host replaces it.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from dtrain.config.cache_dir import cache_dir
from dtrain.data.tar_index import ShardIndex, index_tar

_VERSION = 1
_ARRAYS = ("key_bytes", "key_starts", "member_sample", "member_extension", "member_offset", "member_size")
# Other tools keep a `.tar.idx` too; a safetensors file with metadata is none of theirs.
_MARK = slice(8, 24), b'{"__metadata__":'


def load_or_build(path: str) -> ShardIndex:
    """The index of a shard: the one that is kept if it is fresh, else a new one, which is kept from now on.

    Warns if it cannot be kept anywhere.

    Raises:
        ShardError: If the shard is damaged.
        OSError: If it cannot be read.
    """
    status = os.stat(path)
    for place_of in (_beside, _in_cache):
        index = _load(place_of(path), path, status)
        if index is not None:
            return index
    index = index_tar(path)
    try:
        write(index)
    except OSError as error:
        warnings.warn(
            f"indexes cannot be kept in {cache_dir()} ({error.strerror}): they are built again at every start. Set "
            "DTRAIN_CACHE to a folder that can be written.",
            stacklevel=2,
        )
    return index


def write(index: ShardIndex) -> Path:
    """Keeps an index, beside its shard if possible, else in the cache.

    Returns:
        The file.

    Raises:
        OSError: If neither place can be written.
    """
    content = _pack(index)
    beside = _beside(index.path)
    try:
        if _may_write(beside):
            return _publish(beside, content)
    except OSError:
        pass  # read-only or full: that is what the cache is for
    in_cache = _in_cache(index.path)
    in_cache.parent.mkdir(parents=True, exist_ok=True)
    return _publish(in_cache, content)


def _beside(path: str) -> Path:
    return Path(f"{path}.idx")


def _in_cache(path: str) -> Path:
    name = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:32]
    return cache_dir() / "index" / f"{name}.idx"


def _may_write(place: Path) -> bool:
    # A folder that nobody may write to is meant to stay as it is; root could write there all the same.
    if not place.parent.stat().st_mode & 0o222:
        return False
    try:
        with open(place, "rb") as file:
            start = file.read(_MARK[0].stop)
    except FileNotFoundError:
        return True
    return not start or start[_MARK[0]] == _MARK[1]


def _publish(place: Path, content: bytes) -> Path:
    aside = place.with_name(f".{uuid.uuid4().hex}.tmp")
    # Not tempfile, whose files only their owner can read: a data folder is often shared by a group.
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(aside, place)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return place


def _pack(index: ShardIndex) -> bytes:
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    notes = {
        "version": _VERSION,
        "shard_size": index.shard_size,
        "mtime_ns": index.mtime_ns,
        "extensions": index.extensions,
        "doubts": index.doubts,
    }
    notes["crc32"] = _checksum(notes, arrays)
    return safetensors.numpy.save(arrays, {"dtrain": json.dumps(notes)})


def _load(place: Path, path: str, status: os.stat_result) -> ShardIndex | None:
    """The index in a file; None if there is none, or it is stale, damaged, or not one of ours."""
    try:
        content = place.read_bytes()
    except OSError:
        return None
    if content[_MARK[0]] != _MARK[1]:
        return None
    try:
        contents_end = 8 + int.from_bytes(content[:8], "little")
        notes = json.loads(json.loads(content[8:contents_end])["__metadata__"]["dtrain"])
        if (notes["version"], notes["shard_size"], notes["mtime_ns"]) != (_VERSION, status.st_size, status.st_mtime_ns):
            return None
        arrays = safetensors.numpy.load(content)
        if notes.pop("crc32") != _checksum(notes, arrays):
            return None
    except (safetensors.SafetensorError, ValueError, LookupError, TypeError):
        return None
    return ShardIndex(
        path=path,
        shard_size=notes["shard_size"],
        mtime_ns=notes["mtime_ns"],
        extensions=tuple(notes["extensions"]),
        doubts=tuple(notes["doubts"]),
        **arrays,
    )


def _checksum(notes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
    value = zlib.crc32(json.dumps(notes).encode())
    for name in _ARRAYS:
        value = zlib.crc32(np.ascontiguousarray(arrays[name]).data, value)
    return value
