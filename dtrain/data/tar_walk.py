"""The regular files of a tar, found from its headers alone.

* A *header* is a block of 512 bytes; a *payload* follows it, filled up to whole blocks.
* An *extended header* (PAX, GNU) is a header whose payload says what does not fit into the header behind it.
* The *end mark* is two blocks of zeros; nothing but zeros may follow it.

What ``tarfile`` and webdataset pass over in silence is an error here that names the byte: a file cut short, a damaged
header, an end in the middle. A tar is walked as a whole or not at all. Names stay bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from dtrain.data.shard_error import COPY_AGAIN, ShardError, no_header

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
# Where members are small, reading everything is faster than asking for each header; where they are large, jumping is.
_DENSE_READ, _SPARSE_READ, _DENSE_STRIDE = 256 << 10, 2 << 10, 64 << 10
_VERIFIED_AT_ONCE = 1024
# Paths end at 4 KiB and extended attributes at 64 KiB: an extended header of more than this is garbage.
_MAX_EXTENDED = 1 << 20

# Values of the type field. Types that are in none of these sets have a payload and are passed over.
_FILES = frozenset(b"0\x007")
_LINKS, _WITHOUT_PAYLOAD = frozenset(b"12"), frozenset(b"123456")
_PAX, _PAX_GLOBAL = frozenset(b"xX"), ord("g")
_GNU_NAME, _GNU_LINK, _GNU_SPARSE = ord("L"), ord("K"), ord("S")
_AFTER_DIGITS = frozenset(b"\0 ")
_EXTENDED = _PAX | {_PAX_GLOBAL, _GNU_NAME, _GNU_LINK}

_pax_record = re.compile(rb"(\d{1,7}) ([^=]+)=").match

_REPACK = "Unpack it and pack it again, with GNU tar or `python -m dtrain.pack`."


class Walkable(Protocol):
    """What of a binary file the walk needs."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Goes to a byte; returns which one it is."""

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, at most ``size``; none only at the end."""


def walk(path: str, file: Walkable, links: list[bytes] | None = None) -> Iterator[tuple[bytes, int, int]]:
    """The regular files of a tar, in order; directories, links and devices are passed over, as webdataset does.

    Args:
        path: Name of the tar, for messages.
        file: The tar: ustar, PAX, GNU or older. Read forward, and only as much of it as the headers need.
        links: Gets the names of hard and symbolic links.

    Yields:
        Name, first byte and number of bytes of each file. They count only when the walk has ended without an error: that
        a header is damaged may show a few thousand headers later.

    Raises:
        ShardError: If the tar is cut short, damaged, compressed, no tar at all, or has sparse files.
    """
    unverified: list[tuple[int, bytes]] = []
    try:
        yield from _walk(path, file, unverified, [] if links is None else links)
    except ShardError:
        # A damaged header leads the walk astray. What it stumbled over later is a consequence, so name the cause.
        _verify(path, unverified)
        raise
    _verify(path, unverified)


def _walk(
    path: str, file: Walkable, unverified: list[tuple[int, bytes]], links: list[bytes]
) -> Iterator[tuple[bytes, int, int]]:
    end = file.seek(0, os.SEEK_END)
    offset = 0
    data, start, headers = b"", 0, 0  # a piece of the file, where it starts, and how many headers were found in it
    extended, long_name, long_size = None, None, None  # first extended header of the next member, and what they say
    while True:
        header = data[offset - start : offset - start + _BLOCK]
        if len(header) < _BLOCK:
            if len(unverified) >= _VERIFIED_AT_ONCE:
                _verify(path, unverified)
                unverified.clear()
            # Counted from the last piece, so that a tar of large and small members is read in both ways.
            dense = offset - start <= headers * _DENSE_STRIDE
            data, start, headers = _read(file, offset, _DENSE_READ if dense else _SPARSE_READ), offset, 0
            header = data[:_BLOCK]
            if len(header) < _BLOCK:
                raise _cut_short(path, offset, header)
        if header == _ZEROS:
            if extended is not None:
                raise ShardError(path, extended, "an extended header with no member behind it", COPY_AGAIN)
            _check_end(path, file, offset)
            return
        headers += 1
        unverified.append((offset, header))

        kind = header[156]
        size = _size(header)
        if size is None or size < 0:
            raise ShardError(path, offset, f"a header with the size {header[124:136]!r}", COPY_AGAIN)
        payload = offset + _BLOCK
        if kind in _EXTENDED:
            if size > _MAX_EXTENDED or payload + size > end:
                what = f"an extended header of {size} bytes, too large or beyond the end of the file at {end}"
                raise ShardError(path, offset, what, COPY_AGAIN)
            content = data[payload - start : payload - start + size]
            if len(content) < size:
                content = _read(file, payload, size)
            # Most say nothing but the time; taking those apart would cost as much as the rest of the walk.
            only_time = kind in _PAX and content[2:9] == b" mtime=" and content.find(b"\n") == size - 1
            if not only_time and (kind not in _PAX or _may_move(content)):
                name, other_size = _read_extended(path, offset, kind, content)
                # Where two say the same, the first counts, as in `tarfile`.
                long_name = name if long_name is None else long_name
                long_size = other_size if long_size is None else long_size
            if extended is None:
                extended = offset
            offset = payload + -(-size // _BLOCK) * _BLOCK
            continue

        if kind == _GNU_SPARSE:
            raise _sparse(path, offset)
        name = header[: header.find(0, 0, 100)] if header[99] == 0 else _text(header[:100])
        if header[345]:
            name = _text(header[345:500]) + b"/" + name
        if extended is not None:
            name = name if long_name is None else long_name
            size = size if long_size is None else long_size
            extended, long_name, long_size = None, None, None
        # In the oldest tars a directory is a file whose name ends in a slash. The whole name: one that was cut to fit into
        # the header may end in a slash by chance, which some versions of `tarfile` take for the end of the archive.
        if kind in _WITHOUT_PAYLOAD or (kind == 0 and name.endswith(b"/")):
            if kind in _LINKS:
                links.append(name)
            offset = payload
            continue
        if payload + size > end:
            shown = name.decode("utf-8", "backslashreplace")
            what = f"the file ends at {end}, inside {shown!r}, which takes {size} bytes from {payload} on"
            raise ShardError(path, offset, what, COPY_AGAIN)
        if kind in _FILES:
            yield name, payload, size
        offset = payload + -(-size // _BLOCK) * _BLOCK


def _read_extended(path: str, offset: int, kind: int, content: bytes) -> tuple[bytes | None, int | None]:
    """Name and size that an extended header gives to the next member; None where it gives none."""
    if kind == _GNU_NAME:
        if not _text(content):
            raise ShardError(path, offset, "an extended header with an empty name", COPY_AGAIN)
        return _text(content), None
    if kind == _GNU_LINK:
        return None, None
    records = _pax_records(path, offset, content)
    if any(keyword.startswith(b"GNU.sparse.") for keyword in records):
        raise _sparse(path, offset)
    name, size = records.get(b"path"), records.get(b"size")
    if kind == _PAX_GLOBAL and (name is not None or size is not None):
        raise ShardError(path, offset, "a global header gives all members one path or one size", _REPACK)
    if size is not None and not (size.isdigit() and len(size) < 20):
        raise ShardError(path, offset, f"an extended header with the size {size!r}", COPY_AGAIN)
    return None if name is None else name.rstrip(b"/"), None if size is None else int(size)


def _may_move(content: bytes) -> bool:
    """Whether a PAX header may say more of the next member than how old it is and whose."""
    return b"path=" in content or b"size=" in content or b"GNU.sparse." in content or not content.endswith(b"\n")


def _verify(path: str, headers: list[tuple[int, bytes]]) -> None:
    # Many headers at once: summing one in Python takes longer than the rest of the walk.
    blocks = np.frombuffer(b"".join(header for _, header in headers), np.uint8).reshape(-1, _BLOCK)
    # A checksum is the sum of all bytes with spaces in its own place, usually written as six octal digits.
    sums = blocks.sum(axis=1, dtype=np.int64) - blocks[:, 148:156].sum(axis=1, dtype=np.int64) + 8 * ord(" ")
    digits = blocks[:, 148:154] - np.uint8(ord("0"))
    usual = (digits < 8).all(axis=1) & ((blocks[:, 154] == 0) | (blocks[:, 154] == ord(" ")))
    right = usual & (digits @ 8 ** np.arange(5, -1, -1) == sums)
    for place in np.flatnonzero(~right).tolist():
        # Written in another way, or as the sum of signed bytes, as some old systems did; else it is wrong.
        offset, header = headers[place]
        signed_sum = int(sums[place]) - 256 * sum(byte > 127 for byte in header[:148] + header[156:])
        if _number(header[148:156]) not in (int(sums[place]), signed_sum):
            raise no_header(path, offset, header)


def _read(file: Walkable, offset: int, length: int) -> bytes:
    file.seek(offset)
    piece = file.read(length)
    while 0 < len(piece) < length and (more := file.read(length - len(piece))):
        piece += more  # a file without a buffer may hand over less than it has
    return piece


def _text(field: bytes) -> bytes:
    end = field.find(0)
    return field if end < 0 else field[:end]


def _size(header: bytes) -> int | None:
    if header[135] in _AFTER_DIGITS:  # as nearly all are written
        try:
            return int(header[124:135], 8)
        except ValueError:
            pass
    return _number(header[124:136])


def _number(field: bytes) -> int | None:
    try:
        return int(field.rstrip(b"\0"), 8)
    except ValueError:
        # GNU writes what octal digits cannot hold in base 256, behind a byte that no digits start with.
        if field[0] in (0o200, 0o377):
            return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0o377 else 0)
    try:
        return int(_text(field).strip() or b"0", 8)
    except ValueError:
        return None


def _pax_records(path: str, offset: int, content: bytes) -> dict[bytes, bytes]:
    """The records of a PAX header, each ``<length of the record> <keyword>=<value>\\n``."""
    records = {}
    at = 0
    while match := _pax_record(content, at):
        length, keyword = match.groups()
        end = at + int(length)
        if not match.end() < end <= len(content) or content[end - 1] != ord("\n"):
            break
        records[keyword] = content[match.end() : end - 1]
        at = end
    if at < len(content):
        raise ShardError(
            path, offset, f"an extended header that cannot be read from {content[at : at + 20]!r} on", COPY_AGAIN
        )
    return records


def _check_end(path: str, file: Walkable, offset: int) -> None:
    if len(_read(file, offset, 2 * _BLOCK)) < 2 * _BLOCK:
        raise ShardError(path, offset, "the file ends before the second of the two end blocks", COPY_AGAIN)
    at = offset
    file.seek(at)
    while piece := file.read(_DENSE_READ):
        if piece.count(0) < len(piece):
            at += len(piece) - len(piece.lstrip(b"\0"))
            what = f"zeros, the end mark, but there is more data from {at} on"
            remedy = "Tars joined with cat? Join them with `tar --concatenate` instead. If not: "
            raise ShardError(path, offset, what, remedy + COPY_AGAIN.lower())
        at += len(piece)


def _cut_short(path: str, offset: int, header: bytes) -> ShardError:
    if offset == 0:
        return no_header(path, 0, header)
    what = "the file ends inside a header" if header else "the file ends without the end mark, two blocks of zeros"
    return ShardError(path, offset, f"{what}: members may be missing", COPY_AGAIN)


def _sparse(path: str, offset: int) -> ShardError:
    return ShardError(
        path, offset, "a sparse file, whose bytes do not lie in one piece", "Pack it without tar's --sparse."
    )
