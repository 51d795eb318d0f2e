"""``python -m dtrain.pack text``: text files as shards of token rows for a language model.

Documents are found and assigned to splits (``documents``), encoded by several processes into the stream of each split, and
laid into rows (``rows``), which are written to shards. Beside the shards are ``vocabulary.json``, the tokenizer, and
``dataset.json``, which describes the rows.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.console import Console

from dtrain.data.tokenizers import VOCABULARY, Tokenizer
from dtrain.data.writer import Sample
from dtrain.packing.command import (
    PackCommand,
    ShardSize,
    as_json,
    check_shares,
    print_train_command,
    tar_bytes,
    write_preset,
)
from dtrain.packing.documents import (
    Piece,
    TextFile,
    characters_of,
    choose_val_by,
    find_files,
    pieces_of,
    split_into_pieces,
)
from dtrain.packing.pool import OnProgress
from dtrain.packing.rows import CutRows, TokenStream
from dtrain.packing.staging import OnBadFile, SampleProducer, StagedDataset, Written, staged
from dtrain.tracking.console import progress

#: Extension of a row in a shard.
EXTENSION = "tok"

_DATASET = "dataset.json"
_CHARACTERS = "characters"
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
    patterns = _take_file_splits(options)
    command = PackCommand(options, ShardSize(megabytes=64), console)
    destination, length = command.destination, options.length
    _check(options, command, patterns)
    tokenizer = None if options.tokenizer == _CHARACTERS else Tokenizer(options.tokenizer, options.end_of_text)
    chosen = {name: find_files(sources, options.json_key, command.on_bad_file) for name, sources in patterns.items()}
    excluded = {os.path.realpath(file.path) for files, _ in chosen.values() for file in files}
    files, digest = find_files(options.sources, options.json_key, command.on_bad_file, excluded)
    by = options.val_by or choose_val_by(len(files), command.shares)
    if by != options.val_by and by == "tail":
        print(
            f"too few files ({len(files)}) to give each split whole files: {', '.join(command.shares)} is the end of each "
            "file, as with --val-by tail"
        )
    pieces = split_into_pieces(files, command.prefix, command.shares, by, options.seed)
    pieces |= {name: pieces_of(of_split) for name, (of_split, _) in chosen.items()}
    plan_files = {name: f"{len(of_split)} ({of_hash})" for name, (of_split, of_hash) in chosen.items()}
    files = [*files, *(file for of_split, _ in chosen.values() for file in of_split)]
    documents = sum(file.documents for file in files)
    if tokenizer is None:
        tokenizer = _tokenizer_of_characters(pieces, options.end_of_text is not None, console)
    if tokenizer.end_of_text is None and documents > 1:
        raise ValueError(
            f"tokenizer {options.tokenizer!r} has no end-of-text token, which separates the {documents:,} documents. Add "
            "one to the vocabulary: --end-of-text '<|endoftext|>'."
        )
    facts = {
        "tokenizer": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "length": length,
        "dtype": tokenizer.dtype,
    }
    splits = _stored_splits(destination, facts)
    plan = command.plan(command="text", documents=f"{len(files)} ({digest})", files=plan_files, val_by=by, **facts)
    sample_bytes = int(tar_bytes((length + 1) * np.dtype(tokenizer.dtype).itemsize))
    written: dict[str, Written] = {}
    unused, tokens = [], 0
    with staged(destination, pieces, plan) as dataset:
        for split, its_pieces in pieces.items():
            rows = CutRows(_encode(command, dataset, split, its_pieces, tokenizer, console), length)
            if not rows.count:
                raise ValueError(
                    f"{split}: {rows.stream.tokens:,} tokens do not fill a row of {length + 1:,}. Choose a shorter --length, "
                    "increase the share of the split, take the end of each file (--val-by tail), or pack more text."
                )
            bounds = command.size.bounds(rows.count, sample_bytes)
            make_producer = partial(_row_reader, rows)
            its = written[split] = command.write(dataset, split, bounds, make_producer, rows.count * sample_bytes)
            tokens += rows.stream.tokens
            splits[split] = {"shards": its.shards, "samples": its.samples, "tokens": its.samples * length}
            unused.append(f"{split} {rows.stream.tokens - 1 - rows.count * length:,}")
        is_bytes = tokenizer.identity == "bytes"  # of which each is counted
        bytes_per_token = None if is_bytes else sum(file.text_bytes for file in files) / tokens
        description = {**facts, "row": length + 1, "bytes_per_token": bytes_per_token, "splits": splits}
        dataset.publish({_DATASET: as_json(description), VOCABULARY: as_json(tokenizer.description)})
        command.print_summary(
            written,
            f"documents: {documents:,}",
            f"bad files: {command.skipped:,}",
            f"vocabulary: {tokenizer.vocab_size:,}",
            f"unused tokens: {', '.join(unused)}",
        )
        _print_empty(files)
        field = {"name": "tokens", "role": "id", "dtype": tokenizer.dtype, "length": length + 1}
        write_preset(destination, {EXTENSION: field})
    print(f"  inputs are tokens[:, :-1], targets are tokens[:, 1:], {length:,} each")
    model = ["model=gpt", f"model.vocabulary={tokenizer.vocab_size}", f"model.context={length}"]
    print_train_command(destination, [*model, "task=language_modelling"])


def _take_file_splits(options: Namespace) -> dict[str, list[str]]:
    """Takes the splits that are given by files out of ``options.split``: name to patterns."""
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
            raise ValueError(f"{options.destination} is inside {source} and would be read as text. Choose another DST.")
    check_shares(command.prefix, command.shares)
    for name in patterns:
        if name in (command.prefix, *command.shares):
            raise ValueError(f"--split {name}: this split is named twice. Give it either a share or files.")


def _tokenizer_of_characters(pieces: Mapping[str, Sequence[Piece]], end_of_text: bool, console: Console) -> Tokenizer:
    everything = [piece for of_split in pieces.values() for piece in of_split]
    with progress(console, "bytes searched for characters", _bytes_in(everything)) as on_progress:
        return Tokenizer.of_characters(characters_of(everything, on_progress), end_of_text)


def _print_empty(files: Sequence[TextFile]) -> None:
    empty = sum(file.empty for file in files)
    if empty:
        first = next(file.path for file in files if file.empty)
        print(f"empty documents: {empty:,}, left out; the first is in {first}")


def _encode(
    command: PackCommand,
    dataset: StagedDataset,
    split: str,
    pieces: Sequence[Piece],
    tokenizer: Tokenizer,
    console: Console,
) -> TokenStream:
    total = _bytes_in(pieces)
    with progress(console, f"{split} bytes of text", total) as on_progress:
        jobs = _encode_jobs(split, pieces, tokenizer)
        parts = dataset.compute(jobs, command.processes(total * _WORK_PER_BYTE), on_progress)
    return TokenStream.of(parts, tokenizer.dtype)


def _bytes_in(pieces: Sequence[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


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
        raise ValueError(
            f"{path} describes another dataset: {', '.join(other)}. Choose another DST, or the same options; --tokenizer "
            f"vocabulary:{destination} is the tokenizer of these shards."
        )
    return dict(stored["splits"])


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
    dtype = np.dtype(tokenizer.dtype).newbyteorder("<")
    end = b"" if tokenizer.end_of_text is None else np.array([tokenizer.end_of_text], dtype).tobytes()
    for piece in pieces:
        for text, ends in piece.texts():
            try:
                tokens = tokenizer.encode(text)
            except ValueError as error:
                raise ValueError(f"{piece.path}: {error}") from error
            file.write(tokens.astype(dtype, copy=False).tobytes())
            if ends:
                file.write(end)
        on_progress(piece.stop - piece.start)


def _row_reader(rows: CutRows, start: int, stop: int) -> SampleProducer:
    return partial(_read_rows, rows, start, stop)


def _read_rows(rows: CutRows, start: int, stop: int, on_bad_file: OnBadFile) -> Iterator[Sample]:
    """The samples of one shard, rows ``start`` to ``stop``; the key of a sample is the number of its row."""
    for number, row in enumerate(rows.read(start, stop), start):
        yield {"__key__": f"{number:09d}", EXTENSION: row.tobytes()}
