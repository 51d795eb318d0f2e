"""What artefacts cost to use: latency, samples a second and peak memory, each as a ratio to fp32.

* Each artefact is held by a *probe*, a fresh process. They take turns, so that what slows the machine for a while slows
  all of them, and a ratio is the median of those of each *round*.
* A *call* goes from rows in host memory to fp32 outputs on the device, synchronised: what a server waits for, with
  normalisation and casts. It comes after one that does not count.
* *Memory* is what ``model_memory`` says: weights and all that a call adds to them, the rows included.
* The *largest batch* is looked for where a *budget* is set.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dtrain.config.errors import ConfigError
from dtrain.deployment.batch_search import largest_batch
from dtrain.deployment.probe import Setup
from dtrain.deployment.probing import Probe, probing
from dtrain.deployment.program import RowSpec

_ROUNDS = 5
# Of an artefact at a batch size, all rounds together. Slower calls end the rounds early, after at least one.
_SECONDS = 0.8
# Of one artefact's search for its largest batch, and of the calls of one size in it.
_SEARCH_SECONDS, _TRIAL_SECONDS = 30.0, 0.05
# A size is given up when it has failed so often: something else may have had the machine for a moment.
_TRIALS = 2
# Allocations so far beyond the memory limit fail, which spares the machine the rest of the doubling. Not closer, since they
# are counted as they are asked for, and libraries ask for more than they touch.
_SLACK, _RESERVED_GIB = 1.25, 0.5
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Budget:
    """What the largest batch may take.

    Attributes:
        latency_ms: Median of a call.
        memory_gib: Peak.
    """

    latency_ms: float | None = None
    memory_gib: float | None = None

    @property
    def any(self) -> bool:
        """Whether it says something."""
        return self.latency_ms is not None or self.memory_gib is not None

    def broken_by(self, batch: int, found: _Found) -> str | None:
        """What of it a batch of so many rows breaks, and what the batch took; None if it keeps to all."""
        if found.out_of_memory is not None:
            return f"memory: {batch:,} rows end in {found.out_of_memory}"
        latency = found.latency_ms
        if self.latency_ms is not None and latency > self.latency_ms:
            return f"latency: {batch:,} rows take {latency:.4g} ms"
        if self.memory_gib is not None and found.peak_bytes is not None:
            peak = found.peak_bytes / _GIB
            if peak > self.memory_gib:
                return f"memory: {batch:,} rows take {peak:.3g} GiB"
        return None


UNLIMITED = Budget()


@dataclass
class _Found:
    """What a probe said about one batch size, a list of calls for each round."""

    rounds: list[list[float]] = field(default_factory=list)
    peak_bytes: int | None = None
    out_of_memory: str | None = None

    def add(self, reply: Mapping[str, Any]) -> None:
        self.out_of_memory = reply.get("out_of_memory")
        if self.out_of_memory is None:
            self.rounds.append(reply["calls"])
            if reply["peak_bytes"] is not None:
                self.peak_bytes = max(self.peak_bytes or 0, reply["peak_bytes"])

    @property
    def calls(self) -> list[float]:
        return sorted(seconds for calls in self.rounds for seconds in calls)

    @property
    def latency_ms(self) -> float:
        return 1e3 * median(self.calls)

    def to_json(self, batch: int) -> dict[str, Any]:
        if self.out_of_memory is not None:
            return {"batch": batch, "out_of_memory": self.out_of_memory}
        calls = self.calls
        return {
            "batch": batch,
            "latency_ms": self.latency_ms,
            "latency_p95_ms": 1e3 * calls[math.ceil(0.95 * len(calls)) - 1],
            "samples_per_second": 1e3 * batch / self.latency_ms,
            "peak_mib": None if self.peak_bytes is None else self.peak_bytes / _MIB,
            "calls": len(calls),
            "rounds": len(self.rounds),
        }

    def ratios(self, base: _Found) -> dict[str, float | None] | None:
        """Each figure as a multiple of that of ``base``; None if one of the two has none."""
        if self.out_of_memory is not None or base.out_of_memory is not None:
            return None
        latency = median(median(own) / median(other) for own, other in zip(self.rounds, base.rounds, strict=True))
        peak = self.peak_bytes / base.peak_bytes if self.peak_bytes is not None and base.peak_bytes else None
        return {"latency": latency, "samples_per_second": 1 / latency, "peak_memory": peak}


def measure(
    artefacts: Mapping[str, Path],
    rows: RowSpec,
    device: torch.device,
    *,
    batches: Sequence[int],
    budget: Budget = UNLIMITED,
    base: str | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Runs artefacts in turns.

    Args:
        artefacts: Folders by the name that the report shall give them.
        rows: What all of them take.
        device: Where they shall run.
        batches: Rows of a call.
        budget: Where it says something, the largest batch that keeps to it is looked for.
        base: Name of the artefact that the others are compared with.
        trust: As for ``artefact.load``.

    Returns:
        ``date``, ``device``, ``threads``, ``torch``, ``rows``, ``base``, and ``artefacts``: by name, ``batches``, a list of
        what each took, and ``largest_batch`` where there is a budget.

    Raises:
        ConfigError: If an artefact cannot be loaded or does not run, or memory is limited and cannot be measured.
    """
    memory_limit = None if budget.memory_gib is None else int((budget.memory_gib * _SLACK + _RESERVED_GIB) * _GIB)
    with ExitStack() as processes:
        probes = {
            name: processes.enter_context(probing(Setup(str(folder), rows, str(device), trust, memory_limit)))
            for name, folder in artefacts.items()
        }
        loaded = [probe.reply() for probe in probes.values()]
        found = {batch: _in_turns(probes, batch) for batch in batches}
        told: dict[str, Any] = {}
        for name, probe in probes.items():
            told[name] = {"batches": [found[batch][name].to_json(batch) for batch in batches]}
            if base is not None and name != base:
                for batch, line in zip(batches, told[name]["batches"], strict=True):
                    line["ratios"] = found[batch][name].ratios(found[batch][base])
            if budget.any:
                told[name]["largest_batch"] = _largest_batch(probe, budget)
    return {
        "date": date.today().isoformat(),
        "device": device_name(device),
        "threads": loaded[0]["threads"],
        "torch": torch.__version__,
        "rows": dataclasses.asdict(rows),
        "memory": "torch's tensors" if device.type == "cuda" else "weights, and the growth of resident memory in calls",
        "base": base,
        "budget": dataclasses.asdict(budget),
        "artefacts": told,
    }


def device_name(device: torch.device) -> str:
    """What a GPU, or the CPU, calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _in_turns(probes: Mapping[str, Probe], batch: int) -> dict[str, _Found]:
    """Several rounds, each begun by another probe, at least one and as many as the time allows."""
    names = list(probes)
    found = {name: _Found() for name in names}
    end = time.monotonic() + _SECONDS * len(names)
    for turn in range(_ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if found[name].out_of_memory is None:
                found[name].add(probes[name].ask(batch, _SECONDS / _ROUNDS))
        if time.monotonic() > end:
            break
    return found


def _largest_batch(probe: Probe, budget: Budget) -> dict[str, Any]:
    end = time.monotonic() + _SEARCH_SECONDS

    def broken_by(batch: int) -> str | None:
        if time.monotonic() > end:
            return f"the search, which ends after {_SEARCH_SECONDS:g} s"
        reason = None
        for _ in range(_TRIALS):
            found = _Found()
            found.add(probe.ask(batch, _TRIAL_SECONDS))
            if budget.memory_gib is not None and found.peak_bytes is None and found.out_of_memory is None:
                raise ConfigError(
                    "export.max_memory_gib: this system does not tell the peak memory of a process on a CPU (Linux does). "
                    "Set export.max_memory_gib=null."
                )
            if (reason := budget.broken_by(batch, found)) is None:
                break
        return reason

    batch, reason = largest_batch(broken_by)
    return {"batch": batch, "ended_by": reason}
