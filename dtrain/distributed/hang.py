"""Detects a run that makes no progress: every rank reports where it waits, and the job ends.

* A rank *moves* as long as its ``Place`` changes: its step, or the micro-batches that it received. A thread polls the
  place; the training thread does nothing for it.
* The first rank that has not moved for the time limit *declares* the hang in the store of the process group. The others
  read it there, also a rank that sleeps in its own code and would never time out in a collective.
* Each rank then writes ``logs/hang-rank-00000.txt``: its step, sample keys, the stacks of all threads and, where
  torch's flight recorder is on, its last collectives. The declaring rank prints one line for each rank.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

import torch
from torch.distributed import distributed_c10d as c10d

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.atomic import open_to_append
from dtrain.distributed.process_exit import exit_now
from dtrain.distributed.process_group import let_others_read, publish_failure, published_failure
from dtrain.distributed.world import World

#: Seconds by which the time-out of collectives exceeds the watch's limit: the watch comes first, because its report names
#: where each rank waits.
BACKSTOP = 15.0
_HUNG, _SUMMARY = "dtrain/hang", "dtrain/hang/summary"
# Seconds:
_LONGEST_POLL = 5.0
_REPORT_TIMEOUT = 3.0  # a rank whose C code holds the interpreter lock cannot answer
_JOIN_TIMEOUT = 1.0
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Place:
    """How far a rank is.

    Attributes:
        step: The attempted step that it works on, from 1.
        keys: Keys of the last samples that it received.
        moved: A value that changes whenever the rank makes progress.
    """

    step: int
    keys: Sequence[str]
    moved: Hashable


class HangWatch:
    """Watches the training of this process, inside its ``with`` block.

    Args:
        folder: ``<run.dir>/logs``; it exists.
        world: The ranks; the process group exists.
        cfg: ``timeout_start`` and ``timeout_step`` limit the seconds without progress until, and after, the first step.
        failed: Called with one line before the process ends because of a hang.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        cfg: ParallelConfig,
        failed: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._file = folder / f"hang-rank-{world.rank:05d}.txt"
        self._world = world
        self._timeouts = cfg.timeout_start, cfg.timeout_step
        self._failed = failed
        self._poll = max(0.05, min(_LONGEST_POLL, *(timeout / 20 for timeout in self._timeouts)))
        self._where: Callable[[], Place] | None = None
        self._thread: threading.Thread | None = None
        self._left = threading.Event()
        self._ending = threading.Lock()  # never released
        # A connection of its own: a store serves one call at a time, and the main thread may hang in one.
        self._store = c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs

    def __enter__(self) -> HangWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        if self._thread is not None:
            # The thread refers to the model through the loop, and to a store that may be gone.
            self._thread.join(_JOIN_TIMEOUT)

    def follow(self, where: Callable[[], Place]) -> None:
        """Starts the watch.

        Args:
            where: Returns the current place; called in another thread.
        """
        self._where = where
        self._thread = threading.Thread(target=self._watch, args=(where,), name="hang watch", daemon=True)
        self._thread.start()

    def declare(self, why: str) -> None:
        """Makes all ranks write their reports and exit. Does not return.

        Args:
            why: The reason, such as ``nothing has moved for 300 s``.
        """
        with suppress(RuntimeError):  # the machine with the store is gone: this rank reports alone
            why = self._store.compare_set(_HUNG, "", f"rank {self._world.rank}: {why}").decode()
        self._end(why)

    def _watch(self, where: Callable[[], Place]) -> None:
        place, still = where(), 0.0
        first_step, limit = place.step, self._timeouts[0]
        while not self._left.wait(self._poll):
            # Polls are counted, not seconds: a process that was suspended (Ctrl-Z) has not hung.
            still += self._poll
            now = where()
            if now.moved != place.moved:
                place, still = now, 0.0
                limit = self._timeouts[now.step > first_step]
            with suppress(RuntimeError):
                if self._store.check([_HUNG]):
                    self._end(self._store.get(_HUNG).decode())
            if still > limit and published_failure() is None:
                self.declare(f"nothing has moved for {limit:g} s")

    def _end(self, why: str) -> None:
        self._ending.acquire()  # two threads may declare a hang; the first ends the process
        try:
            self._report(why)
        finally:  # also if the report cannot be written
            exit_now(1)

    def _report(self, why: str) -> None:
        step = self._where().step if self._where is not None else 0
        line = f"rank {self._world.rank}, step {step}: {_main_thread()}"
        try:
            self._write_stacks(why, line)
        except OSError as error:  # such as a full disk: the process must end all the same
            sys.stderr.write(f"dtrain: stacks could not be written: {error}\n")
        text = f"the run hangs ({why})"
        with suppress(RuntimeError):
            self._store.set(f"{_HUNG}/{self._world.rank}", line)
            if why.startswith(f"rank {self._world.rank}: "):
                text = self._summary(text)
                publish_failure(text)
                self._store.set(_SUMMARY, text)
            else:
                self._wait(lambda: self._store.check([_SUMMARY]), 2 * _REPORT_TIMEOUT)
                text = self._store.get(_SUMMARY).decode() if self._store.check([_SUMMARY]) else text
        self._failed(text)
        let_others_read(self._world)

    def _write_stacks(self, why: str, line: str) -> None:
        with TextIOWrapper(open_to_append(self._file), encoding="utf-8") as file:
            keys = json.dumps(list(self._where().keys if self._where is not None else ()))
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n{line}\nlast samples: {keys}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            if collectives := _flight_record():
                file.write(f"\nflight recorder:\n{collectives}\n")

    def _summary(self, text: str) -> str:
        ranks = [f"{_HUNG}/{rank}" for rank in range(self._world.size)]
        self._wait(lambda: self._store.check(ranks), _REPORT_TIMEOUT)
        lines = [
            self._store.get(key).decode() if self._store.check([key]) else f"rank {rank}: no answer"
            for rank, key in enumerate(ranks)
        ]
        sys.stderr.write(
            f"dtrain: {text}. Stacks are in {self._file.parent}/hang-rank-*.txt. If the run is only slow, raise "
            "parallel.timeout_step (before the first step: parallel.timeout_start).\n"
            + "".join(f"  {line}\n" for line in lines)
        )
        return f"{text}: {'; '.join(lines)}"

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            time.sleep(0.05)


def _main_thread() -> str:
    """The function that the main thread is in, and the functions of dtrain that called it."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    stack = traceback.extract_stack(frame)
    path = [call.name for call in stack if call.filename.startswith(_PACKAGE)]
    at = f"{stack[-1].name} ({Path(stack[-1].filename).name}:{stack[-1].lineno})"
    return f"in {at}, called by {' > '.join(path[-4:])}" if path else f"in {at}"


def _flight_record() -> str:
    """The last collectives as JSON; ``""`` if torch does not record them (``TORCH_FR_BUFFER_SIZE``)."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    record = dump(True, False) if dump is not None else b""
    text: str = record.decode(errors="replace") if isinstance(record, bytes) else str(record)
    return text if '"entries":[{' in text else ""
