"""Trackio as a sink: one Trackio run over all restarts, with each record once.

* Trackio resumes a run by its name, so each run directory has its own name: the run's name and four random hexadecimal
  digits, kept in ``<run.dir>/trackio/run-name``.
* The newest record that Trackio has is read from its database; a server only reports its step. Later ones are sent from
  metrics.jsonl and the media folder; a step that a resumed run repeats is not sent again.
* Trackio writes and sends in its own thread, which reports errors as warnings of Python.

The sink may block and raise; ``BackgroundSink`` keeps that away from the training.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trackio
from trackio.sqlite_storage import SQLiteStorage

from dtrain.files import replace_file
from dtrain.runs.records import Mark, MediaFile, Record, finite_metrics, has_evaluation, mark, send_earlier
from dtrain.tracking.provenance import provenance

if TYPE_CHECKING:
    from dtrain.config.schema import TrackerConfig

logger = logging.getLogger("dtrain")


class TrackioSink:
    """A run of Trackio.

    Args:
        tracker: The group ``tracker`` of the config.
        run_dir: The run's directory.
        run_name: Begins the name that Trackio shows.
        config: The resolved config, without secrets, in plain containers.
        resumed_step: The last step of earlier starts in metrics.jsonl.
        note: Shows a sentence to a person.
        media: The media of earlier starts.

    Attributes:
        name: The name of the run in Trackio.

    Raises:
        OSError, ValueError, RuntimeError: If Trackio cannot continue.
    """

    def __init__(
        self,
        tracker: TrackerConfig,
        run_dir: Path,
        run_name: str,
        config: dict[str, Any],
        resumed_step: int,
        note: Callable[[str], None],
        media: Sequence[MediaFile] = (),
    ) -> None:
        self.name = _kept_name(run_dir / "trackio" / "run-name", run_name)
        for module in (trackio, trackio.run, trackio.utils):  # their prints would disturb the progress line
            module.print = lambda *words, **_: logger.info(" ".join(map(str, words)))
        self._run = trackio.init(
            project=tracker.project,
            name=self.name,
            config=config | {"provenance": provenance(Path.cwd())},
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # dtrain's metrics include the memory
            auto_log_cpu=False,
        )
        self._sent = self._newest()
        place = self._run.url or f"`trackio show --project {tracker.project}`"
        note(f"trackio: {place}, run {self.name}")
        send_earlier(self, run_dir / "metrics.jsonl", resumed_step, media)

    def log(self, record: Record) -> None:
        """Sends the finite values of one record, unless Trackio has it already."""
        if mark(record) > self._sent:
            self._run.log(finite_metrics(record), step=int(record["step"]))

    def media(self, step: int, name: str, path: Path) -> None:
        """Sends a picture or a text, unless Trackio has it already."""
        if (step, True) > self._sent:
            text = path.suffix == ".txt"
            shown = (
                trackio.Markdown(_code_block(path.read_text(encoding="utf-8"))) if text else trackio.Image(str(path))
            )
            self._run.log({f"media/{name}": shown}, step=step)

    def alert(self, text: str) -> None:
        """Sends an alert."""
        self._alert("needs attention", text, trackio.AlertLevel.WARN)

    def finish(self, state: str, reason: str | None = None) -> None:
        """Waits until Trackio has stored everything, for about half a minute at most. A failure is an alert."""
        if state == "failed":
            self._alert("failed", reason or "for an unknown reason", trackio.AlertLevel.ERROR)
        self._run.finish()

    def _alert(self, what: str, text: str, level: trackio.AlertLevel) -> None:
        self._run.alert(f"{self.name} {what}", text, level=level)

    def _newest(self) -> Mark:
        """The mark of the newest record that Trackio has."""
        if self._run.url is not None:  # a server only reports the step
            return self._run._next_step - 1, False
        rows = SQLiteStorage.get_logs(self._run.project, self.name, run_id=self._run.id)
        return max(((int(row["step"]), has_evaluation(row)) for row in rows), default=(-1, False))


def _kept_name(path: Path, run_name: str) -> str:
    """The name in ``path``, made if there is none."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with replace_file(path) as file:
            file.write(f"{run_name}-{secrets.token_hex(2)}\n".encode())
    return path.read_text(encoding="utf-8").strip()


def _code_block(text: str) -> str:
    """A text that Markdown shows unchanged."""
    return "".join(f"    {line}\n" for line in text.splitlines())
