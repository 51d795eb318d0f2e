"""Where a run's records go: metrics.jsonl always, a terminal or log always, wandb if the run asks for it.

* A *sink* takes records, one for each logged step.
* Rank 0 has :class:`Sinks`, the other ranks have :class:`NullSinks`, so that the loop reads the same on every rank.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dtrain.config.errors import ConfigError
from dtrain.tracking.console import ConsoleSink, console_sink
from dtrain.tracking.jsonl import JsonlSink, cut_after
from dtrain.tracking.record import Record
from dtrain.tracking.wandb_login import wandb_mode

if TYPE_CHECKING:
    from dtrain.config.schema import TrackerConfig

TRACKERS = ("none", "wandb")


class Sink(Protocol):
    """A place that records go to."""

    def log(self, record: Record) -> None:
        """Takes one record."""

    def finish(self, state: str) -> None:
        """Ends with the state that status.json has; no record comes after it."""


class NullSinks:
    """What ranks other than 0 have: takes everything, keeps nothing."""

    def log(self, record: Record) -> None:
        """Does nothing."""

    def note(self, text: str) -> None:
        """Does nothing."""

    def finish(self, state: str) -> None:
        """Does nothing."""


class Sinks:
    """All sinks of a run as one.

    Args:
        console: The sink that a person reads; it also gets the notes.
        others: Further sinks, in the order in which they get a record; they get it before the console.
    """

    def __init__(self, console: ConsoleSink, *others: Sink) -> None:
        self._console = console
        self._all: tuple[Sink, ...] = (*others, console)

    def log(self, record: Record) -> None:
        """Hands one record to every sink."""
        for sink in self._all:
            sink.log(record)

    def note(self, text: str) -> None:
        """Shows a sentence to a person, without disturbing the progress line."""
        self._console.note(text)

    def finish(self, state: str) -> None:
        """Ends every sink; blocks until wandb has what it was given, for a minute at most.

        Args:
            state: ``finished``, ``stopped`` or ``failed``, as in status.json.
        """
        for sink in self._all:
            sink.finish(state)


def tracker_mode(tracker: TrackerConfig) -> str:
    """Where wandb would send this run: ``online``, ``offline`` or ``disabled`` (also for ``tracker=none``).

    Looks at the config, the environment and the user's files only, so every rank can ask and gets the same answer.

    Raises:
        ConfigError: If the tracker or its mode is unknown, its package is missing, or ``online`` is asked for without
            a login.
    """
    if tracker.name not in TRACKERS:
        raise ConfigError(f"tracker.name: got {tracker.name!r}; known are {', '.join(TRACKERS)}.")
    if tracker.name == "none":
        return "disabled"
    if find_spec("wandb") is None:
        raise ConfigError("tracker=wandb: the package is not installed. Run `pip install wandb`, or use tracker=none.")
    return wandb_mode(tracker.mode)


def build_sinks(
    tracker: TrackerConfig,
    run_dir: Path,
    run_name: str,
    config: dict[str, Any],
    resumed_step: int,
    *,
    total_steps: int | None = None,
) -> Sinks:
    """Opens the sinks of a run; rank 0 alone calls it.

    Args:
        tracker: The group ``tracker`` of the config.
        run_dir: The run's directory; it exists.
        run_name: The name that wandb shows.
        config: The resolved config, without secrets, in plain containers.
        resumed_step: Step of the checkpoint that the run continues from; 0 for a start from nothing. Lines of
            metrics.jsonl after it are dropped.
        total_steps: Attempted steps at which the run ends, if known; for the progress line.

    Raises:
        ConfigError: As :func:`tracker_mode`, before anything is written.
        OSError: If the run directory cannot be written.
    """
    mode = tracker_mode(tracker)
    metrics = run_dir / "metrics.jsonl"
    console = console_sink(total_steps)
    # A run that starts from nothing may log an evaluation at step 0 again, so not even step 0 is kept then.
    if dropped := cut_after(metrics, resumed_step if resumed_step > 0 else -1):
        console.note(f"{metrics}: {dropped} lines after step {resumed_step} dropped; they are trained again.")
    others: list[Sink] = [JsonlSink(metrics)]
    if mode != "disabled":
        # Imported here because it costs a third of a second that a run without wandb should not pay.
        from dtrain.tracking.wandb_sink import WandbSink

        others.append(WandbSink(tracker, mode, run_dir, run_name, config, note=console.note))
    return Sinks(console, *others)
