"""A GPT with and without document masks, and generation with and without a cache.

    python -m benchmarks.language_model [--rounds 9] [--lengths 256 1024 2048] [--json FILE]

A step is forward and backward of rows of documents with lognormal lengths, on one thread of a CPU or on a GPU; the ratio is to
the same step without a mask. On a CPU times are CPU times. The largest difference is that of the logits from those of the same
documents in rows of their own, in float64. Generation appends tokens to one row.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from dtrain.models import GPT

VOCABULARY = 257
DOCUMENT_TOKENS = 200  # median length
TOKENS_OF_A_STEP = 4096


def documents_of(rows: int, length: int, seed: int = 0) -> Tensor:
    """Numbers of the documents in each row, int64 ``[rows, length]``; lengths are lognormal."""
    rng = np.random.default_rng(seed)
    starts = np.zeros((rows, length), np.int64)
    for row in starts:
        ends = np.cumsum(np.maximum(1, rng.lognormal(np.log(DOCUMENT_TOKENS), 1.0, length))).astype(np.int64)
        row[ends[ends < length]] = 1
    return torch.from_numpy(starts.cumsum(axis=1))


def milliseconds(function: Any, device: torch.device) -> float:
    """CPU time of a call; on a GPU the time until it has finished."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    started = clock()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (clock() - started)


def masks(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Measures steps with and without a mask and prints their table."""
    steps: dict[tuple[int, str], Any] = {}
    for length in arguments.lengths:
        rows = max(1, TOKENS_OF_A_STEP // length)
        model = GPT(VOCABULARY, arguments.width, arguments.depth, arguments.heads, length).to(device)
        tokens = torch.randint(VOCABULARY, (rows, length), device=device)
        for kind, documents in (("none", None), ("mask", documents_of(rows, length).to(device))):

            def step(model: GPT = model, tokens: Tensor = tokens, documents: Tensor | None = documents) -> None:
                model(tokens, documents).float().logsumexp(dim=-1).mean().backward()

            steps[length, kind] = step
            step()  # the first call allocates and, on a GPU, compiles
    found = harness.interleaved(arguments.rounds, steps, lambda row: milliseconds(steps[row], device))
    table = harness.Table(
        f"GPT, {arguments.depth} blocks, {arguments.width} wide, {device.type}",
        steps,
        {(length, kind): f"rows of {length:,}, task.documents={kind}" for length, kind in steps},
    )
    table.medians("ms a step", found, 1)
    table.ratios("to none", found, {row: found[row[0], "none"] for row in steps})
    table.show(harness.rounds_note(arguments.rounds))
    return [{"length": length, "documents": kind, "ms": found[length, kind]} for length, kind in steps]


@torch.no_grad()
def largest_difference(arguments: argparse.Namespace, device: torch.device) -> float:
    """Largest difference of the logits of documents that share rows from those of separate rows, in float64."""
    length = max(arguments.lengths)
    model = GPT(VOCABULARY, arguments.width, arguments.depth, arguments.heads, length).to(device).double().eval()
    documents = documents_of(1, length).to(device)
    tokens = torch.randint(VOCABULARY, (1, length), device=device)
    together, worst = model(tokens, documents), 0.0
    for number in documents.unique():
        mine = documents[0] == number
        worst = max(worst, (model(tokens[:, mine]) - together[:, mine]).abs().max().item())
    print(f"largest difference from {len(documents.unique())} separate documents, float64: {worst:.1e}\n", flush=True)
    return worst


def generation(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measures generation and prints its table."""
    count = max(arguments.lengths) // 2
    model = GPT(VOCABULARY, arguments.width, arguments.depth, arguments.heads, 2 * count).to(device).eval()
    prompt = torch.randint(VOCABULARY, (1, count // 4), device=device)
    rows = {"with a cache": True, "without": False}
    found = harness.interleaved(
        arguments.rounds,
        rows,
        lambda row: milliseconds(lambda: model.generate(prompt, count, cache=rows[row]), device) / count,
    )
    table = harness.Table(f"generation of {count:,} tokens", rows)
    table.medians("ms a token", found, 2)
    table.ratios("to without", found, found["without"])
    table.show(harness.rounds_note(arguments.rounds))
    return {"tokens": count, "ms_per_token": found}


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=9)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048], help="tokens of a row")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    arguments = harness.parse(parser, rounds=1, lengths=[32], width=16, depth=1, heads=2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {"masks": masks(arguments, device), "largest_difference": largest_difference(arguments, device)}
    harness.finish(arguments, results | {"generation": generation(arguments, device)})


if __name__ == "__main__":
    main()
