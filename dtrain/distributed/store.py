"""The store of the ranks: rendezvous, and the error of the rank that failed first.

* The *store* is a key-value server (``TCPStore``) on one machine, usually rank 0's. torch's client (2.9-2.13) has no
  time limit for most of its calls: if that machine is lost, or the network to it, a call returns when TCP gives up, after a
  quarter of an hour.
  ``GroupStore`` makes each call in a thread that it abandons, so that every call ends in time.
* A rank that fails *publishes* its error. The others end because of it, and only the first error is shown as the reason.
* Rendezvous: torchrun keeps one store over all restarts of its workers, without a prefix for each (torch 2.9-2.13). An
  earlier attempt leaves addresses there, to which a faster rank would connect ("Gloo connectFullMesh failed"), and its
  published failure. Restart counts cannot tell attempts apart, because every node's torchrun has its own. Instead each
  rank adds a unique name to a list, and rank 0 answers each name with a prefix for this attempt.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from dtrain.distributed.process_exit import in_time
from dtrain.distributed.world import World

T = TypeVar("T")
#: Key of the published failure.
FAILED = "dtrain/failed"
_HOST = "dtrain/host"  # of a rank
_CALLERS = "dtrain/callers"  # names of ranks that wait for an answer, separated by spaces
# Seconds:
_ANSWER = 3.0
_LINGER = 1.0
_RENDEZVOUS_POLL = 0.01
_SAY_POLL = 0.02


class StoreLost(RuntimeError):
    """The store has not answered in time."""


class GroupStore:
    """The store of the process group, with calls that end in time. Any thread may call.

    Args:
        store: The store that the process group uses.
        world: The ranks.

    Attributes:
        address: Host and port of the store.
    """

    def __init__(self, store: dist.Store, world: World) -> None:
        # Its own connection: a connection serves one call at a time, and the main thread may hang in one.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        self._late: threading.Thread | None = None
        self._answered = time.monotonic()
        self.address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self._store.set(f"{_HOST}/{world.rank}", socket.gethostname())

    def call(self, function: Callable[[dist.Store], T]) -> T:
        """Calls ``function`` with the store and returns its result.

        Args:
            function: Makes calls that the store answers at once; no ``wait``, and ``get`` only of keys that exist.

        Raises:
            StoreLost: If the store does not answer, or an abandoned call has not returned yet.
        """
        if self._late is not None and self._late.is_alive():
            raise StoreLost
        try:
            result = in_time(lambda: function(self._store), _ANSWER)
        except TimeoutError as late:
            self._late = late.args[0]
            raise StoreLost from None
        except RuntimeError as error:  # such as a closed connection
            raise StoreLost from error
        self._answered = time.monotonic()
        return result

    @property
    def is_open(self) -> bool:
        """Whether this process is still in the process group."""
        return _group_store is self

    @property
    def silent_for(self) -> float:
        """Seconds since the last answer of the store."""
        return time.monotonic() - self._answered

    def read(self, *keys: str) -> list[str | None]:
        """The values of ``keys``; None for those that do not exist.

        Raises:
            StoreLost: If the store does not answer.
        """
        return self.call(lambda store: [store.get(key).decode() if store.check([key]) else None for key in keys])

    def hosts(self, ranks: Sequence[int]) -> list[str]:
        """The host names of ``ranks``; ``"?"`` if the store does not answer."""
        try:
            return [host or "?" for host in self.read(*(f"{_HOST}/{rank}" for rank in ranks))]
        except StoreLost:
            return ["?"] * len(ranks)


_group_store: GroupStore | None = None


def open_group_store(store: dist.Store, world: World) -> None:
    """Makes ``store`` the store of this process until ``close_group_store``."""
    global _group_store
    _group_store = GroupStore(store, world)


def close_group_store() -> None:
    """This process leaves the process group; from then on there is no published failure."""
    global _group_store
    _group_store = None


def group_store() -> GroupStore:
    """The store of the process group that this process has joined."""
    assert _group_store is not None, "this process has not joined a process group"
    return _group_store


def say_to_all(key: str, text: str, world: World, seconds: float) -> list[str] | None:
    """Every rank publishes a text and reads the texts of all ranks, without a collective of torch.

    Args:
        key: Not used before in this process group.
        text: What this rank publishes.
        world: The ranks.
        seconds: How long to wait for the others.

    Returns:
        The texts by rank; None if one is missing, or a rank has published a failure.
    """
    if world.size == 1:
        return [text]
    keys = [f"dtrain/{key}/{rank}" for rank in range(world.size)]
    deadline = time.monotonic() + seconds
    is_said = False
    while time.monotonic() < deadline:
        try:
            if not is_said:
                group_store().call(lambda store: store.set(keys[world.rank], text))
                is_said = True
            failure, *texts = group_store().read(FAILED, *keys)
        except StoreLost:
            failure, texts = None, [None]
        said = [each for each in texts if each is not None]
        if len(said) == world.size:
            return said
        if failure is not None:
            return None
        time.sleep(_SAY_POLL)
    return None


# -- failures


def published_failure() -> str | None:
    """The error that the first failing rank has published.

    None if there is none, if the store does not answer, or if this rank has left the group.
    """
    try:
        return _group_store.read(FAILED)[0] if _group_store is not None else None
    except StoreLost:
        return None


def publish_failure(text: str) -> str | None:
    """Publishes why the run fails, unless another rank was first.

    Returns:
        The published text of the first rank; None if the store does not answer.
    """
    try:
        sent = text.encode("utf-8", errors="replace").decode()  # a name of a file in it may not be valid text
        return group_store().call(lambda store: store.compare_set(FAILED, "", sent)).decode()
    except StoreLost:
        return None


def let_others_read(world: World) -> None:
    """Waits a second if this process holds the store, so that the other ranks can read it before it ends."""
    if world.rank == 0 and world.size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        time.sleep(_LINGER)


# -- rendezvous


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Collective. Connects to the store of the launcher's environment, below a prefix that no earlier attempt has used.

    Args:
        rank: This process.
        world_size: Number of processes.
        timeout: How long to wait for the other ranks.

    Raises:
        RuntimeError: If they do not arrive in time.
    """
    store = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]
    name = uuid.uuid4().hex
    if rank == 0:
        attempt = dist.PrefixStore(f"dtrain/{name}", store)
        _answer_all(store, attempt, name, world_size, timeout)
        return attempt
    store.append(_CALLERS, f"{name} ")
    store.wait([f"dtrain/answer/{name}"], timeout)
    attempt = dist.PrefixStore(f"dtrain/{store.get(f'dtrain/answer/{name}').decode()}", store)
    attempt.add("arrived", 1)
    return attempt


def _answer_all(store: dist.Store, attempt: dist.Store, name: str, world_size: int, timeout: timedelta) -> None:
    """Answers all names of the list, also of an earlier attempt, until every rank of this attempt has arrived.

    Each poll reads the list in one call, so the work grows with the number of ranks, not with the time they need to arrive.
    """
    answered = 0
    deadline = time.monotonic() + timeout.total_seconds()
    # get() waits for a key that does not exist.
    store.append(_CALLERS, "")  # type: ignore[attr-defined]  # not in torch's stubs
    while attempt.add("arrived", 0) < world_size - 1:
        callers = store.get(_CALLERS).decode().split()
        for caller in callers[answered:]:
            store.set(f"dtrain/answer/{caller}", name)
        answered = len(callers)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{attempt.add('arrived', 0) + 1} of {world_size} ranks arrived within {timeout.total_seconds():g} s "
                "(parallel.timeout_start). Did the others fail to start? See their output."
            )
        time.sleep(_RENDEZVOUS_POLL)
