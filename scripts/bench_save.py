"""What a checkpoint costs the loop: a save in the background against one that it waits for.

    python scripts/bench_save.py [--megabytes 200] [--rounds 7]

A model with AdamW whose state is so large trains steps; in every round one save of each kind is made, in turn. The *stall*
is the time between two steps that the save adds; *meanwhile* is how much longer a step takes while the background write is
going on, which on a machine with few cores is the CPU time of the checksums.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_common import command_line, finish, ratio, spread, table
from torch import nn

from dtrain.training.checkpoint import Checkpoint
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.saver import Saver
from dtrain.training.state import host_copy, optimizer_state

WIDTH = 1024


class Training:
    """Steps of an MLP whose parameters and AdamW state have ``megabytes`` together."""

    def __init__(self, megabytes: float) -> None:
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH**2)))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.inputs = torch.randn(8, WIDTH)
        self.step()

    def step(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started

    def checkpoint(self) -> Checkpoint:
        """As the trainer takes it."""
        tensors, values = optimizer_state(self.optimizer, self.model)
        return Checkpoint(
            {"model": host_copy(self.model.state_dict()), "optimizer": host_copy(tensors)}, {"optimizer": values}
        )

    def megabytes(self) -> float:
        """Of the tensors of a checkpoint."""
        return sum(t.nbytes for group in self.checkpoint().tensors.values() for t in group.values()) / 1e6


def seconds(function: Callable[[], object]) -> float:
    """Of a call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0, help="size of the state (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="saves of each kind (default %(default)s)")
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.megabytes, arguments.rounds = 20.0, 1
    training = Training(arguments.megabytes)
    blocking, background, copying, written, alone, meanwhile = ([] for _ in range(6))
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        checkpoints = Checkpoints(Path(folder))
        saver = Saver(checkpoints)
        for number in range(arguments.rounds):
            alone.append(statistics.median(training.step() for _ in range(9)))
            copying.append(seconds(training.checkpoint))
            blocking.append(seconds(lambda step=2 * number: checkpoints.save(step, training.checkpoint())))
            background.append(seconds(lambda step=2 * number + 1: saver.start(step, training.checkpoint())))
            steps = []
            while saver.is_writing:
                steps.append(training.step())
            meanwhile.append(statistics.median(steps))
            saver.wait()
            written.append(saver.seconds)
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    milliseconds = {
        "stall, the loop waits for the disk": blocking,
        "stall, written in the background": background,
        "the copy to host memory alone": copying,
        "the background write, start to safe": written,
        "a step, nothing else going on": alone,
        "a step meanwhile": meanwhile,
    }
    base = {"a step, nothing else going on": alone, "a step meanwhile": alone}
    rows = [
        (name, spread([1e3 * value for value in values], 1), f"{ratio(values, base.get(name, blocking)):.3f}")
        for name, values in milliseconds.items()
    ]
    print(table(f"{training.megabytes():,.0f} MB, {arguments.rounds} rounds, median (min-max)", ["ms", "ratio"], rows))
    finish(arguments, {"milliseconds": {k: [1e3 * v for v in values] for k, values in milliseconds.items()}})


if __name__ == "__main__":
    main()
