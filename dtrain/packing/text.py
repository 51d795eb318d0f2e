"""``python -m dtrain.pack text``: text files as shards of token rows for a language model.

* A *document* is one UTF-8 file. A *piece* is a document or, of a large document, a few megabytes that end with a line.
* A *stream* is the tokens of a split: document after document, each followed by the end-of-text token. It is written as
  several *parts*, files that different processes write; each part encodes several pieces.
* A *row* is ``length + 1`` tokens of the stream. The first token of a row is the last token of the row before: a row
  gives ``length`` inputs ``row[:-1]`` and ``length`` targets ``row[1:]``, and every token of the stream but the first is
  a target once. The tokens after the last complete row are dropped.
* Parts and rows are raw little-endian numbers, which a field with a ``dtype`` reads (``dtrain.data.fields.Field``).
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.console import Console

from dtrain.data.tokenizers import Tokenizer
from dtrain.data.writer import Sample
from dtrain.packing.command import (
    PackCommand,
    ShardSize,
    as_json,
    assign_to_splits,
    check_shares,
    print_train_command,
    tar_bytes,
    write_preset,
)
from dtrain.packing.pool import OnProgress
from dtrain.packing.staging import OnBadFile, SampleProducer, StagedDataset, Written, staged
from dtrain.tracking.console import progress

#: Values of ``--val-by``: splits get whole documents, or the end of each document.
VAL_BY = ("document", "tail")
#: Extension of a row in a shard.
EXTENSION = "tok"

_DATASET = "dataset.json"
_PIECE_BYTES = 8 << 20
_PART_BYTES = 8 << 20
# Encoding one byte of text takes about as long as writing this many bytes.
_WORK_PER_BYTE = 8


def pack_text(options: Namespace, console: Console) -> None:
    """Runs ``pack text SRC... DST``.

    Raises:
        ValueError: If an option or a file is wrong.
        ModuleNotFoundError: If the package of the tokenizer is missing.
        OSError: If a file cannot be read, ``DST`` holds other shards, or the disk is full.
    """
    command = PackCommand(options, ShardSize(megabytes=64), console)
    destination, length = command.destination, options.length
    _check(options)
    check_shares(command.prefix, command.shares)
    tokenizer = Tokenizer(options.tokenizer, options.end_of_text)
    facts = {
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "length": length,
        "dtype": tokenizer.dtype,
    }
    splits = _stored_splits(destination, facts)
    documents, digest = find_documents(options.sources, command.on_bad_file)
    by = options.val_by or choose_val_by(len(documents), command.shares)
    if by != options.val_by and by == "tail":
        print(
            f"too few files ({len(documents)}) to give each split whole files: {', '.join(command.shares)} is the end of each "
            "file, as with --val-by tail"
        )
    pieces = split_into_pieces(documents, command.prefix, command.shares, by, options.seed)
    plan = command.plan(command="text", documents=f"{len(documents)} ({digest})", val_by=by, **facts)
    sample_bytes = int(tar_bytes((length + 1) * np.dtype(tokenizer.dtype).itemsize))
    written: dict[str, Written] = {}
    unused, streams = [], []
    with staged(destination, pieces, plan) as dataset:
        for split, its_pieces in pieces.items():
            stream = _encode(command, dataset, split, its_pieces, tokenizer, length, console)
            bounds = command.size.bounds(stream.rows, sample_bytes)
            make_producer = partial(_row_reader, stream)
            its = written[split] = command.write(dataset, split, bounds, make_producer, stream.rows * sample_bytes)
            streams.append(stream)
            splits[split] = {"shards": its.shards, "samples": its.samples, "tokens": its.samples * length}
            unused.append(f"{split} {stream.tokens - 1 - stream.rows * length:,}")
        dataset.publish({_DATASET: as_json({**facts, "row": length + 1, "splits": splits})})
        command.print_summary(
            written,
            f"documents: {len(documents):,}",
            f"bad files: {command.skipped:,}",
            f"vocabulary: {tokenizer.vocab_size:,}",
            f"unused tokens: {', '.join(unused)}",
        )
        field = {"name": "tokens", "role": "id", "dtype": tokenizer.dtype, "length": length + 1}
        write_preset(destination, {EXTENSION: field})
    print(f"  inputs are tokens[:, :-1], targets are tokens[:, 1:], {length:,} each")
    model = ["model=gpt", f"model.vocabulary={tokenizer.vocab_size}", f"model.context={length}"]
    task = ["task=language_modelling"]
    if tokenizer.identity != "bytes":
        tokens = sum(its.tokens for its in streams)
        task.append(f"task.bytes_per_token={sum(document.size for document in documents) / tokens:.3f}")
    print_train_command(destination, [*model, *task])


def _check(options: Namespace) -> None:
    if options.length < 1:
        raise ValueError(f"--length {options.length}: want at least 1 token.")
    for source in options.sources:
        if os.path.isdir(source) and options.destination.resolve().is_relative_to(Path(source).resolve()):
            raise ValueError(f"{options.destination} is inside {source} and would be read as text. Choose another DST.")


def _encode(
    command: PackCommand,
    dataset: StagedDataset,
    split: str,
    pieces: list[Piece],
    tokenizer: Tokenizer,
    length: int,
    console: Console,
) -> _TokenStream:
    total = sum(piece.stop - piece.start for piece in pieces)
    with progress(console, f"{split} bytes of text", total) as on_progress:
        jobs = _encode_jobs(split, pieces, tokenizer)
        parts = dataset.compute(jobs, command.processes(total * _WORK_PER_BYTE), on_progress)
    stream = _TokenStream.of(parts, tokenizer.dtype, length)
    if not stream.rows:
        raise ValueError(
            f"{split}: {stream.tokens:,} tokens do not fill a row of {length + 1:,}. Choose a shorter --length, increase the "
            "share of the split, take the end of each file (--val-by tail), or pack more text."
        )
    return stream


def _stored_splits(destination: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The splits of earlier commands with the same destination, tokenizer and length."""
    path = destination / _DATASET
    if not path.exists():
        return {}
    stored = json.loads(path.read_text("utf-8"))
    if not isinstance(stored, dict) or not isinstance(stored.get("splits"), dict):
        raise ValueError(f"{path} does not describe a dataset of tokens. Choose another DST.")
    other = [
        f"{name} {stored.get(name)!r}, not {value!r}" for name, value in facts.items() if stored.get(name) != value
    ]
    if other:
        raise ValueError(f"{path} describes another dataset: {', '.join(other)}. Choose another DST.")
    return dict(stored["splits"])


# -- documents and pieces


@dataclass(frozen=True)
class Document:
    """A text file."""

    path: str
    name: str  # path below the source folder
    size: int  # bytes


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of a file; ``ends`` is True for the last piece of the document."""

    path: str
    start: int
    stop: int
    ends: bool


def find_documents(sources: Sequence[str], on_bad_file: OnBadFile) -> tuple[list[Document], str]:
    """Lists the documents of files, globs and folders, without hidden files.

    Every file is read once to check its encoding, so that hours of encoding do not fail at a byte that is not UTF-8.

    Args:
        sources: Paths and globs.
        on_bad_file: Called for every file that is not UTF-8.

    Returns:
        The documents in the order of the sources, sorted by name within a source, and a hash of names, sizes and
        modification times.

    Raises:
        FileNotFoundError: If a source has no files.
        ValueError: If a file is listed twice, or all files are empty.
    """
    documents: list[Document] = []
    digest, seen = hashlib.sha256(), set[str]()
    for source in sources:
        found = list(_files(source))
        if not found:
            raise FileNotFoundError(
                f"{source}: no text file found. Give files, folders, or a glob in quotes: 'src/**/*.txt'."
            )
        for path, name in found:
            real = os.path.realpath(path)
            if real in seen:
                raise ValueError(f"{path} is listed twice. Remove the repeated source or link.")
            seen.add(real)
            status = os.stat(path)
            document = Document(path, name, status.st_size)
            reason = _why_not_text(document)
            if reason:
                on_bad_file(Path(path), reason)
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
        # Links are followed, as in a glob; find_documents refuses files that are reached twice, and so loops of links.
        for root, folders, names in os.walk(source, followlinks=True):
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
            for name in sorted(name for name in names if not name.startswith(".")):
                path = os.path.join(root, name)
                yield path, os.path.relpath(path, source)
    else:
        for path in sorted(glob.glob(source, recursive=True)):
            if os.path.isfile(path):
                yield path, path


def choose_val_by(documents: int, shares: Mapping[str, float]) -> str:
    """``document`` if each split gets at least one of so many documents, else ``tail``."""
    numbers = assign_to_splits(np.arange(documents), "", shares).values()
    return VAL_BY[0] if all(map(len, numbers)) else VAL_BY[1]


def split_into_pieces(
    documents: Sequence[Document], prefix: str, shares: Mapping[str, float], by: str, seed: int
) -> dict[str, list[Piece]]:
    """Assigns the text to splits and cuts it into pieces.

    Args:
        documents: All documents.
        prefix: Name of the split that gets the text that the shares leave.
        shares: Name to fraction of each other split.
        by: One of ``VAL_BY``.
        seed: Determines, together with the names of the documents, which documents a split gets.

    Returns:
        The pieces of each split.

    Raises:
        ValueError: If a split gets no text.
    """
    if by == "tail":
        result = _cut_tails(documents, prefix, shares)
    else:
        # Ordered by a hash of the name, so that most documents stay in their split when documents are added or removed.
        rank = [hashlib.sha256(os.fsencode(f"{seed}/{document.name}")).digest() for document in documents]
        shuffled = np.array(sorted(range(len(documents)), key=rank.__getitem__), dtype=np.int64)
        result = {
            name: [
                piece for number in chosen.tolist() for piece in _pieces(documents[number], 0, documents[number].size)
            ]
            for name, chosen in assign_to_splits(shuffled, prefix, shares).items()
        }
    empty = [name for name, pieces in result.items() if not pieces]
    if empty:
        raise ValueError(
            f"the split {empty[0]!r} gets no text of {len(documents)} documents. Increase its share, or give each split the "
            "end of each document: --val-by tail."
        )
    return result


def _cut_tails(documents: Sequence[Document], prefix: str, shares: Mapping[str, float]) -> dict[str, list[Piece]]:
    result: dict[str, list[Piece]] = {name: [] for name in (prefix, *shares)}
    for document in documents:
        fraction = 1 - sum(shares.values())
        start, end = 0, _line_end(document.path, round(fraction * document.size), document.size)
        result[prefix] += _pieces(document, start, end)
        for name, share in shares.items():
            fraction += share
            start, end = end, _line_end(document.path, round(fraction * document.size), document.size)
            result[name] += _pieces(document, start, end)
    return result


def _pieces(document: Document, start: int, stop: int) -> list[Piece]:
    pieces = []
    while start < stop:
        end = _line_end(document.path, start + _PIECE_BYTES, stop)
        pieces.append(Piece(document.path, start, end, end == stop))
        start = end
    return pieces


def _line_end(path: str, offset: int, size: int) -> int:
    """First offset at or after ``offset`` where a line begins or, in a line of megabytes, a character begins."""
    if offset >= size:
        return size
    with open(path, "rb") as file:
        file.seek(offset)
        line = file.readline(_PIECE_BYTES)
        end = offset + len(line)
        while end < size and not line.endswith(b"\n"):
            byte = file.read(1)
            if not byte or byte[0] & 0xC0 != 0x80:
                break
            end += 1
    return min(end, size)


def read_piece(piece: Piece) -> str:
    """The text of a piece, without a byte order mark.

    Raises:
        UnicodeDecodeError: If the file has changed since it was checked, and is not UTF-8 any more.
    """
    return _piece_bytes(piece).decode("utf-8-sig" if piece.start == 0 else "utf-8")


def _piece_bytes(piece: Piece) -> bytes:
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        return file.read(piece.stop - piece.start)


def _why_not_text(document: Document) -> str | None:
    """The reason why a file is not UTF-8; None if it is."""
    for piece in _pieces(document, 0, document.size):
        content = _piece_bytes(piece)
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            return f"not UTF-8: byte {piece.start + error.start:,} is 0x{content[error.start]:02x} ({error.reason})"
    return None


# -- tokens and rows


def _encode_jobs(
    split: str, pieces: Sequence[Piece], tokenizer: Tokenizer
) -> dict[str, Callable[[BinaryIO, OnProgress], None]]:
    """File name of each part of a stream and the job that writes it."""
    parts: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if size >= _PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(piece)
        size += piece.stop - piece.start
    return {f"tokens-{split}-{number:06d}": partial(_encode_part, tokenizer, part) for number, part in enumerate(parts)}


def _encode_part(tokenizer: Tokenizer, pieces: Sequence[Piece], file: BinaryIO, on_progress: OnProgress) -> None:
    """Writes the tokens of one part; calls ``on_progress`` with the bytes of text encoded."""
    end = np.array([tokenizer.end_of_text], tokenizer.dtype)
    for piece in pieces:
        tokens = tokenizer.encode(read_piece(piece))
        for array in (tokens, end) if piece.ends else (tokens,):
            file.write(array.astype(array.dtype.newbyteorder("<")).tobytes())
        on_progress(piece.stop - piece.start)


@dataclass(frozen=True)
class _TokenStream:
    """The tokens of a split."""

    parts: Sequence[Path]
    sizes: Sequence[int]  # tokens in each part
    dtype: str
    length: int  # targets of a row

    @staticmethod
    def of(parts: Sequence[Path], dtype: str, length: int) -> _TokenStream:
        itemsize = np.dtype(dtype).itemsize
        return _TokenStream(parts, [path.stat().st_size // itemsize for path in parts], dtype, length)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(self.sizes)

    @property
    def rows(self) -> int:
        """Number of complete rows."""
        return max(self.tokens - 1, 0) // self.length

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop``, shape ``[stop - start]``, little-endian."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        arrays, begin = [], 0
        for path, size in zip(self.parts, self.sizes, strict=True):
            first, last = max(start - begin, 0), min(stop - begin, size)
            if first < last:
                arrays.append(np.fromfile(path, dtype, last - first, offset=first * dtype.itemsize))
            begin += size
        return np.concatenate(arrays)


def _row_reader(stream: _TokenStream, start: int, stop: int) -> SampleProducer:
    return partial(_read_rows, stream, start, stop)


def _read_rows(stream: _TokenStream, start: int, stop: int, on_bad_file: OnBadFile) -> Iterator[Sample]:
    """The samples of one shard, rows ``start`` to ``stop``; the key of a sample is the number of its row."""
    length = stream.length
    tokens = stream.read(start * length, stop * length + 1)
    for number in range(start, stop):
        first = (number - start) * length
        yield {"__key__": f"{number:09d}", EXTENSION: tokens[first : first + length + 1].tobytes()}
