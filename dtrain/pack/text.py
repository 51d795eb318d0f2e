"""``dtrain pack text``: text files as shards of token rows for a language model.

Documents are found and assigned to splits (``documents``), encoded by several processes into the stream of each split, and
laid into rows (``rows``), which are written to shards. Next to the shards are ``vocabulary.json``, the tokenizer, and
``dataset.json``, which describes the rows.
"""

from __future__ import annotations

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

from dtrain.console import OnProgress, progress
from dtrain.data.fields.tokenizers import VOCABULARY, Tokenizer
from dtrain.data.writer import RowBlock
from dtrain.errors import printable
from dtrain.pack.command import (
    PackCommand,
    ShardSize,
    as_json,
    check_shares,
    print_train_command,
    tar_bytes,
    write_preset,
)
from dtrain.pack.documents import (
    Piece,
    TextFile,
    characters_of,
    choose_val_by,
    find_files,
    pieces_of,
    split_into_pieces,
)
from dtrain.pack.rows import BestFitRows, CutRows, SplitRows, TokenStream, layout_jobs
from dtrain.pack.staging import OnBadFile, SampleProducer, StagedDataset, Written, staged

#: Extension of a row in a shard.
EXTENSION = "tok"

_DATASET = "dataset.json"
_CHARACTERS = "characters"
_PART_BYTES = 8 << 20
# Encoding one byte of text takes about as long as writing this many bytes.
_WORK_PER_BYTE = 8
_WORK_PER_TOKEN = 4
#: Values of ``--fit`` and of ``--long-documents``.
FITS = ("cut", "best")
LONG_DOCUMENTS = ("cut", "error")


def pack_text(options: Namespace, console: Console) -> None:
    """Runs ``pack text SRC... DST``.

    Raises:
        ValueError: If an option or a file is wrong.
        ModuleNotFoundError: If the package of the tokenizer is missing.
        OSError: If a file cannot be read, ``DST`` holds other shards, or the disk is full.
    """
    patterns = _take_file_splits(options)
    command = PackCommand(options, ShardSize(megabytes=64), console)
    destination, length = command.destination, options.length
    _check(options, command, patterns)
    tokenizer = None if options.tokenizer == _CHARACTERS else Tokenizer(options.tokenizer, options.end_of_text)
    chosen = {name: find_files(sources, options.json_key, command.on_bad_file) for name, sources in patterns.items()}
    _check_disjoint(chosen)
    excluded = {os.path.realpath(file.path) for files, _ in chosen.values() for file in files}
    files, digest = find_files(options.sources, options.json_key, command.on_bad_file, excluded)
    with_text = [file for file in files if file.documents]
    by = options.val_by or choose_val_by(len(with_text), command.shares)
    if by != options.val_by and by == "tail":
        print(
            f"too few files ({len(with_text)}) to give each split whole files: {', '.join(command.shares)} get the end of each "
            "file, as with --val-by tail"
        )
    pieces = split_into_pieces(with_text, command.prefix, command.shares, by, options.seed)
    pieces |= {name: pieces_of(of_split) for name, (of_split, _) in chosen.items()}
    plan_files = {name: f"{len(of_split)} ({of_hash})" for name, (of_split, of_hash) in chosen.items()}
    files = [*files, *(file for of_split, _ in chosen.values() for file in of_split)]
    documents = sum(file.documents for file in files)
    if tokenizer is None:
        tokenizer = _tokenizer_of_characters(pieces, options.end_of_text is not None, console)
    best = options.fit == "best"
    if tokenizer.end_of_text is None and (documents > 1 or best):
        remedy = (
            "Add one to the vocabulary"
            if options.tokenizer == _CHARACTERS
            else "Pack the text of the vocabulary again with"
        )
        raise ValueError(
            f"tokenizer {options.tokenizer!r} has no end-of-text token, which separates documents ({documents:,}). "
            f"{remedy}: --end-of-text '<|endoftext|>'."
        )
    # Outside the vocabulary, so that this stays the tokenizer's.
    padding = tokenizer.vocab_size if best else None
    dtype = tokenizer.dtype if padding is None else "uint16" if padding < 1 << 16 else "uint32"
    facts = {
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "length": length,
        "dtype": dtype,
        "fit": options.fit,
        "padding": padding,
    }
    stored = _stored_description(destination, facts)
    splits = dict(stored.get("splits", {}))
    plan = command.plan(
        command="text",
        documents=f"{len(files)} ({digest})",
        files=plan_files,
        val_by=by,
        json_key=options.json_key,
        long_documents=options.long_documents,
        **facts,
    )
    if command.is_finished(plan):
        return
    encoding = _Encoding(tokenizer, dtype, best, length if options.long_documents == "error" else None)
    sample_bytes = int(tar_bytes((length + 1) * np.dtype(dtype).itemsize))
    written: dict[str, Written] = {}
    waste, tokens = [], 0
    with staged(destination, pieces, plan) as dataset:
        for split, its_pieces in pieces.items():
            stream = encoding.run(command, dataset, split, its_pieces, console)
            rows: SplitRows = CutRows(stream, length)
            if padding is not None and tokenizer.end_of_text is not None:
                rows = _best_fit_rows(command, dataset, split, stream, length, padding, tokenizer.end_of_text, console)
            if not rows.count:
                raise ValueError(
                    f"{split}: {stream.tokens:,} tokens do not fill a row of {length + 1:,}. Choose a shorter --length, "
                    "increase the share of the split, take the end of each file (--val-by tail), or pack more text."
                )
            bounds = command.size.bounds(rows.count, sample_bytes)
            make_producer = partial(_row_reader, rows)
            its = written[split] = command.write(dataset, split, bounds, make_producer, rows.count * sample_bytes)
            tokens += stream.tokens
            targets = stream.tokens if best else its.samples * length
            splits[split] = {"shards": its.shards, "samples": its.samples, "tokens": targets}
            waste.append(f"{split}: {rows.waste(tokenizer.end_of_text)}")
        is_bytes = tokenizer.identity == "bytes"  # each of which is counted
        bytes_per_token = None if is_bytes else sum(file.text_bytes for file in files) / tokens
        # Of several commands the first one's: it packed the training text.
        description = {**facts, "row": length + 1, "bytes_per_token": bytes_per_token, **stored, "splits": splits}
        dataset.publish({_DATASET: as_json(description), VOCABULARY: as_json(tokenizer.description)})
        command.print_summary(
            written,
            f"documents: {documents:,}",
            f"bad files: {command.skipped:,}",
            f"vocabulary: {tokenizer.vocab_size:,}",
        )
        print("\n".join(waste))
        _print_empty(files)
        field = {"name": "tokens", "role": "id", "dtype": dtype, "length": length + 1}
        write_preset(destination, {EXTENSION: field})
    print(f"  inputs are tokens[:, :-1], targets are tokens[:, 1:], {length:,} each")
    model = ["model=gpt", f"model.vocabulary={tokenizer.vocab_size}", f"model.context={length}"]
    if padding is not None:
        print(f"  padding is the token {padding}, which task=language_modelling leaves out")
    print_train_command(destination, [*model, "task=language_modelling"])


def _take_file_splits(options: Namespace) -> dict[str, list[str]]:
    """Removes the splits that are given by files from ``options.split``, and returns them: name to patterns."""
    patterns: dict[str, list[str]] = {}
    for name, value in options.split:
        if isinstance(value, str):
            patterns.setdefault(name, []).append(value)
    options.split = [(name, value) for name, value in options.split if not isinstance(value, str)]
    return patterns


def _check(options: Namespace, command: PackCommand, patterns: Mapping[str, object]) -> None:
    if options.length < 1:
        raise ValueError(f"--length {options.length}: want at least 1 token.")
    for source in options.sources:
        if os.path.isdir(source) and options.destination.resolve().is_relative_to(Path(source).resolve()):
            raise ValueError(
                f"{options.destination} is inside {source} and would be read as text. Choose a different DST."
            )
    check_shares(command.prefix, command.shares)
    for name in patterns:
        if name in (command.prefix, *command.shares):
            raise ValueError(f"--split {name}: this split is named twice. Give it either a share or files.")


def _check_disjoint(chosen: Mapping[str, tuple[Sequence[TextFile], str]]) -> None:
    split_of: dict[str, str] = {}
    for name, (files, _) in chosen.items():
        for file in files:
            other = split_of.setdefault(os.path.realpath(file.path), name)
            if other != name:
                raise ValueError(f"--split: {file.path} is in {other} and in {name}. Give each file to one split.")


def _tokenizer_of_characters(pieces: Mapping[str, Sequence[Piece]], end_of_text: bool, console: Console) -> Tokenizer:
    everything = [piece for of_split in pieces.values() for piece in of_split]
    with progress(console, "bytes searched for characters", _bytes_in(everything)) as on_progress:
        return Tokenizer.of_characters(characters_of(everything, on_progress), end_of_text)


def _print_empty(files: Sequence[TextFile]) -> None:
    empty = sum(file.empty for file in files)
    if empty:
        first = next(file.path for file in files if file.empty)
        print(printable(f"empty documents: {empty:,}, left out; the first is in {first}"))


def _best_fit_rows(
    command: PackCommand,
    dataset: StagedDataset,
    split: str,
    stream: TokenStream,
    length: int,
    padding: int,
    end_of_text: int,
    console: Console,
) -> BestFitRows:
    jobs = layout_jobs(stream, f"rows-{split}", length, end_of_text, command.seed)
    with progress(console, f"{split} tokens fitted", stream.tokens) as on_progress:
        layouts = dataset.compute(jobs, command.processes(stream.tokens * _WORK_PER_TOKEN), on_progress)
    return BestFitRows.from_stream(stream, length, padding, end_of_text, layouts)


def _bytes_in(pieces: Sequence[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def _stored_description(destination: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier command with the same destination, tokenizer and rows wrote; empty if there was none."""
    path = destination / _DATASET
    if not path.exists():
        return {}
    stored = json.loads(path.read_text("utf-8"))
    if not isinstance(stored, dict) or not isinstance(stored.get("splits"), dict):
        raise ValueError(f"{path} does not describe a dataset of tokens. Choose a different DST.")
    other = [
        f"{name} {stored.get(name)!r}, not {value!r}" for name, value in facts.items() if stored.get(name) != value
    ]
    if other:
        raise ValueError(
            f"{path} describes a different dataset: {', '.join(other)}. Choose a different DST, or the same options; "
            f"--tokenizer vocabulary:{destination} is the tokenizer of these shards."
        )
    return stored


@dataclass(frozen=True)
class _Encoding:
    """How documents become the parts of a stream.

    Attributes:
        tokenizer: The tokenizer.
        dtype: Of the tokens in the parts.
        whole_documents: Whether a part ends with a document.
        longest: A document with more tokens, including the end-of-text token, is refused; None: none is.
    """

    tokenizer: Tokenizer
    dtype: str
    whole_documents: bool
    longest: int | None

    def run(
        self, command: PackCommand, dataset: StagedDataset, split: str, pieces: Sequence[Piece], console: Console
    ) -> TokenStream:
        """Encodes the pieces of a split."""
        total = _bytes_in(pieces)
        with progress(console, f"{split} bytes of text", total) as on_progress:
            parts = dataset.compute(self._jobs(split, pieces), command.processes(total * _WORK_PER_BYTE), on_progress)
        return TokenStream.from_parts(parts, self.dtype)

    def _jobs(self, split: str, pieces: Sequence[Piece]) -> dict[str, Callable[[BinaryIO, OnProgress], None]]:
        """File name of each part and the job that writes it."""
        parts: list[list[Piece]] = [[]]
        size, ends = 0, True
        for piece in pieces:
            if size >= _PART_BYTES and (ends or not self.whole_documents):
                parts.append([])
                size = 0
            parts[-1].append(piece)
            size, ends = size + piece.stop - piece.start, piece.ends
        return {f"tokens-{split}-{number:06d}": partial(self._write, part) for number, part in enumerate(parts)}

    def _write(self, pieces: Sequence[Piece], file: BinaryIO, on_progress: OnProgress) -> None:
        """Writes the tokens of one part; calls ``on_progress`` with the bytes of text encoded."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        end = [] if self.tokenizer.end_of_text is None else [self.tokenizer.end_of_text]
        end_bytes = np.array(end, dtype).tobytes()
        size = 0  # of the current document
        for piece in pieces:
            context = piece.context()
            for text, ends in piece.texts():
                try:
                    tokens = self.tokenizer.encode(text, *context)
                except ValueError as error:
                    raise ValueError(f"{piece.path}: {error}") from error
                file.write(tokens.astype(dtype, copy=False).data)
                size += len(tokens) + (len(end) if ends else 0)
                # Also where a piece ends inside a document, whose rest may be in another part.
                self._check_length(piece, size)
                if ends:
                    file.write(end_bytes)
                    size = 0
            on_progress(piece.stop - piece.start)

    def _check_length(self, piece: Piece, size: int) -> None:
        if self.longest is not None and size > self.longest:
            raise ValueError(
                f"{piece.path}: a document has at least {size:,} tokens, more than the {self.longest:,} of a row. Choose a "
                "longer --length, or cut such documents: --long-documents cut."
            )


def _row_reader(rows: SplitRows, start: int, stop: int) -> SampleProducer:
    return partial(_read_rows, rows, start, stop)


def _read_rows(rows: SplitRows, start: int, stop: int, on_bad_file: OnBadFile) -> Iterator[RowBlock]:
    """The samples of one shard, rows ``start`` to ``stop``."""
    for block in rows.read(start, stop):
        yield RowBlock(start, EXTENSION, block)
        start += len(block)
