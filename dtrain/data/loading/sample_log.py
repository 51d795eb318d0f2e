"""Which samples a run used, and how many bad ones are allowed.

* A ``SampleLog`` writes a rank's files below ``logs/``: every bad sample and, on request, the keys of every step's
  samples. A line is written when its step is committed; lines after a checkpoint's step are cut on resume.
* ``Limits`` say how many bad samples are allowed; a ``BadSampleBudget`` counts them and ends the run. A limit on their
  *share* allows the few damaged files of every large collection. A limit on bad samples *in a row* detects a new failure:
  after a hundred million good samples, a share of 1 % alone would allow a million bad ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from dtrain.data.loading.worker_deaths import DEADLY
from dtrain.data.shards.bad_shards import share_and_count
from dtrain.errors import Explained
from dtrain.files import cut_lines, open_to_append
from dtrain.runs.run_dir import bounded_lines, plain_files

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

    def step_back(self, step: int) -> None:
        """Cuts this rank's lines after ``step``, which are written again."""
        for kind, file in (("keys", self._keys), ("bad", self._bad)):
            if file is not None:
                file.close()
                cut_lines(self._path(kind), lambda line: _step(line) <= step)
        self._keys = self._open("keys") if self._keys is not None else None
        self._bad = None

    def close(self) -> None:
        """Closes the files."""
        for file in (self._keys, self._bad):
            if file is not None:
                with suppress(OSError):  # the failed write was reported already
                    file.close()

    def _open(self, kind: str) -> TextIO:
        return TextIOWrapper(open_to_append(self._path(kind)), encoding="utf-8")

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}-rank-{self._rank:05d}.jsonl"


def truncate_sample_logs(folder: Path, step: int) -> None:
    """Cuts all ranks' lines after ``step``, and incomplete last lines; rank 0 calls it before any rank opens its log.

    The lines go to ``cut-keys-rank-00000.jsonl`` and the like.
    """
    for path in [*folder.glob("keys-rank-*.jsonl"), *folder.glob("bad-rank-*.jsonl")]:
        cut_lines(path, lambda line: _step(line) <= step)


def read_deadly(folder: Path) -> dict[str, str]:
    """The samples that killed loader workers in earlier steps of a run, on any rank: key to reason. A resumed run masks them.

    Args:
        folder: ``<run.dir>/logs``.
    """
    found: dict[str, str] = {}
    # Lines may be on their way from the former to the latter. Those that were cut name deadly samples too.
    for pattern in ("bad-rank-*.jsonl", "cut-bad-rank-*.jsonl"):
        for path in plain_files(folder, pattern, []):
            with path.open("rb") as file:
                for text in bounded_lines(file):
                    if DEADLY.encode() in text:
                        with suppress(ValueError, KeyError, TypeError, RecursionError):
                            line = json.loads(text)
                            if line["reason"].startswith(DEADLY):
                                found[line["key"]] = line["reason"]
    return found


@dataclass(frozen=True)
class Limits:
    """How many samples may be bad before a loader raises.

    Args:
        max_bad: 0 allows none. A number below 1 or a percentage (``"0.5%"``) allows that share of the samples received, and
            always ten. Any other number allows that many samples. None: no limit.
        max_bad_consecutive: How many samples in a row may be bad; a micro-batch with any good sample ends the row. None: no
            limit.

    Raises:
        ValueError: If a limit is negative or not a number, or ``max_bad`` is 1.0, which could mean all samples or one.

    Example:
        >>> from dtrain.data import Limits
        >>> Limits(max_bad="0.5%", max_bad_consecutive=None)  # the argument ``limits`` of ShardLoader
        Limits(max_bad='0.5%', max_bad_consecutive=None)
    """

    max_bad: float | str | None = 0.01
    max_bad_consecutive: int | None = 100

    def __post_init__(self) -> None:
        share_and_count("data.max_bad", self.max_bad, "samples", _ALWAYS_ALLOWED)
        if self.max_bad_consecutive is not None and self.max_bad_consecutive < 0:
            raise ValueError(f"data.max_bad_consecutive: got {self.max_bad_consecutive}, want 0 or more.")


class BadSampleBudget:
    """Counts bad samples; with the same numbers, every rank raises at the same step.

    Args:
        limits: What is allowed. The order of the samples within one call of ``count`` is unknown, so any good sample in it ends
            a row of bad ones.
        bad: Bad samples so far, for a resumed run; also an attribute.
        samples: All samples so far, including bad ones; also an attribute.
    """

    def __init__(self, limits: Limits, *, bad: int = 0, samples: int = 0) -> None:
        self._limits = limits
        self._share, self._count = share_and_count("data.max_bad", limits.max_bad, "samples", _ALWAYS_ALLOWED)
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
        most_in_a_row = self._limits.max_bad_consecutive
        if self.bad > max(self._count, self._share * self.samples):
            most = self._limits.max_bad
            reason = f"{self.bad} of {self.samples} samples could not be read, more than data.max_bad={most} allows."
        elif most_in_a_row is not None and self._in_a_row > most_in_a_row:
            reason = (
                f"{self._in_a_row} samples in a row could not be read, more than data.max_bad_consecutive={most_in_a_row} "
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
