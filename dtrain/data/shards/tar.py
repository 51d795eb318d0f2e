"""Finds the regular files of a tar by its headers, and reports damage.

* A *header* is a block of 512 bytes; a *payload* follows it, padded to whole blocks.
* An *extended header* (PAX, GNU) is a header whose payload holds values that do not fit into the next header.
* The *end mark* is two blocks of zeros; nothing but zeros may follow it.

A truncated file, a damaged header and an end mark in the middle are errors that name the byte; ``tarfile`` and webdataset
ignore them. Names are bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from dtrain.urls import redacted

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
# Where members are small, reading everything is faster than reading each header; where they are large, seeking is
# faster.
_DENSE_READ, _SPARSE_READ, _DENSE_STRIDE = 256 << 10, 2 << 10, 64 << 10
_VERIFIED_AT_ONCE = 1024
# Paths are limited to 4 KiB and extended attributes to 64 KiB: a larger extended header is garbage.
_MAX_EXTENDED = 1 << 20

# Values of the type field. Types in none of these sets have a payload and are skipped.
_FILES = frozenset(b"0\x007")
_LINKS, _WITHOUT_PAYLOAD = frozenset(b"12"), frozenset(b"123456")
_PAX, _PAX_GLOBAL = frozenset(b"xX"), ord("g")
_GNU_NAME, _GNU_LINK, _GNU_SPARSE = ord("L"), ord("K"), ord("S")
_AFTER_DIGITS = frozenset(b"\0 ")
_EXTENDED = _PAX | {_PAX_GLOBAL, _GNU_NAME, _GNU_LINK}

_pax_record = re.compile(rb"(\d{1,20}) ([^=]+)=").match

_REPACK = "Unpack it and pack it again, with GNU tar or `dtrain pack`."
COPY_AGAIN = "Copy or write the shard again."
_COMPRESSED = "data, from which samples cannot be read by position"
_OTHER_FORMATS = (
    (b"\x1f\x8b", f"gzip {_COMPRESSED}", "Decompress it once, with gunzip."),
    (b"BZh", f"bzip2 {_COMPRESSED}", "Decompress it once, with bunzip2."),
    (b"\xfd7zXZ\x00", f"xz {_COMPRESSED}", "Decompress it once, with unxz."),
    (b"\x28\xb5\x2f\xfd", f"zstd {_COMPRESSED}", "Decompress it once, with unzstd."),
    (b"\x04\x22\x4d\x18", f"lz4 {_COMPRESSED}", "Decompress it once, with unlz4."),
    (b"PK\x03\x04", "a zip archive, not a tar", "Unpack it and write a tar."),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "Fetch the file, with git lfs pull."),
    (b"<", "HTML or XML, not a tar", "It may be an error page that was saved under this name: download it again."),
)


def has_end_mark(path: str) -> bool:
    """Whether a local file ends with two blocks of zeros; without them it is still being written, or was cut short."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2 * _BLOCK))
        return file.read() == 2 * _ZEROS


class Walkable(Protocol):
    """The methods of a binary file that ``walk`` needs."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Moves to a byte; returns its offset."""

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, at most ``size``; empty only at the end."""


def walk(path: str, file: Walkable, links: list[bytes] | None = None) -> Iterator[tuple[bytes, int, int]]:
    """The regular files of a tar, in order; directories, links and devices are skipped, as in webdataset.

    Args:
        path: Name of the tar, for messages.
        file: The tar: ustar, PAX, GNU or older. Read forwards, and only as much of it as the headers need.
        links: The names of hard and symbolic links are appended to it.

    Yields:
        Name, first byte and number of bytes of each file. They are valid only after the walk has ended without an error,
        because checksums are verified for many headers at once.

    Raises:
        ShardError: If the tar is truncated, damaged, compressed, not a tar, or has sparse files.
    """
    unverified: list[tuple[int, bytes]] = []
    try:
        yield from _walk(path, file, unverified, [] if links is None else links)
    except ShardError:
        # After a damaged header the walk reads wrong places. Report that header rather than the errors that follow.
        _verify(path, unverified)
        raise
    _verify(path, unverified)


def _walk(
    path: str, file: Walkable, unverified: list[tuple[int, bytes]], links: list[bytes]
) -> Iterator[tuple[bytes, int, int]]:
    end = file.seek(0, os.SEEK_END)
    offset = 0
    data, start, headers = b"", 0, 0  # a piece of the file, where it starts, and how many headers were found in it
    # Of the next member: its first extended header, and the name and size in the extended headers.
    extended = long_name = long_size = None
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
                raise ShardError(path, extended, "an extended header with no member after it", COPY_AGAIN)
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
                problem = f"an extended header of {size} bytes, too large or beyond the end of the file at {end}"
                raise ShardError(path, offset, problem, COPY_AGAIN)
            content = data[payload - start : payload - start + size]
            if len(content) < size:
                content = _read(file, payload, size)
            # Most hold only the time. Parsing those would take as long as the rest of the walk.
            only_time = kind in _PAX and content[2:9] == b" mtime=" and content.find(b"\n") == size - 1
            if not only_time and (kind not in _PAX or _has_location(content)):
                name, other_size = _read_extended(path, offset, kind, content)
                # Of two values the first counts, as in `tarfile`.
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
        # In the oldest tars a directory is a file whose name ends in a slash. The whole name is checked, because a name
        # that was truncated in the header may end in a slash by chance.
        if kind in _WITHOUT_PAYLOAD or (kind == 0 and name.endswith(b"/")):
            if kind in _LINKS:
                links.append(name)
            offset = payload
            continue
        if payload + size > end:
            member = name.decode("utf-8", "backslashreplace")
            problem = f"the file ends at {end}, inside {member!r}, which takes {size} bytes from {payload} on"
            cut = ShardError(path, offset, problem, COPY_AGAIN)
            cut.member = name
            raise cut
        if kind in _FILES:
            yield name, payload, size
        offset = payload + -(-size // _BLOCK) * _BLOCK


def _read_extended(path: str, offset: int, kind: int, content: bytes) -> tuple[bytes | None, int | None]:
    """Name and size of the next member in an extended header; None for a value that it does not contain."""
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
    # Some writers fill sizes up with zeros.
    if size is not None and not (size.isdigit() and len(size.lstrip(b"0")) < 20):
        raise ShardError(path, offset, f"an extended header with the size {size!r}", COPY_AGAIN)
    return None if name is None else name.rstrip(b"/"), None if size is None else int(size)


def _has_location(content: bytes) -> bool:
    """Whether a PAX header may contain a name, a size or a sparse map, besides times and owner."""
    return b"path=" in content or b"size=" in content or b"GNU.sparse." in content or not content.endswith(b"\n")


def _verify(path: str, headers: list[tuple[int, bytes]]) -> None:
    # Many headers at once: summing one header in Python takes longer than the rest of the walk.
    blocks = np.frombuffer(b"".join(header for _, header in headers), np.uint8).reshape(-1, _BLOCK)
    # A checksum is the sum of all bytes with spaces in place of the checksum itself, usually six octal digits.
    sums = blocks.sum(axis=1, dtype=np.int64) - blocks[:, 148:156].sum(axis=1, dtype=np.int64) + 8 * ord(" ")
    digits = blocks[:, 148:154] - np.uint8(ord("0"))
    usual = (digits < 8).all(axis=1) & ((blocks[:, 154] == 0) | (blocks[:, 154] == ord(" ")))
    right = usual & (digits @ 8 ** np.arange(5, -1, -1) == sums)
    for place in np.flatnonzero(~right).tolist():
        # A different notation, or the sum of signed bytes as on some old systems; otherwise the checksum is wrong.
        offset, header = headers[place]
        signed_sum = int(sums[place]) - 256 * sum(byte > 127 for byte in header[:148] + header[156:])
        if _number(header[148:156]) not in (int(sums[place]), signed_sum):
            raise no_header(path, offset, header)


def _read(file: Walkable, offset: int, length: int) -> bytes:
    file.seek(offset)
    piece = file.read(length)
    while 0 < len(piece) < length and (more := file.read(length - len(piece))):
        piece += more  # an unbuffered file may return less than it has
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
        # GNU writes numbers that octal digits cannot hold in base 256, after a marker byte that is not a digit.
        if field[0] in (0o200, 0o377):
            return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0o377 else 0)
    try:
        return int(_text(field).strip() or b"0", 8)
    except ValueError:
        return None


def _pax_records(path: str, offset: int, content: bytes) -> dict[bytes, bytes]:
    r"""The records of a PAX header, each ``<length of the record> <keyword>=<value>\n``."""
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
        half = ShardError(path, offset, "the file ends before the second of the two end blocks", COPY_AGAIN)
        half.has_end_mark = True
        raise half
    at = offset
    file.seek(at)
    while piece := file.read(_DENSE_READ):
        if piece.count(0) < len(piece):
            at += len(piece) - len(piece.lstrip(b"\0"))
            problem = f"zeros, the end mark, but there is more data from {at} on"
            remedy = "Tars joined with cat? Join them with `tar --concatenate` instead. If not: "
            raise ShardError(path, offset, problem, remedy + COPY_AGAIN.lower())
        at += len(piece)


def _cut_short(path: str, offset: int, header: bytes) -> ShardError:
    if offset == 0:
        return no_header(path, 0, header)
    problem = "the file ends inside a header" if header else "the file ends without the end mark, two blocks of zeros"
    return ShardError(path, offset, f"{problem}: members may be missing", COPY_AGAIN)


def _sparse(path: str, offset: int) -> ShardError:
    return ShardError(path, offset, "a sparse file, whose bytes are not contiguous", "Pack it without tar's --sparse.")


class ShardError(ValueError):
    """A shard that cannot be indexed: its path (a URL without its secrets), the byte, the problem there and the remedy.

    Attributes:
        member: Name of the member that is cut; None if its name is not known.
        has_end_mark: Whether the end mark has begun, so that no member follows.
    """

    member: bytes | None = None
    has_end_mark = False

    def __init__(self, path: str, offset: int, problem: str, remedy: str) -> None:
        super().__init__(redacted(path), offset, problem, remedy)
        self.path, self.offset, self.problem, self.remedy = redacted(path), offset, problem, remedy

    def __str__(self) -> str:
        return f"shard {self.path!r}, byte {self.offset}: {self.problem}. {self.remedy}"


def no_header(path: str, offset: int, header: bytes) -> ShardError:
    """The error for bytes that are not a header; at the start of a shard, the error may name a different file format."""
    if offset:
        return ShardError(path, offset, "no tar header, or one whose checksum is wrong", COPY_AGAIN)
    if not header:
        return ShardError(path, 0, "the file is empty", COPY_AGAIN)
    for magic, problem, remedy in _OTHER_FORMATS:
        if header.lstrip().startswith(magic):
            begins = f": it begins with {header[:40]!r}" if magic == b"<" else ""
            return ShardError(path, 0, problem + begins, remedy)
    return ShardError(path, 0, f"not a tar: it starts with {header[:16]!r}", COPY_AGAIN)
