"""Text files as pieces that can be encoded one by one.

* A *document* is one file, UTF-8.
* A *piece* is a document, or, of a large one, some megabytes that end with a line: what is encoded at a time.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtrain.packing.shares import deal

_PIECE = 8 << 20
#: How a share of the text is taken: whole documents, or the end of each.
VAL_BY = ("document", "tail")


@dataclass(frozen=True)
class Document:
    """A file: where it is, its name below the source, its size in bytes."""

    path: str
    name: str
    size: int


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a file; ``ends`` if the document ends there."""

    path: str
    start: int
    stop: int
    ends: bool


def find(sources: Sequence[str], on_bad: Callable[[Path, str], None]) -> tuple[list[Document], str]:
    """The documents of files, globs and folders (all their files but hidden ones).

    All are read once, so that hours of encoding do not end at a byte that is no text.

    Args:
        sources: Paths and globs.
        on_bad: Told of every file that is not UTF-8; raises, or returns to leave it out.

    Returns:
        The documents, in the order of the sources, those of one sorted by name; and what tells these files from others.

    Raises:
        FileNotFoundError: If a source matches nothing.
        ValueError: If a file is named twice, or there is no text.
    """
    documents: list[Document] = []
    digest, seen = hashlib.sha256(), set[str]()
    for source in sources:
        found = list(_files(source))
        if not found:
            raise FileNotFoundError(
                f"{source}: there is no text file. Name files, folders, or a glob in quotes: 'src/**/*.txt'."
            )
        for path, name in found:
            real = os.path.realpath(path)
            if real in seen:
                raise ValueError(f"{path} is named twice. Each document is packed once.")
            seen.add(real)
            status = os.stat(path)
            document = Document(path, name, status.st_size)
            reason = _not_text(document)
            if reason:
                on_bad(Path(path), reason)
                continue
            documents.append(document)
            digest.update(os.fsencode(name) + b"\0%d %d\n" % (status.st_size, status.st_mtime_ns))
    if not any(document.size for document in documents):
        raise ValueError(f"{', '.join(sources)}: all files are empty.")
    return documents, digest.hexdigest()[:16]


def _files(source: str) -> Iterator[tuple[str, str]]:
    """Path and name of each file of a source, sorted."""
    if os.path.isfile(source):
        yield source, os.path.basename(source)
    elif os.path.isdir(source):
        # Links are followed, as in a glob: what they name twice, or a loop of them, is told by `find`.
        for root, folders, names in os.walk(source, followlinks=True):
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                path = os.path.join(root, name)
                yield path, os.path.relpath(path, source)
    else:
        for path in sorted(glob.glob(source, recursive=True)):
            if os.path.isfile(path):
                yield path, path


def deal_pieces(
    documents: Sequence[Document], prefix: str, shares: Mapping[str, float], by: str, seed: int
) -> dict[str, list[Piece]]:
    """The pieces of each split.

    Args:
        documents: All.
        prefix: Name of the split that gets what the shares leave.
        shares: Name to share of each other one.
        by: One of ``VAL_BY``.
        seed: Decides which documents those are, together with their names.

    Raises:
        ValueError: If a split would get nothing.
    """
    if by == "tail":
        dealt = _tails(documents, prefix, shares)
    else:
        # By name, so that a document stays in its split when others come and go, as far as the share allows.
        rank = [hashlib.sha256(os.fsencode(f"{seed}/{document.name}")).digest() for document in documents]
        shuffled = np.array(sorted(range(len(documents)), key=rank.__getitem__), dtype=np.int64)
        numbers = deal(shuffled, prefix, shares)
        dealt = {
            name: [
                piece for number in chosen.tolist() for piece in _pieces(documents[number], 0, documents[number].size)
            ]
            for name, chosen in numbers.items()
        }
    empty = [name for name, pieces in dealt.items() if not pieces]
    if empty:
        raise ValueError(
            f"{len(documents)} documents give no text to {empty[0]!r}. Take a larger share, or the end of each document: "
            "--val-by tail."
        )
    return dealt


def _tails(documents: Sequence[Document], prefix: str, shares: Mapping[str, float]) -> dict[str, list[Piece]]:
    dealt: dict[str, list[Piece]] = {name: [] for name in (prefix, *shares)}
    for document in documents:
        left = 1 - sum(shares.values())
        start, end = 0, _line_end(document.path, round(left * document.size), document.size)
        dealt[prefix] += _pieces(document, start, end)
        for name, share in shares.items():
            left += share
            start, end = end, _line_end(document.path, round(left * document.size), document.size)
            dealt[name] += _pieces(document, start, end)
    return dealt


def _pieces(document: Document, start: int, stop: int) -> list[Piece]:
    pieces = []
    while start < stop:
        end = _line_end(document.path, start + _PIECE, stop)
        pieces.append(Piece(document.path, start, end, end == stop))
        start = end
    return pieces


def _line_end(path: str, offset: int, size: int) -> int:
    """The first offset from ``offset`` on where a line begins, or at least, in a line of megabytes, a character."""
    if offset >= size:
        return size
    with open(path, "rb") as file:
        file.seek(offset)
        line = file.readline(_PIECE)
        end = offset + len(line)
        while end < size and not line.endswith(b"\n"):
            byte = file.read(1)
            if not byte or byte[0] & 0xC0 != 0x80:
                break
            end += 1
    return min(end, size)


def read(piece: Piece) -> str:
    """The text of a piece, without a byte order mark.

    Raises:
        UnicodeDecodeError: If the file has changed and is not UTF-8 any more.
    """
    return _bytes(piece).decode("utf-8-sig" if piece.start == 0 else "utf-8")


def _bytes(piece: Piece) -> bytes:
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        return file.read(piece.stop - piece.start)


def _not_text(document: Document) -> str | None:
    """Why a file is no text; None if it is."""
    for piece in _pieces(document, 0, document.size):
        content = _bytes(piece)
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            return f"not UTF-8: byte {piece.start + error.start:,} is 0x{content[error.start]:02x} ({error.reason})"
    return None
