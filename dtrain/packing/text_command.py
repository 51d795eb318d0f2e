"""``python -m dtrain.pack text``: find, plan, encode, write, publish, tell."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dtrain.packing import documents, tokens
from dtrain.packing.command import YOUR_OWN, Command, as_json
from dtrain.packing.preset import print_command, write_preset
from dtrain.packing.progress import progress
from dtrain.packing.shares import check_shares
from dtrain.packing.sizes import ShardSize, tar_bytes
from dtrain.packing.tokenizers import Tokenizer
from dtrain.packing.unfinished import Unfinished, Written, unfinished

_DATASET = "dataset.json"
# A byte of text takes as long to encode as some bytes to write.
_WORK_OF_A_BYTE = 8


def pack_text(options: Namespace, console: Console) -> None:
    """``text SRC... DST``.

    Raises:
        ValueError: If an option or a file is wrong.
        ModuleNotFoundError: If the tokenizer's package is missing.
        OSError: If a file cannot be read, or ``DST`` holds other shards or is full.
    """
    command = Command(options, ShardSize(megabytes=64), console)
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
    splits = _known_splits(destination, facts)
    texts, digest = documents.find(options.sources, command.on_bad)
    pieces = documents.deal_pieces(texts, command.prefix, command.shares, options.val_by, options.seed)
    plan = command.plan(command="text", documents=f"{len(texts)} ({digest})", val_by=options.val_by, **facts)
    sample_bytes = int(tar_bytes((length + 1) * np.dtype(tokenizer.dtype).itemsize))
    written: dict[str, Written] = {}
    left_over = []
    with unfinished(destination, pieces, plan) as work:
        for split, its_pieces in pieces.items():
            stream = _encode(command, work, split, its_pieces, tokenizer, length, console)
            cut = command.size.cut(stream.rows, sample_bytes)
            make = partial(tokens.TokenRows, stream)
            its = written[split] = command.write(work, split, cut, make, stream.rows * sample_bytes)
            splits[split] = {"shards": its.shards, "samples": its.samples, "tokens": its.samples * length}
            left_over.append(f"{split} {stream.tokens - 1 - stream.rows * length:,}")
        work.publish({_DATASET: as_json({**facts, "row": length + 1, "splits": splits})})
        command.summarise(
            written,
            f"documents: {len(texts):,}",
            f"bad files: {command.bad_files:,}",
            f"vocabulary: {tokenizer.vocab_size:,}",
            f"tokens left over: {', '.join(left_over)}",
        )
        field = {"name": "tokens", "role": "id", "dtype": tokenizer.dtype, "length": length + 1}
        write_preset(destination, {tokens.EXTENSION: field})
    print(f"  inputs are tokens[:, :-1], targets tokens[:, 1:], {length:,} each")
    print_command(destination, YOUR_OWN)


def _check(options: Namespace) -> None:
    if options.length < 1:
        raise ValueError(f"--length {options.length}: want at least 1 token.")
    for source in options.sources:
        if os.path.isdir(source) and options.destination.resolve().is_relative_to(Path(source).resolve()):
            raise ValueError(
                f"{options.destination} lies inside {source}, where it would be read as text. Choose another DST."
            )


def _encode(
    command: Command,
    work: Unfinished,
    split: str,
    pieces: list[documents.Piece],
    tokenizer: Tokenizer,
    length: int,
    console: Console,
) -> tokens.Stream:
    total = sum(piece.stop - piece.start for piece in pieces)
    with progress(console, f"{split} bytes of text", total) as tick:
        jobs = tokens.parts(split, pieces, tokenizer)
        parts = work.compute(jobs, command.processes(total * _WORK_OF_A_BYTE), tick)
    stream = tokens.Stream.of(parts, tokenizer.dtype, length)
    if not stream.rows:
        raise ValueError(
            f"{split}: {stream.tokens:,} tokens do not fill a row of {length + 1:,}. Take a shorter --length, or more text."
        )
    return stream


def _known_splits(destination: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The splits that were packed there before, by the same tokenizer in rows of the same length."""
    path = destination / _DATASET
    if not path.exists():
        return {}
    known = json.loads(path.read_text("utf-8"))
    if not isinstance(known, dict) or not isinstance(known.get("splits"), dict):
        raise ValueError(f"{path} does not tell of a data set of tokens. Choose another DST.")
    other = [f"{name} {known.get(name)!r}, not {value!r}" for name, value in facts.items() if known.get(name) != value]
    if other:
        raise ValueError(f"{path} tells of another data set: {', '.join(other)}. Choose another DST.")
    return dict(known["splits"])
