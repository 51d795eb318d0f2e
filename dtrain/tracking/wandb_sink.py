"""wandb as a sink: one run identity over all restarts.

* The *run id* is made once and kept in ``wandb/run-id``; every start, offline or not, uses it.
* A *piece* is the directory that wandb makes for one start. A restart trains some steps again; records that the pieces
  (offline) or the server (online) have already are not sent a second time. Those that they lack, since a killed wandb
  loses the newest, are sent from metrics.jsonl. Records are told apart by their marks, since the evaluation at a step may
  come in a later start than the step.

It may hang and raise: ``BackgroundSink`` keeps that from the training.
"""

from __future__ import annotations

import html
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wandb

from dtrain.tracking.atomic import replacing
from dtrain.tracking.jsonl import read_records
from dtrain.tracking.provenance import provenance
from dtrain.tracking.record import Mark, Record, mark
from dtrain.tracking.wandb_log import last_mark

if TYPE_CHECKING:
    from dtrain.config.schema import TrackerConfig

#: What this sink may raise.
ERRORS = (wandb.Error, OSError, ValueError)
#: Seconds that wandb may take to reach its server, and to send what is left at the end.
TIMEOUT = 30


class WandbSink:
    """A run of wandb.

    Args:
        tracker: The group ``tracker`` of the config.
        mode: ``online`` or ``offline``.
        run_dir: The run's directory; wandb writes to ``wandb/`` in it.
        run_name: The name that wandb shows.
        config: The resolved config, without secrets, in plain containers.
        resumed_step: The last step that metrics.jsonl has from earlier starts.
        note: Shows a sentence to a person.

    Attributes:
        run_id: The run's identity, eight hexadecimal digits.

    Raises:
        wandb.Error, OSError, ValueError: Here and later, if wandb cannot go on.
    """

    def __init__(
        self,
        tracker: TrackerConfig,
        mode: str,
        run_dir: Path,
        run_name: str,
        config: dict[str, Any],
        resumed_step: int,
        note: Callable[[str], None],
    ) -> None:
        directory = run_dir / "wandb"
        self.run_id = _run_id(directory)
        pieces = list(directory.glob("*run-*/*.wandb"))  # and not that of this start
        self._run = wandb.init(
            id=self.run_id,
            name=run_name,
            dir=str(run_dir),
            mode=mode,  # type: ignore[arg-type]
            resume="allow",
            entity=tracker.entity,
            project=tracker.project,
            tags=list(tracker.tags),
            config=config | {"provenance": provenance(Path.cwd())},
            settings=_settings(),
        )
        self._kept = _kept(pieces, mode, self._run.starting_step - 1)
        for record in read_records(run_dir / "metrics.jsonl"):
            if record["step"] <= resumed_step:
                self.log(record)
        place = self._run.url if mode == "online" else f"offline in {directory}"
        note(f"wandb: {place}, run id {self.run_id}")

    def log(self, record: Record) -> None:
        """Sends one record, if wandb does not have it."""
        if mark(record) > self._kept:
            self._send(dict(record), int(record["step"]))

    def media(self, step: int, name: str, path: Path) -> None:
        """Sends a picture or a text of an evaluation, if wandb does not have that."""
        if (step, True) > self._kept:
            text = path.suffix == ".txt"
            shown = wandb.Html(_page(path.read_text(encoding="utf-8"))) if text else wandb.Image(str(path))
            self._send({f"media/{name}": shown}, step)

    def finish(self, state: str, reason: str | None = None) -> None:
        """Waits until wandb has sent or stored everything; a failure is an alert."""
        if state == "failed":
            self._run.alert(f"{self._run.name} failed", reason or "for an unknown reason", level="ERROR")
        self._run.finish(exit_code=1 if state == "failed" else 0)
        # Offline, finish returns before the file is written; the end of wandb's own process is the proof that it is.
        wandb.teardown()

    def _send(self, values: dict[str, Any], step: int) -> None:
        # wandb gathers what has the same step in one row, and needs no other axis than the step itself. A server takes no
        # row before the one that a resumed run starts with: there a late evaluation stands one step further.
        self._run.log(values, step=max(step, self._run.starting_step))


def _run_id(directory: Path) -> str:
    """The id kept in ``directory``, made now if there is none."""
    directory.mkdir(exist_ok=True)
    path = directory / "run-id"
    if not path.exists():
        with replacing(path) as handle:
            handle.write(secrets.token_hex(4).encode() + b"\n")
    return path.read_text(encoding="utf-8").strip()


def _kept(pieces: list[Path], mode: str, on_server: int) -> Mark:
    """The newest record that wandb has.

    Args:
        pieces: The files of earlier starts.
        mode: Of this start.
        on_server: Online, the last step that the server has: the online pieces may hold a little more than they could send.
    """
    found = {(on_server, False)}
    for piece in pieces:
        until = on_server if mode == "online" and not piece.parent.name.startswith("offline-") else math.inf
        found.add(last_mark(piece, until) or (-1, False))
    return max(found)


def _page(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _settings() -> wandb.Settings:
    settings = wandb.Settings(
        console="off",  # capture would wrap the streams under the progress line; the run directory has the logs anyway
        silent=True,
        init_timeout=TIMEOUT,
        x_disable_meta=True,  # it holds the command line, and with that any secret of an override
    )
    if hasattr(settings, "finish_timeout"):  # wandb >= 0.31; older ones may wait longer at the end
        settings.finish_timeout = TIMEOUT
    return settings
