"""Faults on purpose: what a run survives can be tried out on the run itself.

``'faults=["crash@rank=1,step=5", "disk_full@step=20"]'``, or the same in the environment, ``DTRAIN_FAULTS="crash@rank=1,step=5;
disk_full@step=20"``. A *fault* strikes one rank (default 0) in one attempted step, and once in the life of a run directory,
which a marker in ``<run.dir>/faults`` remembers, so that a restart does not meet it again; ``once=false`` repeats it.

* ``crash`` raises, ``kill`` is SIGKILL, ``hang`` sleeps for ever, ``slow`` sleeps ``seconds`` (default 1), all before the
  step's first forward, where the other ranks do not expect it.
* ``nan`` makes this rank's gradients NaN after they were averaged, ``corrupt_sample`` a sample of its first micro-batch
  unreadable.
* ``disk_full`` refuses the checkpoint of the step with ENOSPC, ``torn_checkpoint`` cuts one off after it was written.

A run without faults has a plain ``Loop`` and plain ``Checkpoints``: it pays nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dtrain.config.errors import ConfigError
from dtrain.config.schema import CheckpointConfig
from dtrain.data import Batch
from dtrain.training.checkpoint import Checkpoint
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.loop import Loop

_IN_THE_STEP = ("crash", "kill", "hang", "slow", "nan", "corrupt_sample")
_IN_THE_SAVE = ("disk_full", "torn_checkpoint")
logger = logging.getLogger("dtrain")


class InjectedFault(RuntimeError):
    """A crash that was asked for."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: What happens.
        step: Attempted step, from 1.
        rank: Where; checkpoints are written by rank 0.
        once: Whether it stays away after it struck.
        seconds: How long ``slow`` takes.
    """

    kind: str
    step: int
    rank: int = 0
    once: bool = True
    seconds: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """``kind@key=value,...``.

        Raises:
            ConfigError: If the kind or a key is unknown, a value does not fit, or there is no step.
        """
        kind, _, rest = text.strip().partition("@")
        given = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        readers: dict[str, Callable[[str], object]] = {
            "step": int,
            "rank": int,
            "once": lambda value: {"true": True, "false": False}[value.lower()],
            "seconds": float,
        }
        try:
            if kind not in (*_IN_THE_STEP, *_IN_THE_SAVE) or "step" not in given:
                raise ValueError
            return cls(kind, **{key: readers[key](value) for key, value in given.items()})  # type: ignore[arg-type]
        except (ValueError, KeyError):
            raise ConfigError(
                f"faults: got {text!r}, want KIND@step=N with KIND one of {', '.join((*_IN_THE_STEP, *_IN_THE_SAVE))}, and "
                "after it, if need be, rank=N, once=false, seconds=S; such as crash@rank=1,step=5."
            ) from None

    def __str__(self) -> str:
        given = (f for f in fields(self)[1:] if getattr(self, f.name) != f.default)
        return f"{self.kind}@" + ",".join(f"{f.name}={getattr(self, f.name)}".lower() for f in given)


class Faults:
    """The faults of a run, on one of its ranks.

    Args:
        faults: Those of all ranks.
        run_dir: The run's directory; markers are kept in it.
        rank: This process.
    """

    def __init__(self, faults: Sequence[Fault], run_dir: Path, rank: int) -> None:
        self._all = list(faults)
        self._mine = [fault for fault in faults if fault.rank == rank]
        self._run_dir = run_dir

    @classmethod
    def of(cls, config: Sequence[str], run_dir: Path, rank: int, environment: Mapping[str, str] = os.environ) -> Faults:
        """The faults of a config and of ``DTRAIN_FAULTS``.

        Raises:
            ConfigError: If one cannot be read.
        """
        given = environment.get("DTRAIN_FAULTS", "").split(";")
        return cls([Fault.parse(text) for text in (*config, *given) if text.strip()], run_dir, rank)

    def __str__(self) -> str:
        """All of them, for a banner; ``""`` if there are none."""
        return "; ".join(map(str, self._all))

    def checkpoints(self, cfg: CheckpointConfig) -> Checkpoints:
        """The run's checkpoints, which faults may strike."""
        if not self._mine:
            return Checkpoints.of(self._run_dir, cfg)
        checkpoints = FaultyCheckpoints.of(self._run_dir, cfg)
        assert isinstance(checkpoints, FaultyCheckpoints)
        checkpoints.faults = self
        return checkpoints

    def loop(self, *args: Any) -> Loop:
        """The loop with these arguments, which faults may strike."""
        return FaultyLoop(self, *args) if self._mine else Loop(*args)

    def due(self, step: int, *kinds: str) -> Iterator[Fault]:
        """Those that strike in ``step``; each is marked before it does."""
        for fault in self._mine:
            if fault.step == step and fault.kind in kinds and not (fault.once and self._marker(fault).exists()):
                self._marker(fault).parent.mkdir(exist_ok=True)
                self._marker(fault).touch()
                logger.warning("injected fault: %s", fault)
                yield fault

    def _marker(self, fault: Fault) -> Path:
        return self._run_dir / "faults" / f"{fault.kind}-rank-{fault.rank}-step-{fault.step}"


class FaultyLoop(Loop):
    """A loop in which faults strike."""

    def __init__(self, faults: Faults, *args: Any) -> None:
        super().__init__(*args)
        self._faults = faults

    def _accumulate(self, batches: Iterator[Batch]) -> None:
        step = self._parts.step.step + 1
        for fault in self._faults.due(step, "crash", "kill", "hang", "slow"):
            _strike(fault)
        for _ in self._faults.due(step, "corrupt_sample"):
            batches = _first_corrupt(batches)
        super()._accumulate(batches)
        for _ in self._faults.due(step, "nan"):
            for parameter in self._parts.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))


class FaultyCheckpoints(Checkpoints):
    """Checkpoints that a disk fails.

    Attributes:
        faults: Set before one is saved.
    """

    faults: Faults

    def save(self, step: int, checkpoint: Checkpoint) -> Path:
        """As it should be, unless a fault is due."""
        for _ in self.faults.due(step, "disk_full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path(step)))
        path = super().save(step, checkpoint)
        for _ in self.faults.due(step, "torn_checkpoint"):
            model = path / "model.safetensors"
            os.truncate(model, model.stat().st_size // 2)
        return path


def _strike(fault: Fault) -> None:
    if fault.kind == "crash":
        raise InjectedFault(f"injected fault: {fault}")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    while fault.kind == "hang":
        time.sleep(60)


def _first_corrupt(batches: Iterator[Batch]) -> Iterator[Batch]:
    batch = next(batches)
    row = next(row for row, key in enumerate(batch.sample_keys) if key)
    batch.bad.append({"key": batch.sample_keys[row], "reason": "injected fault: corrupt_sample"})
    batch.sample_keys[row] = ""
    batch.valid[row] = False
    yield batch
    yield from batches
