"""The index of one shard: which samples it has, and where each field of each of them lies.

* A *member* is a regular file of the tar whose name has a key and an extension.
* A *sample* is a run of members with equal keys, side by side.

Members are grouped exactly as webdataset groups them. Everything is kept in arrays, because a shard can have millions of
samples. Keys are bytes, and become text as in ``tarfile``: UTF-8, undecodable bytes as lone surrogates.
"""

from __future__ import annotations

import os
import re
import stat
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dtrain.data.read_ahead import ReadAhead
from dtrain.data.shard_error import ShardError
from dtrain.data.shard_file import RemoteShard, Stamp, stamp_of
from dtrain.data.tar_walk import Walkable, walk
from dtrain.data.urls import is_url

#: Splits a name into key and extension; None where it has no key. webdataset's `base_plus_ext` on bytes.
split_name = re.compile(rb"^((?:.*/|)[^.]+)[.]([^/]*)$").match
# webdataset's `skip_meta`.
_is_meta = re.compile(rb"__[^/]*__($|/)").match
# Names that webdataset itself uses inside a sample.
_RESERVED = ("__key__", "__url__", "__local_path__", "__bad__")


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Where each field of each sample of one shard lies.

    Attributes:
        path: The shard.
        stamp: Its size and version, which tell whether the index is stale.
        extensions: The distinct extensions, lower-cased.
        doubts: Sentences about what is legal but was probably not meant.
        key_bytes: All keys end to end, uint8, shape ``[bytes]``.
        key_starts: Where each key starts in ``key_bytes``, and the end, int64, shape ``[samples + 1]``.
        member_sample: Sample of each member, int32, shape ``[members]``, ascending.
        member_extension: Place in ``extensions`` of each member's extension, int32, shape ``[members]``.
        member_offset: First byte of each member's payload, int64, shape ``[members]``.
        member_size: Bytes of each member's payload, int64, shape ``[members]``.
    """

    path: str
    stamp: Stamp
    extensions: tuple[str, ...]
    doubts: tuple[str, ...]
    key_bytes: np.ndarray
    key_starts: np.ndarray
    member_sample: np.ndarray
    member_extension: np.ndarray
    member_offset: np.ndarray
    member_size: np.ndarray

    @property
    def num_samples(self) -> int:
        """Samples of the shard."""
        return len(self.key_starts) - 1

    def key(self, sample: int) -> str:
        """The key of one sample, without the shard's name."""
        start, end = self.key_starts[sample : sample + 2]
        return decode_name(self.key_bytes[start:end].tobytes())

    def columns(self, extensions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Where the given fields of all samples lie.

        Args:
            extensions: Each one an extension or, as in webdataset, alternatives such as ``jpg;jpeg;png``, of which the
                first that a sample has is taken.

        Returns:
            Offsets and sizes, int64, shape ``[samples, len(extensions)]`` each; -1 where a sample has no such field.
        """
        offsets = np.full((self.num_samples, len(extensions)), -1, np.int64)
        sizes = np.full_like(offsets, -1)
        places = {extension: place for place, extension in enumerate(self.extensions)}
        for column, alternatives in enumerate(extensions):
            # The first alternative is written last, so that it stays.
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
        path: A tar: ustar, PAX, GNU or older; a path or a URL.

    Raises:
        ShardError: If it is cut short, damaged, compressed or no tar; if it has sparse files; if a sample has two members
            of one extension; if it changes meanwhile. Names the byte and what to do.
        NoRanges: If a server hands it out as a whole only.
        OSError: If it cannot be read.
    """
    if is_url(path):
        shard = RemoteShard(path)
        index = _index(path, shard.stamp(), ReadAhead(shard))
        shard.close()
    else:
        index = _index_file(path)
    if stamp_of(path) != index.stamp:
        raise ShardError(path, 0, "it changed while it was indexed", "Start again when it is written.")
    return index


def index_copy(copy: str, path: str, stamp: Stamp) -> ShardIndex:
    """Indexes a shard in a file that has the same bytes.

    Args:
        copy: The file.
        path: The shard.
        stamp: That of the shard.

    Raises:
        ShardError: As ``index_tar``.
        OSError: If the file cannot be read.
    """
    with open(copy, "rb", buffering=0) as file:
        return _index(path, stamp, file)


def _index_file(path: str) -> ShardIndex:
    # Asked before it is opened, because opening a named pipe waits for a writer.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ShardError(
            path, 0, "not a regular file, inside which samples can be reached directly", "Save it to a file."
        )
    with open(path, "rb", buffering=0) as file:  # the walk knows better how much to read
        status = os.fstat(file.fileno())
        return _index(path, Stamp(status.st_size, status.st_mtime_ns), file)


def decode_name(name: bytes | memoryview) -> str:
    """A name or key of a tar as text; ``encode("utf-8", "surrogateescape")`` gives the bytes back."""
    return str(name, "utf-8", "surrogateescape")


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
        if name.startswith(b"__") and _is_meta(name):
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
    return ShardIndex(
        path=path,
        stamp=stamp,
        extensions=tuple(extensions),
        doubts=(),
        key_bytes=np.array(key_bytes, np.uint8),
        key_starts=np.array(key_starts, np.int64),
        member_sample=np.repeat(np.arange(len(members), dtype=np.int32), members),
        member_extension=np.array(places, np.int32)[np.array(spelling, np.int64)],
        member_offset=np.array(offsets, np.int64),
        member_size=np.array(sizes, np.int64),
    )


def _check_extensions(index: ShardIndex) -> None:
    for reserved in _RESERVED:
        if reserved in index.extensions:
            member = int(np.argmax(index.member_extension == index.extensions.index(reserved)))
            what = f"{_member_name(index, member)!r} has an extension that webdataset uses itself"
            raise ShardError(index.path, int(index.member_offset[member]), what, "Give it another one.")
    twice = _first_pair(index.member_sample, index.member_extension)
    if twice is not None:
        first, second = twice
        what = (
            f"{_member_name(index, second)!r} is in its sample for the second time (first at "
            f"{index.member_offset[first]}; upper and lower case are the same)"
        )
        raise ShardError(index.path, int(index.member_offset[second]), what, "Give one of them another extension.")


def _dotted_names(index: ShardIndex) -> list[str]:
    # `img_0.5.jpg` and `img_0.7.jpg` are fields 5.jpg and 7.jpg of one sample img_0, which few people mean.
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
        "ends at the first dot. If they were meant to be two samples, write them without that dot."
    ]


def _returning_keys(index: ShardIndex) -> list[str]:
    blob, starts = index.key_bytes.tobytes(), index.key_starts.tolist()
    keys = [blob[start:end] for start, end in pairwise(starts)]
    if len(set(keys)) == len(keys):
        return []
    again = next(key for key, times in Counter(keys).items() if times > 1)
    return [
        f"the key {decode_name(again)!r} comes back after other keys: these are two samples, because the members of one "
        "must lie side by side. Sort the names before packing."
    ]


def _links(names: list[bytes]) -> list[str]:
    members = [name for name in names if split_name(name) and not _is_meta(name)]
    if not members:
        return []
    return [
        f"{decode_name(members[0])!r} is a link ({len(members)} of these in the shard), which holds no bytes: its sample lacks "
        "that field. Pack again with copies: GNU tar --hard-dereference --dereference, or `python -m dtrain.pack`."
    ]


def _first_pair(samples: np.ndarray, marks: np.ndarray) -> tuple[int, int] | None:
    """The first two members of one sample that have the same mark, by the place of the second; None if all differ."""
    codes = samples.astype(np.int64) * (int(marks.max(initial=0)) + 1) + marks
    order = np.argsort(codes, kind="stable")
    equal = np.flatnonzero(np.diff(codes[order]) == 0)
    if not len(equal):
        return None
    second = equal[np.argmin(order[equal + 1])] + 1
    return int(order[second - 1]), int(order[second])


def _member_name(index: ShardIndex, member: int) -> str:
    return f"{index.key(int(index.member_sample[member]))}.{index.extensions[index.member_extension[member]]}"
