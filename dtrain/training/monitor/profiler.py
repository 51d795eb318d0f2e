"""Profiles a few steps with ``torch.profiler``: a trace file and a page of text. Without ``profile.steps`` it does nothing.

* A *label* names a part of a step in the trace (``step.profiler_label``).
* A *trace* is a JSON file in Chrome's format; times are in microseconds.
* *Communication* is NCCL's kernels on a GPU, and gloo's threads on a CPU; *compute* is every other kernel or operator.
  Communication is *hidden* while compute runs at the same time.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from dtrain.config.schema import ProfileConfig
from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.files import replace_file
from dtrain.training.monitor.communication import Traffic
from dtrain.training.step import PARTS, STEP, profiler_label, switch_labels

FOLDER = "profile"
_MAX_STEPS = 100  # a trace of these is hundreds of megabytes
_TOP = 15
_WIDTH = 72
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
# Events that contain operators, or the wait for the last bucket; they are no work themselves.
_WRAPPERS = ("c10d::", "autograd::", "torch::autograd::")
logger = logging.getLogger("dtrain")


class StepProfiler:
    """Profiles the attempted steps ``first`` to ``last`` on this rank; make it with ``from_config``. Its errors end no run.

    The step before is profiled as well and discarded, because it includes the start of the profiler.
    """

    def __init__(
        self,
        first: int,
        last: int,
        run_dir: Path,
        rank: int,
        device: torch.device,
        note: Callable[[str], None],
        traffic: Traffic | None = None,
    ) -> None:
        self._first, self._last = first, last
        self._folder = run_dir / FOLDER
        self._rank = rank
        self._device = device
        self._note = note
        self._traffic = traffic
        self._profile: profile | None = None
        self._label: AbstractContextManager[object] = nullcontext()  # of the current step
        self._steps = 0

    @classmethod
    def from_config(
        cls,
        cfg: ProfileConfig,
        step: int,
        run_dir: Path,
        world: World,
        note: Callable[[str], None],
        traffic: Traffic | None = None,
    ) -> StepProfiler | None:
        """The profiler of this rank; None if it has nothing to profile.

        Args:
            cfg: The group ``profile`` of the config.
            step: Attempted steps so far.
            run_dir: The run's directory.
            world: The ranks.
            note: Receives a line with the path of the profile.
            traffic: What a step sends; None: unknown.

        Raises:
            ConfigError: If the steps or ranks are impossible.
        """
        if cfg.steps is None:
            return None
        if len(cfg.steps) != 2 or not 1 <= cfg.steps[0] <= cfg.steps[1] < cfg.steps[0] + _MAX_STEPS:
            raise ConfigError(
                f"profile.steps: got {list(cfg.steps)}, want the first and the last attempted step, at most {_MAX_STEPS} of "
                f"them, such as [101,105]."
            )
        if missing := [rank for rank in cfg.ranks if not 0 <= rank < world.size]:
            raise ConfigError(f"profile.ranks: got {missing[0]}, the run has ranks 0 to {world.size - 1}.")
        first, last = cfg.steps
        if world.rank not in cfg.ranks or last <= step:
            return None
        return cls(max(first, step + 1), last, run_dir, world.rank, world.device, note, traffic)

    def before(self, step: int) -> None:
        """Call it at the beginning of the attempted step ``step``."""
        if self._profile is None and self._first - 1 <= step <= self._last:
            self._guarded(self._start, step)
        if self._profile is not None:
            self._label = profiler_label(STEP)
            self._label.__enter__()

    def after(self, step: int) -> None:
        """Call it at the end of the attempted step ``step``."""
        if self._profile is None:
            return
        self._label.__exit__(None, None, None)
        self._profile.step()
        self._steps += self._first <= step
        if step >= self._last:
            self._guarded(self._finish)

    def close(self) -> None:
        """Writes the profile of the steps so far, if the run ends inside the range."""
        if self._profile is not None and self._steps:
            self._guarded(self._finish)
        elif self._profile is not None:
            self._guarded(self._stop)

    def _start(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        warmup = int(step < self._first)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=warmup, active=self._last - step + 1 - warmup, repeat=1),
        )
        switch_labels(True)
        self._profile.start()

    def _finish(self) -> None:
        stopped = self._stop()
        self._folder.mkdir(exist_ok=True)
        last = self._first + self._steps - 1
        path = self._folder / f"rank-{self._rank:05d}-steps-{self._first:09d}-{last:09d}.json.gz"
        aside = path.with_name(f".{path.name}")
        aside.unlink(missing_ok=True)  # a link must not be followed
        stopped.export_chrome_trace(str(aside))
        os.replace(aside, path)
        title = f"steps {self._first} to {last} of rank {self._rank}"
        page = TraceSummary.read(path, STEP, PARTS).text(title, self._traffic)
        with replace_file(path.with_name(path.name.removesuffix(".json.gz") + ".txt")) as file:
            file.write(f"{page}\n".encode())
        logger.info("profile of %s", page)
        self._note(f"profile of {title}: {path} (https://ui.perfetto.dev opens it), with a summary next to it")

    def _stop(self) -> profile:
        stopped, self._profile = self._profile, None
        assert stopped is not None
        switch_labels(False)
        stopped.stop()
        return stopped

    def _guarded(self, function: Callable[..., object], *args: object) -> None:
        try:
            function(*args)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            self._profile, self._first = None, self._last + 2  # do not try again
            switch_labels(False)
            logger.warning("the profile of steps up to %d was not made: %s", self._last, error)
            self._note(f"WARNING: no profile ({type(error).__name__}: {error})")


@dataclass(frozen=True)
class TraceSummary:
    """Summary of a trace of some steps of one rank.

    Attributes:
        steps: Number of steps.
        step_ms: Wall time per step; all times are in milliseconds.
        parts: Label of each part of a step to its time per step.
        communication_ms: Time with communication per step.
        hidden_ms: The part of it that is hidden behind compute.
        top: (operator or kernel, calls per step, self time per step), most expensive first.
        on_device: Whether ``top`` lists kernels of a GPU.
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
        """Summarises the steps with the label ``step``, and their ``parts``, of a trace, which may be gzipped.

        Raises:
            ValueError: If it is no trace, or has no step.
        """
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            content = json.load(file)
        return cls.from_events([event for event in content["traceEvents"] if event.get("ph") == "X"], step, parts)

    @classmethod
    def from_events(cls, events: Sequence[dict[str, Any]], step: str, parts: Sequence[str]) -> TraceSummary:
        """Summarises complete events (``ph: X``): host events inside a step, and all device events, which run later.

        Raises:
            ValueError: If there is no step among them.
        """
        steps = [event for event in events if event["name"] == step and event.get("cat") == "user_annotation"]
        if not steps:
            raise ValueError("the trace holds no step")
        number = len(steps)
        during = union(_intervals(steps))
        events = [event for event in events if event.get("cat") in _ON_DEVICE or _starts_in(event, during)]
        on_device = any(event.get("cat") == "kernel" for event in events)
        work: list[dict[str, Any]] = []
        communication: list[dict[str, Any]] = []
        for event in events:
            kind, name = event.get("cat"), event["name"]
            if on_device and kind in _ON_DEVICE:
                (communication if name.startswith("nccl") else work).append(event)
            elif not on_device and kind == "user_annotation" and name.startswith("gloo:"):
                communication.append(event)
            elif not on_device and kind == "cpu_op":
                work.append(event)
        compute = [event for event in work if not event["name"].startswith(_WRAPPERS)]
        spent: dict[str, float] = defaultdict(float)
        for event in events:
            if event.get("cat") == "user_annotation" and event["name"] in parts:
                spent[event["name"]] += event["dur"]
        communicating = union(_intervals(communication))
        return cls(
            steps=number,
            step_ms=sum(event["dur"] for event in steps) / number / 1e3,
            parts={name: spent[name] / number / 1e3 for name in parts if name in spent},
            communication_ms=_length(communicating) / number / 1e3,
            hidden_ms=_length(intersection(communicating, union(_intervals(compute)))) / number / 1e3,
            top=_top(work, number),
            on_device=on_device,
        )

    def text(self, title: str, traffic: Traffic | None = None) -> str:
        """The summary as a page of text under ``title``; with ``traffic``, what a step sends."""
        lines = [f"{title}: {self.steps} steps, {self.step_ms:.2f} ms each", ""]
        lines += [f"  {'of a step':<16}{'ms':>9}{'share':>8}"]
        lines += [f"  {name:<16}{ms:9.2f}{self._share(ms):8.0%}" for name, ms in self.parts.items()]
        lines += [f"  {'communication':<16}{self.communication_ms:9.2f}{self._share(self.communication_ms):8.0%}"]
        if self.communication_ms:
            lines[-1] += f"   {self.hidden_ms / self.communication_ms:.0%} of it hidden behind compute"
        if traffic is not None and traffic.collectives:
            lines += ["", *traffic.table(self.communication_ms)]
        what = "kernel" if self.on_device else "operator"
        lines += ["", f"  {what:<{_WIDTH}}{'calls':>8}{'ms':>9}{'share':>8}"]
        lines += [
            f"  {_shortened(name):<{_WIDTH}}{calls:8.1f}{ms:9.3f}{self._share(ms):8.0%}" for name, calls, ms in self.top
        ]
        return "\n".join(lines)

    def _share(self, ms: float) -> float:
        return ms / self.step_ms


def union(intervals: np.ndarray) -> np.ndarray:
    """Merges overlapping intervals (start, end), float64, shape ``[n, 2]``, to disjoint ones in order, ``[m, 2]``."""
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    if not len(intervals):
        return intervals
    reach = np.maximum.accumulate(intervals[:, 1])
    begins = np.concatenate([[True], intervals[1:, 0] > reach[:-1]])
    ends = np.concatenate([begins[1:], [True]])
    return np.stack([intervals[begins, 0], reach[ends]], axis=1)


def intersection(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The intersection of two sets of disjoint intervals in order, as ``union`` returns them."""
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
    """The names with the most self time, which excludes events nested in them on the same thread or stream."""
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
