"""What the parts of ``gpu_session.py`` have in common: commands that end when the part's time is up, and what runs leave."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timed_process
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
_LEAST = 3.0  # seconds in which nothing can be done: not even the imports

#: A row of a part's table: column to value, None where there is none.
Line = dict[str, "float | str | None"]


class Skipped(Exception):
    """A part cannot be done here; the message says why."""


class NoTimeLeft(Exception):
    """A part has used up its time before it could start a command."""


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Attributes:
        run_dir: Its directory.
        records: The lines of metrics.jsonl.
        seconds: In the training loop.
    """

    run_dir: Path
    records: list[dict[str, Any]]
    seconds: float

    def last(self, name: str) -> float | None:
        """The last value of a metric; None if there is none."""
        values = [record[name] for record in self.records if name in record]
        return float(values[-1]) if values else None

    @property
    def step_seconds(self) -> float:
        """Median of the steps since the last record but one, when everything was compiled long ago."""
        return float(
            [record for record in self.records if "time/step_seconds_p50" in record][-1]["time/step_seconds_p50"]
        )

    @property
    def gib(self) -> float:
        """The most memory it held: tensors on a GPU, or what the process held of the host's."""
        names = ("memory/max_allocated_gib", "memory/max_resident_gib")
        return float(max(record[name] for record in self.records for name in names if name in record))


class Bench:
    """One part's means.

    Args:
        folder: For its runs; made where it is missing.
        out: Folder of the results, for what is worth keeping.
        deadline: On the monotonic clock.
        quick: Whether everything is to be small.

    Attributes:
        gpus: How many there are.
        roomy: Whether the first one has the memory for large batches.
        commands: What was run, for people to repeat.
    """

    def __init__(self, folder: Path, out: Path, deadline: float, *, quick: bool) -> None:
        self.folder = folder
        self.out = out.resolve()
        self.quick = quick
        self.gpus = torch.cuda.device_count()
        self.roomy = self.gpus > 0 and torch.cuda.get_device_properties(0).total_memory > 40 * 2**30
        self.commands: list[str] = []
        self._deadline = deadline

    @property
    def ranks(self) -> int:
        """Processes that use the whole machine."""
        return self.gpus or 2

    def python(self, *arguments: str | Path, ranks: int = 1) -> str:
        """Runs Python, under torchrun for several ranks; returns what it printed.

        Raises:
            Failed: If it fails.
            OutOfTime: If it does not end in time.
            NoTimeLeft: If it was not started.
        """
        left = self._deadline - time.monotonic()
        if left < _LEAST:
            raise NoTimeLeft(f"its time was used up after {len(self.commands)} commands")
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        words = [*torchrun, *map(str, arguments)]
        shown = shlex.join(["python", *words]).replace(str(self.folder), "RUNS").replace(f"{ROOT}{os.sep}", "")
        self.commands.append(shown)
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = [str(ROOT), str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        return timed_process.run(
            [sys.executable, *words],
            seconds=left,
            cwd=ROOT,
            environment={"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def train(self, name: str, *overrides: str, ranks: int = 1) -> Trained:
        """Trains in ``folder/name``.

        Raises:
            Failed, OutOfTime, NoTimeLeft: As ``python``.
        """
        run_dir = self.folder / name
        self.python(
            "-m",
            "dtrain.train",
            *overrides,
            f"run.dir={run_dir}",
            "tracker=none",
            "checkpoint.keep_last=1",
            ranks=ranks,
        )
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return Trained(run_dir, records, json.loads((run_dir / "status.json").read_text())["trained_seconds"])
