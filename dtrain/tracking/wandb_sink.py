"""wandb as a sink: one wandb run over all restarts, with each record once.

* The *run id* is generated once and kept in ``wandb/run-id``; every start uses it, online or offline.
* wandb keeps each start in a *piece*: a directory ``wandb/run-*`` or ``wandb/offline-run-*``. A resumed run repeats
  some steps. Records that wandb already has are not sent again; those that it lacks are sent from metrics.jsonl and the
  media folder.
* The newest record that wandb has: online, the server reports its step. Offline, ``wandb/sent.json`` has it for the
  pieces that were closed. A killed wandb loses its newest records, so an offline piece that was not closed is moved to
  ``wandb/killed/`` and its records are sent again.

The sink may block and raise; ``BackgroundSink`` keeps that away from the training.
"""

from __future__ import annotations

import html
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wandb

from dtrain.files import replace_file
from dtrain.runs.records import Mark, Record, mark, send_earlier
from dtrain.tracking.provenance import provenance
from dtrain.tracking.wandb_artifacts import checkpoint_artifact

if TYPE_CHECKING:
    from dtrain.config.schema import TrackerConfig
    from dtrain.tracking.wandb_artifacts import StagedCheckpoint

# Of wandb's own statistics; it logs "shutdown can only be called once" at the end of the process.
logging.getLogger("opentelemetry.sdk.metrics").setLevel(logging.ERROR)

_ERRORS = (wandb.Error, OSError, ValueError)
#: Seconds for wandb to reach its server, and to send the rest at the end.
TIMEOUT = 30
_NOTHING: Mark = (-1, False)


class WandbSink:
    """A run of wandb.

    Args:
        tracker: The group ``tracker`` of the config.
        mode: ``online`` or ``offline``.
        run_dir: The run's directory; wandb writes to ``wandb/`` in it.
        run_name: The name that wandb shows.
        config: The resolved config, without secrets, in plain containers.
        resumed_step: The last step of earlier starts in metrics.jsonl.
        note: Shows a sentence to a person.
        media: Step, name and file of the media of earlier starts.

    Attributes:
        run_id: The run's identity.

    Raises:
        wandb.Error, OSError, ValueError: Here and in all methods, if wandb cannot continue.
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
        media: Sequence[tuple[int, str, Path]] = (),
    ) -> None:
        self._note, self._online = note, mode == "online"
        self._folder = run_dir / "wandb"
        self._folder.mkdir(exist_ok=True)
        self.run_id = _run_id(self._folder)
        sent, closed = _read_sent(self._folder)
        for piece in self._folder.glob("offline-run-*"):
            if piece.name not in closed and not list(piece.glob("*.synced")):
                _set_aside(piece)
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
        self._closed = closed
        self._sent = self._newest = max(sent, (self._run.starting_step - 1, False))
        send_earlier(self, run_dir / "metrics.jsonl", resumed_step, media)
        place = self._run.url if mode == "online" else f"offline in {self._folder}"
        note(f"wandb: {place}, run id {self.run_id}")

    def log(self, record: Record) -> None:
        """Sends one record, unless wandb has it already."""
        self._send(mark(record), dict(record))

    def media(self, step: int, name: str, path: Path) -> None:
        """Sends a picture or a text of an evaluation, unless wandb has it already."""
        if (step, True) > self._sent:
            text = path.suffix == ".txt"
            shown = wandb.Html(_page(path.read_text(encoding="utf-8"))) if text else wandb.Image(str(path))
            self._send((step, True), {f"media/{name}": shown})

    def checkpoint(self, staged: StagedCheckpoint) -> None:
        """Uploads a checkpoint as a version of the artifact ``checkpoint-<run id>``. An error does not end the sink."""
        try:
            artifact, aliases = checkpoint_artifact(self.run_id, staged)
            self._run.log_artifact(artifact, aliases=aliases)
        except _ERRORS as error:
            self._note(f"wandb: the checkpoint of step {staged.step} could not be uploaded ({error})")

    def alert(self, text: str) -> None:
        """Sends an alert."""
        self._run.alert(f"{self._run.name} needs attention", text, level="WARN", wait_duration=1)  # default: 60 s

    def finish(self, state: str, reason: str | None = None) -> None:
        """Waits until wandb has sent or stored everything. A failure is an alert."""
        if state == "failed":
            self._run.alert(f"{self._run.name} failed", reason or "for an unknown reason", level="ERROR")
        piece = Path(self._run.dir).parent.name
        self._run.finish(exit_code=1 if state == "failed" else 0)
        # Offline, finish returns before the file is written; it is complete when wandb's own process has ended.
        wandb.teardown()
        if self._online:  # offline, `wandb sync` uploads them
            shutil.rmtree(self._folder / "checkpoints", ignore_errors=True)
        with replace_file(self._folder / "sent.json") as file:
            file.write(json.dumps({"newest": self._newest, "closed": [*self._closed, piece]}).encode())

    def _send(self, at: Mark, values: dict[str, Any]) -> None:
        if at <= self._sent:
            return
        # wandb merges values of the same step into one row. A server accepts no row before the first step of a resumed
        # run, so a late evaluation is sent with the next step.
        self._run.log(values, step=max(at[0], self._run.starting_step))
        self._newest = max(self._newest, at)


def tear_down() -> None:
    """Ends the connection to wandb's process after an error. Otherwise wandb does so at the end of this process, and prints a
    traceback if its own process is gone."""
    with suppress(Exception):
        wandb.teardown(exit_code=1)


def _run_id(folder: Path) -> str:
    """The id in ``folder``; else the id that the agent of a sweep gave this process; else a generated one."""
    path = folder / "run-id"
    if not path.exists():
        of_sweep = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
        with replace_file(path) as file:
            file.write((of_sweep or secrets.token_hex(4)).encode() + b"\n")
    return path.read_text(encoding="utf-8").strip()


def _read_sent(folder: Path) -> tuple[Mark, list[str]]:
    """The newest record of all closed pieces, and their names."""
    try:
        content = json.loads((folder / "sent.json").read_text(encoding="utf-8"))
        step, is_evaluation = content["newest"]
        return (int(step), bool(is_evaluation)), [str(name) for name in content["closed"]]
    except FileNotFoundError:
        return _NOTHING, []


def _set_aside(piece: Path) -> None:
    """Moves the piece of a killed start to where ``wandb sync`` does not look; nothing is deleted."""
    folder = piece.parent / "killed"
    folder.mkdir(exist_ok=True)
    piece.rename(folder / piece.name)


def _page(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _settings() -> wandb.Settings:
    settings = wandb.Settings(
        console="off",  # capturing would wrap the streams of the progress line; the run directory has the logs anyway
        silent=True,
        init_timeout=TIMEOUT,
        x_disable_meta=True,  # it contains the command line, and with that any secret of an override
    )
    if hasattr(settings, "finish_timeout"):  # wandb >= 0.31; older ones may wait longer at the end
        settings.finish_timeout = TIMEOUT
    return settings
