"""Ends a rank that waits for ever: with a report of where every rank waits, or because another rank has failed.

* ``HangWatch`` judges in a thread, by this machine's clock. It asks the store of the ranks in another thread, which may be
  stuck there: time limits hold if the store, its machine or the network is lost.
* While the run starts, a rank hangs that has been in one call of ``torch.distributed`` for ``parallel.timeout_start``.
* While it trains, a rank *moves* as long as its ``Place`` changes: its step, or the micro-batches that it received. The
  training thread does nothing for it. The first rank that has not moved for ``parallel.timeout_step`` *declares* the hang
  in the store. The others read it there, also a rank that sleeps in its own code and would never time out in a collective.
* Each rank then writes ``logs/hang-rank-00000.txt``: its step, sample keys, the stacks of all threads and, where
  torch's flight recorder is on, its last collectives. The declaring rank prints one line for each rank.
* A rank whose peer has failed ends by itself where the collective breaks, as on gloo. A kernel of NCCL does not break, and
  the main thread waits for it in C code; so the watch ends the process.
* With one rank, time at the prompt of a debugger does not count: nobody waits for it.
* A process whose C code never releases the interpreter lock is ended by ``exit_if_lock_is_held``. No thread can end a call that
  the kernel does not interrupt, such as one that waits for a failed disk or driver.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

import torch

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.process_exit import CLEANUP, exit_if_lock_is_held, exit_now, exit_within, in_time
from dtrain.distributed.process_group import first_failure, limit_cleanup
from dtrain.distributed.store import FAILED, StoreLost, group_store, let_others_read, publish_failure
from dtrain.distributed.torchrun import torchrun_is_quiet
from dtrain.distributed.torchrun_end import main_frame
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, RankLost, in_brief
from dtrain.files import open_to_append

_HUNG, _SUMMARY = "dtrain/hang", "dtrain/hang/summary"
# Seconds:
_LONGEST_POLL = 1.0
_GRACE = 2.0  # for a rank to end by itself after another rank has failed
_STORE_LOST = 15.0  # without an answer of the store; a rank that waits for the disk of rank 0 hangs from then on
_REPORT_TIMEOUT = 3.0  # a rank whose C code holds the interpreter lock cannot answer
_END = 20.0  # for a report and for background writers: a slow disk or tracker must not keep a process
_LOCK_HELD = 20.0  # beyond the limit, so that other ranks report first
_TRACKER = 5.0
_JOIN_TIMEOUT = 1.0
_PACKAGE = str(Path(__file__).parents[1])
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd", "debugpy")  # packages; pydevd is the core of debugpy and PyCharm
_COLLECTIVES = ("torch.distributed", "torch.nn.parallel.distributed")  # modules
logger = logging.getLogger("dtrain")


@dataclass(frozen=True)
class Place:
    """How far a rank is.

    Attributes:
        step: The attempted step that it works on, from 1.
        keys: Keys of the last samples that it received.
        moved: A value that changes whenever the rank makes progress.
        waits_for_disk: Whether it waits for the disk of rank 0, which is not a hang while the store answers.
    """

    step: int
    keys: Sequence[str]
    moved: Hashable
    waits_for_disk: bool = False


class HangWatch:
    """Watches this process inside its ``with`` block, which is inside the block of ``process_group``.

    Args:
        world: The ranks.
        cfg: ``timeout_start`` and ``timeout_step`` limit the seconds without progress until, and after, the first step.
        failed: Called with one line before the process ends because of a hang or a failure of another rank.
    """

    def __init__(self, world: World, cfg: ParallelConfig, failed: Callable[[str], None] = lambda text: None) -> None:
        self._world = world
        self._timeouts = cfg.timeout_start, cfg.timeout_step
        self._failed = failed
        self._poll = max(0.05, min(_LONGEST_POLL, *(timeout / 20 for timeout in self._timeouts)))
        self._store = group_store()
        self._heard: tuple[str | None, str | None] = None, None  # the last values of _HUNG and FAILED
        self._where: Callable[[], Place] = _place_at_start
        self._folder: Path | None = None
        self._first_step: int | None = None  # of the training
        self._left = threading.Event()
        self._ending = threading.Lock()  # never released
        self._threads = [threading.Thread(target=self._watch, name="hang watch", daemon=True)]
        if world.size > 1:
            self._threads.append(threading.Thread(target=self._listen, name="hang listener", daemon=True))

    def __enter__(self) -> HangWatch:
        self._limit_lock(self._timeouts[0])  # C code may hold the lock before the watch has run once
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._fails(error)
        self._left.set()
        self._threads[0].join(_JOIN_TIMEOUT)
        # Both callables refer to the model. The listener may still wait for the store when this process ends, and must not keep
        # the model alive: it holds the process group, whose threads have to end before the interpreter does. A watch that
        # is still alive writes a report, and ends the process.
        if not self._threads[0].is_alive():
            self._where, self._failed = _place_at_start, lambda text: None
        if self._world.size > 1:
            faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def following(self, where: Callable[[], Place], folder: Path) -> Iterator[None]:
        """Watches the training in the block.

        Args:
            where: Returns the current place; called in another thread.
            folder: ``<run.dir>/logs``, for the reports; it exists.
        """
        # Not left to the watch: before its next poll, several steps may be done.
        self._first_step = where().step
        self._folder, self._where = folder, where
        try:
            yield
        except BaseException as error:
            self._fails(error)
            raise
        # The end of a run waits for no other rank, but perhaps for a tracker.
        self._where = lambda: Place(where().step, (), object())

    def declare(self, why: str) -> None:
        """Makes all ranks write their reports and exit. Does not return.

        Args:
            why: The reason, such as ``nothing has moved for 300 s``.
        """
        why = f"rank {self._world.rank}: {why}"
        try:
            why = self._store.call(lambda store: store.compare_set(_HUNG, "", why)).decode()
        except StoreLost:
            why += (
                f"; the store on {self._store.address} has not answered for {self._store.silent_for:.0f} s: its machine is "
                "down, or the network to it"
            )
        self._end(lambda: self._report(why))

    # -- threads

    def _listen(self) -> None:
        """Reads the store; a call may take long, so ``_watch`` does not wait for it."""
        while not self._left.wait(self._poll):
            with suppress(StoreLost):
                hung, failed = self._store.read(_HUNG, FAILED)
                self._heard = hung, failed

    def _watch(self) -> None:
        place, still, failed_for = self._where(), 0.0, 0.0
        while not self._left.wait(self._poll):
            # Polls are counted, not seconds: a process that was suspended (Ctrl-Z) has not hung.
            still += self._poll
            now = self._where()
            limit = self._timeouts[self._first_step is not None and now.step > self._first_step]
            self._limit_lock(limit)
            disk = now.waits_for_disk and self._store_answers()
            if now.moved != place.moved or disk or (self._world.size == 1 and _is_debugged()):
                place, still = now, 0.0
            hung, failed = self._heard
            if hung is not None:
                self._end(lambda why=hung: self._report(why))  # type: ignore[misc]
            if failed is not None and not failed.startswith(f"rank {self._world.rank} "):
                failed_for += self._poll
                if failed_for > _GRACE:
                    self._end(lambda why=failed: self._follow_failure(why))  # type: ignore[misc]
            if still > limit:
                self.declare(f"nothing has moved for {limit:g} s")

    def _limit_lock(self, seconds: float) -> None:
        if self._world.size > 1:  # a single process waits for no other, and may be suspended for any time
            exit_if_lock_is_held(seconds + _LOCK_HELD)

    def _store_answers(self) -> bool:
        return self._world.size == 1 or self._store.silent_for < _STORE_LOST

    # -- ends

    def _fails(self, error: BaseException) -> None:
        """Publishes the error with which the main thread ends, and limits the time of its cleanup."""
        if isinstance(error, (ConfigError, RankLost)) or self._left.is_set() or self._world.size == 1:
            return
        self._left.set()
        trace = "".join(traceback.format_exception(error)).rstrip()
        message = f"dtrain: rank {self._world.rank} failed, and could not end within {CLEANUP:g} s\n{trace}"
        limit_cleanup(CLEANUP, message)
        first_failure(self._world, error)

    def _end(self, tell: Callable[[], None]) -> None:
        self._ending.acquire()  # two threads may end the process; the first does
        exit_within(_END, 1)
        self._limit_lock(_END)  # the watch no longer does
        try:
            tell()
        finally:  # also if the report cannot be written
            exit_now(1)

    def _follow_failure(self, why: str) -> None:
        self._show(f"dtrain: rank {self._world.rank} stops: {in_brief(why)}", shown=not torchrun_is_quiet())
        self._tell_tracker(why)
        let_others_read(self._world)
        exit_now(1, f"dtrain: rank {self._world.rank} stops: {in_brief(why)}", shown=not torchrun_is_quiet())

    def _report(self, why: str) -> None:
        line = f"rank {self._world.rank}, step {self._where().step}: {_main_thread()}"
        text = f"the run hangs ({why})"
        mine = why.startswith(f"rank {self._world.rank}: ")
        with suppress(StoreLost):
            self._store.call(lambda store: store.set(f"{_HUNG}/{self._world.rank}", line))
        if mine:
            text = self._summary(text)
            publish_failure(text)
            with suppress(StoreLost):
                self._store.call(lambda store: store.set(_SUMMARY, text))
        if self._folder is not None:
            try:
                self._write_stacks(self._folder, why, line)
            except OSError as error:  # such as a full disk: the process must end all the same
                sys.stderr.write(f"dtrain: stacks could not be written: {error}\n")
        if not mine:
            text = self._wait_for([_SUMMARY], 2 * _REPORT_TIMEOUT)[0] or text
        logger.error(text)
        self._tell_tracker(text)
        let_others_read(self._world)

    def _summary(self, text: str) -> str:
        """Prints where all ranks are, and returns it on one line."""
        ranks = range(self._world.size)
        answers = self._wait_for([f"{_HUNG}/{rank}" for rank in ranks], _REPORT_TIMEOUT)
        absent = [rank for rank in ranks if answers[rank] is None]
        hosts = dict(zip(absent, self._store.hosts(absent), strict=True))
        lines = [answers[rank] or f"rank {rank} on {hosts[rank]}: no answer" for rank in ranks]
        stacks = f" Stacks are in {self._folder}/hang-rank-*.txt." if self._folder is not None else ""
        sys.stderr.write(
            f"dtrain: {text}.{stacks} If the run is only slow, raise "
            "parallel.timeout_step (before the first step: parallel.timeout_start).\n"
            + "".join(f"  {line}\n" for line in lines)
        )
        return f"{text}: {'; '.join(lines)}"

    def _wait_for(self, keys: list[str], seconds: float) -> list[str | None]:
        """The values of ``keys``, as soon as all exist or the time is over; None for keys that do not."""
        values: list[str | None] = [None] * len(keys)
        deadline = time.monotonic() + seconds
        with suppress(StoreLost):
            while None in (values := self._store.read(*keys)) and time.monotonic() < deadline:
                time.sleep(0.05)
        return values

    def _write_stacks(self, folder: Path, why: str, line: str) -> None:
        path = folder / f"hang-rank-{self._world.rank:05d}.txt"
        with TextIOWrapper(open_to_append(path), encoding="utf-8") as file:
            keys = json.dumps(list(self._where().keys))
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n{line}\nlast samples: {keys}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(_flight_records())

    def _show(self, text: str, *, shown: bool) -> None:
        logger.error(text)
        if shown:
            sys.stderr.write(f"{text}\n")

    def _tell_tracker(self, text: str) -> None:
        with suppress(TimeoutError):
            in_time(lambda: self._failed(text), _TRACKER)


def _place_at_start() -> Place:
    """A place that moves unless the main thread is still in the same call of ``torch.distributed``."""
    frame = main_frame()
    module = frame.f_globals.get("__name__", "") if frame is not None else ""
    return Place(0, (), frame if frame is not None and module.startswith(_COLLECTIVES) else object())


def _is_debugged() -> bool:
    """Whether the main thread is at the prompt of a debugger, or was started by one."""
    frame = main_frame()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _main_thread() -> str:
    """The function that the main thread is in, and the functions of dtrain that called it."""
    stack = traceback.extract_stack(main_frame())
    path = [call.name for call in stack if call.filename.startswith(_PACKAGE)]
    at = f"{stack[-1].name} ({Path(stack[-1].filename).name}:{stack[-1].lineno})"
    return f"in {at}, called by {' > '.join(path[-4:])}" if path else f"in {at}"


def _flight_records() -> str:
    """The last collectives of gloo and NCCL as JSON; ``""`` if torch does not record them (``TORCH_FR_BUFFER_SIZE``)."""
    text = ""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is None:  # this build of torch has no NCCL
            continue
        try:
            # NCCL's recorder takes locks that a thread stuck in NCCL may hold.
            record = in_time(lambda dump=dump: dump(True, False), _REPORT_TIMEOUT)  # type: ignore[misc]
        except (TimeoutError, RuntimeError) as error:
            text += f"\n{name}: {type(error).__name__}\n"
            continue
        content = record.decode(errors="replace") if isinstance(record, bytes) else str(record)
        if '"entries":[{' in content:
            text += f"\nflight recorder:\n{content}\n"
    return text
