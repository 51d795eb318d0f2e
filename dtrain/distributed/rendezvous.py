"""A store that no earlier attempt of the job has written to.

torchrun keeps one store over all restarts of its workers, without a prefix for each (torch 2.9-2.13). What the attempt before
left in it is poison: its addresses, to which a faster rank tries to connect ("Gloo connectFullMesh failed"), and the failure
that it published. Restart counts cannot tell attempts apart, since every node's torchrun has its own.

So each rank *says hello* with a name that nobody had before, and rank 0 answers to that name with a prefix for this attempt.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_LOOK_EVERY = 0.01


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Collective. The store that the launcher's environment describes, below a prefix of this attempt's own.

    Args:
        rank: This process.
        world_size: Number of processes.
        timeout: For the others to come.

    Raises:
        RuntimeError: If they do not come.
    """
    store = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]
    name = uuid.uuid4().hex
    if rank == 0:
        ours = dist.PrefixStore(f"dtrain/{name}", store)
        _answer_all(store, ours, name, world_size, timeout)
        return ours
    store.set(f"dtrain/hello/{rank}", name)
    store.wait([f"dtrain/answer/{name}"], timeout)
    ours = dist.PrefixStore(f"dtrain/{store.get(f'dtrain/answer/{name}').decode()}", store)
    ours.add("arrived", 1)
    return ours


def _answer_all(store: dist.Store, ours: dist.Store, name: str, world_size: int, timeout: timedelta) -> None:
    """Answers whoever says hello, also those of an attempt that is over, until all ranks of this one have arrived."""
    answered: set[str] = set()
    deadline = time.monotonic() + timeout.total_seconds()
    while ours.add("arrived", 0) < world_size - 1:
        for key in (f"dtrain/hello/{rank}" for rank in range(1, world_size)):
            if store.check([key]) and (caller := store.get(key).decode()) not in answered:
                store.set(f"dtrain/answer/{caller}", name)
                answered.add(caller)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{ours.add('arrived', 0) + 1} of {world_size} ranks came within {timeout.total_seconds():g} s "
                "(parallel.timeout_start). Did the others fail to start? Their output says why."
            )
        time.sleep(_LOOK_EVERY)
