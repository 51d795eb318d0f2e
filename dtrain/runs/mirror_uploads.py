"""``python -m dtrain.runs.mirror_uploads``: the process that uploads a run to its mirror while rank 0 trains.

* It is a process, not a thread, because a thread would compete with the training loop for the interpreter lock: a request of
  s3fs copies buffers of 50 MB and runs Python for each of its pieces. A process can also be ended at any time.
* Rank 0 writes *requests* to its standard input, one JSON object per line, and reads *reports* from its standard output. When
  the input ends without ``{"end": true}``, rank 0 is gone, and this process ends at once.
* Of several checkpoints that wait, only the newest is uploaded. What fails is tried again, with growing pauses.
* Before each manifest the claims are read again. If a different start has claimed the mirror since, nothing more is uploaded.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.distributed.process_exit import exit_with_parent, kill_with_parent
from dtrain.errors import without_secrets_in
from dtrain.files import open_regular, read_bounded, replace_file, size_and_hash
from dtrain.runs.mirror import KNOWN, MANIFEST, RECORDS, Claim, Mirror, MirroredCheckpoint, Records, is_record
from dtrain.runs.run_dir import retained_steps
from dtrain.urls import network_errors

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between two attempts
_LONGEST_PAUSE_AT_END = 2.0
_SPOOL = "record"  # the file that a record is copied to, because most of them grow while they are uploaded


@dataclass(frozen=True)
class Task:
    """What the process does.

    Attributes:
        url: The mirror, with its secrets.
        run_dir: The run directory.
        folder: Of this process: staged checkpoints, and a copy of the record that is being uploaded.
        known: The newest claim that the run directory has the steps of; 0 for none.
        keep_last: ``checkpoint.keep_last``.
        keep_every: ``checkpoint.keep_every``.
    """

    url: str
    run_dir: str
    folder: str
    known: int
    keep_last: int
    keep_every: int | None


@dataclass(frozen=True)
class Save:
    """A request: a checkpoint to upload.

    Attributes:
        folder: The staged files, which are deleted when they are not needed any more.
        step: Attempted steps.
        best: Step of the best checkpoint by now; None without one.
    """

    folder: str
    step: int
    best: int | None


@dataclass
class State:
    """A report, for ``status.json``.

    Attributes:
        url: The mirror, without secrets.
        claim: This start's number; None before it has one.
        step: Step of the newest checkpoint in the mirror; None before there is one.
        uploaded: When that was complete, in Unix seconds.
        waiting: Step of the checkpoint that is being uploaded, or will be; None if none is.
        error: Why the last attempt failed; None if it did not.
        superseded: The start that has claimed the mirror since, for a message.
    """

    url: str
    claim: int | None = None
    step: int | None = None
    uploaded: float | None = None
    waiting: int | None = None
    error: str | None = None
    superseded: str | None = None


class Superseded(Exception):
    """A different start has claimed the mirror; the message describes it."""


class Uploader:
    """Uploads checkpoints and records.

    Args:
        task: What to do.
        report: Called with each new state.
    """

    def __init__(self, task: Task, report: Callable[[State], None]) -> None:
        self._task = task
        self._report = report
        self._mirror = Mirror(task.url, retries=False)  # the worker repeats whole uploads
        self.state = State(str(self._mirror))
        self._claim: Claim | None = None
        self._uploads = self._records = 0
        self._there: set[str] = set()  # SHA-256 of records in the mirror
        self._hashes: dict[tuple[str, int, int], dict[str, Any]] = {}  # by name, size and time of the last change
        self.best: int | None = None  # step of the best checkpoint

    def upload(self, save: Save) -> None:
        """Uploads records and then a checkpoint, if the mirror does not have it, and deletes old ones.

        Raises:
            Superseded: If a different start has claimed the mirror.
            OSError: If the mirror cannot be written.
        """
        claim, self.best = self._claimed(), save.best
        if not self._has(save):
            self.upload_records()
            self._uploads += 1
            target = MirroredCheckpoint(claim, save.step, self._uploads)
            self._mirror.put_checkpoint(target, Path(save.folder), self._require_claim)
            with suppress(*network_errors()):  # the next upload deletes it
                self._mirror.delete_old(claim, lambda steps: self._kept(steps, save))
        self.state.step, self.state.uploaded = save.step, time.time()

    def upload_records(self) -> None:
        """Uploads the records of the run directory as they are now; raises as ``upload``."""
        claim = self._claimed()
        run_dir, files = Path(self._task.run_dir), {}
        for path in sorted(path for pattern in RECORDS for path in run_dir.glob(pattern)):
            name = path.relative_to(run_dir).as_posix()
            if is_record(name) and path.is_file() and not path.is_symlink():
                with suppress(FileNotFoundError):  # it was replaced or deleted
                    files[name] = self._upload_record(claim, path, name)
        self._require_claim()
        self._records += 1
        self._mirror.put_records(Records(claim, self._records, files, self.best))
        with suppress(*network_errors()):
            self._there &= self._mirror.delete_old_records(claim)

    def _upload_record(self, claim: Claim, path: Path, name: str) -> dict[str, Any]:
        status = path.stat()
        key = (name, status.st_size, status.st_mtime_ns)
        if self._hashes.get(key, {}).get("sha256") not in self._there:
            copy = Path(self._task.folder) / _SPOOL
            with open_regular(path) as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            self._hashes[key] = size_and_hash(copy)
            sha256 = self._hashes[key]["sha256"]
            if sha256 not in self._there:
                self._mirror.put_file(claim, copy, sha256)
                self._there.add(sha256)
        return self._hashes[key]

    def _claimed(self) -> Claim:
        """The claim of this start, which it takes when the mirror can first be reached."""
        if self._claim is None:
            newest = next(iter(self._mirror.checkpoints()), None)
            if newest is not None and newest.claim.number > self._task.known:
                host = self._mirror.host_of(newest.claim)
                raise Superseded(f"claim {newest.claim.number} of host {host}, with step {newest.step}")
            self._claim = self._mirror.claim()
            # Before anything is uploaded: the directory has all steps of this claim.
            write_known(Path(self._task.run_dir), self._task.url, self._claim.number)
            self.state.claim = self._claim.number
            self._report(self.state)
        return self._claim

    def _require_claim(self) -> None:
        assert self._claim is not None
        if (newer := self._mirror.newer_than(self._claim)) is not None:
            raise Superseded(newer)

    def _has(self, save: Save) -> bool:
        """Whether the newest checkpoint in the mirror is this one, as in the first upload of a start that resumed from it."""
        newest = next(iter(self._mirror.checkpoints()), None)
        if newest is None or newest.step != save.step:
            return False
        return self._mirror.manifest(newest) == read_bounded(Path(save.folder) / MANIFEST)

    def _kept(self, steps: list[int], save: Save) -> set[int]:
        return retained_steps(steps, save.step, self._task.keep_last, self._task.keep_every, save.best)


def write_known(run_dir: Path, url: str, claim: int) -> None:
    """Records the newest claim of which a run directory has all steps.

    Raises:
        OSError: On a write failure.
    """
    with replace_file(run_dir / KNOWN) as file:
        file.write(json.dumps({"url": without_secrets_in(url), "claim": claim}).encode() + b"\n")


def read_known(run_dir: Path, url: str) -> int | None:
    """The claim that ``write_known`` recorded for this mirror; None for none."""
    try:
        content = json.loads(read_bounded(run_dir / KNOWN))
        return int(content["claim"]) if content["url"] == without_secrets_in(url) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


class Worker:
    """Takes requests from a queue and does what is newest, until the end is requested.

    Args:
        uploader: Does it.
        report: Called with each new state.
    """

    def __init__(self, uploader: Uploader, report: Callable[[State], None]) -> None:
        self.requests: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._uploader = uploader
        self._report = report
        self._save: Save | None = None
        self._wants_records = self._ends = False
        self._best: int | None = None  # of the request for records

    def run(self) -> None:
        """Returns at the end, when everything is uploaded or the mirror has been claimed by a different start."""
        pause = 0.0
        while True:
            self._take(pause)
            if self._save is None and not self._wants_records:
                if self._ends:
                    return
                continue
            try:
                self._work()
                pause = 0.0
                self._set_error(None)
            except Superseded as newer:
                self._drop()
                self._uploader.state.superseded = str(newer)
                self._report(self._uploader.state)
                while not self._ends:
                    self._drop()
                    self._take(0.0)
                return
            except Exception as error:  # noqa: BLE001 - nothing may stop the training; it is reported, and tried again
                self._set_error(f"{type(error).__name__}: {error}")
                pause = min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE_AT_END if self._ends else _LONGEST_PAUSE)

    def _work(self) -> None:
        if (save := self._save) is not None:
            self._uploader.upload(save)
            # A newer one may have replaced it meanwhile: requests are taken between two uploads only.
            self._drop()
        elif self._wants_records:
            self._uploader.best = self._best
            self._uploader.upload_records()
            self._wants_records = False

    def _take(self, pause: float) -> None:
        """Takes all requests that are there; waits for the first one, or until ``pause`` seconds have passed, if not 0."""
        is_idle = self._save is None and not self._wants_records and not self._ends
        deadline = time.monotonic() + pause
        while True:
            try:
                seconds = None if is_idle else max(0.0, deadline - time.monotonic())
                request = self.requests.get(timeout=seconds) if seconds != 0.0 else self.requests.get_nowait()
            except queue.Empty:
                return
            if "save" in request:
                self._drop()
                self._save = Save(**request["save"])
                self._uploader.state.waiting = self._save.step
                self._report(self._uploader.state)
            if "records" in request:
                self._wants_records, self._best = True, request["records"]
            self._ends |= "end" in request
            is_idle = False
            if self._ends:
                deadline = min(deadline, time.monotonic() + _LONGEST_PAUSE_AT_END)

    def _drop(self) -> None:
        """Forgets the checkpoint that waits, and deletes its staged files."""
        if self._save is not None:
            shutil.rmtree(self._save.folder, ignore_errors=True)
        self._save = self._uploader.state.waiting = None

    def _set_error(self, error: str | None) -> None:
        self._uploader.state.error = error and without_secrets_in(error)
        self._report(self._uploader.state)


def main() -> None:
    """Reads a ``Task`` and then requests from standard input, and writes states to standard output."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):  # they are for rank 0, which decides
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = os.getppid()
    if not kill_with_parent():
        exit_with_parent(parent)
    lines = sys.stdin.buffer
    if not (first := lines.readline()):
        return
    task = Task(**json.loads(first))

    def report(state: State) -> None:
        os.write(1, json.dumps(asdict(state)).encode() + b"\n")

    worker = Worker(Uploader(task, report), report)

    def read() -> None:
        ends = False
        for line in lines:
            request = json.loads(line)
            ends |= "end" in request
            worker.requests.put(request)
        if not ends:  # rank 0 is gone
            os._exit(1)

    threading.Thread(target=read, name="requests", daemon=True).start()
    worker.run()
    sys.stdout.flush()
    os._exit(0)  # threads of fsspec need no end


if __name__ == "__main__":
    main()
