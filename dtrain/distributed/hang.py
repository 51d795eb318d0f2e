"""A run that is stuck: every rank says where it waits, one of them sums it up, and the job ends.

* A run *moves* as long as what ``where()`` shows of it changes: its step, or the micro-batches that it was handed. A thread
  looks from time to time; the training itself does nothing for it.
* The first rank that has not moved for the time limit *declares* the hang in the store of the process group. The others see
  that there, also the one that is asleep in its own code and would never time out.
* Each rank then writes ``logs/hang-rank-00000.txt``: step, sample keys, the stacks of all threads and, where torch's flight
  recorder is on, its last collectives. The rank that declared it prints one line for each rank.
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
from pathlib import Path
from types import TracebackType

import torch
from torch.distributed import distributed_c10d as c10d

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.ending import end_process
from dtrain.distributed.process_group import failure, let_others_look, publish_failure
from dtrain.distributed.world import World

#: Collectives get so many seconds more than the watch, so that it is first and tells more than their own time-out.
BACKSTOP = 15.0
_HUNG, _SUMMED_UP = "dtrain/hang", "dtrain/hang/summed-up"
_LONGEST_TICK = 5.0
_REPORTS_WITHIN = 3.0  # seconds: a rank that the interpreter is kept from cannot answer
_LETS_GO_WITHIN = 1.0
_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        step: The attempted step that it works on, from 1.
        keys: Keys of the last samples that it was handed.
        moved: Anything that differs from one look to the next unless the rank is stuck.
    """

    step: int
    keys: Sequence[str]
    moved: Hashable


class HangWatch:
    """Watches the training of this process while it is entered.

    Args:
        folder: ``<run.dir>/logs``; it exists.
        world: The ranks; they have a process group.
        cfg: Has the seconds without a move that are a hang: ``timeout_start`` until the first step of this start is done,
            ``timeout_step`` from then on.
        failed: Called with one line before the process ends for a hang.
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
        self._tick = max(0.05, min(_LONGEST_TICK, *(timeout / 20 for timeout in self._timeouts)))
        self._where: Callable[[], Place] | None = None
        self._thread: threading.Thread | None = None
        self._left = threading.Event()
        self._ending = threading.Lock()  # never let go of again
        # Of its own, because a store serves one call at a time and the main thread may hang in one.
        self._store = c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs

    def __enter__(self) -> HangWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join(
                _LETS_GO_WITHIN
            )  # it holds the model by way of the loop, and the store may be gone that it asks

    def follow(self, where: Callable[[], Place]) -> None:
        """Begins to watch what ``where``, called in another thread, shows."""
        self._where = where
        self._thread = threading.Thread(target=self._watch, args=(where,), name="hang watch", daemon=True)
        self._thread.start()

    def declare(self, why: str) -> None:
        """Makes all ranks report and end; does not return.

        Args:
            why: Such as ``nothing has moved for 300 s``.
        """
        with suppress(RuntimeError):  # the machine that keeps the store is gone: this rank reports for itself
            why = self._store.compare_set(_HUNG, "", f"rank {self._world.rank}: {why}").decode()
        self._end(why)

    def _watch(self, where: Callable[[], Place]) -> None:
        place, still = where(), 0.0
        first_step, limit = place.step, self._timeouts[0]
        while not self._left.wait(self._tick):
            # Looks are counted, not seconds: a process that was suspended (Ctrl-Z) has not hung.
            still += self._tick
            now = where()
            if now.moved != place.moved:
                place, still = now, 0.0
                limit = self._timeouts[now.step > first_step]
            with suppress(RuntimeError):
                if self._store.check([_HUNG]):
                    self._end(self._store.get(_HUNG).decode())
            if still > limit and failure() is None:
                self.declare(f"nothing has moved for {limit:g} s")

    def _end(self, why: str) -> None:
        self._ending.acquire()  # two threads may have come to it; the first ends the process
        try:
            self._report(why)
        finally:  # also where nobody reads the report any more
            end_process(1)

    def _report(self, why: str) -> None:
        step = self._where().step if self._where is not None else 0
        line = f"rank {self._world.rank}, step {step}: {_main_thread()}"
        try:
            self._write_stacks(why, line)
        except OSError as error:  # such as a full disk, which is no reason to stay
            sys.stderr.write(f"dtrain: no stacks: {error}\n")
        text = f"the run hangs ({why})"
        with suppress(RuntimeError):
            self._store.set(f"{_HUNG}/{self._world.rank}", line)
            if why.startswith(f"rank {self._world.rank}: "):
                text = self._sum_up(text)
                publish_failure(text)
                self._store.set(_SUMMED_UP, text)
            else:
                self._wait(lambda: self._store.check([_SUMMED_UP]), 2 * _REPORTS_WITHIN)
                text = self._store.get(_SUMMED_UP).decode() if self._store.check([_SUMMED_UP]) else text
        self._failed(text)
        let_others_look(self._world)

    def _write_stacks(self, why: str, line: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            keys = json.dumps(list(self._where().keys if self._where is not None else ()))
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n{line}\nlast samples: {keys}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            if collectives := _flight_record():
                file.write(f"\nflight recorder:\n{collectives}\n")

    def _sum_up(self, text: str) -> str:
        ranks = [f"{_HUNG}/{rank}" for rank in range(self._world.size)]
        self._wait(lambda: self._store.check(ranks), _REPORTS_WITHIN)
        lines = [
            self._store.get(key).decode() if self._store.check([key]) else f"rank {rank}: has not answered"
            for rank, key in enumerate(ranks)
        ]
        sys.stderr.write(
            f"dtrain: {text}. Stacks are in {self._file.parent}/hang-rank-*.txt. If it is only slow, raise "
            "parallel.timeout_step (before the first step timeout_start).\n" + "".join(f"  {line}\n" for line in lines)
        )
        return f"{text}: {'; '.join(lines)}"

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            time.sleep(0.05)


def _main_thread() -> str:
    """What the main thread is in, and which functions of dtrain's have led there."""
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    stack = traceback.extract_stack(frame)
    path = [call.name for call in stack if call.filename.startswith(_PACKAGE)]
    at = f"{stack[-1].name} ({Path(stack[-1].filename).name}:{stack[-1].lineno})"
    return f"in {at}, called by {' > '.join(path[-4:])}" if path else f"in {at}"


def _flight_record() -> str:
    """The last collectives as JSON; ``""`` where torch does not record them (``TORCH_FR_BUFFER_SIZE``)."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    record = dump(True, False) if dump is not None else b""
    text: str = record.decode(errors="replace") if isinstance(record, bytes) else str(record)
    return text if '"entries":[{' in text else ""
