"""The index of one shard: its samples and where each of their members is; built from the tar, stored, loaded.

* A *member* is a regular file of the tar whose name has a key and an extension.
* A *sample* is a run of adjacent members with equal keys. Members are grouped exactly as webdataset groups them.
* An index is *fresh* while the shard has the stamp that is stored in the index.
* It is stored next to the shard (``x.tar.idx``), or in the cache directory where that is not possible. The index of a URL is
  read from both places, but only written to the cache. An uploaded index next to a URL is fresh if the sizes and the last
  header agree; modification times mean nothing after an upload.
* It is replaced atomically, so that any number of processes may build the same index at once.
* Its *digest* is a hash of the samples' keys, extensions and member sizes, in stored order. It distinguishes a shard that was
  packed again from the old one, even if both have the same name, size and number of samples. An index that was stored before
  there were digests gets its digest when it is loaded.

Everything is in arrays, because a shard can have millions of samples. Keys are bytes, and become text as in
``tarfile``: UTF-8, undecodable bytes as lone surrogates. The file format is safetensors (a header and plain aligned
arrays, no pickle) with a checksum over everything. It is read completely rather than mapped, so that a reader is safe
when another host replaces the file on a network file system.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tarfile
import warnings
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from dtrain.data.shards.http_ranges import NoRanges
from dtrain.data.shards.node_cache import CacheFull, CachePolicy
from dtrain.data.shards.shard_file import ReadAhead, RemoteFile, Stamp, stamp_of, walk_reads_all
from dtrain.data.shards.tar import ShardError, Walkable, walk
from dtrain.files import cache_dir, replace_file
from dtrain.urls import absolute, is_url

#: Splits a name into key and extension; None where it has no key. webdataset's `base_plus_ext` on bytes.
split_name = re.compile(rb"^((?:.*/|)[^.]+)[.]([^/]*)$").match
#: webdataset's ``skip_meta``.
is_meta = re.compile(rb"__[^/]*__($|/)").match
# Names that webdataset itself uses inside a sample.
_RESERVED = ("__key__", "__url__", "__local_path__", "__bad__")
_VERSION = 2
_ARRAYS = ("key_bytes", "key_starts", "member_sample", "member_extension", "member_offset", "member_size")
# Other tools write `.tar.idx` files too. dtrain's are safetensors files with metadata, which start like this.
_MARK = slice(8, 24), b'{"__metadata__":'


def load_or_build(path: str, stamp: Stamp | None = None, policy: CachePolicy | None = None) -> ShardIndex:
    """The index of a shard: the stored one if it is fresh, else a new one, which is then stored.

    Warns if it cannot be stored anywhere.

    Args:
        path: A path or a URL.
        stamp: Its stamp; None: ``stamp_of(path)``.
        policy: Its cache receives a copy of a URL if there is room, and is indexed. None: the default cache does, but only if
            the server does not support range requests.

    Raises:
        ShardError: If the shard is damaged.
        ShardChanged: If it does not have the given ``stamp``.
        CacheFull: If it would have to be copied and there is no room.
        OSError: If it cannot be read.
    """
    stamp = stamp_of(path) if stamp is None else stamp
    for place_of in (_in_cache,) if is_url(path) else (_beside, _in_cache):
        index = _load(place_of(path), path)
        if index is not None and index.stamp == stamp:
            return index
    index = _uploaded(path, stamp) if is_url(path) else None
    if index is None:
        index = _build(path, stamp, policy)
    try:
        write_index(index)
    except OSError as error:
        warnings.warn(
            f"indexes cannot be stored in {cache_dir()} ({error.strerror}): they are built again at every start. Set "
            "DTRAIN_CACHE to a writable folder.",
            stacklevel=2,
        )
    return index


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where each member of each sample of one shard is.

    Attributes:
        path: The shard.
        stamp: Its stamp when it was indexed.
        extensions: The distinct extensions, in lower case.
        doubts: Warnings about legal but probably unintended names, as sentences.
        digest: Hash of keys, extensions and member sizes in stored order, below 2**64.
        key_bytes: All keys, concatenated, uint8, shape ``[bytes]``.
        key_starts: Where each key starts in ``key_bytes``, and the end, int64, shape ``[samples + 1]``.
        member_sample: Sample of each member, int32, shape ``[members]``, ascending.
        member_extension: Index into ``extensions`` of each member's extension, int32, shape ``[members]``.
        member_offset: First byte of each member's payload, int64, shape ``[members]``.
        member_size: Bytes of each member's payload, int64, shape ``[members]``.
    """

    path: str
    stamp: Stamp
    extensions: tuple[str, ...]
    doubts: tuple[str, ...]
    digest: int
    key_bytes: np.ndarray
    key_starts: np.ndarray
    member_sample: np.ndarray
    member_extension: np.ndarray
    member_offset: np.ndarray
    member_size: np.ndarray

    @property
    def num_samples(self) -> int:
        """Number of samples of the shard."""
        return len(self.key_starts) - 1

    def key(self, sample: int) -> str:
        """The key of one sample, without the shard's name."""
        start, end = self.key_starts[sample : sample + 2]
        return decode_name(self.key_bytes[start:end].tobytes())

    def columns(self, extensions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Where the given fields of all samples are.

        Args:
            extensions: Each is an extension or, as in webdataset, alternatives in order of preference, ``jpg;jpeg;png``.

        Returns:
            Offsets and sizes, int64, shape ``[samples, len(extensions)]`` each; -1 where a sample has no such field.
        """
        offsets = np.full((self.num_samples, len(extensions)), -1, np.int64)
        sizes = np.full_like(offsets, -1)
        places = {extension: place for place, extension in enumerate(self.extensions)}
        for column, alternatives in enumerate(extensions):
            # The first alternative is written last, so that it takes precedence.
            for extension in reversed(alternatives.split(";")):
                if extension in places:
                    members = self.member_extension == places[extension]
                    samples = self.member_sample[members]
                    offsets[samples, column] = self.member_offset[members]
                    sizes[samples, column] = self.member_size[members]
        return offsets, sizes


def index_tar(path: str) -> ShardIndex:
    """Indexes one shard.

    Args:
        path: A tar (ustar, PAX, GNU or older), as a path or a URL.

    Raises:
        ShardError: If it is truncated, damaged, compressed or not a tar; if it has sparse files; if a sample has two
            members of one extension; if it changes meanwhile. Names the byte and what to do.
        NoRanges: If the server does not support range requests.
        OSError: If it cannot be read.
    """
    if is_url(path):
        with closing(RemoteFile(path)) as shard:
            index = _index(path, shard.stamp(), ReadAhead(shard))
    else:
        index = _index_file(path)
    if stamp_of(path) != index.stamp:
        raise ShardError(path, 0, "it changed while it was indexed", "Start again when it is completely written.")
    return index


def write_index(index: ShardIndex) -> Path:
    """Stores an index next to its shard if that is possible, else in the cache; returns the path of the index.

    Raises:
        OSError: If neither place can be written.
    """
    content = _to_bytes(index)
    beside, in_cache = _beside(index.path), _in_cache(index.path)
    if not is_url(index.path):
        with suppress(OSError):  # read-only or full: store it in the cache instead
            if _may_write(beside):
                with replace_file(beside, concurrent=True) as file:
                    file.write(content)
                return beside
    in_cache.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(in_cache, concurrent=True) as file:
        file.write(content)
    return in_cache


def decode_name(name: bytes | memoryview) -> str:
    """A name or key of a tar as text; ``encode("utf-8", "surrogateescape")`` reverses it."""
    return str(name, "utf-8", "surrogateescape")


def _index_file(path: str) -> ShardIndex:
    # Checked before opening, because opening a named pipe waits for a writer.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ShardError(path, 0, "not a regular file, so samples cannot be read by position", "Save it to a file.")
    with open(path, "rb", buffering=0) as file:  # the walk chooses the size of its reads
        status = os.fstat(file.fileno())
        return _index(path, Stamp(status.st_size, status.st_mtime_ns), file)


def _index(path: str, stamp: Stamp, file: Walkable) -> ShardIndex:
    links: list[bytes] = []
    index = _group(path, stamp, walk(path, file, links))
    _check_extensions(index)
    return replace(index, doubts=(*_dotted_names(index), *_returning_keys(index), *_links(links)))


def _group(path: str, stamp: Stamp, files: Iterator[tuple[bytes, int, int]]) -> ShardIndex:
    last_key = None
    key_bytes, key_starts, first_member = bytearray(), array("q", [0]), array("q")
    spellings: dict[bytes, int] = {}
    spelling, offsets, sizes = array("q"), array("q"), array("q")
    for name, offset, size in files:
        if name.startswith(b"__") and is_meta(name):
            continue
        match = split_name(name)
        if match is None:
            continue
        key, extension = match.groups()
        if key != last_key:
            last_key = key
            key_bytes += key
            key_starts.append(len(key_bytes))
            first_member.append(len(offsets))
        if extension not in spellings:
            spellings[extension] = len(spellings)
        spelling.append(spellings[extension])
        offsets.append(offset)
        sizes.append(size)

    extensions: dict[str, int] = {}
    places = [extensions.setdefault(decode_name(raw).lower(), len(extensions)) for raw in spellings]
    members: np.ndarray = np.diff(np.array(first_member, np.int64), append=len(offsets))
    arrays: dict[str, np.ndarray] = {
        "key_bytes": np.array(key_bytes, np.uint8),
        "key_starts": np.array(key_starts, np.int64),
        "member_sample": np.repeat(np.arange(len(members), dtype=np.int32), members),
        "member_extension": np.array(places, np.int32)[np.array(spelling, np.int64)],
        "member_offset": np.array(offsets, np.int64),
        "member_size": np.array(sizes, np.int64),
    }
    return ShardIndex(
        path=path,
        stamp=stamp,
        extensions=tuple(extensions),
        doubts=(),
        digest=_digest(tuple(extensions), arrays),
        **arrays,
    )


def _digest(extensions: tuple[str, ...], arrays: Mapping[str, np.ndarray]) -> int:
    # Not of the offsets: the same samples may be packed with other headers.
    digest = hashlib.sha256(json.dumps(extensions).encode())
    for name in ("key_bytes", "key_starts", "member_sample", "member_extension", "member_size"):
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return int.from_bytes(digest.digest()[:8], "little")


def _check_extensions(index: ShardIndex) -> None:
    for reserved in _RESERVED:
        if reserved in index.extensions:
            member = int(np.argmax(index.member_extension == index.extensions.index(reserved)))
            problem = f"{_member_name(index, member)!r} has an extension that is reserved by webdataset"
            raise ShardError(index.path, int(index.member_offset[member]), problem, "Rename it.")
    twice = _first_pair(index.member_sample, index.member_extension)
    if twice is not None:
        first, second = twice
        problem = (
            f"{_member_name(index, second)!r} occurs twice in its sample (first at byte "
            f"{index.member_offset[first]}; upper and lower case are equal)"
        )
        raise ShardError(
            index.path, int(index.member_offset[second]), problem, "Give one of them a different extension."
        )


def _dotted_names(index: ShardIndex) -> list[str]:
    # `img_0.5.jpg` and `img_0.7.jpg` are the fields 5.jpg and 7.jpg of one sample img_0, which is rarely intended.
    endings: dict[str, int] = {}
    numbered = [extension[:1].isdigit() and "." in extension for extension in index.extensions]
    ending = [
        endings.setdefault(extension.rpartition(".")[2], len(endings)) if odd else -1
        for extension, odd in zip(index.extensions, numbered, strict=True)
    ]
    if not endings:
        return []
    member_ending = np.array(ending, np.int32)[index.member_extension]
    members = np.flatnonzero(member_ending >= 0)
    merged = _first_pair(index.member_sample[members], member_ending[members])
    if merged is None:
        return []
    first, second = (_member_name(index, int(members[place])) for place in merged)
    return [
        f"{first!r} and {second!r} belong to one sample, {index.key(int(index.member_sample[members[merged[0]]]))!r}: a key "
        "ends at the first dot. If they are two samples, rename them without that dot."
    ]


def _returning_keys(index: ShardIndex) -> list[str]:
    blob, starts = index.key_bytes.tobytes(), index.key_starts.tolist()
    keys = [blob[start:end] for start, end in pairwise(starts)]
    if len(set(keys)) == len(keys):
        return []
    again = next(key for key, times in Counter(keys).items() if times > 1)
    return [
        f"the key {decode_name(again)!r} occurs again after other keys, which makes two samples: the members of a sample "
        "must be adjacent. Sort the names before packing."
    ]


def _links(names: list[bytes]) -> list[str]:
    members = [name for name in names if split_name(name) and not is_meta(name)]
    if not members:
        return []
    return [
        f"{decode_name(members[0])!r} is a link ({len(members)} links in the shard), which holds no bytes: its sample lacks "
        "that field. Pack again with copies: GNU tar --hard-dereference --dereference, or `dtrain pack`."
    ]


def _first_pair(samples: np.ndarray, marks: np.ndarray) -> tuple[int, int] | None:
    """The first two members of one sample with equal marks, by the position of the second; None if there are none."""
    codes = samples.astype(np.int64) * (int(marks.max(initial=0)) + 1) + marks
    order = np.argsort(codes, kind="stable")
    equal = np.flatnonzero(np.diff(codes[order]) == 0)
    if not len(equal):
        return None
    second = equal[np.argmin(order[equal + 1])] + 1
    return int(order[second - 1]), int(order[second])


def _member_name(index: ShardIndex, member: int) -> str:
    return f"{index.key(int(index.member_sample[member]))}.{index.extensions[index.member_extension[member]]}"


def _build(path: str, stamp: Stamp, policy: CachePolicy | None) -> ShardIndex:
    # Copied first, the shard is read once, for its index and its samples. Other copies are not removed for it: where a
    # dataset does not fit, its last shards would remove its first ones before their samples are read.
    if policy is not None and is_url(path) and walk_reads_all(path, stamp.size):
        with suppress(CacheFull):
            return _index_copy(path, stamp, policy, evict=False)
    try:
        return index_tar(path)
    except NoRanges:
        return _index_copy(path, stamp, policy or CachePolicy(), evict=True)


def _index_copy(path: str, stamp: Stamp, policy: CachePolicy, evict: bool) -> ShardIndex:
    with policy.cache.fetch_open(path, stamp, evict=evict) as copy:
        return _index(path, stamp, copy)


def _uploaded(url: str, stamp: Stamp) -> ShardIndex | None:
    """The index stored next to a URL; None if there is no fresh one."""
    if "?" in url:  # a signature is valid for one file
        return None
    try:
        with closing(RemoteFile(f"{url}.idx")) as file:
            index = _from_bytes(file.read(0, file.size), url)
    except OSError:
        return None
    if index is None or index.stamp.size != stamp.size or not _has_last_header(url, index):
        return None
    return replace(index, stamp=stamp)


def _has_last_header(url: str, index: ShardIndex) -> bool:
    """Whether the shard has its last header where the index expects it; a different shard of equal size is unlikely to."""
    if not len(index.member_offset):
        return False
    last = int(index.member_offset.argmax())
    try:
        with closing(RemoteFile(url)) as file:
            header = file.read(int(index.member_offset[last]) - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE)
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size == int(index.member_size[last])
    except (tarfile.HeaderError, NoRanges):
        return False


def _beside(path: str) -> Path:
    return Path(f"{path}.idx")


def _in_cache(path: str) -> Path:
    name = hashlib.sha256(os.fsencode(absolute(path))).hexdigest()[:32]
    return cache_dir() / "index" / f"{name}.idx"


def _may_write(place: Path) -> bool:
    # A folder without any write permission is meant to stay unchanged; root could write there nevertheless.
    if not place.parent.stat().st_mode & 0o222:
        return False
    try:
        with open(place, "rb") as file:
            start = file.read(_MARK[0].stop)
    except FileNotFoundError:
        return True
    return not start or start[_MARK[0]] == _MARK[1]


def _to_bytes(index: ShardIndex) -> bytes:
    arrays = {name: getattr(index, name) for name in _ARRAYS}
    notes: dict[str, Any] = {"version": _VERSION, "stamp": index.stamp, "extensions": index.extensions}
    notes |= {"doubts": index.doubts, "digest": index.digest}
    notes["crc32"] = _checksum(notes, arrays)
    return safetensors.numpy.save(arrays, {"dtrain": json.dumps(notes)})


def _load(place: Path, path: str) -> ShardIndex | None:
    """The index in a file; None if the file is missing, damaged or not dtrain's."""
    try:
        return _from_bytes(place.read_bytes(), path)
    except OSError:
        return None


def _from_bytes(content: bytes, path: str) -> ShardIndex | None:
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
    extensions = tuple(notes["extensions"])
    digest = notes["digest"] if "digest" in notes else _digest(extensions, arrays)
    return ShardIndex(path, Stamp(*notes["stamp"]), extensions, tuple(notes["doubts"]), digest, **arrays)


def _checksum(notes: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
    value = zlib.crc32(json.dumps(notes).encode())
    for name in _ARRAYS:
        value = zlib.crc32(np.ascontiguousarray(arrays[name]).data, value)
    return value
