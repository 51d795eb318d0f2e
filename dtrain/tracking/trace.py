"""What a profiler's trace says about a few steps: a page of text.

* A *trace* is a JSON file in Chrome's format, as ``torch.profiler`` writes it; times are in microseconds.
* *Communication* is NCCL's kernels on a GPU, gloo's work in its own threads on a CPU; *compute* is every other kernel, or
  operator. Communication is *hidden* while compute goes on.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_TOP = 15
_WIDTH = 72
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
# Around operators, and around waiting for the last bucket; not work themselves.
_WRAPPERS = ("c10d::", "autograd::", "torch::autograd::")


@dataclass(frozen=True)
class TraceSummary:
    """Some steps of one rank.

    Attributes:
        steps: How many.
        step_ms: Wall time of a step.
        parts: Name of each annotated part that occurs to its milliseconds a step.
        communication_ms: Time a step in which anything was being communicated.
        hidden_ms: Of it, while compute went on.
        top: (operator or kernel, calls a step, milliseconds a step in itself), most expensive first.
        on_device: Whether ``top`` are kernels.
    """

    steps: int
    step_ms: float
    parts: dict[str, float]
    communication_ms: float
    hidden_ms: float
    top: list[tuple[str, float, float]]
    on_device: bool

    @classmethod
    def read(cls, path: Path, step: str, parts: Sequence[str]) -> TraceSummary:
        """Summarises a trace.

        Args:
            path: The trace, gzipped or not.
            step: Name of the annotation that each step is in.
            parts: Names of the annotations to sum up.

        Raises:
            ValueError: If it is no trace, or no step is in it.
        """
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            content = json.load(file)
        return cls.of([event for event in content["traceEvents"] if event.get("ph") == "X"], step, parts)

    @classmethod
    def of(cls, events: Sequence[dict[str, Any]], step: str, parts: Sequence[str]) -> TraceSummary:
        """Summarises complete events (``ph: X``) of a trace: those inside a step, and all of a device, which runs behind.

        Raises:
            ValueError: If no step is among them.
        """
        steps = [event for event in events if event["name"] == step and event.get("cat") == "user_annotation"]
        if not steps:
            raise ValueError("the trace holds no step")
        number = len(steps)
        during = union(_intervals(steps))
        events = [event for event in events if event.get("cat") in _ON_DEVICE or _starts_in(event, during)]
        on_device = any(event.get("cat") == "kernel" for event in events)
        work: list[dict[str, Any]] = []
        talk: list[dict[str, Any]] = []
        for event in events:
            kind, name = event.get("cat"), event["name"]
            if on_device and kind in _ON_DEVICE:
                (talk if name.startswith("nccl") else work).append(event)
            elif not on_device and kind == "user_annotation" and name.startswith("gloo:"):
                talk.append(event)
            elif not on_device and kind == "cpu_op":
                work.append(event)
        computing = [event for event in work if not event["name"].startswith(_WRAPPERS)]
        spent: dict[str, float] = defaultdict(float)
        for event in events:
            if event.get("cat") == "user_annotation" and event["name"] in parts:
                spent[event["name"]] += event["dur"]
        communicating = union(_intervals(talk))
        return cls(
            steps=number,
            step_ms=sum(event["dur"] for event in steps) / number / 1e3,
            parts={name: spent[name] / number / 1e3 for name in parts if name in spent},
            communication_ms=_length(communicating) / number / 1e3,
            hidden_ms=_length(intersection(communicating, union(_intervals(computing)))) / number / 1e3,
            top=_top(work, number),
            on_device=on_device,
        )

    def text(self, title: str) -> str:
        """The page."""
        lines = [f"{title}: {self.steps} steps, {self.step_ms:.2f} ms each", ""]
        lines += [f"  {'of a step':<16}{'ms':>9}{'share':>8}"]
        lines += [f"  {name:<16}{ms:9.2f}{self._share(ms):8.0%}" for name, ms in self.parts.items()]
        lines += [f"  {'communication':<16}{self.communication_ms:9.2f}{self._share(self.communication_ms):8.0%}"]
        if self.communication_ms:
            lines[-1] += f"   {self.hidden_ms / self.communication_ms:.0%} of it hidden behind compute"
        what = "kernel" if self.on_device else "operator"
        lines += ["", f"  {what:<{_WIDTH}}{'calls':>8}{'ms':>9}{'share':>8}"]
        lines += [
            f"  {_shortened(name):<{_WIDTH}}{calls:8.1f}{ms:9.3f}{self._share(ms):8.0%}" for name, calls, ms in self.top
        ]
        return "\n".join(lines)

    def _share(self, ms: float) -> float:
        return ms / self.step_ms


def union(intervals: np.ndarray) -> np.ndarray:
    """The same points as disjoint intervals in order.

    Args:
        intervals: Start and end, float64, shape ``[n, 2]``.

    Returns:
        float64, shape ``[m, 2]``.
    """
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    if not len(intervals):
        return intervals
    reach = np.maximum.accumulate(intervals[:, 1])
    begins = np.concatenate([[True], intervals[1:, 0] > reach[:-1]])
    ends = np.concatenate([begins[1:], [True]])
    return np.stack([intervals[begins, 0], reach[ends]], axis=1)


def intersection(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What lies in both.

    Args:
        one: Disjoint intervals in order, float64, shape ``[n, 2]``.
        other: The same, shape ``[m, 2]``.

    Returns:
        Disjoint intervals in order, float64, shape ``[k, 2]``.
    """
    edges = np.concatenate([one.ravel(), other.ravel()])
    # +1 where an interval begins and -1 where it ends; points covered twice are in both.
    rises = np.concatenate([np.tile([1, -1], len(one)), np.tile([1, -1], len(other))])
    order = np.lexsort([rises, edges])  # at equal times ends come first: touching is not overlapping
    depth = np.cumsum(rises[order])
    begins = np.flatnonzero(depth == 2)
    return np.stack([edges[order][begins], edges[order][begins + 1]], axis=1) if len(begins) else np.empty((0, 2))


def _intervals(events: Iterable[dict[str, Any]]) -> np.ndarray:
    pairs = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    return np.array(pairs, np.float64).reshape(-1, 2)


def _starts_in(event: dict[str, Any], intervals: np.ndarray) -> bool:
    place = int(np.searchsorted(intervals[:, 0], event["ts"], side="right")) - 1
    return place >= 0 and event["ts"] < intervals[place, 1]


def _length(intervals: np.ndarray) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def _top(events: Sequence[dict[str, Any]], steps: int) -> list[tuple[str, float, float]]:
    """Time of each name outside the events inside it, of the same thread or stream."""
    calls: dict[str, int] = defaultdict(int)
    own: dict[str, float] = defaultdict(float)
    lanes: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        lanes[event.get("pid"), event.get("tid")].append(event)
    for lane in lanes.values():
        around: list[dict[str, Any]] = []
        for event in sorted(lane, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            if around:
                own[around[-1]["name"]] -= event["dur"]
            calls[event["name"]] += 1
            own[event["name"]] += event["dur"]
            around.append(event)
    names = sorted(own, key=lambda name: -own[name])[:_TOP]
    return [(name, calls[name] / steps, own[name] / steps / 1e3) for name in names]


def _shortened(name: str) -> str:
    return name if len(name) < _WIDTH else f"{name[: _WIDTH - 4]}..."
