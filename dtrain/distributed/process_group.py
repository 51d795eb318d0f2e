"""The process group of a run: joined once, and left cleanly whether the run succeeds or fails.

* Errors: a rank that fails publishes its error in the group's store before it closes its connections. The other ranks,
  whose collectives break, read the store and end with one line. So only the rank that failed first shows a traceback.
* Time-outs: a collective may take ``parallel.timeout_start`` until the first step is done, while files are indexed and
  kernels are compiled, and ``parallel.timeout_step`` afterwards, each ``BACKSTOP`` seconds longer: ``HangWatch`` comes
  first, because it reports where each rank waits.
* gloo's threads free the tensors of their last collectives while holding the interpreter lock. They are joined before
  the interpreter is torn down; otherwise they abort the process (torch 2.9-2.13), after a run that was successful.
* Network: NCCL finds the fast network itself; ``NCCL_DEBUG=WARN`` makes it report errors instead of hanging silently.
  gloo uses the interface of this machine's own name. Where that is the loopback, as on Debian, other machines cannot
  connect to it, so the interface that leads to them is set instead.
* With many ranks, gloo connects two ranks when they first communicate. A full mesh would need a socket for each pair of ranks,
  and each rank would ask the store for the address of every other rank (docs/scale.md).
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# The functions of this module bind the default group that exists when the module is first imported as a default
# argument, and so keep its threads alive for ever. DDP imports it later; importing it here binds no group.
import torch.distributed.nn.functional
from torch.distributed import distributed_c10d as c10d

from dtrain.distributed.process_exit import exit_unless
from dtrain.distributed.store import (
    close_group_store,
    fresh_store,
    let_others_read,
    open_group_store,
    publish_failure,
    published_failure,
)
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, PeerFailed, PeerLost, RankLost

#: Seconds by which the time-out of collectives exceeds the limits of the config.
BACKSTOP = 15.0
_LOST = (
    "another rank is gone without an error message: it was killed (SIGKILL; out of memory?), or its machine is down. See the "
    "output of torchrun and the system's log. Start again: the run continues from its newest checkpoint."
)
_JOINED = "dtrain/joined"
_ALL_JOINED = "dtrain/all_joined"
# A failing rank publishes its error before it closes its connections; only a killed one stays silent for longer.
_WAIT_FOR_ERROR = 2.0
# Destroying a group of NCCL waits for its peers, and rank 0 may wait for a minute for each of its trackers before that.
_LEAVE_TIMEOUT = 300.0
# Dropping the last reference to a gloo group joins its threads. DDP would do so while holding the interpreter lock, and a
# thread that waits for that lock would never end.
_groups: list[dist.ProcessGroup] = []
_cleanups: list[threading.Event] = []  # set when this process has left its group
_NETWORK_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_GLOO_", "UCX_", "FI_")
# Ranks. Up to here a full mesh is ready within seconds, and a rank that was killed is noticed by all others at once.
_LARGEST_MESH = 256
_UNUSED_ADDRESS = "192.0.2.1"  # reserved by RFC 5737, so only the default route leads there
_UNUSED_PORT = 9  # nothing is sent
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@contextmanager
def process_group(
    timeout: float, join: Callable[[timedelta], tuple[World, dist.Store] | None] = lambda timeout: None
) -> Iterator[World]:
    """Joins the ranks that the launcher started; without a launcher, a world of one.

    Args:
        timeout: Seconds that a collective may take, until ``set_timeout`` changes it.
        join: Returns this rank's world and a store that all its ranks see; or None, to use those of the launcher.

    Yields:
        This rank's world.

    Raises:
        PeerFailed: Instead of the error of a collective, if another rank failed first.
        PeerLost: Instead of a broken connection, if no rank has published an error.
        ConfigError: If the launcher's environment is incomplete or there are more ranks than GPUs.
    """
    limit = timedelta(seconds=timeout)
    world, store = join(limit) or (World.from_environment(), None)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # NCCL's flight recorder, for reports of a hang
    with _joining(world, timeout):
        if store is None:
            # A store in memory: a world of one opens no port and cannot collide with another.
            store = fresh_store(world.rank, world.size, limit) if world.launched else dist.HashStore()
        dist.init_process_group(world.backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
        set_timeout(timeout)
        open_group_store(store, world)
    if world.size > 1:
        assert dist.group.WORLD is not None
        _groups.append(dist.group.WORLD)
    try:
        # A rank that fails at once would close its connections while others still open theirs, and its error would be
        # lost.
        with _joining(world, timeout):
            _wait_until_all_joined(world, limit)
            if os.environ.get("TORCH_GLOO_LAZY_INIT") == "1" and world.size > 1:
                # A rank only notices the end of ranks that it has a connection to, and waits for others (gloo issue 520).
                dist.all_reduce(torch.zeros(1))
        yield world
    except RankLost:
        close_group_store()
        dist.destroy_process_group()
        raise
    except ConfigError:
        _leave(world)  # every rank raises it, so no rank waits for this one
        raise
    except BaseException as error:
        first = first_failure(world, error)
        let_others_read(world)
        close_group_store()
        if world.device.type == "cuda":
            c10d._abort_process_group()  # destroying a NCCL group waits for its peers, and one of them is gone
        else:
            dist.destroy_process_group()
        if first is not None:
            raise PeerFailed(first) from None
        if _is_lost_connection(error):
            raise PeerLost(_LOST) from error
        raise
    else:
        _leave(world)
    finally:
        # A process may still be writing a checkpoint then.
        for cleanup in _cleanups:
            cleanup.set()
        _cleanups.clear()


def limit_cleanup(seconds: float, message: str) -> None:
    """Shows ``message`` and ends this process, unless it has left the process group in ``seconds``."""
    _cleanups.append(threading.Event())
    exit_unless(_cleanups[-1], seconds, message)


def set_timeout(seconds: float) -> None:
    """Sets how long a collective may take from now on; it ends ``BACKSTOP`` seconds later."""
    # torch 2.15 has made the function public, and warns of its former name.
    set_timeout_of = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout
    for group in list(c10d._world.pg_map):  # the default group, and the groups of a hybrid mesh
        set_timeout_of(timedelta(seconds=seconds + BACKSTOP), group)


def keep_group(group: dist.ProcessGroup) -> None:
    """Keeps a group of several ranks, which other code made, until this process has left all groups."""
    if group.size() > 1 and not any(group is kept for kept in _groups):
        _groups.append(group)


def _leave(world: World) -> None:
    """Leaves the group while no collective is running; gloo's threads would wait for one until its time-out."""
    close_group_store()
    left = threading.Event()
    if world.size > 1:
        exit_unless(
            left, _LEAVE_TIMEOUT, f"dtrain: rank {world.rank} could not leave its group in {_LEAVE_TIMEOUT:g} s"
        )
    try:
        dist.destroy_process_group()
    finally:
        left.set()
    if _groups:
        atexit.register(join_threads)


def join_threads() -> None:
    """Frees the groups that this process has left: their threads end, and their connections close."""
    gc.collect()  # models in DDP hold the group, too
    _groups.clear()


@contextmanager
def _joining(world: World, timeout: float) -> Iterator[None]:
    """Ends this process if a call in the block waits for a store that has been lost. The calls have time-outs for the rest."""
    joined = threading.Event()
    if world.launched:
        store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        message = (
            f"dtrain: error: rank {world.rank} on {socket.gethostname()}: the ranks have not joined within {timeout:g} s "
            f"(parallel.timeout_start): their store on {store} or one of them does not answer. Is a machine down, or the "
            "network?"
        )
        exit_unless(joined, timeout + BACKSTOP, message)
    try:
        yield
    finally:
        joined.set()


def _wait_until_all_joined(world: World, limit: timedelta) -> None:
    store = c10d._get_default_store()
    if store.add(_JOINED, 1) == world.size:
        store.set(_ALL_JOINED, "")
    store.wait([_ALL_JOINED], limit)


def first_failure(world: World, error: BaseException) -> str | None:
    """Publishes this rank's error; returns the text of another rank if that was first, else None."""
    first = _published_because_of(error, world)
    if first is None:
        reason = _LOST if _is_lost_connection(error) else f"{type(error).__name__}: {error}"
        first = publish_failure(f"rank {world.rank} failed: {reason}")
    return None if first is None or first.startswith(f"rank {world.rank} ") else first


def is_lost_rank(error: BaseException, world: World) -> bool:
    """Whether a collective failed because another rank is gone; waits two seconds for an error of that rank."""
    return _is_lost_connection(error) and _published_because_of(error, world) is None


def _published_because_of(error: BaseException, world: World) -> str | None:
    """The error of the rank that failed first; waits for it if this rank's error comes from a collective."""
    deadline = time.monotonic() + (_WAIT_FOR_ERROR if is_from_collective(error) and world.size > 1 else 0)
    while (first := published_failure()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return first


def is_from_collective(error: BaseException) -> bool:
    """Whether a collective has raised the error, as it does when another rank ends."""
    return isinstance(error, (dist.DistBackendError, dist.DistNetworkError)) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def _is_lost_connection(error: BaseException) -> bool:
    text = str(error).lower()
    return is_from_collective(error) and any(sign in text for sign in ("connection", "remote process", "broken pipe"))


# -- network


def settle_network(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets network variables of NCCL and gloo that the user has not set, and prints all of them once per machine.

    Does nothing if all ranks are on one machine. Call it before the process group is made.
    """
    if environment.get("WORLD_SIZE", "1") == environment.get("LOCAL_WORLD_SIZE", "1"):
        return
    set_by_user = {name for name in environment if name.startswith(_NETWORK_VARIABLES)}
    environment.setdefault("NCCL_DEBUG", "WARN")
    if "GLOO_SOCKET_IFNAME" not in environment and (interface := interface_for_gloo(environment)):
        environment["GLOO_SOCKET_IFNAME"] = interface
    if int(environment.get("WORLD_SIZE", "1")) > _LARGEST_MESH:
        environment.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if environment.get("LOCAL_RANK") == "0":
        print(f"network of {socket.gethostname()}: {_describe_network(environment, set_by_user)}", flush=True)


def interface_for_gloo(environment: Mapping[str, str]) -> str | None:
    """The network interface towards the other machines; None if gloo finds one itself, or none can be determined.

    Args:
        environment: ``MASTER_ADDR`` in it names one of the machines.
    """
    if not _is_loopback(_resolved(socket.gethostname()) or "127.0.0.1"):
        return None
    towards = (_resolved(environment.get("MASTER_ADDR", "")), _UNUSED_ADDRESS)
    local = next((address for other in towards if other and (address := _source_address(other))), None)
    return _interface_of(local) if local else None


def _describe_network(environment: Mapping[str, str], set_by_user: set[str]) -> str:
    """``GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=ib0 (yours)``."""
    return ", ".join(
        f"{name}={value}{' (yours)' if name in set_by_user else ''}"
        for name, value in sorted(environment.items())
        if name.startswith(_NETWORK_VARIABLES)
    )


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name) if name else None
    except OSError:
        return None


def _source_address(other: str) -> str | None:
    """The address of this machine that packets to ``other`` carry; None for the loopback or without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, _UNUSED_PORT))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if _is_loopback(address) else address


def _interface_of(address: str) -> str | None:
    """The interface with this address; None on other systems than Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
