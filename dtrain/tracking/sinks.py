"""Where a run's records go: metrics.jsonl always, a terminal or log always, wandb and TensorBoard if the run asks for it.

* A *sink* takes records, one for each logged step, and *media*: pictures and texts that were written to files.
* Rank 0 has :class:`Sinks`, the other ranks have :class:`NullSinks`, so that the loop reads the same on every rank.
* A sink that fails is reported once and takes no other one down.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dtrain.config.errors import ConfigError
from dtrain.tracking.background import BackgroundSink
from dtrain.tracking.console import ConsoleSink, console_sink
from dtrain.tracking.jsonl import JsonlSink, cut_after
from dtrain.tracking.media import cut_media_after, write_media
from dtrain.tracking.record import Record
from dtrain.tracking.wandb_login import wandb_mode

if TYPE_CHECKING:
    from dtrain.config.schema import TrackerConfig

#: What ``tracker.name`` may be, and the packages that each needs.
TRACKERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "both": ("wandb", "tensorboard"),
}
logger = logging.getLogger("dtrain")


class Sink(Protocol):
    """A place that records go to."""

    def log(self, record: Record) -> None:
        """Takes one record."""

    def media(self, step: int, name: str, path: Path) -> None:
        """Takes a picture (``.png``) or a text (``.txt``)."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Ends with the state that status.json has, and why; no record comes after it."""


class NullSinks:
    """What ranks other than 0 have: takes everything, keeps nothing."""

    def log(self, record: Record) -> None:
        """Does nothing."""

    def media(self, step: int, name: str, content: bytes | str) -> None:
        """Does nothing."""

    def note(self, text: str) -> None:
        """Does nothing."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Does nothing."""


class Sinks:
    """All sinks of a run as one.

    Args:
        media: The folder of pictures and texts.
        console: The sink that a person reads; it also gets the notes.
        others: Further sinks, in the order in which they get a record; they get it before the console.
    """

    def __init__(self, media: Path, console: ConsoleSink, *others: Sink) -> None:
        self._folder = media
        self._console = console
        self._all: tuple[Sink, ...] = (*others, console)
        self._refused: set[str] = set()
        self._finishing = threading.Lock()
        self._finished = False

    def log(self, record: Record) -> None:
        """Hands one record to every sink."""
        for sink in self._all:
            self._or_said(f"a record could not be written to {type(sink).__name__}", partial(sink.log, record))

    def media(self, step: int, name: str, content: bytes | str) -> None:
        """Writes a picture or a text to ``media/<name>/step-000000050.png`` (``.txt``), and hands it to every sink.

        Args:
            step: Attempted steps before it.
            name: What it shows: letters, digits, ``_``, ``-`` and ``.``.
            content: The bytes of a PNG file, or text.

        Raises:
            ValueError: If the name cannot be a folder's, or the bytes are no PNG.
        """
        self._or_said(f"media/{name} could not be written", partial(self._media, step, name, content))

    def note(self, text: str) -> None:
        """Shows a sentence to a person, without disturbing the progress line."""
        try:
            self._console.note(text)
        except OSError:  # nobody reads the output any more; what follows from that is another record's story
            logger.warning("not shown: %s", text)

    def finish(self, state: str, reason: str | None = None) -> None:
        """Ends every sink, at the first call; blocks until they have what they were given, for about a minute at most.

        Any thread may call; a second call waits for the first.

        Args:
            state: ``finished``, ``stopped`` or ``failed``, as in status.json. wandb sends an alert if it is ``failed``.
            reason: Why, for a person; without secrets.
        """
        with self._finishing:
            for sink in () if self._finished else self._all:
                self._or_said(f"{type(sink).__name__} could not end", partial(sink.finish, state, reason))
            self._finished = True

    def _media(self, step: int, name: str, content: bytes | str) -> None:
        path = write_media(self._folder, step, name, content)
        for sink in self._all:
            sink.media(step, name, path)

    def _or_said(self, what: str, function: Callable[[], None]) -> None:
        try:
            function()
        except OSError as error:
            if what not in self._refused:
                self._refused.add(what)
                logger.warning("%s (%s)", what, error)
                self.note(f"WARNING: {what} ({error}). This is said once.")


def tracker_mode(tracker: TrackerConfig) -> str:
    """Where wandb would send this run: ``online``, ``offline`` or ``disabled`` (also for a tracker without wandb).

    Looks at the config, the environment and the user's files only, so every rank can ask and gets the same answer.

    Raises:
        ConfigError: If the tracker or its mode is unknown, its package is missing, or ``online`` is asked for without
            a login.
    """
    if tracker.name not in TRACKERS:
        raise ConfigError(f"tracker.name: got {tracker.name!r}; known are {', '.join(TRACKERS)}.")
    packages = TRACKERS[tracker.name]
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(
                f"tracker={tracker.name}: the package {package} is not installed. Run `pip install {package}`, or use "
                "tracker=none."
            )
    return wandb_mode(tracker.mode) if "wandb" in packages else "disabled"


def build_sinks(
    tracker: TrackerConfig,
    run_dir: Path,
    run_name: str,
    config: dict[str, Any],
    resumed_step: int,
    *,
    evaluation_due: bool = False,
    total_steps: int | None = None,
) -> Sinks:
    """Opens the sinks of a run; rank 0 alone calls it.

    Args:
        tracker: The group ``tracker`` of the config.
        run_dir: The run's directory; it exists.
        run_name: The name that wandb shows.
        config: The resolved config, without secrets, in plain containers.
        resumed_step: Step of the checkpoint that the run continues from; 0 for a start from nothing. Lines of
            metrics.jsonl after it are dropped, and media.
        evaluation_due: Whether the evaluation at that step is still to come: a line of it is dropped, too.
        total_steps: Attempted steps at which the run ends, if known; for the progress line.

    Raises:
        ConfigError: As :func:`tracker_mode`, before anything is written.
        OSError: If the run directory cannot be written.
    """
    mode = tracker_mode(tracker)
    metrics, media = run_dir / "metrics.jsonl", run_dir / "media"
    console = console_sink(total_steps)
    # A run that starts from nothing may log an evaluation at step 0 again, so not even step 0 is kept then.
    kept = resumed_step if resumed_step > 0 else -1
    if dropped := cut_after(metrics, (kept, not evaluation_due)):
        console.note(f"{metrics}: {dropped} lines after step {resumed_step} dropped; what they tell is done again.")
    cut_media_after(media, kept)
    others: list[Sink] = [JsonlSink(metrics)]
    # Both are imported where they are used: they cost a second that a run without them should not pay.
    if mode != "disabled":
        from dtrain.tracking import wandb_sink

        others.append(
            BackgroundSink(
                "wandb",
                lambda: wandb_sink.WandbSink(tracker, mode, run_dir, run_name, config, resumed_step, console.note),
                errors=wandb_sink.ERRORS,
                note=console.note,
                if_unfinished=f"Send the rest later: wandb sync {run_dir / 'wandb'}",
            )
        )
    if "tensorboard" in TRACKERS[tracker.name]:
        from dtrain.tracking.tensorboard_sink import TensorBoardSink

        others.append(
            BackgroundSink(
                "tensorboard",
                lambda: TensorBoardSink(run_dir / "tensorboard", config, resumed_step),
                errors=(OSError, ValueError),
                note=console.note,
            )
        )
    return Sinks(media, console, *others)
