"""Which samples a run used, and how many bad ones are allowed.

* A ``SampleLog`` writes a rank's files below ``logs/``: every bad sample and, on request, the keys of every step's
  samples. A line is written when its step is committed; lines after a checkpoint's step are cut on resume.
* A ``BadSampleBudget`` ends a run with too many bad samples. A limit on their *share* allows the few damaged files of
  every large collection. A limit on bad samples *in a row* detects a new failure: after a hundred million good samples,
  a share of 1 % alone would allow a million bad ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from dtrain.config.errors import Explained
from dtrain.distributed.atomic import cut_lines, open_to_append

logger = logging.getLogger("dtrain")
_ALWAYS_ALLOWED = 10.0


class SampleLog:
    """The sample log of one rank.

    Args:
        folder: ``<run.dir>/logs``; it must exist.
        rank: This process.
        record_keys: Also write the keys of all samples.
    """

    def __init__(self, folder: Path, rank: int, record_keys: bool) -> None:
        self._folder = folder
        self._rank = rank
        self._keys: TextIO | None = self._open("keys") if record_keys else None
        self._bad: TextIO | None = None

    def write(self, step: int, keys: list[str], bad: list[dict[str, Any]]) -> None:
        """Writes the samples of a committed accumulation window: the keys of its valid rows and its bad samples' records.

        Raises:
            Explained: If the keys cannot be written, because a run that has to record its samples must not omit any.
        """
        try:
            for line in bad:
                if self._bad is None:  # opened late: most runs have no bad sample and get no empty file
                    self._bad = self._open("bad")
                _append(self._bad, {"step": step, **line})
        except OSError as error:
            logger.warning("step %d: its bad samples could not be logged (%s): %s", step, error, bad)
        if self._keys is None:
            return
        try:
            _append(self._keys, {"step": step, "keys": keys})
        except OSError as error:
            raise Explained(
                f"data.record_keys=true, but the keys of step {step} could not be written ({error}). Free disk space and start "
                "the run again: it resumes from its last checkpoint. Or set data.record_keys=false."
            ) from error

    def close(self) -> None:
        """Closes the files."""
        for file in (self._keys, self._bad):
            if file is not None:
                with suppress(OSError):  # the failed write was reported already
                    file.close()

    def _open(self, kind: str) -> TextIO:
        return TextIOWrapper(open_to_append(self._folder / f"{kind}-rank-{self._rank:05d}.jsonl"), encoding="utf-8")


def truncate_sample_logs(folder: Path, step: int) -> None:
    """Cuts all ranks' lines after ``step``, and incomplete last lines; rank 0 calls it before any rank opens its log.

    The lines go to ``cut-keys-rank-00000.jsonl`` and the like.
    """
    for path in [*folder.glob("keys-rank-*.jsonl"), *folder.glob("bad-rank-*.jsonl")]:
        cut_lines(path, lambda line: _step(line) <= step)


class BadSampleBudget:
    """Counts bad samples; with the same numbers, every rank raises at the same step.

    Args:
        most: 0 for none, below 1 a share of the samples (ten are always allowed), else a count.
        consecutive: Bad samples in a row; None for no such limit. The order within one call of ``count`` is unknown, so
            any good sample in it ends the row.
        bad: Bad samples so far, of a resumed run; also an attribute.
        samples: All samples so far, including bad ones; also an attribute.
    """

    def __init__(self, most: float, consecutive: int | None = None, *, bad: int = 0, samples: int = 0) -> None:
        for key, limit in (("data.max_bad", most), ("data.max_bad_consecutive", consecutive)):
            if limit is not None and not limit >= 0:
                raise ValueError(f"{key}: got {limit}, want 0 or more.")
        self._most = most
        self._consecutive = consecutive
        self._in_a_row = 0
        self.bad = bad
        self.samples = samples

    def count(self, good: int, bad: int, last: Mapping[str, Any]) -> None:
        """Counts the good and bad samples of a micro-batch, or of a global batch.

        Args:
            good: Samples that could be read.
            bad: Samples that could not be read.
            last: Record of a bad one, for the message; empty if it is on another rank.

        Raises:
            TooManyBadSamples: If there are more than the budget allows.
        """
        self.bad += bad
        self.samples += good + bad
        self._in_a_row = 0 if good else self._in_a_row + bad
        if not bad:
            return
        allowed = max(_ALWAYS_ALLOWED, self._most * self.samples) if 0 < self._most < 1 else self._most
        if self.bad > allowed:
            reason = (
                f"{self.bad} of {self.samples} samples could not be read, more than data.max_bad={self._most:g} allows."
            )
        elif self._consecutive is not None and self._in_a_row > self._consecutive:
            reason = (
                f"{self._in_a_row} samples in a row could not be read, more than data.max_bad_consecutive={self._consecutive} "
                "allows. Check the storage and the shards."
            )
        else:
            return
        example = f" One of them: {last['key']}: {last['reason']}." if last else ""
        raise TooManyBadSamples(f"{reason}{example} All are listed in logs/bad-rank-*.jsonl of the run.")


class TooManyBadSamples(Explained, RuntimeError):
    """More samples could not be read than the budget allows."""


def _append(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def _step(line: bytes) -> float:
    if line.endswith(b"\n"):  # the next line would be appended to an incomplete one
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            return int(json.loads(line)["step"])
    return float("inf")
