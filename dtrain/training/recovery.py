"""Recovery without a restart (``parallel.recover``, experimental): when a rank is lost, the others continue.

* A rank is *lost* if its process or machine ends without raising an error: the connections of the others break. A rank
  that raises an error ends the run as usual, because the error would happen again.
* The *members* are the ranks that are left. Each has a locked file in ``<run.dir>/.recovery``; the operating system releases
  the lock of a process that has ended, so the others know whom to wait for.
* A *generation* is one agreement on the members. The first member that creates the generation's file is its leader: it
  opens a store, waits until every member has arrived there or has ended, and publishes the list. If the leader ends too, the
  others begin the next generation.
* The *memory* is a checkpoint in host memory. A step is applied by all ranks or by none, but a rank may be lost after some of
  the others have applied the last step. So the members compare their steps, and all take the state of one that is furthest.

The run is then rebuilt for the members and continues after the last applied step: the loader divides the rest of the epoch
among them, and the global batch size does not change. Per-step recovery follows torchft
(https://github.com/meta-pytorch/torchft), but needs no server, because all ranks see the run directory.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

import safetensors.torch
import torch
import torch.distributed as dist

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.collectives import from_rank0, wait_for_all
from dtrain.distributed.lock import RunLock
from dtrain.distributed.process_group import is_lost_rank, join_threads
from dtrain.distributed.stop import StopRequests
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, PeerLost, RankLost
from dtrain.files import try_lock
from dtrain.training.checkpoint.checkpoints import Checkpoint
from dtrain.training.checkpoint.resume import build_rest
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.checkpoint.tensors import contiguous
from dtrain.training.loop import Loop
from dtrain.training.monitor.run_logger import RunLogger

T = TypeVar("T")
_FOLDER = ".recovery"
_CONNECT_TIMEOUT = 10.0  # seconds
_POLL = 0.02
_MOST_GENERATIONS = 1000


class Recovery:
    """Starts a run again in this process while ranks are lost; without ``parallel.recover`` it starts it once.

    Args:
        run_dir: The run's directory, which all ranks see.
        parallel: ``recover`` and ``timeout_step``.

    Attributes:
        is_on: Whether this run recovers.
        run_lock: Of the run directory; a process keeps it when the run continues.
        began: When this process began, in seconds of ``time.monotonic()``.

    Raises:
        ConfigError: If ``parallel.recover`` is set and cannot work here.
    """

    def __init__(self, run_dir: Path, parallel: ParallelConfig, environment: Mapping[str, str] = os.environ) -> None:
        self.is_on = parallel.recover and int(environment.get("WORLD_SIZE", "1")) > 1
        if self.is_on and "TORCHELASTIC_RUN_ID" in environment:
            raise ConfigError(
                "parallel.recover: got true, but torchrun ends all ranks of a machine when one ends. Start the ranks with "
                "srun --kill-on-bad-exit=0 python -m dtrain.train ..., or set parallel.recover=false."
            )
        self.run_lock = RunLock(run_dir, print)
        self._folder = run_dir / _FOLDER
        self._timeout = parallel.timeout_step
        self._generation = 0
        self.began = time.monotonic()
        self._name = ""
        self._members: list[str] = []
        self._lock: IO[Any] | None = None
        self._stores: list[dist.Store] = []  # a store of this process serves the others as long as it exists
        self._training: tuple[TrainState, Loop, RunLogger] | None = None
        self._stop: StopRequests | None = None
        self._memory: Checkpoint | None = None

    def run(self, start: Callable[[], T]) -> T:
        """Calls ``start``, and again whenever it raises ``RankLost``."""
        while True:
            try:
                return start()
            except RankLost:
                pass  # after this block nothing refers to the stack any more
            self._remember()
            # This closes the connections. A member that waits for this rank, and not for the lost one, gets its error only now.
            join_threads()
            self._generation += 1

    @contextmanager
    def lost_ranks(self, world: World) -> Iterator[None]:
        """Raises ``RankLost`` instead of the error of a collective, if a rank is lost and this process can continue."""
        try:
            yield
        except Exception as error:
            can_continue = self._training is not None or self._memory is not None
            if self.is_on and can_continue and is_lost_rank(error, world):
                raise RankLost("another rank is lost") from error
            raise

    def join(self, timeout: timedelta) -> tuple[World, dist.Store] | None:
        """The world of the members that are left, and a store that all of them see; None on the first start.

        Args:
            timeout: How long to wait for the others.

        Raises:
            ConfigError: If this run cannot recover.
            PeerLost: If the others continue without this process.
        """
        if self._generation == 0:
            if self.is_on and World.from_environment().device.type == "cuda":
                raise ConfigError(
                    "parallel.recover: got true, but it works with gloo on CPUs only: NCCL may end a broken vote with wrong "
                    "sums, which the optimizer would apply. Set parallel.recover=false."
                )
            return None
        while True:
            try:
                return self._join_generation(timeout)
            except PeerLost:
                raise
            except (RuntimeError, OSError) as error:  # the leader is gone
                if self._generation > _MOST_GENERATIONS:
                    raise PeerLost(f"parallel.recover: the members do not find each other ({error}).") from error
                self._generation += 1

    def restore(self, run: TrainState) -> str | None:
        """Collective. Restores the newest memory of all members; None on the first start.

        Returns:
            A description for the banner.
        """
        if self._generation == 0:
            return None
        memory = self._memory
        assert memory is not None
        mine = (memory.state["counters"]["step"], memory.state["progress"]["evaluation_due"])
        places: list[tuple[int, bool]] = [mine] * dist.get_world_size()
        dist.all_gather_object(places, mine)
        step = max(step for step, _ in places)
        source = next(rank for rank, (reached, _) in enumerate(places) if reached == step)
        build_rest(run, memory)
        run.restore(_broadcast_checkpoint(memory if run.world.rank == source else None, source))
        # The lost rank may have ended an evaluation for some of the members only.
        run.totals.evaluation_due = any(due for reached, due in places if reached == step)
        return f"after step {step}, from the memory of member {self._members[source]}"

    @property
    def requested_stop(self) -> str | None:
        """Why a stop was requested before, or while, a rank was lost; None if it was not."""
        return self._stop.reason if self._stop is not None else None

    def arm(self, run: TrainState, loop: Loop, run_logger: RunLogger, stop: StopRequests) -> None:
        """Collective. Arms recovery: from now on this process survives the loss of other ranks. The run directory exists."""
        self._training, self._memory, self._stop = (run, loop, run_logger), None, stop
        if not self.is_on or self._lock is not None:
            return
        job = from_rank0(self._new_job)
        self._folder /= job
        self._name, self._members = str(run.world.rank), [str(rank) for rank in range(run.world.size)]
        self._lock = (self._folder / self._name).open("w")
        # A forked loader worker would hold the lock for some seconds after this process has ended.
        os.register_at_fork(after_in_child=self._lock.close)
        try_lock(self._lock)
        wait_for_all()  # a lock that is not taken yet would look like a lost rank

    def end(self) -> None:
        """On rank 0: removes the files of a run that has ended."""
        if self._lock is not None and self._members[0] == self._name:
            shutil.rmtree(self._folder.parent, ignore_errors=True)

    def _new_job(self) -> str:
        # The run directory is locked, so these are files of jobs that have ended.
        shutil.rmtree(self._folder, ignore_errors=True)
        job = uuid.uuid4().hex
        (self._folder / job).mkdir(parents=True)
        return job

    def _remember(self) -> None:
        if self._training is None:  # another rank was lost before training continued
            return
        (run, loop, run_logger), self._training = self._training, None
        loop.abandon()
        self._memory = run.checkpoint({})
        run_logger.finish("stopped", "another rank was lost; the others continue")
        sys.stderr.write(
            f"dtrain: rank {run.world.rank}: another rank was lost; the others continue after step {run.step.step}\n"
        )

    # -- members

    def _join_generation(self, timeout: timedelta) -> tuple[World, dist.Store]:
        folder = self._folder / f"generation-{self._generation}"
        folder.mkdir(exist_ok=True)
        store, leads = self._store_of(folder / "leader.json")
        self._stores.append(store)
        store.set(f"arrived/{self._name}", socket.gethostname())
        if leads:
            store.set("members", json.dumps(self._arrived(store)))
        store.wait(["members"], timeout + timedelta(seconds=self._timeout))
        members = json.loads(store.get("members"))
        if self._name not in members:
            raise PeerLost(
                "parallel.recover: the other ranks continue without this one, which did not answer within "
                f"parallel.timeout_step={self._timeout:g} s."
            )
        self._members = members
        hosts = [store.get(f"arrived/{name}").decode() for name in members]
        rank = members.index(self._name)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(len(members)),
            LOCAL_RANK=str(hosts[:rank].count(hosts[rank])),
            LOCAL_WORLD_SIZE=str(hosts.count(hosts[rank])),
            DTRAIN_STARTS=str(self._generation),
        )
        return World.from_environment(), dist.PrefixStore("group", store)

    def _store_of(self, file: Path) -> tuple[dist.Store, bool]:
        """The store of the generation whose leader wrote ``file``, and whether this process is the leader."""
        limit = timedelta(seconds=_CONNECT_TIMEOUT)
        if not file.exists():
            local = os.environ.get("MASTER_ADDR", "").startswith(("127.", "localhost"))
            host = "127.0.0.1" if local else socket.gethostname()
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
            staged = file.with_name(f"{file.name}.{self._name}")
            staged.write_text(json.dumps([host, store.port]))
            with suppress(FileExistsError):
                os.link(staged, file)  # of several members, one succeeds
                return store, True
        host, port = json.loads(file.read_text())
        return dist.TCPStore(host, port, is_master=False, timeout=limit), False

    def _arrived(self, store: dist.Store) -> list[str]:
        """Waits until each member has arrived or has ended; returns the arrived ones."""
        deadline = time.monotonic() + self._timeout
        missing = [name for name in self._members if name != self._name]
        while missing and time.monotonic() < deadline:
            missing = [name for name in missing if not store.check([f"arrived/{name}"]) and self._is_alive(name)]
            time.sleep(_POLL)
        # In the order before, so that rank 0, which holds the lock of the run directory, stays rank 0.
        return [name for name in self._members if store.check([f"arrived/{name}"])]

    def _is_alive(self, name: str) -> bool:
        """Whether the member's process holds its lock."""
        with (self._folder / name).open() as file:
            return not try_lock(file, shared=True, without_locks=False)


def _broadcast_checkpoint(checkpoint: Checkpoint | None, source: int) -> Checkpoint:
    """Collective. Sends a checkpoint of ``source`` to all ranks, in the format of its files."""
    text, files = b"", {}
    if checkpoint is not None:
        # recovery is refused with sharded models, so these are whole tensors
        tensors: Any = checkpoint.tensors
        files = {name: safetensors.torch.save(contiguous(group)) for name, group in tensors.items()}
        text = json.dumps({"state": checkpoint.state, "files": list(files)}).encode()
    header = json.loads(_broadcast(text, source))
    received = {name: safetensors.torch.load(_broadcast(files.get(name, b""), source)) for name in header["files"]}
    return Checkpoint(received, header["state"])


def _broadcast(content: bytes, source: int) -> bytes:
    size = torch.tensor([len(content)])
    dist.broadcast(size, src=source)
    payload = torch.frombuffer(bytearray(content or int(size)), dtype=torch.uint8)
    dist.broadcast(payload, src=source)
    return payload.numpy().tobytes()
