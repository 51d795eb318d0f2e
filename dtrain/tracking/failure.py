"""Leaves a trace of a run that ends with an error: in this rank's log, and in status.json."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtrain.tracking.status import write_status

logger = logging.getLogger("dtrain")


@dataclass
class FailureRecord:
    """How far the run was; set ``step`` as soon as it is known."""

    step: Callable[[], int] = lambda: 0


@contextmanager
def failures_recorded(run_dir: Path, rank: int) -> Iterator[FailureRecord]:
    """Logs an exception that passes through; rank 0 also sets the state ``failed``.

    Args:
        run_dir: The run's directory; it exists and belongs to this run.
        rank: This process.
    """
    record = FailureRecord()
    try:
        yield record
    except BaseException as error:
        step = record.step()
        logger.exception("failed after step %d", step)
        if rank == 0:
            write_status(run_dir, "failed", step, f"{type(error).__name__}: {error}")
        raise
