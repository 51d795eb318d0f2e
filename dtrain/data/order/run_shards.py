"""The shards of one source that a run has known, and what a state says of them.

* ``RunShards`` compares the shards of a state with those that there are now, as ``Growth`` allows, and remembers which ones
  were removed and how many there were at the first start.
* It is the same for a run on one source and for each source of a mixture. Where the samples of new shards come in an epoch is
  decided in ``position`` and ``mixture_position``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import numpy as np

from dtrain.data.order.growth import Growth, ShardList
from dtrain.data.order.index import Index


class RunShards:
    """The shards of a source.

    Args:
        index: Their index. It begins with the shards of the state that will be checked, in their order; see
            ``Growth.numbering``.
        growth: What may have changed since then.
        as_recorded: The state is that of an earlier segment: shards that were removed later had samples then.

    Attributes:
        index: The argument.
        growth: The argument.
        first: Number of shards at the run's first start.
        removed: Number of each shard that was removed to the epoch in which that happened.
        changes: Sentences about shards that joined or left when the state was loaded.
    """

    def __init__(self, index: Index, growth: Growth, *, as_recorded: bool = False) -> None:
        self.index, self.growth, self._as_recorded = index, growth, as_recorded
        self.first = len(index.counts)
        self.removed: dict[int, int] = {}
        self.changes: list[str] = []

    @property
    def has_changed(self) -> bool:
        """Whether shards have joined or left since the run's first start."""
        return self.first < len(self.index.counts) or bool(self.removed)

    def head(self, described: Mapping[str, Any]) -> Index:
        """The index of the shards that a segment of the run knew.

        Args:
            described: The description of its index.
        """
        index, known = self.index, described.get("num_shards")
        if index.shard_list is None or known is None or known >= len(index.counts):
            return index
        return index.head(known)

    def check(self, saved: Mapping[str, Any], what: str = "the dataset") -> int:
        """How many shards a state knows: the first ones of the index.

        Args:
            saved: ``data``, ``shards`` and ``removed``, as in the state of ``Position``.
            what: Names the data in the message.

        Raises:
            ValueError: If the data have changed in a way that ``growth`` does not allow; names the difference.
        """
        index, mine, remedy = self.index, self.index.shard_list, ""
        if mine is not None and "shards" in saved:
            known = ShardList.from_state(saved["shards"])
            number = len(known.names)
            removed = {shard for shard, _ in saved.get("removed", [])}
            if returned := sorted(removed - set(index.removed)):
                raise ValueError(
                    f"the shard {mine.names[returned[0]]} was removed from this run and is back. Give it a different name, "
                    "with data.grow, to use it as a new one."
                )
            here = np.setdiff1d(np.arange(number), index.removed)
            allowed = (self.growth.when is not None or number == len(mine.names)) and (
                self.growth.allow_removed or not set(index.removed) - removed
            )
            if allowed and mine.names[:number] == known.names and (mine.checks[here] == known.checks[here]).all():
                # Without removed shards, the whole fingerprint can be compared, too.
                head = index.head(number) if number < len(mine.names) else index
                if index.removed or not head.difference(saved["data"]):
                    return number
            remedy = self.growth.remedy(known, mine)
        elif self._as_recorded and index.removed:
            return len(index.counts)  # an earlier segment, whose list is the beginning of the list that was compared
        if difference := index.difference(saved["data"]):
            remedy = f"{remedy} Or resume" if remedy else "Resume"
            raise ValueError(
                f"{what} changed since this state was saved: {difference} {remedy} with the old shards, or start a new run."
            )
        return len(index.counts)

    def loaded(
        self,
        saved: Mapping[str, Any],
        known: int,
        epoch: int,
        *,
        joined: int,
        unused: Callable[[np.ndarray], int],
    ) -> RunShards:
        """The shards after a state was loaded.

        Args:
            saved: ``first_shards`` and ``removed``, as in the state of ``Position``.
            known: The result of ``check``.
            epoch: The epoch of the state.
            joined: How many shards this epoch draws from; 0 if it has used no sample.
            unused: How many of these samples, which were removed, the epoch has not used yet.
        """
        result, index, is_begun = copy(self), self.index, joined > 0
        result.first = saved.get("first_shards", known)
        result.removed = dict(saved.get("removed", []))
        result.changes = []
        if new := len(index.counts) - known:
            at = epoch + 1 if is_begun and self.growth.when != "now" else epoch
            where = f"the rest of epoch {epoch}" if at == epoch and is_begun else f"at epoch {at}"
            samples = int(index.counts[known:].sum())
            result.changes.append(f"new: {_counted(new, 'shard')} with {samples:,} samples, joining {where}")
        gone = [shard for shard in index.removed if shard not in result.removed and shard < known]
        if not gone or self._as_recorded:
            return result
        left_out = ""
        if is_begun:
            starts = np.cumsum(index.counts)
            lost = np.concatenate([np.arange(starts[shard] - index.counts[shard], starts[shard]) for shard in gone])
            left_out = f", {unused(lost):,} of them left out of the rest of epoch {epoch}"
        # Of an epoch that has not drawn from them they are no part, as if they had been removed before it.
        result.removed |= {shard: epoch if shard < joined else epoch - 1 for shard in gone}
        samples = int(index.counts[gone].sum())
        result.changes.append(f"removed: {_counted(len(gone), 'shard')} with {samples:,} samples{left_out}")
        return result

    def from_the_beginning(self) -> RunShards:
        """The same shards, without those that were removed from the first epoch on."""
        result = copy(self)
        result.removed = dict.fromkeys(self.removed, -1)
        return result

    def state_dict(self) -> dict[str, Any]:
        """``first_shards``, the number at the first start if they have grown since, and ``removed``, [number, epoch] of each
        shard that was removed; JSON values."""
        state: dict[str, Any] = {}
        if self.first < len(self.index.counts):
            state["first_shards"] = self.first
        if self.removed:
            state["removed"] = [list(each) for each in sorted(self.removed.items())]
        return state


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
