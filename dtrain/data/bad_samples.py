"""How many samples may be bad before a run ends.

* The *share* forgives what every large collection has: a file in ten thousand that is damaged.
* The *row* does not forgive what is going wrong now. After a hundred million good samples a share of 1 % would still let a
  million bad ones pass while a disk is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.config.errors import Explained

_ALWAYS_FORGIVEN = 10.0


class TooManyBadSamples(Explained, RuntimeError):
    """More samples than the budget allows could not be read."""


class BadSampleBudget:
    """Counts bad samples; given the same numbers, every rank comes to the same end.

    Args:
        most: 0 for none, below 1 a share of the samples (ten are always forgiven), else a count.
        consecutive: Bad samples with no good one between them; None for no such limit. Within what is counted at once
            nobody knows who came after whom, so one good sample there ends the row.
        bad: Bad samples to continue from.
        samples: All samples to continue from, bad ones included.

    Attributes:
        bad: Bad samples so far.
        samples: Samples so far, bad ones included.

    Raises:
        ValueError: If a limit is negative.
    """

    def __init__(self, most: float, consecutive: int | None = None, *, bad: int = 0, samples: int = 0) -> None:
        for key, limit in (("max_bad", most), ("max_bad_consecutive", consecutive)):
            if limit is not None and not limit >= 0:
                raise ValueError(f"{key}: got {limit}, want 0 or more.")
        self._most = most
        self._consecutive = consecutive
        self._row = 0
        self.bad = bad
        self.samples = samples

    def count(self, good: int, bad: int, last: Mapping[str, Any]) -> None:
        """Counts the samples of a micro-batch, or of a global batch.

        Args:
            good: Those that could be read.
            bad: Those that could not.
            last: The ledger line of a bad one, for the message; empty where only another rank has it.

        Raises:
            TooManyBadSamples: If there are more than the budget allows.
        """
        self.bad += bad
        self.samples += good + bad
        self._row = 0 if good else self._row + bad
        if not bad:
            return
        allowed = max(_ALWAYS_FORGIVEN, self._most * self.samples) if 0 < self._most < 1 else self._most
        if self.bad > allowed:
            told = (
                f"{self.bad} of {self.samples} samples could not be read, more than data.max_bad={self._most:g} allows."
            )
        elif self._consecutive is not None and self._row > self._consecutive:
            told = (
                f"{self._row} samples in a row could not be read, more than data.max_bad_consecutive={self._consecutive} "
                "allows: something is wrong with all of them."
            )
        else:
            return
        example = f" One of them: {last['key']}: {last['reason']}." if last else ""
        raise TooManyBadSamples(f"{told}{example} All are named in logs/bad-rank-*.jsonl of the run.")
