"""wandb as a sink: one run identity over all restarts, and no way to hold up or stop the training.

* A *thread* owns wandb from its start to its end. The loop only puts records into a queue, so a server that does not
  answer costs it a few seconds at the start and nothing later, and an error that wandb raises ends this thread alone.
* The *run id* is made once and kept in ``wandb/run-id``; every start, offline or not, uses it.
* A *piece* is the directory that wandb makes for one start. A restart trains some steps again; those that the pieces
  (offline) or the server (online) have already are not sent a second time.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wandb

from dtrain.tracking.atomic import replacing
from dtrain.tracking.record import Record
from dtrain.tracking.wandb_log import last_step

if TYPE_CHECKING:
    from dtrain.config.schema import TrackerConfig

#: Seconds that wandb may take to reach its server, and to send what is left at the end.
TIMEOUT = 30
#: Seconds of these that the training waits for at its start.
START = 5
#: Records that may wait for a slow wandb; more are dropped rather than kept in memory.
WAITING = 10_000


class WandbSink:
    """Sends records to wandb from a thread.

    Args:
        tracker: The group ``tracker`` of the config.
        mode: ``online`` or ``offline``.
        run_dir: The run's directory; wandb writes to ``wandb/`` in it.
        run_name: The name that wandb shows.
        config: The resolved config, without secrets, in plain containers.
        note: Shows a sentence to a person; called from the thread.

    Attributes:
        run_id: The run's identity, eight hexadecimal digits.
    """

    def __init__(
        self,
        tracker: TrackerConfig,
        mode: str,
        run_dir: Path,
        run_name: str,
        config: dict[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self.run_id = _run_id(run_dir / "wandb")
        self._mode = mode
        self._directory = run_dir / "wandb"
        self._note = note
        self._init: dict[str, Any] = {
            "id": self.run_id,
            "name": run_name,
            "dir": str(run_dir),
            "mode": mode,
            "resume": "allow",
            "entity": tracker.entity,
            "project": tracker.project,
            "tags": list(tracker.tags),
            "config": config,
        }
        self._queue: queue.Queue[Record | str] = queue.Queue(WAITING)
        self._full = False
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        # wandb starts processes of its own. A loader worker that is forked in that moment inherits the pipes on which
        # Python waits for them and keeps them open, so wandb would hang until the loader ends (seen). By now it has
        # started them and is done, or waits for its server.
        self._started.wait(START)

    def log(self, record: Record) -> None:
        """Leaves one record for the thread; returns at once, whatever wandb does."""
        self._put(record)

    def finish(self, state: str) -> None:
        """Waits until wandb has sent or stored everything, for about a minute at most."""
        self._put(state)
        self._thread.join(2 * TIMEOUT + 5)
        if self._thread.is_alive():
            self._note(f"wandb: not done in time. Send the rest later: wandb sync {self._directory}")

    def _put(self, item: Record | str) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            if not self._full:
                self._note(f"wandb: {WAITING} records wait to be sent; the next are left out. metrics.jsonl has all.")
            self._full = True

    def _work(self) -> None:
        try:
            kept = _kept_step(self._directory, self._mode)
            run = wandb.init(**self._init, settings=_settings())
            # A resumed online run starts after the last step that the server has.
            kept = max(kept, run.starting_step - 1)
            place = run.url if self._mode == "online" else f"offline in {self._directory}"
            self._note(f"wandb: {place}, run id {self.run_id}")
            self._started.set()
            while not isinstance(item := self._queue.get(), str):
                if item["step"] > kept:
                    # wandb gathers what has the same step in one row, and needs no other axis than the step itself.
                    run.log(dict(item), step=int(item["step"]))
            run.finish(exit_code=1 if item == "failed" else 0)
            # Offline, finish returns before the file is written; the end of wandb's own process is the proof that it is.
            wandb.teardown()
        except (wandb.Error, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            self._note(f"wandb: {reason}. The run goes on without it; metrics.jsonl has everything.")
        finally:
            self._started.set()


def _run_id(directory: Path) -> str:
    """The id kept in ``directory``, made now if there is none."""
    directory.mkdir(exist_ok=True)
    path = directory / "run-id"
    if not path.exists():
        with replacing(path) as handle:
            handle.write(secrets.token_hex(4).encode() + b"\n")
    return path.read_text(encoding="utf-8").strip()


def _kept_step(directory: Path, mode: str) -> int:
    """The newest step that the pieces of earlier starts hold; -1 if none does.

    Online, the server says what it has of the online pieces: they may hold a little more than they could send.
    """
    pieces = directory.glob("offline-run-*/*.wandb" if mode == "online" else "*run-*/*.wandb")
    return max((step for piece in pieces if (step := last_step(piece)) is not None), default=-1)


def _settings() -> wandb.Settings:
    # Console capture would wrap the streams under the progress line; the run directory has the logs anyway.
    settings = wandb.Settings(console="off", silent=True, init_timeout=TIMEOUT)
    if hasattr(settings, "finish_timeout"):  # wandb >= 0.31; older ones may wait longer at the end
        settings.finish_timeout = TIMEOUT
    return settings
