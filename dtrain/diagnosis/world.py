"""What the ranks are together: the same software everywhere?"""

from __future__ import annotations

import platform
import socket

import torch
import torch.distributed as dist

from dtrain import __version__
from dtrain.diagnosis.finding import Finding
from dtrain.distributed.world import World


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
