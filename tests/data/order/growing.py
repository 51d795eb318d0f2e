"""What a run on data that change owes, in plain sets: the oracle of the tests of growth."""

from __future__ import annotations

from collections.abc import Mapping

#: Name of the shard, and number in it.
Sample = tuple[str, int]


class Promise:
    """The samples that the current epoch still owes.

    Args:
        tail: With ``"drop"`` an epoch may end with samples that do not fill a step.
    """

    def __init__(self, tail: str = "pad") -> None:
        self._tail = tail
        self._files: set[Sample] = set()
        self._owed: set[Sample] | None = None  # None: nothing of the epoch was used
        self._joined: set[Sample] = set()
        self.epoch = 0

    def start(self, files: Mapping[str, int], *, now: bool) -> None:
        """A start on these shards, name to number of samples."""
        self._files = {(name, number) for name, size in files.items() for number in range(size)}
        if self._owed is not None:
            self._owed &= self._files  # what was removed
            if now:
                self._owed |= self._files - self._joined
                self._joined |= self._files

    def take(self, epoch: int, samples: list[Sample], is_last: bool) -> None:
        """A step of an epoch used these samples; it may be the last one."""
        if epoch != self.epoch:  # the rest of an epoch may have been dropped at a start, as too small for a step
            assert self._tail == "drop" or not self._owed
            assert epoch == self.epoch + 1
            self.epoch, self._owed = epoch, None
        if self._owed is None:
            self._owed, self._joined = set(self._files), set(self._files)
        assert len(set(samples)) == len(samples)
        assert set(samples) <= self._owed, sorted(set(samples) - self._owed)
        self._owed -= set(samples)
        if is_last:
            assert self._tail == "drop" or not self._owed, sorted(self._owed)
            self.epoch, self._owed = epoch + 1, None
