"""Destinations of a run's records: metrics.jsonl and the console always, and the trackers that the config names.

* A *sink* takes records, one per logged step, and *media*: pictures and texts that were written to files.
* Rank 0 has ``Sinks``; the other ranks have ``NullSinks``, which do nothing.
* Trackers (wandb, TensorBoard, MLflow, Trackio) are *slow sinks*: each runs in its own thread, and the training only puts
  records into a bounded queue. An error ends the thread, not the run.
* A sink that fails is reported once and does not affect the others.
"""

from __future__ import annotations

import configparser
import logging
import netrc
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from dtrain.errors import ConfigError, shortened, without_secrets_in
from dtrain.extras import install_command
from dtrain.files import replace_file
from dtrain.runs.records import JsonlSink, MediaFile, Record, Sink, cut_after
from dtrain.tracking.console_sink import ConsoleSink, console_sink

if TYPE_CHECKING:
    from dtrain.config.schema import TrackerConfig
    from dtrain.tracking.wandb_artifacts import CheckpointArtifacts

#: The trackers, and the command that installs the package of each.
TRACKERS = {
    "wandb": "pip install wandb",
    **{name: install_command(name) for name in ("tensorboard", "mlflow", "trackio")},
}
#: Further values of ``tracker.name``.
_ALIASES: dict[str, tuple[str, ...]] = {"none": (), "both": ("wandb", "tensorboard")}
#: Seconds to wait for a slow sink to open at the start; to end; and to end after a failure, when other processes are
#: waiting.
OPEN_TIMEOUT, FINISH_TIMEOUT, FINISH_TIMEOUT_AFTER_FAILURE = 5.0, 65.0, 10.0
#: Largest number of records in the queue of a slow sink; further ones are dropped. metrics.jsonl has them.
QUEUE_SIZE = 10_000
_LONGEST_REASON = 500  # characters of an error on the console; the log file has all of it
ARTIFACTS = ("none", "best", "last", "all")
WANDB_MODES = ("online", "offline", "disabled")
_WANDB_SYNONYMS = {"run": "online", "dryrun": "offline"}  # that wandb accepts in WANDB_MODE
_WANDB_SERVER = "https://api.wandb.ai"
_PNG = b"\x89PNG\r\n\x1a\n"
_MEDIA_NAME = re.compile(r"\w[\w.-]*")
_MEDIA_FILE = re.compile(r"step-(\d+)\.(png|txt)")
logger = logging.getLogger("dtrain")


class NullSinks:
    """The sinks of ranks other than 0: does nothing."""

    def log(self, record: Record) -> None:
        """Does nothing."""

    def media(self, step: int, name: str, content: bytes | str) -> None:
        """Does nothing."""

    def note(self, text: str) -> None:
        """Does nothing."""

    def checkpoint(self, path: Path, step: int, is_best: bool) -> None:
        """Does nothing."""

    def alert(self, text: str) -> None:
        """Does nothing."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Does nothing."""


class Sinks:
    """All sinks of a run as one.

    Args:
        media: The folder of pictures and texts.
        console: The sink for a person; it also shows notes.
        others: Further sinks. They get a record in this order, before the console does.
        artifacts: Takes checkpoints; None if no tracker gets them.
    """

    def __init__(
        self, media: Path, console: ConsoleSink, *others: Sink, artifacts: CheckpointArtifacts | None = None
    ) -> None:
        self._folder = media
        self._console = console
        self._others = others
        self._artifacts = artifacts
        self._all: tuple[Sink | ConsoleSink, ...] = (*others, console)
        self._reported: set[str] = set()
        self._finishing = threading.Lock()
        self._finished = False

    def log(self, record: Record) -> None:
        """Passes one record to every sink."""
        for sink in self._all:
            self._report_errors(f"a record could not be written to {type(sink).__name__}", partial(sink.log, record))

    def media(self, step: int, name: str, content: bytes | str) -> None:
        """Writes a picture or a text to ``media/<name>/step-000000050.png`` (``.txt``), and passes it to the sinks.

        Raises:
            ValueError: As ``write_media``.
        """
        self._report_errors(f"media/{name} could not be written", partial(self._media, step, name, content))

    def note(self, text: str) -> None:
        """Shows a sentence on the console, without disturbing the progress line."""
        text = without_secrets_in(text)
        try:
            self._console.note(text)
        except OSError:  # the reader of the output is gone
            logger.warning("not shown: %s", text)

    def checkpoint(self, path: Path, step: int, is_best: bool) -> None:
        """Passes a checkpoint that was written to wandb, if ``tracker.artifacts`` is set. Any thread may call.

        Args:
            path: Its folder.
            step: Attempted steps so far.
            is_best: Whether it has the best value of ``checkpoint.best``.
        """
        if self._artifacts is not None:
            saved = partial(self._artifacts.saved, path, step, is_best)
            self._report_errors("a checkpoint could not be passed to wandb", saved)

    def alert(self, text: str) -> None:
        """Passes a warning to the sinks besides the console, of which wandb and Trackio send it to the user."""
        text = without_secrets_in(text)
        for sink in self._others:
            self._report_errors(f"{type(sink).__name__} could not send an alert", partial(sink.alert, text))

    def finish(self, state: str, reason: str | None = None) -> None:
        """Ends every sink, at the first call. Blocks until they have written everything, for about a minute at most.

        Any thread may call; a second call waits for the first.

        Args:
            state: ``finished``, ``stopped`` or ``failed``, as in status.json. For ``failed`` wandb sends an alert.
            reason: Why, for a person. Secrets in it are hidden.
        """
        reason = None if reason is None else without_secrets_in(reason)
        with self._finishing:
            if not self._finished:
                if self._artifacts is not None:
                    self._artifacts.finish()
                # At the same time: the process must not wait a minute for each tracker.
                ends = [threading.Thread(target=self._end, args=(sink, state, reason)) for sink in self._others]
                for end in ends:
                    end.start()
                for end in ends:
                    end.join()
                self._end(self._console, state, reason)
            self._finished = True

    def _end(self, sink: Sink | ConsoleSink, state: str, reason: str | None) -> None:
        self._report_errors(f"{type(sink).__name__} could not end", partial(sink.finish, state, reason))

    def _media(self, step: int, name: str, content: bytes | str) -> None:
        path = write_media(self._folder, step, name, content)
        for sink in self._others:
            sink.media(step, name, path)

    def _report_errors(self, problem: str, function: Callable[[], None]) -> None:
        try:
            function()
        except OSError as error:
            if problem not in self._reported:
                self._reported.add(problem)
                logger.warning("%s (%s)", problem, error)
                self.note(f"WARNING: {problem} ({error}). Further errors of this kind are not shown.")


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
    """Opens the sinks of a run; only rank 0 calls it.

    Args:
        tracker: The group ``tracker`` of the config.
        run_dir: The run's directory; it exists.
        run_name: The name that trackers show.
        config: The resolved config, without secrets, in plain containers.
        resumed_step: Step of the checkpoint that the run resumes from; 0 for a new start. Records and media after it are
            moved to ``cut-metrics.jsonl`` and ``cut-media/``.
        evaluation_due: Whether the evaluation at that step will run again; then its record is moved, too.
        total_steps: Attempted steps at which the run ends, for the progress line; None if unknown.

    Raises:
        ConfigError: As ``tracker_mode``, before anything is written.
        OSError: If the run directory cannot be written.
    """
    mode = tracker_mode(tracker, run_dir)
    metrics, media = run_dir / "metrics.jsonl", run_dir / "media"
    console = console_sink(total_steps)
    # A new start may log an evaluation at step 0 again, so a record of step 0 is cut, too.
    kept = resumed_step if resumed_step > 0 else -1
    if cut := cut_after(metrics, (kept, not evaluation_due)):
        console.note(
            f"{metrics}: {cut} lines after step {resumed_step} moved to cut-metrics.jsonl; the steps are repeated."
        )
    cut_media_after(media, kept)
    others: list[Sink] = [JsonlSink(metrics)]
    earlier = media_files(media)

    def note(text: str) -> None:
        console.note(without_secrets_in(text))

    def add(
        name: str, open: Callable[[], Sink], if_unfinished: str = "", on_error: Callable[[], None] | None = None
    ) -> BackgroundSink:
        sink = BackgroundSink(name, open, note=note, if_unfinished=if_unfinished, on_error=on_error)
        others.append(sink)
        return sink

    # All are imported where they are used: importing them takes a second or two.
    names = tracker_names(tracker)
    artifacts = None
    if mode != "disabled":
        from dtrain.tracking import wandb_sink
        from dtrain.tracking.wandb_artifacts import CheckpointArtifacts

        sink = add(
            "wandb",
            lambda: wandb_sink.WandbSink(tracker, mode, run_dir, run_name, config, resumed_step, note, earlier),
            f"Send the rest later: wandb sync {run_dir / 'wandb'}",
            wandb_sink.tear_down,
        )
        if tracker.artifacts != "none":
            artifacts = CheckpointArtifacts(
                tracker.artifacts,
                run_dir,
                lambda staged: sink.put(lambda opened: cast(wandb_sink.WandbSink, opened).checkpoint(staged)),
            )
    if "tensorboard" in names:
        from dtrain.tracking.tensorboard_sink import TensorBoardSink

        add(
            "tensorboard",
            lambda: TensorBoardSink(run_dir / "tensorboard", config, resumed_step),
        )
    if "mlflow" in names:
        from dtrain.tracking import mlflow_sink

        add(
            "mlflow",
            lambda: mlflow_sink.MlflowSink(tracker, run_dir, run_name, config, resumed_step, note, earlier),
            "metrics.jsonl has all records.",
        )
    if "trackio" in names:
        from dtrain.tracking.trackio_sink import TrackioSink

        add(
            "trackio",
            lambda: TrackioSink(tracker, run_dir, run_name, config, resumed_step, note, earlier),
            "metrics.jsonl has all records.",
        )
    return Sinks(media, console, *others, artifacts=artifacts)


# -- slow sinks


class BackgroundSink:
    """Runs a slow sink in a thread. An error ends the sink: one line for a person, and the traceback in the log file.

    Args:
        name: The sink's name in notes.
        open: Makes the sink; called in the thread.
        note: Shows a sentence to a person; called from any thread.
        if_unfinished: Advice for a sink that did not end in time.
        on_error: Called in the thread after an error.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[], Sink],
        *,
        note: Callable[[str], None],
        if_unfinished: str = "",
        on_error: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._open = open
        self._note = note
        self._if_unfinished = if_unfinished
        self._on_error = on_error
        self._queue: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(QUEUE_SIZE)
        self._full = False
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        # wandb starts processes. A loader worker that is forked at that moment inherits the pipes on which Python waits
        # for them, and keeps them open, so that wandb hangs until the loader ends (observed). After this wait wandb has
        # started its processes, or is waiting for its server.
        self._opened.wait(OPEN_TIMEOUT)

    def log(self, record: Record) -> None:
        """Puts one record into the queue; never blocks."""
        self.put(lambda sink: sink.log(record))

    def media(self, step: int, name: str, path: Path) -> None:
        """Puts a picture or text into the queue; never blocks."""
        self.put(lambda sink: sink.media(step, name, path))

    def alert(self, text: str) -> None:
        """Puts an alert into the queue; never blocks."""
        self.put(lambda sink: sink.alert(text))

    def finish(self, state: str, reason: str | None = None) -> None:
        """Waits until the sink has sent or stored everything, or until the time-out."""
        deadline = time.monotonic() + (FINISH_TIMEOUT_AFTER_FAILURE if state == "failed" else FINISH_TIMEOUT)
        for item in (lambda sink: sink.finish(state, reason), None):
            self.put(item, deadline)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._note(f"{self._name}: did not end in time. {self._if_unfinished}".rstrip())

    def put(self, item: Callable[[Sink], None] | None, deadline: float | None = None) -> None:
        """Puts a call into the queue, None to end; never blocks without a deadline (``time.monotonic``)."""
        if not self._thread.is_alive():
            return
        try:
            if deadline is None:
                self._queue.put_nowait(item)
            else:
                self._queue.put(item, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            if not self._full:
                self._note(
                    f"{self._name}: {QUEUE_SIZE} records are waiting; further ones are dropped. metrics.jsonl has all."
                )
            self._full = True

    def _work(self) -> None:
        try:
            sink = self._open()
            self._opened.set()
            while (call := self._queue.get()) is not None:
                call(sink)
        except (Exception, SystemExit) as error:  # trackers raise errors of many libraries
            logger.warning("%s has ended", self._name, exc_info=True)
            reason = (
                shortened(without_secrets_in(" ".join(str(error).split())), _LONGEST_REASON) or type(error).__name__
            )
            self._note(f"{self._name}: {reason}. The run continues without it; metrics.jsonl has everything.")
            if self._on_error is not None:
                self._on_error()
        finally:
            self._opened.set()


# -- media


def write_media(folder: Path, step: int, name: str, content: bytes | str) -> Path:
    """Writes a picture or a text atomically.

    Args:
        folder: ``<run.dir>/media``; created if it does not exist.
        step: Attempted steps so far.
        name: A folder name such as ``confusion``: letters, digits, ``_``, ``-`` and ``.``.
        content: The bytes of a PNG file, or text.

    Returns:
        The file, ``<folder>/<name>/step-000000050.png`` or ``.txt``.

    Raises:
        ValueError: If the name is not a valid folder name, or the content is neither a PNG file nor text.
        OSError: On a write failure.
    """
    if not _MEDIA_NAME.fullmatch(name):
        raise ValueError(f"media: got the name {name!r}, want letters, digits, _, - and . only, as in 'confusion'.")
    if not isinstance(content, (bytes, str)):
        raise ValueError(
            f"media {name!r}: got a {type(content).__name__}, want the bytes of a PNG file or a text. "
            "dtrain.training.task.png converts an array."
        )
    if isinstance(content, bytes) and not content.startswith(_PNG):
        raise ValueError(f"media {name!r}: got bytes that begin with {content[:8]!r}, want a PNG file.")
    suffix, data = ("txt", content.encode()) if isinstance(content, str) else ("png", content)
    path = folder / name / f"step-{step:09d}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(data)
    return path


def media_files(folder: Path) -> list[MediaFile]:
    """All media."""
    found = ((_MEDIA_FILE.fullmatch(path.name), path) for path in sorted(folder.glob("*/step-*")))
    return [(int(match[1]), path.parent.name, path) for match, path in found if match]


def cut_media_after(folder: Path, step: int) -> None:
    """Moves media of later steps, which a resumed run is about to repeat, to ``cut-media/`` next to ``folder``."""
    for at, name, path in media_files(folder):
        if at > step:
            cut = folder.with_name(f"cut-{folder.name}") / name
            cut.mkdir(parents=True, exist_ok=True)
            os.replace(path, cut / path.name)


# -- trackers of a config, and the mode of wandb: from the environment and the user's files; imports none of them


def tracker_names(tracker: TrackerConfig) -> tuple[str, ...]:
    """The trackers of a config, each once: ``()`` for ``none``.

    Raises:
        ConfigError: If one is unknown, or ``tracker.name`` is neither a name nor a list of names.
    """
    chosen = [tracker.name] if isinstance(tracker.name, str) else tracker.name
    known = (*TRACKERS, *_ALIASES)
    if not isinstance(chosen, Sequence) or not chosen or any(name not in known for name in chosen):
        raise ConfigError(
            f"tracker.name: got {tracker.name!r}; known are {', '.join(known)}, and lists such as [wandb,mlflow]."
        )
    return tuple(dict.fromkeys(each for name in chosen for each in _ALIASES.get(name, (name,))))


def sends_alerts(tracker: TrackerConfig, run_dir: Path) -> bool:
    """Whether a tracker sends alerts to the user."""
    return tracker_mode(tracker, run_dir) != "disabled" or "trackio" in tracker_names(tracker)


def tracker_mode(tracker: TrackerConfig, run_dir: Path | None = None) -> str:
    """The mode of wandb: ``online``, ``offline`` or ``disabled`` (also for a tracker without wandb).

    Args:
        tracker: The group ``tracker`` of the config.
        run_dir: The run's directory, which need not exist; None without a run.

    Raises:
        ConfigError: If the tracker or its mode is unknown, its package is missing, or ``online`` is set without a
            login.
    """
    check_tracker(tracker)
    if "wandb" not in tracker_names(tracker):
        return "disabled"
    return wandb_mode(tracker.mode, was_online=run_dir is not None and was_online(run_dir))


def describe_trackers(tracker: TrackerConfig, run_dir: Path) -> str:
    """Where the records of a run go, in one line.

    Raises:
        ConfigError: As ``tracker_mode``.
    """
    mode, names = tracker_mode(tracker, run_dir), tracker_names(tracker)
    places = ["metrics.jsonl", *(name for name in names if name != "wandb")]
    if mode == "online":
        places.append(f"wandb online, {wandb_server()}")
    elif mode == "offline":
        places.append("wandb offline; artifacts and alerts are sent with tracker.mode=online, or later by `wandb sync`")
    return ", ".join(places)


def was_online(run_dir: Path) -> bool:
    """Whether wandb was online at the newest start of a run: by the names of its directories, ``[offline-]run-TIME-ID``."""
    pieces = [path.name for path in (run_dir / "wandb").glob("*run-*") if path.is_dir()]
    newest = max(pieces, key=lambda name: name.removeprefix("offline-"), default="")
    return newest.startswith("run-")


def check_tracker(tracker: TrackerConfig) -> None:
    """As ``tracker_mode``, without the login, which only rank 0 needs.

    Raises:
        ConfigError: If the tracker or its mode is unknown, or its package is missing.
    """
    names = tracker_names(tracker)
    if tracker.mode is not None and _WANDB_SYNONYMS.get(tracker.mode, tracker.mode) not in WANDB_MODES:
        raise ConfigError(f"tracker.mode: got {tracker.mode!r}; known are {', '.join(WANDB_MODES)}.")
    if tracker.artifacts not in ARTIFACTS:
        raise ConfigError(f"tracker.artifacts: got {tracker.artifacts!r}; known are {', '.join(ARTIFACTS)}.")
    if tracker.artifacts != "none" and "wandb" not in names:
        raise ConfigError(
            f"tracker.artifacts={tracker.artifacts}: only wandb gets checkpoints, but tracker.name={tracker.name}. Add wandb, "
            "or set tracker.artifacts=none."
        )
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"tracker.name={tracker.name}: the package {name} is not installed. Run: {TRACKERS[name]}, or use tracker=none."
            )


def wandb_mode(configured: str | None, environ: Mapping[str, str] = os.environ, *, was_online: bool = False) -> str:
    """``online``, ``offline`` or ``disabled``: the first of these that is set.

    1. ``tracker.mode``, 2. WANDB_MODE, 3. ``online`` for a run of a sweep's agent, which sets WANDB_SWEEP_ID, 4. the mode of
    the run's newest start, 5. ``offline``. A login alone does not make a run online: the user may have it for other programs.

    Args:
        configured: ``tracker.mode``; None: the environment and the run decide.
        environ: The environment.
        was_online: Whether the run was online at its newest start. Without a login, it then continues offline.

    Raises:
        ConfigError: If the mode is unknown, or it is ``online`` without an API key for the server, which wandb would ask
            the user to type.
    """
    key, value = ("tracker.mode", configured) if configured else ("WANDB_MODE", environ.get("WANDB_MODE"))
    if not value and environ.get("WANDB_SWEEP_ID"):
        key, value = "a sweep's agent (WANDB_SWEEP_ID is set): WANDB_MODE", "online"
    login = wandb_logged_in(environ)
    if not value:
        return "online" if was_online and login else "offline"
    mode = _WANDB_SYNONYMS.get(value, value)
    if mode not in WANDB_MODES:
        raise ConfigError(f"{key}: got {value!r}; known are {', '.join(WANDB_MODES)}.")
    if mode == "online" and not login:
        raise ConfigError(
            f"{key}={value}, but there is no API key for {wandb_server(environ)}. Run `wandb login`, set WANDB_API_KEY, or "
            "use tracker.mode=offline and upload later with `wandb sync`."
        )
    return mode


def wandb_logged_in(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment or the netrc file has an API key for the server."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    files = [environ["NETRC"]] if environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    host = urlsplit(wandb_server(environ)).netloc
    for file in files:
        try:
            entry = netrc.netrc(str(Path(file).expanduser())).authenticators(host)
        except (OSError, netrc.NetrcParseError):  # wandb could not read this file either
            continue
        if entry and entry[2]:
            return True
    return False


def wandb_server(environ: Mapping[str, str] = os.environ) -> str:
    """The server's URL: WANDB_BASE_URL, else the host of ``wandb login --host``, else wandb's own."""
    if url := environ.get("WANDB_BASE_URL"):
        return url.rstrip("/")
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(Path(environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser() / "settings")
    except configparser.Error:
        return _WANDB_SERVER
    return settings.get("default", "base_url", fallback=_WANDB_SERVER).rstrip("/")
