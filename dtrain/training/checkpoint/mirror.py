"""The mirror of a run (``checkpoint.mirror``): what a start takes from it, and what it sends to it.

* *Fetching*: a start whose run directory has no run, or has an earlier state of it than the mirror, takes the newest whole
  checkpoint and the records from there. They are put into a temporary folder, verified, and moved into the run directory when
  everything else of the start was validated. Until then nothing of the run directory changes.
* *Uploading* is in ``uploads``.
* *Several machines* need no common disk for DDP: rank 0 alone reads and writes the mirror (``other_machines``).

Only what is typed is composed: of a fetched config nothing is used but its comparison with the typed one.
"""

from __future__ import annotations

import glob
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dtrain.config.schema import Config
from dtrain.distributed.collectives import from_rank0
from dtrain.errors import ConfigError, as_config_error, without_secrets_in
from dtrain.files import remove, try_lock
from dtrain.runs.mirror import Mirror, MirroredCheckpoint
from dtrain.runs.mirror_uploads import read_known, write_known
from dtrain.runs.run_dir import move_records_aside
from dtrain.runs.run_spec import CONFIG, OVERRIDES, RunSpec
from dtrain.training.checkpoint.checkpoints import Checkpoints
from dtrain.training.checkpoint.manifest import compare, read_manifest
from dtrain.training.checkpoint.state import TrainState
from dtrain.training.checkpoint.uploads import AfterTheEnd, MirrorListener, MirrorUploads
from dtrain.urls import network_errors

_RUN_FILES = (CONFIG, OVERRIDES, "status.json", "metrics.jsonl", "starts.jsonl", "checkpoints")
_MOVING = ".mirror-moving"  # exists in the run directory while fetched files are moved there
_SECONDS_AT_FAILURE = 5.0  # the other ranks wait for this one
_POLL = 2.0  # seconds of a collective while rank 0 downloads: a longer one would look like a hang
_ATTEMPTS = 3  # to download, if a checkpoint is deleted meanwhile


class RunMirror:
    """The mirror of a run, or nothing at all without ``checkpoint.mirror``. All ranks have one.

    Args:
        cfg: The composed config.
        spec: The run.

    Attributes:
        source: Folder with what earlier starts have left: the run directory, or the temporary folder of fetched files.
        notes: Lines for the user, on all ranks.
    """

    def __init__(self, cfg: Config, spec: RunSpec) -> None:
        self._cfg = cfg
        self._dir = spec.dir
        self._url = cfg.checkpoint.mirror
        self.source = spec.dir
        self.notes: list[str] = []
        self._moves_aside = False
        self._temporary: Path | None = None  # on rank 0, while it has files
        self.uploads: MirrorUploads | None = None  # on rank 0, from ``start`` on

    @property
    def is_fetched(self) -> bool:
        """Whether ``source`` is the temporary folder."""
        return self.source != self._dir

    # -- fetching

    def fetch(self) -> None:
        """Collective. Sets ``source``; downloads what the run directory lacks.

        Raises:
            ConfigError: On every rank, if the directory has no run and the mirror cannot be read; if its checkpoints are
                damaged, or from a run that this directory has nothing to do with.
        """
        if self._url is None:
            return
        call = _InBackground(self._fetch)
        while not from_rank0(call.has_ended):
            pass
        found = from_rank0(call.result)
        # Relative to the run directory, which need not have the same path on every machine.
        self.source = Path(os.path.normpath(self._dir / found["folder"]))
        self.notes, self._moves_aside = found["notes"], found["moves_aside"]

    def _fetch(self) -> dict[str, Any]:
        """On rank 0, in a thread."""
        assert self._url is not None
        never = self._cfg.run.resume == "never"
        has_run = not (self._dir / _MOVING).exists() and any((self._dir / name).exists() for name in _RUN_FILES)
        nothing = {"folder": ".", "notes": [], "moves_aside": False}
        with as_config_error("checkpoint.mirror"):
            mirror = Mirror(self._url, retries=not has_run)  # a run that is here need not wait for the mirror
        try:
            whole = mirror.checkpoints()
        except network_errors() as error:
            if has_run:
                reason = without_secrets_in(f"{type(error).__name__}: {error}")
                note = f"checkpoint.mirror: {mirror} cannot be read ({reason}): the run continues from {self._dir}"
                return nothing | {"notes": [note]}
            raise ConfigError(
                f"checkpoint.mirror: {error}\n  {self._dir} has no run either, so it is unknown from which step to continue. "
                "Start again when the mirror can be read, or without checkpoint.mirror for a new run."
            ) from error
        if not whole:
            return nothing
        if never:
            raise ConfigError(
                f"run.resume=never, but {mirror} has a checkpoint of step {whole[0].step}. Leave run.resume out to resume, or "
                "use a different checkpoint.mirror for a new run."
            )
        newest, notes = whole[0], []
        if has_run:
            known, host = read_known(self._dir, self._url), mirror.host_of(newest.claim)
            if known is not None and newest.claim.number <= known:
                return nothing
            if known is None:
                raise ConfigError(
                    f"checkpoint.mirror: {mirror} has a checkpoint of step {newest.step}, from host {host}, but the run in "
                    f"{self._dir} was never mirrored there. Use a different checkpoint.mirror; or an empty "
                    "run.dir, to continue the mirrored run."
                )
            notes.append(
                f"{mirror} has step {newest.step} of a later start, on host {host}: the run continues from there, and the "
                f"records of {self._dir} are moved into its folder moved-aside."
            )
        folder = self._make_temporary()
        with as_config_error("checkpoint.mirror"):
            notes += self._download(mirror, folder)
        return {"folder": os.path.relpath(folder, self._dir), "notes": notes, "moves_aside": has_run}

    def _make_temporary(self) -> Path:
        """A new folder on the file system of the run directory. Those of starts that were killed are deleted."""
        places = [(self._dir.parent, f".{self._dir.name}.mirror-fetch."), (self._dir, ".mirror-fetch.")]
        parent, prefix = places[self._dir.is_dir()]  # which may be a volume of its own
        with as_config_error("run.dir"):
            parent.mkdir(parents=True, exist_ok=True)
            for left in [path for folder, begin in places for path in folder.glob(f"{glob.escape(begin)}*")]:
                with suppress(OSError), (left / ".lock").open() as lock:
                    if try_lock(lock, without_locks=False):
                        remove(left)
            self._temporary = parent / f"{prefix}{uuid.uuid4().hex}"
            self._temporary.mkdir()
            self._lock = (self._temporary / ".lock").open("w")
            # A forked loader worker would hold the lock after this process has ended.
            os.register_at_fork(after_in_child=self._lock.close)
            try_lock(self._lock)
        return self._temporary

    def _download(self, mirror: Mirror, folder: Path) -> list[str]:
        """Downloads the newest whole checkpoint, the best one and the records; returns lines about damaged ones."""
        for attempt in range(_ATTEMPTS):
            problems: list[str] = []
            records = mirror.records()
            try:
                newest = next((it for it in mirror.checkpoints() if self._is_good(mirror, it, folder, problems)), None)
                if newest is None:
                    raise ConfigError(
                        f"{mirror} has no whole checkpoint:\n" + "".join(f"    {it}\n" for it in problems)
                    )
                write_known(folder, mirror.url, newest.claim.number)
                if records is not None:
                    if records.best not in (None, newest.step):
                        best = [it for it in mirror.checkpoints() if it.step == records.best]
                        any(self._is_good(mirror, it, folder, problems) for it in best)
                    problems += mirror.fetch_records(records, folder)
                return problems
            except FileNotFoundError:  # the start that wrote it before, or one after it, has deleted it
                if attempt == _ATTEMPTS - 1:
                    raise
            remove(folder / "checkpoints")
        raise AssertionError("the last attempt returns or raises")

    def _is_good(self, mirror: Mirror, checkpoint: MirroredCheckpoint, folder: Path, problems: list[str]) -> bool:
        path = Checkpoints(folder / "checkpoints").path(checkpoint.step)
        try:
            mirror.fetch_checkpoint(checkpoint, path)
            # Not with verify_folder, which is collective: the other ranks wait for this thread, and verify all of it later.
            for name, entry in read_manifest(path).items():
                try:
                    compare(path / name, entry)
                except ValueError as error:
                    raise ValueError(f"{name} {error}") from error
        except ValueError as error:
            remove(path)
            reason = str(error).replace(f"{path}: ", "")
            problems.append(f"skipped a broken checkpoint: {mirror}/{checkpoint.place}: {reason}")
            return False
        return True

    @contextmanager
    def named(self) -> Iterator[None]:
        """In errors of the block, the mirror stands for the temporary folder."""
        try:
            yield
        except ConfigError as error:
            if not self.is_fetched or self._url is None:
                raise
            raise ConfigError(str(error).replace(str(self.source), str(Mirror(self._url)))) from error

    def move_in(self) -> None:
        """Collective. Moves the fetched files into the run directory, which this start has locked.

        Raises:
            ConfigError: On every rank, if they cannot be moved. The next start fetches them again.
        """
        if self.is_fetched:
            from_rank0(self._move_in)
            self.source = self._dir

    def _move_in(self) -> None:
        with as_config_error(f"run.dir: {self._dir} cannot be written, choose a different one"):
            if self._moves_aside:
                move_records_aside(self._dir)
            self._dir.mkdir(parents=True, exist_ok=True)
            (self._dir / _MOVING).touch()
            for path in sorted(self.source.iterdir()):
                if path.name == ".lock":
                    continue
                target = self._dir / path.name
                if (
                    path.is_dir() and target.is_dir() and path.name != "checkpoints"
                ):  # such as logs, with those of a launcher
                    for file in path.iterdir():
                        os.replace(file, target / file.name)
                    continue
                if target.is_dir():
                    remove(target)
                os.replace(path, target)
            (self._dir / _MOVING).unlink()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            remove(self._temporary)
            self._lock.close()
            self._temporary = None

    # -- uploading

    def start(self, run: TrainState, listener: MirrorListener) -> None:
        """On rank 0: begins to upload, in the main thread. The run directory is this start's by now.

        Raises:
            ConfigError: If the process cannot be started.
        """
        if self._url is None:
            return
        checkpoints = run.checkpoints
        if self.uploads is None:
            with as_config_error("checkpoint.mirror"):
                self.uploads = MirrorUploads(self._url, self._dir, self._cfg, checkpoints, listener)
        self.uploads.listener = listener  # also of a run that continues in this process, because a rank was lost
        listener.uploads, run.mirror_status = self.uploads, lambda: self.uploads.status if self.uploads else {}
        if steps := checkpoints.steps():  # the start before may have ended before it was uploaded
            self.uploads.saved(checkpoints.path(steps[-1]), steps[-1])

    def finish(self) -> None:
        """Collective. Waits until everything is uploaded, at most ``checkpoint.mirror_seconds``; warns if that is too short."""
        if self._url is None:
            return
        if self.uploads is not None:
            self.uploads.listener = AfterTheEnd()
            self.uploads.request_end()
        deadline = time.monotonic() + self._cfg.checkpoint.mirror_seconds

        def has_ended() -> bool:
            assert self.uploads is not None
            return self.uploads.wait(min(_POLL, max(0.0, deadline - time.monotonic()))) or time.monotonic() >= deadline

        while not from_rank0(has_ended):
            pass
        if self.uploads is not None:
            self.uploads.close(warns=True)

    def close(self) -> None:
        """Ends the uploads of a run that failed, and deletes what was fetched for a start that was refused."""
        if self.uploads is not None:
            self.uploads.listener = AfterTheEnd()
            self.uploads.request_end()
            self.uploads.wait(min(_SECONDS_AT_FAILURE, self._cfg.checkpoint.mirror_seconds))
            self.uploads.close(warns=False)
        self._remove_temporary()


@contextmanager
def run_mirror(cfg: Config, spec: RunSpec) -> Iterator[RunMirror]:
    """The mirror of a run; at the end of the block its process has ended and its temporary folder is deleted."""
    mirror = RunMirror(cfg, spec)
    try:
        yield mirror
    finally:
        mirror.close()


class _InBackground:
    """Runs a function on rank 0 in a thread, while the others ask for its end in short collectives."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def has_ended(self) -> bool:
        """Starts the function at the first call; waits a while."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fetch", daemon=True)
            self._thread.start()
        self._thread.join(_POLL)
        return not self._thread.is_alive()

    def result(self) -> Any:
        """What the function returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised by ``result``
            self._error = error
