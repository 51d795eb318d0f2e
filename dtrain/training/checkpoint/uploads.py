"""Uploads of a run to its mirror (``checkpoint.mirror``), as rank 0 sees them.

Rank 0 stages hard links to each complete checkpoint and passes them to a process (``dtrain.runs.mirror_uploads``), which works
in the background. Retention of the run directory does not touch the links. Nothing that happens to the uploads stops the
training; their state is in ``status.json``.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import dtrain
from dtrain.config.schema import Config
from dtrain.errors import printable
from dtrain.files import link_or_copy, remove
from dtrain.runs.mirror import Mirror
from dtrain.runs.mirror_uploads import Save, Task, read_known
from dtrain.training.checkpoint.checkpoints import Checkpoints

_FOLDER = ".mirror"  # in the run directory: staged checkpoints
logger = logging.getLogger("dtrain")


class MirrorListener(Protocol):
    """Shows what happens to uploads, and tells them of new checkpoints.

    Attributes:
        uploads: Set when they begin.
    """

    uploads: MirrorUploads | None

    def note(self, line: str) -> None:
        """Something that went well."""

    def warn(self, text: str) -> None:
        """Something that the user should act on."""


class AfterTheEnd:
    """Shows warnings when the records of a run are closed."""

    uploads: MirrorUploads | None = None

    def note(self, line: str) -> None:
        """Writes to the log of the rank, if it is still open."""
        logger.info(line)

    def warn(self, text: str) -> None:
        """Writes to standard error and to the log of the rank, if it is still open."""
        logger.warning(text)
        sys.stderr.write(f"dtrain: WARNING: {printable(text)}\n")


class MirrorUploads:
    """The process that uploads, as rank 0 sees it.

    Args:
        url: The mirror.
        run_dir: The run directory.
        cfg: The config; its retention applies to the mirror, too.
        checkpoints: Those of the run.
        listener: Shows warnings; also an attribute.

    Attributes:
        status: The last report of the process, for ``status.json``.
    """

    def __init__(
        self, url: str, run_dir: Path, cfg: Config, checkpoints: Checkpoints, listener: MirrorListener
    ) -> None:
        self._folder = run_dir / _FOLDER
        remove(self._folder)  # what a killed start has left
        self._folder.mkdir()
        self._checkpoints = checkpoints
        self.listener = listener
        self._lock = threading.Lock()  # a checkpoint is saved in a thread
        self._warned: str | None = None
        self._pending = b""
        self.status: Mapping[str, Any] = {"url": str(Mirror(url)), "claim": None, "step": None, "waiting": None}
        self._seconds = cfg.checkpoint.mirror_seconds
        package = str(Path(dtrain.__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        # From the main thread: the kernel ends the process when the thread that started it ends.
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", "dtrain.runs.mirror_uploads"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        known = read_known(run_dir, url) or 0
        task = Task(url, str(run_dir), str(self._folder), known, cfg.checkpoint.keep_last, cfg.checkpoint.keep_every)
        self._send(asdict(task))

    def saved(self, path: Path, step: int) -> None:
        """A checkpoint is complete; any thread may call, before the checkpoint can be deleted."""
        if self.status.get("superseded"):
            return
        staged = self._folder / f"{path.name}.{uuid.uuid4().hex}"
        try:
            staged.mkdir()
            for file in path.iterdir():
                link_or_copy(file, staged / file.name)
        except OSError as error:
            remove(staged)
            self._warn(f"checkpoint.mirror: the checkpoint of step {step} could not be staged ({error}).")
            return
        self._send({"save": asdict(Save(str(staged), step, self._checkpoints.best_step()))})

    def poll(self) -> None:
        """Takes reports of the process, and warns once of each kind of failure. Does not wait."""
        process = self._process
        if process is None or process.stdout is None:
            return
        with suppress(BlockingIOError):
            while data := os.read(process.stdout.fileno(), 1 << 16):
                self._pending += data
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            self._report(json.loads(line))
        if process.poll() not in (None, 0):
            self._process = None
            self._warn(
                f"checkpoint.mirror: the process that uploads has ended with code {process.returncode}, so nothing more is "
                "uploaded. The next start uploads again."
            )

    def _report(self, status: Mapping[str, Any]) -> None:
        self.status = status
        url = status["url"]
        if status["superseded"]:
            self._warn(
                f"checkpoint.mirror: {url} was claimed by a different start ({status['superseded']}), so nothing more is "
                "uploaded. Stop one of the two runs."
            )
        elif status["error"]:
            self._warn(
                f"checkpoint.mirror: {url} cannot be written ({status['error']}). The run continues, and the upload is tried "
                "again."
            )
        elif self._warned is not None and status["waiting"] is None and status["step"] is not None:
            self.listener.note(f"checkpoint.mirror: step {status['step']} is uploaded")
            self._warned = None

    def _warn(self, text: str) -> None:
        kind = text.partition("(")[0]
        if kind != self._warned:  # not once for each attempt
            self._warned = kind
            self.listener.warn(text)

    def request_end(self) -> None:
        """Asks for the records as they are now, and for the end when everything is uploaded."""
        self._send({"records": self._checkpoints.best_step()})
        self._send({"end": True})

    def wait(self, seconds: float) -> bool:
        """Whether the process has ended, within ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if self._process is None or self._process.poll() is not None:
                self.poll()
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))

    def close(self, *, warns: bool) -> None:
        """Ends the process, and warns if it had something left to upload."""
        self.poll()
        process, self._process = self._process, None
        if process is None:
            return
        is_done = process.poll() == 0
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        remove(self._folder)
        if warns and not is_done:
            waiting, there = self.status.get("waiting"), self.status.get("step")
            what = f"the checkpoint of step {waiting}" if waiting is not None else "the records of the end"
            self.listener.warn(
                f"checkpoint.mirror: {what} could not be uploaded within checkpoint.mirror_seconds={self._seconds:g}. A start "
                f"elsewhere {f'continues after step {there}' if there is not None else 'uses what earlier starts uploaded'}; "
                "one in this directory uploads the rest."
            )

    def _send(self, request: Mapping[str, Any]) -> None:
        with self._lock, suppress(OSError):  # ``poll`` warns if the process has ended
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
