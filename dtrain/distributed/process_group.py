"""The process group of a run: joined once, left cleanly whether the run succeeds or fails.

* A rank that fails publishes so in the group's store before its connections close. The others, which only see their
  collective break, look there and end with one line instead of a traceback of their own, so that the first traceback on
  the screen is the one that matters.
* A collective may take ``timeout_start`` while files are indexed and kernels compiled, and ``timeout_step`` from the
  first finished step on.
* gloo's threads free the tensors of their last collectives under the interpreter's lock. They are joined while there is an
  interpreter: one that is torn down under them aborts the process (torch 2.9-2.13), after a run that was fine.
"""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions have the default group of the moment at which they are imported as a default, and so keep its threads for ever;
# DDP imports them. Now there is none.
import torch.distributed.nn.functional
from torch.distributed import distributed_c10d as c10d

from dtrain.config.errors import ConfigError, PeerFailed, PeerLost
from dtrain.distributed.rendezvous import fresh_store
from dtrain.distributed.world import World

_LOST = (
    "another rank is gone and has not said why: it was killed (SIGKILL; out of memory?), or its machine is. torchrun and the "
    "system's log know. Start again: the run continues from its newest checkpoint."
)
_FAILED = "dtrain/failed"
_JOINED = "dtrain/joined"
_ALL_JOINED = "dtrain/all_joined"
# A peer publishes its failure before it closes its connections; only a killed one stays silent for longer.
_PATIENCE = 2.0
_LINGER = 1.0
# Whoever lets go of a gloo group last joins its threads. DDP would do so while it keeps the interpreter locked, and a thread
# that waits for that lock would never end.
_held: list[dist.ProcessGroup] = []


@contextmanager
def process_group(timeout: float) -> Iterator[World]:
    """Joins the ranks that the launcher started, or a world of one.

    Args:
        timeout: Seconds that a collective may take, until ``set_timeout`` changes it.

    Yields:
        This rank's world.

    Raises:
        PeerFailed: Instead of an error in a collective, if another rank failed first.
        PeerLost: Instead of a broken connection, if no rank has failed.
        ConfigError: If the environment cannot work.
    """
    world = World.of()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # NCCL's flight recorder, for when the run hangs
    limit = timedelta(seconds=timeout)
    # A store in memory: a world of one opens no port and cannot collide with another.
    store = fresh_store(world.rank, world.size, limit) if world.launched else dist.HashStore()
    dist.init_process_group(world.backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
    if world.size > 1:
        assert dist.group.WORLD is not None
        _held.append(dist.group.WORLD)
    try:
        # A rank that failed at once would close its connections while others still make theirs, and they could not say why.
        _wait_until_all_joined(world, limit)
        yield world
    except ConfigError:
        _leave()  # raised on every rank alike, so nobody waits for this one
        raise
    except BaseException as error:
        first = _who_failed_first(world, error)
        let_others_look(world)
        if world.device.type == "cuda":
            c10d._abort_process_group()  # destroying a NCCL group waits for its peers, and one of them is gone
        else:
            dist.destroy_process_group()
        if first is not None:
            raise PeerFailed(first) from None
        if _lost_peer(error):
            raise PeerLost(_LOST) from error
        raise
    else:
        _leave()


def _leave() -> None:
    """Where nothing is on its way any more; else threads would be waited for until their collective has timed out."""
    dist.destroy_process_group()
    if _held:
        atexit.register(_join_threads)


def _join_threads() -> None:
    gc.collect()  # models in DDP, which hold the group, too
    _held.clear()


def set_timeout(seconds: float) -> None:
    """From now on a collective of the default group may take so long."""
    c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def failure() -> str | None:
    """What the first rank that failed has published; None if no rank has, or the group is left."""
    try:
        store = c10d._get_default_store()
        return store.get(_FAILED).decode() if store.check([_FAILED]) else None
    except (RuntimeError, ValueError):  # the machine that keeps the store is gone; this rank has left the group
        return None


def publish_failure(text: str) -> str | None:
    """Tells all ranks why the run fails, unless another one was first; returns what counts, None without a store."""
    try:
        return c10d._get_default_store().compare_set(_FAILED, "", text).decode()
    except RuntimeError:
        return None


def let_others_look(world: World) -> None:
    """Waits a moment, before a process ends with which the store ends."""
    if world.rank == 0 and world.size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        time.sleep(_LINGER)


def _wait_until_all_joined(world: World, limit: timedelta) -> None:
    store = c10d._get_default_store()
    if store.add(_JOINED, 1) == world.size:
        store.set(_ALL_JOINED, "")
    store.wait([_ALL_JOINED], limit)


def _who_failed_first(world: World, error: BaseException) -> str | None:
    """Publishes this rank's failure, unless it only follows from another's; returns the text of another one."""
    deadline = time.monotonic() + (_PATIENCE if _is_collective(error) and world.size > 1 else 0)
    while (first := failure()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if first is None:
        what = _LOST if _lost_peer(error) else f"{type(error).__name__}: {error}"
        first = publish_failure(f"rank {world.rank} failed: {what}")
    return None if first is None or first.startswith(f"rank {world.rank} ") else first


def _is_collective(error: BaseException) -> bool:
    return isinstance(error, (dist.DistBackendError, dist.DistNetworkError)) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def _lost_peer(error: BaseException) -> bool:
    text = str(error).lower()
    return _is_collective(error) and any(sign in text for sign in ("connection", "remote process", "broken pipe"))
