"""Shard indexes that outlive the process: beside their shards, or in the cache where nothing can be written there.

* An index is *fresh* while the shard has the stamp that is noted in it.
* That of a URL is looked for beside it, but only ever written to the cache. Beside it lies one that was uploaded with the
  shard, whose modification time nobody knows any more: it is fresh if the sizes and the last header agree.
* It is published by a rename, so that any number of processes may build the same one at once: a reader sees a whole file.

The file is a safetensors file (a table of contents and plain arrays, aligned, no pickle) with a checksum over everything.
Reading it whole, rather than mapping it, keeps a reader safe from a network file system on which another host replaces it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import uuid
import warnings
import zlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from dtrain.config.cache_dir import cache_dir
from dtrain.data.cache_policy import CachePolicy
from dtrain.data.remote import NoRanges, RemoteFile
from dtrain.data.shard_file import Stamp, stamp_of
from dtrain.data.tar_index import ShardIndex, index_copy, index_tar
from dtrain.data.urls import absolute, is_url

_VERSION = 2
_ARRAYS = ("key_bytes", "key_starts", "member_sample", "member_extension", "member_offset", "member_size")
# Other tools keep a `.tar.idx` too; a safetensors file with metadata is none of theirs.
_MARK = slice(8, 24), b'{"__metadata__":'


def load_or_build(path: str, stamp: Stamp | None = None, policy: CachePolicy | None = None) -> ShardIndex:
    """The index of a shard: the one that is kept if it is fresh, else a new one, which is kept from now on.

    Warns if it cannot be kept anywhere.

    Args:
        path: A path or a URL.
        stamp: Its stamp, if it is known. None: it is asked for.
        policy: Has the cache that a shard is copied into if its server cannot start in the middle of it.

    Raises:
        ShardError: If the shard is damaged.
        ShardChanged: If it is not what ``stamp`` says.
        CacheFull: If it would have to be copied, and there is no room.
        OSError: If it cannot be read.
    """
    stamp = stamp_of(path) if stamp is None else stamp
    for place_of in (_in_cache,) if is_url(path) else (_beside, _in_cache):
        index = _load(place_of(path), path)
        if index is not None and index.stamp == stamp:
            return index
    index = _uploaded(path, stamp) if is_url(path) else None
    if index is None:
        index = _build(path, stamp, policy or CachePolicy())
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
    """Keeps an index, beside its shard if that is a file and it is possible, else in the cache.

    Returns:
        The file.

    Raises:
        OSError: If neither place can be written.
    """
    content = _pack(index)
    beside = _beside(index.path)
    try:
        if not is_url(index.path) and _may_write(beside):
            return _publish(beside, content)
    except OSError:
        pass  # read-only or full: that is what the cache is for
    in_cache = _in_cache(index.path)
    in_cache.parent.mkdir(parents=True, exist_ok=True)
    return _publish(in_cache, content)


def _build(path: str, stamp: Stamp, policy: CachePolicy) -> ShardIndex:
    try:
        return index_tar(path)
    except NoRanges:
        return index_copy(str(policy.cache.fetched(path, stamp)), path, stamp)


def _uploaded(url: str, stamp: Stamp) -> ShardIndex | None:
    """The index beside a URL; None if there is none that is fresh."""
    if "?" in url:  # a signature is good for one file
        return None
    try:
        with closing(RemoteFile(f"{url}.idx")) as file:
            index = _unpack(file.read(0, file.size), url)
    except OSError:
        return None
    if index is None or index.stamp.size != stamp.size or not _has_last_header(url, index):
        return None
    return replace(index, stamp=stamp)


def _has_last_header(url: str, index: ShardIndex) -> bool:
    """Whether the shard has a header where the index has its last member: in another shard, it would lie elsewhere."""
    if not len(index.member_offset):
        return False
    last = int(index.member_offset.argmax())
    try:
        with closing(RemoteFile(url)) as file:
            header = file.read(int(index.member_offset[last]) - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE)
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size == index.member_size[last]
    except (tarfile.HeaderError, NoRanges):
        return False


def _beside(path: str) -> Path:
    return Path(f"{path}.idx")


def _in_cache(path: str) -> Path:
    name = hashlib.sha256(os.fsencode(absolute(path))).hexdigest()[:32]
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
        "stamp": index.stamp,
        "extensions": index.extensions,
        "doubts": index.doubts,
    }
    notes["crc32"] = _checksum(notes, arrays)
    return safetensors.numpy.save(arrays, {"dtrain": json.dumps(notes)})


def _load(place: Path, path: str) -> ShardIndex | None:
    """The index in a file; None if there is none, or it is damaged or not one of ours."""
    try:
        return _unpack(place.read_bytes(), path)
    except OSError:
        return None


def _unpack(content: bytes, path: str) -> ShardIndex | None:
    if content[_MARK[0]] != _MARK[1]:
        return None
    try:
        contents_end = 8 + int.from_bytes(content[:8], "little")
        notes = json.loads(json.loads(content[8:contents_end])["__metadata__"]["dtrain"])
        if notes["version"] != _VERSION:
            return None
        arrays = safetensors.numpy.load(content)
        if notes.pop("crc32") != _checksum(notes, arrays):
            return None
    except (safetensors.SafetensorError, ValueError, LookupError, TypeError):
        return None
    return ShardIndex(
        path=path,
        stamp=Stamp(*notes["stamp"]),
        extensions=tuple(notes["extensions"]),
        doubts=tuple(notes["doubts"]),
        **arrays,
    )


def _checksum(notes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
    value = zlib.crc32(json.dumps(notes).encode())
    for name in _ARRAYS:
        value = zlib.crc32(np.ascontiguousarray(arrays[name]).data, value)
    return value
