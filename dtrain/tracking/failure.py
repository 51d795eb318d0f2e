"""Leaves a trace of a run that ends with an error: in this rank's log, and in status.json."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtrain.config.errors import PeerFailed, in_brief
from dtrain.config.run import without_url_secrets
from dtrain.tracking.status import write_status

logger = logging.getLogger("dtrain")


class FailureRecord:
    """What is written if the run fails.

    Args:
        run_dir: The run's directory.
        rank: This process; rank 0 writes status.json.

    Attributes:
        step: Gives the attempted steps so far. Until it is set nothing is written: the directory may be another run's.
        facts: Gives further entries of status.json.
        tell: Tells whoever is elsewhere why the run failed; called on rank 0, after status.json is written.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self.step: Callable[[], int] | None = None
        self.facts: Callable[[], dict[str, Any]] = dict
        self.tell: Callable[[str], None] = lambda reason: None

    def write(self, reason: str) -> None:
        """Sets the state ``failed``, and tells; a disk that refuses is said, and hides no failure."""
        if self.step is None or self._rank != 0:
            return
        # What is in an error's text leaves this machine.
        reason = without_url_secrets(reason)
        try:
            write_status(self._run_dir, "failed", self.step(), reason, **self.facts())
        except OSError as error:
            sys.stderr.write(f"dtrain: status.json could not be written ({error}).\n")
        sys.stderr.write(f"dtrain: failed at step {self.step()} ({in_brief(reason)}): {self._run_dir}\n")
        self.tell(reason)


@contextmanager
def failures_recorded(run_dir: Path, rank: int) -> Iterator[FailureRecord]:
    """Logs an exception that passes through, and on rank 0 sets the state ``failed``.

    Enter it before the process group, whose end turns the broken connection that a rank sees into what broke it.
    """
    record = FailureRecord(run_dir, rank)
    try:
        yield record
    except BaseException as error:
        if record.step is not None:
            logger.exception("failed after step %d", record.step())
        record.write(
            str(error) if isinstance(error, PeerFailed) else f"rank {rank} failed: {type(error).__name__}: {error}"
        )
        raise
