"""Slow ranks: how long each rank works in a step, which one is the slowest, and which ones stay slow.

* The *own time* of a rank is the part of a step in which it waits for no other rank: the wait for data, the forwards, and the
  backwards without averaging. It ends with the last forward. ``StragglerTimer`` measures it.
* ``StragglerReport`` exchanges the ranks' own times at logged steps, by a gather that no rank waits for: its result is read at
  the next exchange. An exchange costs 150 microseconds of a core, so there is one in ``EVERY`` steps.
* A rank is *slow* if its own time exceeds the median by a fifth of a step. ``SlowRanks`` finds those that are slow in several
  exchanges in succession; rank 0 names them once, and once more when they have recovered.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.distributed.store import group_store
from dtrain.distributed.world import World

#: Steps between two exchanges of own times.
EVERY = 50
#: Exchanges in succession after which a rank has become slow, and has recovered.
LASTING, RECOVERED = 3, 2
# Share of a step that a slow rank costs at least; and at most, if it has recovered.
_SLOW, _RECOVERED_BELOW = 0.2, 0.1
_LEAST = 0.005  # seconds of a step: in shorter times, the operating system and other programs make ranks differ
#: (begin, end) of pieces of own time, as the clock returned them.
Pieces = list[tuple[Any, Any]]


class StragglerTimer:
    """Measures the own time of this rank, with hooks on the model's forward.

    DDP broadcasts rank 0's buffers before a forward. That wait is excluded, unless the model is compiled as a whole or is a
    ScriptModule, whose inner forward takes no hooks.

    Args:
        model: The model in DDP.
        device: Its device.
        clock: Has ``now()`` and ``between(began, ended)`` in seconds; None: the clock of the device.
    """

    def __init__(self, model: DistributedDataParallel, device: torch.device, clock: Any = None) -> None:
        self._clock = clock or (_DeviceClock() if device.type == "cuda" else _HostClock())
        self._pieces: Pieces = []
        self._since: Any = None  # begin of the current piece; None: not measuring
        inner: nn.Module = model.module
        self._handles = [model.register_forward_hook(self._end_piece)]
        # A ScriptModule takes no hooks and has no _compiled_call_impl.
        opaque = isinstance(inner, torch.jit.ScriptModule) or inner._compiled_call_impl is not None
        if model.broadcast_buffers and any(True for _ in inner.buffers()) and not opaque:
            self._handles.append(model.register_forward_pre_hook(self._pause))
            self._handles.append(inner.register_forward_pre_hook(self._resume))

    def begin(self) -> None:
        """Starts the measurement of a step."""
        self._pieces = []
        self._since = self._clock.now()

    def taken(self) -> Pieces:
        """Own time since ``begin``, until the last forward. Convert it with ``seconds`` after the step's vote."""
        pieces, self._pieces, self._since = self._pieces, [], None
        return pieces

    def end(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def seconds(self, pieces: Pieces) -> float:
        """The sum of ``pieces`` in seconds."""
        return sum(self._clock.between(began, ended) for began, ended in pieces)

    def _pause(self, *_: Any) -> None:
        if self._since is not None:
            self._pieces.append((self._since, self._clock.now()))

    def _resume(self, *_: Any) -> None:
        if self._since is not None:
            self._since = self._clock.now()

    def _end_piece(self, *_: Any) -> None:
        if self._since is not None:
            now = self._clock.now()
            self._pieces.append((self._since, now))
            self._since = now


class StragglerReport:
    """Finds the slowest rank, and those that stay slow, from the own times of all ranks. Does nothing in a world of one.

    Args:
        world: The ranks.
        slow: Called on rank 0 with a sentence about ranks that stay slow.
        recovered: Called on rank 0 when they no longer are.
    """

    def __init__(
        self,
        world: World,
        slow: Callable[[str], None] = lambda text: None,
        recovered: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._world = world
        self._slow, self._recovered = slow, recovered
        self._slow_ranks = SlowRanks()
        self._own, self._whole = 0.0, 0.0
        self._steps = 0
        self._next = 0
        self._begin = _Begin(0, time.time())  # of the steps that are added up
        self._work: dist.Work | None = None
        self._exchanged = (self._begin, 0.0)
        self._seconds_of_ranks = torch.zeros(world.size, dtype=torch.float64)
        self._own_mean = torch.zeros(1, dtype=torch.float64)

    def add(self, own: float, whole: float) -> None:
        """Adds a step: its own time on this rank, and its duration, in seconds."""
        self._own += own
        self._whole += whole
        self._steps += 1

    def exchange(self, step: int) -> dict[str, float | int]:
        """Collective, but does not wait. Reads the last exchange, and starts the next one after ``EVERY`` steps.

        Args:
            step: Attempted steps, equal on all ranks.

        Returns:
            The metrics of ``straggler``; empty without a new exchange, and in a world of one.
        """
        if self._world.size == 1:
            return {}
        found = self._found()
        if step < self._next or not self._steps:
            return found
        self._next = step + EVERY
        self._own_mean = torch.tensor([self._own / self._steps], dtype=torch.float64)
        self._exchanged = self._begin, self._whole / self._steps
        self._seconds_of_ranks = torch.zeros(self._world.size, dtype=torch.float64)
        self._own, self._whole, self._steps = 0.0, 0.0, 0
        self._begin = _Begin(step, time.time())
        # On the host: gloo gathers while the GPUs compute.
        self._work = dist.all_gather(list(self._seconds_of_ranks.split(1)), self._own_mean, async_op=True)
        return found

    def end(self) -> None:
        """Collective. Waits for the last exchange."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _found(self) -> dict[str, float | int]:
        if self._work is None:
            return {}
        # It was started before the votes of later steps, so it has ended and this does not block.
        self.end()
        if self._world.rank == 0:
            self._tell(self._slow_ranks.add(*self._exchanged, self._seconds_of_ranks.tolist()))
        return straggler(self._seconds_of_ranks)

    def _tell(self, changes: list[Change]) -> None:
        if not changes:
            return
        hosts = group_store().hosts(range(self._world.size))
        for members, change in by_node(changes, hosts):
            since = (
                f"since step {change.since.step + 1:,} ({time.strftime('%H:%M:%S', time.localtime(change.since.time))})"
            )
            if change.recovered:
                self._recovered(f"{members} is no longer slower than the other ranks, {since}.")
            else:
                self._slow(
                    f"{members} is slower than the other ranks {since}: its own work takes {change.own:.3g} s in a step, "
                    f"{change.own / change.median:.2g} times the median, and all ranks wait for it. Look for another process "
                    "on its cores or GPU, a throttled device, or a slow disk."
                )


@dataclass(frozen=True)
class _Begin:
    """When the steps of an exchange began: the attempted steps before them, and Unix seconds."""

    step: int
    time: float


@dataclass(frozen=True)
class Change:
    """A rank has become slow, or has recovered.

    Attributes:
        rank: The rank.
        since: When that began.
        own: Its mean own time in a step of the last exchange, in seconds.
        median: The lower median of all ranks.
        recovered: Whether it is no longer slow.
    """

    rank: int
    since: _Begin
    own: float
    median: float
    recovered: bool


class SlowRanks:
    """Finds ranks that stay slow, and those that have recovered."""

    def __init__(self) -> None:
        self._named: set[int] = set()
        # By rank: exchanges in succession that contradict what was said of it, and when they began.
        self._count: dict[int, int] = {}
        self._since: dict[int, _Begin] = {}

    def add(self, begin: _Begin, step_seconds: float, own: Sequence[float]) -> list[Change]:
        """Adds an exchange.

        Args:
            begin: When its steps began.
            step_seconds: Mean duration of its steps.
            own: Mean own time of each rank in these steps, in seconds.

        Returns:
            Each rank that has become slow or has recovered with this exchange.
        """
        median = statistics.median_low(own)
        changes = []
        for rank, seconds in enumerate(own):
            named = rank in self._named
            late = seconds - median
            slow = late > max(_SLOW * step_seconds, _LEAST)
            recovered = late < max(_RECOVERED_BELOW * step_seconds, _LEAST)
            if recovered if named else slow:
                self._count[rank] = self._count.get(rank, 0) + 1
                self._since.setdefault(rank, begin)
            else:
                self._count.pop(rank, None)
                self._since.pop(rank, None)
            if self._count.get(rank, 0) >= (RECOVERED if named else LASTING):
                self._named ^= {rank}
                del self._count[rank]
                changes.append(Change(rank, self._since.pop(rank), seconds, median, recovered=named))
        return changes


def by_node(changes: Sequence[Change], hosts: Sequence[str]) -> list[tuple[str, Change]]:
    """Merges the changes of all ranks of a node into one.

    Args:
        changes: Changes of one exchange.
        hosts: Host name of each rank.

    Returns:
        ``rank 3 on n07`` with its change, or ``node n07 (ranks 0 to 3)`` with its slowest rank's change.
    """
    found = []
    for recovered in (False, True):
        group = {change.rank: change for change in changes if change.recovered is recovered}
        for host in dict.fromkeys(hosts[rank] for rank in group):
            ranks = [rank for rank, name in enumerate(hosts) if name == host]
            host_changes = [change for rank, change in group.items() if hosts[rank] == host]
            if len(host_changes) == len(ranks) > 1 and len(ranks) < len(hosts):
                worst = max(host_changes, key=lambda change: change.own)
                found.append((f"node {host} (ranks {ranks[0]} to {ranks[-1]})", worst))
            else:
                found += [(f"rank {change.rank} on {host}", change) for change in host_changes]
    return found


def straggler(seconds: Tensor) -> dict[str, float | int]:
    """``time/slowest_rank``, and ``time/straggler_seconds``: its difference from the lower median of all ranks.

    Args:
        seconds: Mean own time of each rank in a step, float64, shape ``[ranks]``.
    """
    times: list[float] = seconds.tolist()
    slowest = max(times)
    return {
        "time/slowest_rank": times.index(slowest),
        "time/straggler_seconds": slowest - statistics.median_low(times),
    }


class _HostClock:
    now = staticmethod(time.monotonic)

    def between(self, began: float, ended: float) -> float:
        return ended - began


class _DeviceClock:
    """CUDA events on the current stream; nothing waits for them. The device must have passed both ends of a duration."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return float(began.elapsed_time(ended)) / 1000
