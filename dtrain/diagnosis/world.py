"""What the ranks are together: the same software everywhere, and how fast they sum."""

from __future__ import annotations

import platform
import socket
import time

import numpy as np
import torch
import torch.distributed as dist

from dtrain import __version__
from dtrain.diagnosis.finding import Finding
from dtrain.distributed.world import World

#: What the one all-reduce of a step carries.
VOTE_FLOATS = 8
BUCKET_BYTES = 16 * 2**20
_SLOW_VOTE = 1e-3
_VOTES, _BUCKETS, _WARM_UP = 200, 10, 5


def ranks_agree(world: World) -> Finding:
    """Collective. Whether all ranks have the same versions."""
    mine = f"dtrain {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    everybody: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(everybody, (socket.gethostname(), mine))
    others = {f"rank {rank} ({host})": text for rank, (host, text) in enumerate(everybody) if text != everybody[0][1]}
    hosts = len({host for host, _ in everybody})
    if not others:
        return Finding(
            "ranks",
            f"{world.size} on {hosts} machine{'s' * (hosts > 1)}, {world.backend.split(':')[-1]}, equal versions",
        )
    rank, text = next(iter(others.items()))
    return Finding(
        "ranks",
        f"{len(others)} of {world.size} have other versions: rank 0 has {everybody[0][1]}; {rank} has {text}",
        "error",
        "Use one environment for all of them",
    )


def all_reduce_speed(world: World) -> list[Finding]:
    """Collective. Latency of a small all-reduce and bandwidth of a large one, as the slowest rank sees them.

    The bandwidth is the bus bandwidth of nccl-tests: bytes a second times 2 (n - 1) / n, which does not depend on the
    number of ranks n.
    """
    latency = _median_seconds(torch.zeros(VOTE_FLOATS, device=world.device), _VOTES)
    seconds = _median_seconds(torch.zeros(BUCKET_BYTES // 4, device=world.device), _BUCKETS)
    bandwidth = BUCKET_BYTES / seconds * 2 * (world.size - 1) / world.size
    vote = f"{VOTE_FLOATS} floats in {latency * 1e6:,.0f} microseconds (median of {_VOTES}, slowest rank)"
    slow = latency > _SLOW_VOTE
    remedy = "Every step waits for one such. Too many processes for the cores? The wrong network interface "
    remedy += "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)?"
    return [
        Finding("all-reduce latency", vote, "warning" if slow else "ok", remedy if slow else ""),
        Finding(
            "all-reduce bandwidth",
            f"{BUCKET_BYTES >> 20} MiB in {seconds * 1e3:,.1f} ms, {bandwidth / 1e9:,.2f} GB/s on the bus: the gradients of "
            f"100 million parameters take {4e8 / BUCKET_BYTES * seconds * 1e3:,.0f} ms where nothing hides them",
        ),
    ]


def _median_seconds(tensor: torch.Tensor, times: int) -> float:
    """Of one all-reduce; the slowest rank's median, on every rank."""
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
