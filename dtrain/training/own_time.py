"""How long each rank takes for its own part of a step, and which rank the others wait for.

* *Own time* is what no other rank has a share in: the wait for data, and the forwards, and the backwards that average
  nothing. It ends with the last forward, since the backward after it waits for the others.
* The ranks *exchange* their means at logged steps, by a gather that nobody waits for: what it brings is read at the next
  one. It costs 150 microseconds of a core, so there are some steps between two of them.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.distributed.world import World

#: Steps between two exchanges.
EVERY = 50
#: What a clock showed when a piece of own time began, and when it ended.
Pieces = list[tuple[Any, Any]]


class Clock(Protocol):
    """Says how long something took, perhaps only later."""

    def now(self) -> Any:
        """A moment."""

    def between(self, began: Any, ended: Any) -> float:
        """Seconds between two moments that are over."""


class HostClock:
    """The time of the host."""

    def now(self) -> float:
        """A moment."""
        return time.monotonic()

    def between(self, began: float, ended: float) -> float:
        """Seconds."""
        return ended - began


class DeviceClock:
    """The time of a GPU, which works through what the host has queued; never waited for."""

    def now(self) -> torch.cuda.Event:
        """A moment: when the device has done all that is queued now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        """Seconds. The device must have passed both."""
        return began.elapsed_time(ended) / 1000


class OwnTime:
    """Takes the time that a rank spends by itself.

    Where DDP gives all ranks rank 0's buffers before a forward, that is another rank's time, too, and is left out; unless
    the model is compiled as a whole or a ScriptModule, which nothing can look into.

    Args:
        model: The model in DDP; its forwards are watched.
        device: Where it computes.
        clock: To take the time with; None: that of the device.
    """

    def __init__(self, model: DistributedDataParallel, device: torch.device, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or (DeviceClock() if device.type == "cuda" else HostClock())
        self._pieces: Pieces = []
        self._since: Any = None  # None: not taking time
        inner: nn.Module = model.module
        self._handles = [model.register_forward_hook(self._mark)]
        # A ScriptModule takes no hooks, and has nothing compiled.
        opaque = isinstance(inner, torch.jit.ScriptModule) or inner._compiled_call_impl is not None
        if model.broadcast_buffers and any(True for _ in inner.buffers()) and not opaque:
            self._handles.append(model.register_forward_pre_hook(self._pause))
            self._handles.append(inner.register_forward_pre_hook(self._resume))

    def begin(self) -> None:
        """A step begins."""
        self._pieces = []
        self._since = self._clock.now()

    def taken(self) -> Pieces:
        """What a step took until its last forward was done; for ``seconds``, once the step's vote is in."""
        pieces, self._pieces, self._since = self._pieces, [], None
        return pieces

    def end(self) -> None:
        """Watches no more."""
        for handle in self._handles:
            handle.remove()

    def seconds(self, pieces: Pieces) -> float:
        """Their sum."""
        return sum(self._clock.between(began, ended) for began, ended in pieces)

    def _pause(self, *_: Any) -> None:
        if self._since is not None:
            self._pieces.append((self._since, self._clock.now()))

    def _resume(self, *_: Any) -> None:
        if self._since is not None:
            self._since = self._clock.now()

    def _mark(self, *_: Any) -> None:
        if self._since is not None:
            now = self._clock.now()
            self._pieces.append((self._since, now))
            self._since = now


class Stragglers:
    """Tells from the own times of all ranks which one is slow. A world of one has none.

    Args:
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._size = world.size
        self._seconds = 0.0
        self._steps = 0
        self._next = 0
        self._work: dist.Work | None = None
        self._everybodys = torch.zeros(world.size, dtype=torch.float64)
        self._mine = torch.zeros(1, dtype=torch.float64)

    def add(self, seconds: float) -> None:
        """A step's own time."""
        self._seconds += seconds
        self._steps += 1

    def exchange(self, step: int) -> dict[str, float | int]:
        """Collective, without a wait. Says what the last exchange has brought, and begins another if it is time to.

        Args:
            step: Attempted steps, equal on all ranks.

        Returns:
            ``time/slowest_rank``, and ``time/straggler_seconds``: by how much its mean own time of a step was above the
            lower median of all ranks. Empty if no exchange has ended since the last call, and in a world of one.
        """
        if self._size == 1:
            return {}
        found = self._found()
        if step < self._next or not self._steps:
            return found
        self._next = step + EVERY
        self._mine = torch.tensor([self._seconds / self._steps], dtype=torch.float64)
        self._everybodys = torch.zeros(self._size, dtype=torch.float64)
        self._seconds, self._steps = 0.0, 0
        # On the host, where gloo gathers beside whatever the GPUs do.
        self._work = dist.all_gather(list(self._everybodys.split(1)), self._mine, async_op=True)
        return found

    def end(self) -> None:
        """Collective. The last exchange is over."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _found(self) -> dict[str, float | int]:
        if self._work is None:
            return {}
        # It began before the votes of all the steps since, so it is over.
        self.end()
        return straggler(self._everybodys)


def straggler(seconds: Tensor) -> dict[str, float | int]:
    """The slowest rank and its distance to the median; of an even number of ranks that is the lower one.

    Args:
        seconds: Of each rank, float64, shape ``[ranks]``.
    """
    times: list[float] = seconds.tolist()
    slowest = max(times)
    return {
        "time/slowest_rank": times.index(slowest),
        "time/straggler_seconds": slowest - statistics.median_low(times),
    }
