"""What the commands that pack have in common: their options, what they leave out, what they tell."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dtrain.packing.progress import progress
from dtrain.packing.sizes import ShardSize
from dtrain.packing.unfinished import BadFile, Make, Unfinished, Written

# Less than this is written sooner than another process has started.
_BYTES_PER_PROCESS = 64 << 20
#: At the end of the command that trains, where only the user knows.
YOUR_OWN = "model=YOURS task=YOURS"


class Command:
    """One packing command while it runs.

    Args:
        options: As parsed; those that all packing commands have.
        default_size: Of the shards.
        console: For progress and what is left out.

    Attributes:
        destination: Folder of the shards.
        prefix: Name of the split that gets what the others leave.
        shares: The others: name to share.
        size: Of the shards.
        bad_files: How many were left out before writing began.
    """

    def __init__(self, options: Namespace, default_size: ShardSize, console: Console) -> None:
        self.destination: Path = options.destination
        self.prefix: str = options.prefix
        self.shares: dict[str, float] = dict(options.split)
        if options.val is not None:
            self.shares["val"] = options.val
        asked = options.shards, options.samples_per_shard, options.shard_mb
        self.size = default_size if asked == (None, None, None) else ShardSize(*asked)
        self.bad_files = 0
        if options.processes is not None and options.processes < 1:
            raise ValueError(f"--processes {options.processes}: want at least 1.")
        self._processes: int | None = options.processes
        self._seed: int = options.seed
        self._skip_bad: bool = getattr(options, "bad", "error") == "skip"
        self._console = console
        self._began = time.perf_counter()

    def plan(self, **facts: Any) -> dict[str, Any]:
        """All that decides the shards' bytes: ``facts`` and the common options."""
        return {
            **facts,
            "prefix": self.prefix,
            "splits": self.shares,
            "seed": self._seed,
            "shard_size": {name: value for name, value in vars(self.size).items() if value is not None},
        }

    def on_bad(self, path: Path, reason: str) -> None:
        """Tells of a file that is left out.

        Raises:
            BadFile: If none is to be.
        """
        if not self._skip_bad:
            raise BadFile(path, reason)
        self.bad_files += 1
        self._tell_left_out(f"left out {path}: {reason}")

    def processes(self, work: int) -> int:
        """How many to use for as much work as writing so many bytes."""
        if self._processes is not None:
            return self._processes
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(min(cores, work // _BYTES_PER_PROCESS), 1)

    def write(
        self, work: Unfinished, split: str, cut: np.ndarray, make: Callable[[int, int], Make], total_bytes: int
    ) -> Written:
        """``Unfinished.write`` with a progress bar."""
        with progress(self._console, f"{split} samples", int(cut[-1])) as tick:
            processes = self.processes(total_bytes)
            return work.write(split, cut, make, processes, tick, self._tell_left_out, self._skip_bad)

    def summarise(self, written: Mapping[str, Written], *more: str) -> None:
        """Prints what was written, and how long it took."""
        for split, its in written.items():
            print(f"{self.destination}/{split}-*.tar: samples: {its.samples:,}, shards: {its.shards:,}")
        print(", ".join([*more, f"{time.perf_counter() - self._began:.1f} s"]))

    def _tell_left_out(self, line: str) -> None:
        self._console.print(line, markup=False)


def as_json(value: Any) -> bytes:
    """The content of a JSON file."""
    return json.dumps(value, indent=1).encode() + b"\n"
