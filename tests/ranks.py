"""Real processes for tests: ``run_ranks(2, fn)`` runs ``fn(rank)`` in two forked processes joined by gloo.

* A *rank* is a fork of the pytest process, so ``fn`` may be a closure and sees the test's variables; what it returns
  is copied back by value.
* Every rank ends: by itself, by the watchdog in it, or by its parent. One that hangs is named with its pid and stack.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo  # DDP imports it, which takes seconds: here once, and not in every rank
import torch.distributed as dist

T = TypeVar("T")

#: Seconds that the others get to end after the first rank failed; gloo notices a closed connection at once.
GRACE = 10.0
#: Makes a rank write the stacks of its threads: a run under test may cancel the watchdog, of which a process has one.
_SHOW_STACKS = signal.SIGPROF
_STACK_SECONDS = 1.0


class RanksFailed(RuntimeError):
    """Some ranks raised, died or hung.

    Attributes:
        reports: Rank to its traceback, stack or exit code, the first to fail first.
        hung: Rank to pid of those that had to be killed.
    """

    def __init__(self, world_size: int, reports: dict[int, str], hung: dict[int, int]) -> None:
        self.reports = reports
        self.hung = hung
        text = "\n".join(f"--- rank {rank}: {report}" for rank, report in reports.items())
        super().__init__(f"{len(reports)} of {world_size} ranks failed\n{text}")


def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 200.0,
    group_timeout: float = 100.0,
    init: bool = True,
    agent: bool = True,
) -> list[T]:
    """Runs ``fn(rank, *args)`` in ``world_size`` forked processes, one torch thread each.

    Args:
        world_size: Number of processes.
        fn: What each rank runs. Its result must be picklable; tensors are copied.
        timeout: Seconds until ranks that have not returned are killed.
        group_timeout: Seconds that a collective may take.
        init: Join the ranks in a default gloo process group. False leaves that to ``fn``; the environment of torchrun
            (``RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT``) is set either way.
        agent: Without ``init``: this process has the store, as torchrun's agent. False leaves it to rank 0, as ``srun`` and
            ``mpirun`` do; half a second is lost where another rank is faster, and one where a rank fails.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksFailed: If a rank raised, died without a result or had to be killed; shows every failed rank.
    """
    context = multiprocessing.get_context("fork")
    # A rank that collected this process's garbage, such as a group of gloo, would wait for threads that it does not have.
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        # Its server is started after the forks: the last one would copy a lock that the server's thread holds while the first
        # ranks connect, and wait for it for ever.
        listener = socket.create_server(("127.0.0.1", 0)) if agent and not init else None
        port = listener.getsockname()[1] if listener else _free_port()
        store: dist.TCPStore | None = None
        ranks = []
        try:
            for number in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                setup = _Setup(number, world_size, port, Path(folder), timeout, group_timeout, init, listener)
                process = context.Process(target=_child, args=(setup, sender, fn, args), name=f"rank {number}")
                process.start()
                # Closed before the next fork: a copy left open there would hide this rank's death from its reader.
                sender.close()
                ranks.append(_Rank(number, process, receiver, Path(folder) / f"stack-{number}"))
            if listener is not None:
                options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
                store = dist.TCPStore("127.0.0.1", port, **options)
            return _collect(ranks, timeout)
        finally:
            gc.unfreeze()
            if listener is not None:
                listener.close()
            for rank in ranks:
                rank.end()
            # Now: a process that is forked later would abort where it collects a server whose thread it does not have.
            del store


@dataclass(frozen=True)
class _Setup:
    """What a child has to know about itself."""

    rank: int
    world_size: int
    port: int
    folder: Path
    timeout: float
    group_timeout: float
    init: bool
    listener: socket.socket | None  # of the store that the parent has


class _Rank:
    """The parent's view of a child."""

    def __init__(self, number: int, process: ForkProcess, receiver: Connection, stack: Path) -> None:
        self.number = number
        self.process = process
        self.receiver = receiver
        self.stack = stack

    def read(self) -> tuple[bool, Any]:
        """``(True, result)`` or ``(False, report)`` of a rank that has something to say or has died."""
        try:
            ok, payload = self.receiver.recv()
        except (EOFError, OSError):  # it ended, perhaps in the middle of what it had to say
            self.process.join()
            code = self.process.exitcode
            if stack := self.dumped_stack():
                return False, f"(pid {self.process.pid}) was still running at the timeout\n{stack}"
            return False, f"(pid {self.process.pid}) ended with code {code} and without a result"
        return ok, pickle.loads(payload) if ok else f"(pid {self.process.pid})\n{payload}"

    def dumped_stack(self) -> str:
        return self.stack.read_text() if self.stack.exists() else ""

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.receiver.close()


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    """Waits for all ranks, a little longer than their own watchdogs do, so that they can say where they are."""
    results: dict[int, Any] = {}
    reports: dict[int, str] = {}
    hung: dict[int, int] = {}
    deadline = time.monotonic() + timeout + 2.0
    waiting = list(ranks)
    while waiting:
        ready = wait([rank.receiver for rank in waiting], max(0.0, deadline - time.monotonic()))
        for rank in [rank for rank in waiting if rank.receiver in ready]:
            waiting.remove(rank)
            ok, value = rank.read()
            if ok:
                results[rank.number] = value
                continue
            if rank.dumped_stack():
                hung[rank.number] = rank.process.pid or 0
            if not reports:
                deadline = min(deadline, time.monotonic() + GRACE)
            reports[rank.number] = value
        if not ready:
            for rank in waiting:
                os.kill(rank.process.pid or 0, _SHOW_STACKS)
            time.sleep(_STACK_SECONDS)
            for rank in waiting:
                hung[rank.number] = rank.process.pid or 0
                stack = rank.dumped_stack()
                reports[rank.number] = f"(pid {rank.process.pid}) was still running and was killed\n{stack}"
            break
    for rank in ranks:
        if rank.number in results:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive():
                hung[rank.number] = rank.process.pid or 0
                reports[rank.number] = f"(pid {rank.process.pid}) returned but did not exit, and was killed"
    if reports:
        raise RanksFailed(len(ranks), reports, hung)
    return [results[rank.number] for rank in ranks]


def _child(setup: _Setup, sender: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """One rank, from environment to result."""
    stack = open(setup.folder / f"stack-{setup.rank}", "w")  # noqa: SIM115 - the watchdog writes to it until the exit
    # pytest's would write a fatal error to a descriptor that the fork has left to somebody else, such as the result's pipe.
    faulthandler.disable()
    faulthandler.register(_SHOW_STACKS, file=stack)
    # Ends this process even where its parent is gone.
    faulthandler.dump_traceback_later(setup.timeout, exit=True, file=stack)
    try:
        _enter(setup)
        # Pickled here and not by the pipe, whose pickler would hand tensors over as shared memory of a dying process.
        payload = pickle.dumps(fn(setup.rank, *args))
        if dist.is_initialized():
            dist.destroy_process_group()
        sender.send((True, payload))
    except BaseException:  # noqa: BLE001 - whatever ended the rank, SystemExit included, is the parent's to show
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        sys.stdout.flush()
        sys.stderr.flush()


def _enter(setup: _Setup) -> None:
    rank, world_size = str(setup.rank), str(setup.world_size)
    os.environ.update(
        RANK=rank,
        WORLD_SIZE=world_size,
        LOCAL_RANK=rank,
        LOCAL_WORLD_SIZE=world_size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.port),
        OMP_NUM_THREADS="1",
    )
    if setup.listener is not None:
        setup.listener.close()
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
    # More than one thread would hang: the OpenMP pool of the parent does not survive a fork.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if setup.init:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(setup.folder / "store"), setup.world_size),
            rank=setup.rank,
            world_size=setup.world_size,
            timeout=timedelta(seconds=setup.group_timeout),
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
