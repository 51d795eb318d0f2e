"""A hook that causes failures in a real run, to test its recovery.

    'train.hooks=[{_target_: benchmarks.fault_hook.Faults, faults: ["crash@rank=1,step=5", "disk_full@step=20"]}]'

A *fault* happens on one rank (default 0) in one attempted step. It happens once for a run directory, also after a restart,
because a marker file in ``<run.dir>/faults`` records it; ``once=false`` repeats it.

* ``crash`` raises, ``kill`` is SIGKILL, ``hang`` sleeps for ever, ``slow`` sleeps ``seconds`` (default 1), all before the
  step's first forward; ``slow`` in ``steps`` steps (default 1) from ``step`` on.
* ``nan`` sets this rank's gradients to NaN between their averaging and the vote; ``corrupt_sample`` makes a sample in the
  step's first micro-batch unreadable.
* ``disk_full`` fails the checkpoint of the step with ENOSPC, in a sharded run on any rank; ``torn_checkpoint`` truncates a file
  of it after it was written.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dtrain.data import Batch
from dtrain.distributed.world import World
from dtrain.training.checkpoint.checkpoints import Checkpoint
from dtrain.training.checkpoint.state import TrainState

_IN_THE_STEP = ("crash", "kill", "hang", "slow", "nan", "corrupt_sample")
_IN_THE_SAVE = ("disk_full", "torn_checkpoint")
logger = logging.getLogger("dtrain")


def faulty(*faults: str) -> str:
    """The override that injects these faults."""
    return f"train.hooks=[{{_target_: benchmarks.fault_hook.Faults, faults: {list(faults)}}}]"


class InjectedFault(RuntimeError):
    """The exception of a ``crash`` fault."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: One of the kinds in the module's docstring.
        step: Attempted step, from 1.
        rank: The rank. Rank 0 writes checkpoints, and completes those of a sharded run.
        once: Whether it happens only once for a run directory.
        seconds: Duration of ``slow``.
        steps: Number of steps of ``slow``.
    """

    kind: str
    step: int
    rank: int = 0
    once: bool = True
    seconds: float = 1.0
    steps: int = 1

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parses ``kind@key=value,...``.

        Raises:
            ValueError: If the kind or a key is unknown, a value has the wrong type, or the step is missing.
        """
        kind, _, rest = text.strip().partition("@")
        values = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        parsers: dict[str, Callable[[str], object]] = {
            "step": int,
            "rank": int,
            "once": lambda value: {"true": True, "false": False}[value.lower()],
            "seconds": float,
            "steps": int,
        }
        try:
            if kind not in (*_IN_THE_STEP, *_IN_THE_SAVE) or "step" not in values:
                raise ValueError
            return cls(kind, **{key: parsers[key](value) for key, value in values.items()})  # type: ignore[arg-type]
        except (ValueError, KeyError):
            raise ValueError(
                f"faults: got {text!r}, want KIND@step=N with KIND one of {', '.join((*_IN_THE_STEP, *_IN_THE_SAVE))}, "
                "optionally followed by rank=N, once=false, seconds=S, steps=N; such as crash@rank=1,step=5."
            ) from None

    def __str__(self) -> str:
        values = (f for f in fields(self)[1:] if getattr(self, f.name) != f.default)
        return f"{self.kind}@" + ",".join(f"{f.name}={getattr(self, f.name)}".lower() for f in values)


class Faults:
    """The hook.

    Args:
        faults: The faults of all ranks, such as ``crash@rank=1,step=5``.

    Raises:
        ValueError: If one cannot be parsed.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self._faults = [Fault.parse(text) for text in faults]
        self._begun: set[Fault] = set()

    def on_start(self, run: TrainState) -> None:
        """Wraps the public callables of the run in which its faults happen; nothing on a rank without faults."""
        self._faults = [fault for fault in self._faults if fault.rank == run.world.rank]
        if not self._faults:
            return
        self._markers = run.run_dir / "faults"
        accumulate, epoch = run.step.accumulate, run.train_loader.epoch
        save, write_rank, complete = run.checkpoints.save, run.checkpoints.write_rank, run.checkpoints.complete

        def faulty_accumulate(window: Iterable[Batch], micro_batches: int) -> None:
            step = run.step.step + 1
            for fault in self.due(step, "crash", "kill", "hang", "slow"):
                _inject(fault)
            accumulate(window, micro_batches)
            for _ in self.due(step, "nan"):
                for parameter in run.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.fill_(float("nan"))

        def faulty_epoch(n: int) -> Iterator[Batch]:
            corrupted = 0
            for batch in epoch(n):
                step = run.step.step + 1
                if step != corrupted:  # only the first micro-batch of a step
                    for _ in self.due(step, "corrupt_sample"):
                        _corrupt_first_sample(batch)
                        corrupted = step
                yield batch

        def fill_disk(step: int) -> None:
            for _ in self.due(step, "disk_full"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.checkpoints.path(step)))

        def tear(step: int, path: Path) -> Path:
            for _ in self.due(step, "torn_checkpoint"):
                torn = min(path.glob("*.safetensors"))
                os.truncate(torn, torn.stat().st_size // 2)
            return path

        def faulty_save(step: int, checkpoint: Checkpoint) -> Path:
            fill_disk(step)
            return tear(step, save(step, checkpoint))

        # -- of a sharded run

        def faulty_write_rank(staged: Path, checkpoint: Checkpoint, world: World) -> dict[str, Any]:
            fill_disk(checkpoint.state["counters"]["step"])
            return write_rank(staged, checkpoint, world)

        def faulty_complete(step: int, *arguments: Any) -> Path:
            return tear(step, complete(step, *arguments))

        run.step.accumulate = faulty_accumulate  # type: ignore[method-assign, assignment]
        run.train_loader.epoch = faulty_epoch  # type: ignore[method-assign]
        run.checkpoints.save = faulty_save  # type: ignore[method-assign]
        run.checkpoints.write_rank = faulty_write_rank  # type: ignore[method-assign]
        run.checkpoints.complete = faulty_complete  # type: ignore[method-assign, assignment]

    def due(self, step: int, *kinds: str) -> Iterator[Fault]:
        """Yields this rank's faults of ``step``; marks each one before."""
        for fault in self._faults:
            if fault.kind not in kinds:
                continue
            marker = self._markers / f"{fault.kind}-rank-{fault.rank}-step-{fault.step}"
            if fault.step == step and not (fault.once and marker.exists()):
                self._markers.mkdir(exist_ok=True)
                marker.touch()
                logger.warning("injected fault: %s", fault)
                self._begun.add(fault)
                yield fault
            elif fault in self._begun and fault.step < step < fault.step + fault.steps:
                yield fault


def _inject(fault: Fault) -> None:
    if fault.kind == "crash":
        raise InjectedFault(f"injected fault: {fault}")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    while fault.kind == "hang":
        time.sleep(60)


def _corrupt_first_sample(batch: Batch) -> None:
    row = next(row for row, key in enumerate(batch.sample_keys) if key)
    batch.bad.append({"key": batch.sample_keys[row], "reason": "injected fault: corrupt_sample"})
    batch.sample_keys[row] = ""
    batch.valid[row] = False
