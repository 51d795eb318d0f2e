"""Tokens a second that ``dtrain pack text`` writes, beside the writers of litdata, mosaicml-streaming and webdataset.

    python -m benchmarks.pack_text [--documents 100000] [--length 1024] [--rounds 3] [--json FILE]

* Input: a ``.jsonl`` file of made-up documents, whose lengths are lognormal (median 400 bytes, sigma 1); a token is a byte,
  and each document is followed by an end-of-text token. So no time is spent in a tokenizer.
* dtrain writes rows of ``length + 1`` tokens in tar shards, cut or best fit. webdataset's ShardWriter and mosaicml-streaming's
  MDSWriter write the same cut rows, in a loop over the lines as their users write it. litdata's ``optimize`` writes the tokens
  of each document, which its TokensLoader cuts when they are read.
* One process writes. CPU time covers it and its children, from the call to the last file; imports are not counted. ``waste``
  is the share of the targets that are padding, and ``cut`` the share of documents that are in several rows; the others cut
  as dtrain does.

litdata and mosaicml-streaming: see ``benchmarks.loader``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import harness
from benchmarks.loader import is_installed

MEDIAN, SIGMA = 400, 1.0
END = 256
SHARD_BYTES = 64_000_000
MODULES = {"litdata": "litdata", "mosaicml-streaming": "streaming"}


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=3)
    parser.add_argument("--documents", type=int, default=100_000, help="number of documents (default %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="targets of a row (default %(default)s)")
    arguments = harness.parse(parser, rounds=1, documents=300)
    with harness.scratch() as folder:
        source = folder / "documents.jsonl"
        tokens = write_documents(source, arguments.documents)
        there = [row for row in WRITERS if is_installed(MODULES.get(row, "numpy"))]
        found = harness.interleaved(
            arguments.rounds,
            there,
            lambda row: harness.in_new_process(measure, row, str(source), str(folder / "out"), arguments.length),
        )
    show(arguments, tokens, {row: found.get(row, []) for row in WRITERS})


def show(arguments: argparse.Namespace, tokens: int, results: dict[str, list[dict[str, float]]]) -> None:
    """Prints the table."""
    rate = {row: [tokens / one["cpu"] / 1e6 for one in rounds] for row, rounds in results.items()}
    table = harness.Table(
        f"{arguments.documents:,} documents, {tokens:,} tokens, rows of {arguments.length:,}", results
    )
    table.medians("million tokens a CPU second", rate, 1)
    table.ratios("ratio", rate, rate["webdataset"])
    for heading, name, scale, decimals in (
        ("seconds", "seconds", 1, 1),
        ("MB written", "bytes", 1e6, 0),
        ("peak MiB", "peak", 1024, 0),
    ):
        values = {
            row: f"{min(one[name] for one in rounds) / scale:,.{decimals}f}"
            for row, rounds in results.items()
            if rounds
        }
        table.text(heading, values)
    for name in ("waste", "cut"):
        table.text(
            name, {row: f"{rounds[0][name]:.2%}" for row, rounds in results.items() if rounds and name in rounds[0]}
        )
    table.show(harness.rounds_note(arguments.rounds, "; seconds, MB and MiB: the least of the rounds"))
    harness.finish(arguments, {"tokens": tokens, "measured": results}, ("webdataset", "litdata", "mosaicml-streaming"))


def write_documents(path: Path, number: int) -> int:
    """Writes made-up documents, one in each line; returns the number of their tokens."""
    rng = np.random.default_rng(0)
    sizes = np.maximum(rng.lognormal(np.log(MEDIAN), SIGMA, number), 1).astype(np.int64)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8)
    text = letters[rng.integers(0, len(letters), int(sizes.max()) + 100_000)].tobytes().decode()
    begins = rng.integers(0, 100_000, number)
    with path.open("w") as file:
        for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
            file.write(json.dumps({"text": text[begin : begin + size]}) + "\n")
    return int(sizes.sum()) + number


def measure(writer: str, source: str, out: str, length: int) -> dict[str, float]:
    """Packs the documents once, in a process of its own."""
    shutil.rmtree(out, ignore_errors=True)
    write = WRITERS[writer]
    write(None, out, length)  # imports
    started, cpu = time.perf_counter(), harness.cpu_seconds()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        write(source, out, length)
    found = {"cpu": harness.cpu_seconds_since(cpu), "seconds": time.perf_counter() - started}
    found["bytes"] = sum(path.stat().st_size for path in Path(out).rglob("*") if path.is_file())
    found["peak"] = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for name, pattern in (("waste", r"padding: ([\d.]+)%"), ("cut", r"documents cut: .*\(([\d.]+)%\)")):
        if shown := re.search(pattern, printed.getvalue()):
            found[name] = float(shown[1]) / 100
    return found


# -- the writers: source None only imports


def dtrain_cut(source: str | None, out: str, length: int, fit: str = "cut") -> None:
    """``dtrain pack text``."""
    from dtrain.pack.__main__ import main as pack

    if source is not None:
        arguments = ["text", source, out, "--length", str(length), "--fit", fit, "--processes", "1"]
        if pack(arguments):
            raise SystemExit(f"dtrain.pack {' '.join(arguments)} failed")


def dtrain_best(source: str | None, out: str, length: int) -> None:
    """The same with ``--fit best``."""
    dtrain_cut(source, out, length, "best")


def webdataset(source: str | None, out: str, length: int) -> None:
    """ShardWriter."""
    from webdataset import ShardWriter

    if source is None:
        return
    Path(out).mkdir()
    with ShardWriter(f"{out}/train-%06d.tar", maxsize=SHARD_BYTES, maxcount=1 << 60, verbose=0) as shards:
        for number, row in enumerate(cut_rows(source, length)):
            shards.write({"__key__": f"{number:09d}", "tok": row.tobytes()})


def streaming(source: str | None, out: str, length: int) -> None:
    """MDSWriter."""
    harness.declare_torchvision_operators()
    from streaming import MDSWriter

    if source is None:
        return
    with MDSWriter(out=out, columns={"tokens": f"ndarray:uint16:{length + 1}"}, size_limit=SHARD_BYTES) as shards:
        for row in cut_rows(source, length):
            shards.write({"tokens": row})


def litdata(source: str | None, out: str, length: int) -> None:
    """``optimize`` with a TokensLoader."""
    harness.declare_torchvision_operators()
    from litdata import TokensLoader, optimize

    if source is not None:
        optimize(
            fn=tensors,
            inputs=[source],
            output_dir=out,
            chunk_bytes=SHARD_BYTES,
            item_loader=TokensLoader(block_size=length + 1),
            num_workers=1,
            verbose=False,
        )


WRITERS: dict[str, Callable[[str | None, str, int], None]] = {
    "webdataset": webdataset,
    "litdata": litdata,
    "mosaicml-streaming": streaming,
    "dtrain": dtrain_cut,
    "dtrain, best fit": dtrain_best,
}


def tensors(source: str) -> Iterator[object]:
    """The tokens of each document, as litdata's documentation has them."""
    import torch

    for tokens in documents(source):
        yield torch.from_numpy(tokens)


def documents(source: str) -> Iterator[np.ndarray]:
    """The tokens of each document, uint16, ``[tokens]``."""
    with open(source, encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"].encode()
            tokens = np.empty(len(text) + 1, np.uint16)
            tokens[:-1] = np.frombuffer(text, np.uint8)
            tokens[-1] = END
            yield tokens


def cut_rows(source: str, length: int) -> Iterator[np.ndarray]:
    """Consecutive rows, uint16, ``[length + 1]``; the first token of a row is the last one of the row before."""
    rest = np.empty(0, np.uint16)
    for tokens in documents(source):
        rest = np.concatenate([rest, tokens])
        begin = 0
        while begin + length < len(rest):
            yield rest[begin : begin + length + 1]
            begin += length
        rest = rest[begin:]


if __name__ == "__main__":
    main()
