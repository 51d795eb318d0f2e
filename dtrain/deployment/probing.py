"""A probe's process, seen from the one that asks it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from dtrain.config.errors import ConfigError
from dtrain.deployment.probe import Setup


class Probe:
    """Asks and waits for the reply.

    Args:
        folder: The artefact that it holds.
        process: With pipes for its input and output.
        errors: What it writes to standard error.
    """

    def __init__(self, folder: str, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._folder = folder
        self._process = process
        self._errors = errors

    def ask(self, batch: int, seconds: float) -> dict[str, Any]:
        """Has the artefact run batches of so many rows for so long, at least once.

        Returns:
            ``calls``, the seconds of each, and ``peak_bytes``, None where the system does not tell; or ``out_of_memory``,
            the allocator's words.

        Raises:
            ConfigError: If the artefact does not run.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and `reply` says how
            self._process.stdin.write(json.dumps({"batch": batch, "seconds": seconds}) + "\n")
            self._process.stdin.flush()
        return self.reply(f" with {batch:,} rows")

    def reply(self, doing: str = "") -> dict[str, Any]:
        """The next line that it sends; the first one comes when the artefact is loaded.

        Raises:
            ConfigError: If it has ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        code = self._process.wait()
        self._errors.seek(0)
        told = "".join(f"    {line}\n" for line in self._errors.read().strip().splitlines()[-8:])
        how = f"was killed by signal {-code}, perhaps for its memory" if code < 0 else f"ended with code {code}"
        raise ConfigError(f"export: {self._folder} cannot be measured{doing}: its process {how}.\n{told}".rstrip())


@contextmanager
def probing(setup: Setup) -> Iterator[Probe]:
    """A probe's process, started now and killed at the end of the block."""
    # The fresh process shall find the user's own modules where this one found them.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "dtrain.deployment.probe", json.dumps(dataclasses.asdict(setup))]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            yield Probe(setup.folder, process, errors)
        finally:
            process.kill()
            process.communicate()  # closes the pipes, whatever is left in them
