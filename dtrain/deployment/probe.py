"""``python -m dtrain.deployment.probe SETUP``: a fresh process that holds one artefact and runs it when told to.

One artefact a process, so that its memory is its own; told when, so that several take turns on one device. ``SETUP`` is
JSON, and so is each line that comes in, ``{"batch", "seconds"}``, and that goes out, ``{"calls", "peak_bytes"}`` or
``{"out_of_memory"}``. The first line to go out says that the artefact is loaded: ``{"threads", "warnings"}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from dtrain.config.errors import ConfigError
from dtrain.deployment import artefact
from dtrain.deployment.artefact import Artefact
from dtrain.deployment.model_memory import ModelMemory, let_allocations_fail
from dtrain.deployment.program import RowSpec
from dtrain.training.out_of_memory import is_out_of_memory


@dataclass(frozen=True)
class Setup:
    """What a probe is started with.

    Attributes:
        folder: The artefact.
        rows: What it takes.
        device: Where it runs.
        trust: As for ``artefact.load``.
        memory_limit: Bytes beside those of the weights past which allocations in host memory fail; None: what is free.
    """

    folder: str
    rows: RowSpec
    device: str
    trust: bool = False
    memory_limit: int | None = None

    @classmethod
    def from_json(cls, text: str) -> Setup:
        """What ``json.dumps(dataclasses.asdict(setup))`` gave."""
        content = json.loads(text)
        return cls(rows=RowSpec.from_json(content.pop("rows")), **content)


def made_up(spec: RowSpec, batch: int) -> Tensor:
    """``[batch, *spec.shape]``: one row of noise, repeated; zeros where integers may be tokens, of which nobody knows how
    many there are."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        row = torch.rand(spec.shape, generator=generator).to(dtype)
    elif dtype == torch.uint8:
        row = torch.randint(256, spec.shape, generator=generator, dtype=dtype)
    else:
        row = torch.zeros(spec.shape, dtype=dtype)
    return row.expand(batch, *spec.shape).contiguous()


class _Runner:
    """An artefact and the memory that it takes."""

    def __init__(self, setup: Setup) -> None:
        self._spec, self._device = setup.rows, torch.device(setup.device)
        folder = Path(setup.folder)
        self._artefact = self._load(setup)
        description = self._artefact.description
        if not description.format.in_torch:
            # Only a second loading tells what the weights take: the first one, and a call, bring the runtime in as well.
            self._artefact.outputs(made_up(self._spec, 1))
            del self._artefact
            self._memory = ModelMemory(self._device, 0)
            self._artefact = self._load(setup)
        else:
            self._memory = ModelMemory(self._device, (folder / description.file).stat().st_size)
        if self._device.type == "cpu":
            let_allocations_fail(setup.memory_limit)
        self._rows: Tensor | None = None
        self._peak: int | None = None

    def _load(self, setup: Setup) -> Artefact:
        return artefact.load(Path(setup.folder), self._device, trust=setup.trust)

    @property
    def warnings(self) -> list[str]:
        """As ``Artefact.warnings``."""
        return self._artefact.warnings

    def run(self, batch: int, seconds: float) -> dict[str, Any]:
        """Runs a batch again and again, at least once."""
        try:
            if self._rows is None or len(self._rows) != batch:
                self._prepare(batch)
            calls: list[float] = []
            while not calls or sum(calls) < seconds:
                calls.append(self._call())
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._rows = None
            return {"out_of_memory": (str(error) or type(error).__name__).splitlines()[0]}
        return {"calls": calls, "peak_bytes": self._peak}

    def _prepare(self, batch: int) -> None:
        """Warms up, then looks how much memory one call takes: an allocator that serves many keeps some between them."""
        self._rows = None
        self._memory.give_back()
        self._rows = made_up(self._spec, batch)
        self._call()
        self._memory.reset()
        self._call()
        self._peak = self._memory.bytes()

    def _call(self) -> float:
        """Seconds from rows in host memory to outputs on the device."""
        assert self._rows is not None
        begun = time.perf_counter()
        self._artefact.outputs(self._rows)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begun


def main(arguments: Sequence[str]) -> int:
    """Serves until its input ends; returns the exit code."""
    (setup,) = arguments
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a model prints shall not get between the replies
    try:
        runner = _Runner(Setup.from_json(setup))
        _send(replies, {"threads": torch.get_num_threads(), "warnings": runner.warnings})
        for line in sys.stdin:
            _send(replies, runner.run(**json.loads(line)))
    except (ConfigError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _send(replies: TextIO, content: dict[str, Any]) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
