"""The documents of ``pack text``: found in files, assigned to splits, and read in pieces.

* A *document* is the text of one UTF-8 file; in a ``.jsonl`` file, the text in one line.
* A *piece* is a part of a file of a few megabytes, which one process reads at a time: it ends with a line. So memory does not
  grow with the size of a file.
* The *context* of a piece is the text of the same document before and after it: a tokenizer needs it, because some tokens
  depend on their neighbours.
* A *split* gets whole files (``document``), or the end of every file: from a line on (``tail``), or from a character on
  (``character``). Files that ``--split NAME=FILES`` names belong to that split as a whole.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dtrain.pack.command import assign_to_splits
from dtrain.pack.staging import OnBadFile

#: Values of ``--val-by``.
VAL_BY = ("document", "tail", "character")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSON_LINES = (".jsonl", ".ndjson")
_JSON_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
_JSON, _JSON_SPACE = json.JSONDecoder(), " \t\r\n"
_PIECE_BYTES = 8 << 20
_CONTEXT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file with text.

    Attributes:
        path: Where it is.
        name: Its path below the source folder.
        size: Bytes of the file.
        json_key: Key of the text in each line; None: the file is one document.
        documents: Number of documents that are not empty.
        empty: Number of empty documents.
        text_bytes: Bytes of the documents, in UTF-8.
    """

    path: str
    name: str
    size: int
    json_key: str | None = None
    documents: int = 0
    empty: int = 0
    text_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a file.

    Attributes:
        path: The file.
        start: First byte.
        stop: The byte after the last one.
        json_key: Key of the text in each line; None: the file is one document.
        document: First byte of the document, or of the part of it that its split has, and the byte after its last one.
    """

    path: str
    start: int
    stop: int
    json_key: str | None
    document: tuple[int, int]

    @property
    def ends(self) -> bool:
        """Whether a document ends where the piece does."""
        return self.stop == self.document[1] or self.json_key is not None

    def context(self) -> tuple[str, str]:
        """The text of the document before and after the piece: 64 KiB each, or less; none of lines of JSON."""
        if self.json_key is not None:
            return "", ""
        first, last = self.document
        before = _read(self.path, max(self.start - _CONTEXT_BYTES, first), self.start)
        after = _read(self.path, self.stop, min(self.stop + _CONTEXT_BYTES, last))
        # Characters that are cut at the far ends are left out.
        mark = before.startswith(_BYTE_ORDER_MARK) and self.start <= _CONTEXT_BYTES
        return before[3 * mark :].decode(errors="ignore"), after.decode(errors="ignore")

    def texts(self) -> Iterator[tuple[str, bool]]:
        """The text of each document in the piece that is not empty, and whether the document ends with it.

        A byte order mark is left out.

        Raises:
            ValueError: If the file has changed since it was checked, and is no longer text.
        """
        if self.json_key is None:
            yield _bytes(self).decode("utf-8-sig" if self.start == 0 else "utf-8"), self.ends
            return
        for line in _bytes(self).splitlines():
            text = _text_of(line, self.json_key)
            if text:
                yield text, True


def find_files(
    sources: Sequence[str], json_key: str, on_bad_file: OnBadFile, excluded: Collection[str] = ()
) -> tuple[list[TextFile], str]:
    """Lists the files that paths, globs and folders name, without hidden files.

    Every file is read once to check its content, so that hours of encoding do not fail at a byte that is not UTF-8.

    Args:
        sources: Paths and globs.
        json_key: Key of the text in each line of a ``.jsonl`` file.
        on_bad_file: Called for every file that is not text.
        excluded: Real paths of files to leave out.

    Returns:
        The files in the order of the sources, sorted by name within a source, and a hash of names, sizes and
        modification times.

    Raises:
        FileNotFoundError: If a source has no files.
        ValueError: If a file is listed twice, or all documents are empty.
    """
    files: list[TextFile] = []
    digest, seen = hashlib.sha256(), set[str]()
    for source in sources:
        found = list(_paths(source))
        if not found:
            raise FileNotFoundError(
                f"{source}: no text file found. Give files, folders, or a glob in quotes: 'src/**/*.txt'."
            )
        for path, name in found:
            real = os.path.realpath(path)
            if real in seen:
                raise ValueError(f"{path} is listed twice. Remove the repeated source or link.")
            seen.add(real)
            if real in excluded:
                continue
            status = os.stat(path)
            file = TextFile(path, name, status.st_size, json_key if path.endswith(_JSON_LINES) else None)
            try:
                files.append(_checked(file))
            except ValueError as error:
                on_bad_file(Path(path), str(error))
                if file.json_key is not None:
                    lines = sum(len(_bytes(piece).splitlines()) for piece in _pieces(file, 0, file.size))
                    print(f"{path}: all of its {lines:,} lines are left out")
                continue
            digest.update(os.fsencode(name) + b"\0%d %d\n" % (status.st_size, status.st_mtime_ns))
    if not any(file.documents for file in files):
        raise ValueError(f"{', '.join(sources)}: all documents are empty. Name files with text.")
    return files, digest.hexdigest()[:16]


def _paths(source: str) -> Iterator[tuple[str, str]]:
    """Path and name of each file of a source, sorted."""
    if os.path.isfile(source):
        yield source, os.path.basename(source)
    elif os.path.isdir(source):
        # Links are followed, as in a glob; find_files refuses files that are reached twice, and so loops of links.
        for root, folders, names in os.walk(source, followlinks=True):
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                path = os.path.join(root, name)
                yield path, os.path.relpath(path, source)
    else:
        for path in sorted(glob.glob(source, recursive=True)):
            if os.path.isfile(path):
                yield path, path


def _checked(file: TextFile) -> TextFile:
    """The file with its counts; a ``ValueError`` says why it is not text."""
    documents = empty = text_bytes = 0
    for piece in _pieces(file, 0, file.size):
        content = _bytes(piece)
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"not UTF-8: byte {piece.start + error.start:,} is 0x{content[error.start]:02x} ({error.reason})"
            ) from error
        if file.json_key is None:
            text_bytes += len(content) - (3 if piece.start == 0 and content.startswith(_BYTE_ORDER_MARK) else 0)
            continue
        begin = piece.start
        for line in content.splitlines(keepends=True):
            try:
                text = _text_of(line, file.json_key)
            except ValueError as error:
                raise ValueError(f"the line at byte {begin:,} {error}") from error
            begin += len(line)
            if text is not None:
                documents, empty = documents + bool(text), empty + (not text)
                text_bytes += len(text if text.isascii() else text.encode())
    if file.json_key is None:
        documents, empty = int(text_bytes > 0), int(text_bytes == 0)
    return TextFile(file.path, file.name, file.size, file.json_key, documents, empty, text_bytes)


def _text_of(line: bytes, key: str) -> str | None:
    """The text in a line of a ``.jsonl`` file; None if the line is blank. A ``ValueError`` says what the line is instead."""
    if not line or line.isspace():
        return None
    try:
        content = line.decode().removeprefix("\ufeff").strip(_JSON_SPACE)
        value, end = _JSON.raw_decode(content)  # half a microsecond a line faster than json.loads
        if end != len(content):
            raise json.JSONDecodeError("Extra data", content, end)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"is {_json_type(value)}, want an object with the key {key!r}")
    if key not in value:
        raise ValueError(f"has no key {key!r}, it has {', '.join(map(repr, value))}: set --json-key")
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"has {_json_type(text)} at the key {key!r}, want a string")
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half of a surrogate pair, which is not Unicode text ({error.reason})") from error
    return text


def _json_type(value: object) -> str:
    return _JSON_TYPES.get(type(value), "a number")


def characters_of(pieces: Iterable[Piece], on_progress: Callable[[int], None]) -> set[str]:
    """All distinct characters; calls ``on_progress`` with the bytes read."""
    found: set[str] = set()
    for piece in pieces:
        for text, _ in piece.texts():
            found.update(text)
        on_progress(piece.stop - piece.start)
    return found


# -- splits and pieces


def choose_val_by(files: int, shares: Mapping[str, float]) -> str:
    """``document`` if there are enough files for each split to get at least one, else ``tail``."""
    numbers = assign_to_splits(np.arange(files), "", shares).values()
    return VAL_BY[0] if all(map(len, numbers)) else VAL_BY[1]


def split_into_pieces(
    files: Sequence[TextFile], prefix: str, shares: Mapping[str, float], by: str, seed: int
) -> dict[str, list[Piece]]:
    """Assigns the text to splits and cuts it into pieces.

    Args:
        files: All files.
        prefix: Name of the split that gets the text that the shares leave.
        shares: Name to fraction of each other split.
        by: One of ``VAL_BY``.
        seed: Determines, together with the names of the files, which files a split gets.

    Returns:
        The pieces of each split.

    Raises:
        ValueError: If a split gets no text.
    """
    if by == VAL_BY[0]:
        # Ordered by a hash of the name, so that most files stay in their split when files are added or removed.
        rank = [hashlib.sha256(os.fsencode(f"{seed}/{file.name}")).digest() for file in files]
        shuffled = np.array(sorted(range(len(files)), key=rank.__getitem__), dtype=np.int64)
        result = {
            name: pieces_of([files[number] for number in chosen.tolist()])
            for name, chosen in assign_to_splits(shuffled, prefix, shares).items()
        }
    else:
        result = _cut_tails(files, prefix, shares, exactly=by == VAL_BY[2])
    empty = [name for name, pieces in result.items() if not pieces]
    if empty:
        raise ValueError(
            f"the split {empty[0]!r} gets no text from the {len(files)} files. Increase its share, or give each split the "
            "end of each file: --val-by tail."
        )
    return result


def pieces_of(files: Iterable[TextFile]) -> list[Piece]:
    """The pieces of whole files."""
    return [piece for file in files if file.documents for piece in _pieces(file, 0, file.size)]


def _cut_tails(
    files: Sequence[TextFile], prefix: str, shares: Mapping[str, float], exactly: bool
) -> dict[str, list[Piece]]:
    result: dict[str, list[Piece]] = {name: [] for name in (prefix, *shares)}
    for file in files:
        cut = _character_begin if exactly else _line_end
        if file.json_key is not None:
            cut = partial(_line_end, whole=True)
        fraction = 1 - sum(shares.values())
        start, end = 0, cut(file.path, int(fraction * file.size), file.size)
        result[prefix] += _pieces(file, start, end)
        for number, (name, share) in enumerate(shares.items(), 1):
            fraction += share
            start = end
            end = file.size if number == len(shares) else cut(file.path, int(fraction * file.size), file.size)
            result[name] += _pieces(file, start, end)
    return result


def _pieces(file: TextFile, start: int, stop: int) -> list[Piece]:
    pieces, document = [], (start, stop)
    while start < stop:
        end = _line_end(file.path, start + _PIECE_BYTES, stop, whole=file.json_key is not None)
        pieces.append(Piece(file.path, start, end, file.json_key, document))
        start = end
    return pieces


def _line_end(path: str, offset: int, size: int, whole: bool = False) -> int:
    """First offset at or after ``offset`` where a line begins or, in a line of megabytes, a character begins.

    With ``whole``, no line is cut.
    """
    if offset >= size:
        return size
    with open(path, "rb") as file:
        # One byte before it, so that a line that begins exactly there stays whole.
        file.seek(max(offset - 1, 0))
        end = file.tell()
        while end < size:
            line = file.readline(_PIECE_BYTES)
            end += len(line)
            if line.endswith(b"\n") or not whole:
                break
    return min(end, size) if line.endswith(b"\n") else _character_begin(path, end, size)


def _character_begin(path: str, offset: int, size: int) -> int:
    """First offset at or after ``offset`` where a character begins."""
    with open(path, "rb") as file:
        file.seek(offset)
        while offset < size:
            byte = file.read(1)
            if not byte or byte[0] & 0xC0 != 0x80:
                break
            offset += 1
    return min(offset, size)


def _bytes(piece: Piece) -> bytes:
    return _read(piece.path, piece.start, piece.stop)


def _read(path: str, start: int, stop: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(stop - start)
