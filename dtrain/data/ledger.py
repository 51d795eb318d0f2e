"""What a run used: the keys of every step's samples if asked for, and every sample that could not be read.

Each rank writes files of its own below ``logs/``; a line is written when its step is committed, and lines after a
checkpoint's step are dropped when a run goes on from there.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from dtrain.config.errors import Explained

logger = logging.getLogger("dtrain")


class Ledger:
    """One rank's ledger.

    Args:
        folder: ``<run.dir>/logs``; it exists.
        rank: This process.
        record_keys: Whether the keys of all samples are written, too.
    """

    def __init__(self, folder: Path, rank: int, record_keys: bool) -> None:
        self._folder = folder
        self._rank = rank
        self._keys: TextIO | None = self._open("keys") if record_keys else None
        self._bad: TextIO | None = None

    def write(self, step: int, keys: list[str], bad: list[dict[str, Any]]) -> None:
        """Writes what the window of a committed step held.

        Args:
            step: The attempted step.
            keys: Sample keys of its valid rows.
            bad: Its bad samples, a line each.

        Raises:
            Explained: If the keys could not be written: a run that shall prove what it used does not go on without.
        """
        try:
            for line in bad:
                if self._bad is None:  # most runs have none: no empty file for them
                    self._bad = self._open("bad")
                _append(self._bad, {"step": step, **line})
        except OSError as error:
            logger.warning("step %d: its bad samples could not be written down (%s): %s", step, error, bad)
        if self._keys is None:
            return
        try:
            _append(self._keys, {"step": step, "keys": keys})
        except OSError as error:
            raise Explained(
                f"data.record_keys=true, but the keys of step {step} could not be written ({error}). Make room and start "
                "again: the run continues from its last checkpoint. Or set data.record_keys=false."
            ) from error

    def close(self) -> None:
        """Closes the files."""
        for file in (self._keys, self._bad):
            if file is not None:
                with suppress(OSError):  # what could not be written has been said
                    file.close()

    def _open(self, kind: str) -> TextIO:
        return (self._folder / f"{kind}-rank-{self._rank:05d}.jsonl").open("a", encoding="utf-8")


def cut_ledgers(folder: Path, step: int) -> None:
    """Drops what all ranks wrote after ``step``; for rank 0, before any rank opens its ledger.

    A last line that a kill cut short is dropped, too.
    """
    for path in [*folder.glob("keys-rank-*.jsonl"), *folder.glob("bad-rank-*.jsonl")]:
        aside = path.with_name(f".{path.name}.aside")
        with path.open(encoding="utf-8", errors="replace") as lines, aside.open("w", encoding="utf-8") as kept:
            kept.writelines(line for line in lines if _step(line) <= step)
        os.replace(aside, path)


def _append(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def _step(line: str) -> float:
    if line.endswith("\n"):  # one that was cut just before its end would run into the next
        with suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["step"])
    return float("inf")
