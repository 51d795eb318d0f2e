"""How fast the ranks sum, from what a vote carries to a bucket of gradients."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from dtrain.diagnosis.finding import Finding
from dtrain.distributed.world import World

#: What the one all-reduce of a step carries.
VOTE_FLOATS = 8
VOTE_BYTES = 4 * VOTE_FLOATS
#: DDP's first bucket of gradients, and its others.
BUCKETS_BYTES = (2**20, 25 * 2**20)
_SLOW_VOTE = 1e-3
_VOTES, _BUCKETS, _WARM_UP = 200, 10, 5


@dataclass(frozen=True)
class AllReduce:
    """What sums over the ranks take here: seconds of one, as the slowest rank sees it, by size in bytes."""

    size: int
    seconds: dict[int, float]

    @classmethod
    def measure(cls, world: World) -> AllReduce:
        """Collective."""
        votes = {VOTE_BYTES: _median_seconds(VOTE_BYTES, _VOTES, world.device)}
        buckets = {nbytes: _median_seconds(nbytes, _BUCKETS, world.device) for nbytes in BUCKETS_BYTES}
        return cls(world.size, votes | buckets)

    def estimate(self, nbytes: int) -> float:
        """Seconds for so many bytes, in as many buckets as they need; between what was measured, a straight line."""
        sizes = sorted(self.seconds)
        if nbytes > sizes[-1]:
            return nbytes / sizes[-1] * self.seconds[sizes[-1]]
        return float(np.interp(nbytes, sizes, [self.seconds[size] for size in sizes]))

    def findings(self) -> list[Finding]:
        """Latency of a small all-reduce and bandwidth of large ones.

        The bandwidth is the bus bandwidth of nccl-tests: bytes a second times 2 (n - 1) / n, which does not depend on the
        number of ranks n.
        """
        latency = self.seconds[VOTE_BYTES]
        vote = f"{VOTE_FLOATS} floats in {latency * 1e6:,.0f} microseconds (median of {_VOTES}, slowest rank)"
        slow = latency > _SLOW_VOTE
        remedy = "Every step waits for one such. Too many processes for the cores? The wrong network interface "
        remedy += "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)?"
        buckets = [
            f"{nbytes / 2**20:g} MiB in {self.seconds[nbytes] * 1e3:,.1f} ms, {self._bandwidth(nbytes) / 1e9:,.2f} GB/s"
            for nbytes in BUCKETS_BYTES
        ]
        return [
            Finding("all-reduce latency", vote, "warning" if slow else "ok", remedy if slow else ""),
            Finding(
                "all-reduce bandwidth",
                f"{'; '.join(buckets)} on the bus: the gradients of 100 million parameters take "
                f"{self.estimate(400_000_000) * 1e3:,.0f} ms where nothing hides them",
            ),
        ]

    def _bandwidth(self, nbytes: int) -> float:
        return nbytes / self.seconds[nbytes] * 2 * (self.size - 1) / self.size


def _median_seconds(nbytes: int, times: int, device: torch.device) -> float:
    """Of one all-reduce; the slowest rank's median, on every rank."""
    tensor = torch.zeros(nbytes // 4, device=device)
    for _ in range(_WARM_UP):
        dist.all_reduce(tensor)
    taken = []
    for _ in range(times):
        _wait(tensor)
        start = time.perf_counter()
        dist.all_reduce(tensor)
        _wait(tensor)
        taken.append(time.perf_counter() - start)
    median = torch.tensor([float(np.median(taken))], device=tensor.device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)


def _wait(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
