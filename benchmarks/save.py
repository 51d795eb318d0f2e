"""Cost of a checkpoint for the training loop: saved in the background, and saved while the loop waits.

    python -m benchmarks.save [--megabytes 200] [--rounds 7] [--json FILE]

A model whose parameters and AdamW state have this size trains; each round makes one save of each kind. The *stall* is the
time between two steps that the save adds. ``a step during the write`` shows how much the background write slows a step: on
a machine with few cores that is the CPU time of the checksums.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks import harness
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from dtrain.training.checkpoint.manager import AsyncWriter
from dtrain.training.checkpoint.optimizer_state import optimizer_state
from dtrain.training.checkpoint.state import host_copy

WIDTH = 1024
BLOCKING = "stall, the loop waits for the write"
BACKGROUND = "stall, written in the background"
COPY = "the copy to host memory alone"
WRITE = "the background write"
STEP = "a step, no write"
STEP_DURING_WRITE = "a step during the write"
#: Each row and the row that its ratio refers to.
ROWS = {
    BLOCKING: BLOCKING,
    BACKGROUND: BLOCKING,
    COPY: BLOCKING,
    WRITE: BLOCKING,
    STEP: STEP,
    STEP_DURING_WRITE: STEP,
}


class Training:
    """Steps of an MLP whose parameters and AdamW state have ``megabytes`` together."""

    def __init__(self, megabytes: float) -> None:
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH**2)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.inputs = torch.randn(8, WIDTH)
        self.step()

    def step(self) -> None:
        """One optimizer step."""
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checkpoint(self) -> Checkpoint:
        """A copy of the state, made like the trainer's."""
        tensors, values = optimizer_state(self.optimizer, self.model)
        groups = {"model": host_copy(self.model.state_dict()), "optimizer": host_copy(tensors)}
        return Checkpoint(groups, {"optimizer": values})


def milliseconds(function: Callable[..., object], *arguments: int) -> float:
    """Wall time of a call."""
    started = time.perf_counter()
    function(*arguments)
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=7)
    parser.add_argument("--megabytes", type=float, default=200.0, help="size of the state (default %(default)s)")
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder")
    arguments = harness.parse(parser, rounds=1, megabytes=20.0)
    training = Training(arguments.megabytes)
    times: dict[str, list[float]] = {row: [] for row in ROWS}
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        checkpoints = Checkpoints(Path(folder))
        saver = AsyncWriter()

        def blocking(step: int) -> None:
            checkpoints.save(step, training.checkpoint())

        def background(step: int) -> None:
            checkpoint = training.checkpoint()
            saver.start(step, lambda: checkpoints.save(step, checkpoint))

        for turn in range(arguments.rounds):
            times[STEP].append(statistics.median(milliseconds(training.step) for _ in range(9)))
            times[COPY].append(milliseconds(training.checkpoint))
            times[BLOCKING].append(milliseconds(blocking, 2 * turn))
            times[BACKGROUND].append(milliseconds(background, 2 * turn + 1))
            during: list[float] = []
            while saver.is_writing or not during:
                during.append(milliseconds(training.step))
            times[STEP_DURING_WRITE].append(statistics.median(during))
            saver.wait()
            times[WRITE].append(saver.seconds * 1e3)
    nbytes = training.checkpoint().nbytes
    table = harness.Table(f"{nbytes / 1e6:,.0f} MB", ROWS)
    table.medians("ms", times, 1)
    table.ratios("ratio", times, {row: times[base] for row, base in ROWS.items()}, 3)
    table.show(harness.rounds_note(arguments.rounds))
    harness.finish(arguments, {"milliseconds": times})


if __name__ == "__main__":
    main()
