"""The shards of a source in the order in which a state knows them.

Known shards keep their numbers, and new ones are appended, whatever the sort of their names (``order.growth``); in a mixture,
those of each source by themselves. Shards that a state knows and that are missing are known by their names only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrain.data.order.growth import Growth, ShardList
from dtrain.data.order.mixture_position import saved_of_source
from dtrain.data.sources.mixture import MixtureSource
from dtrain.data.sources.shard_source import ShardSource
from dtrain.data.sources.source import Source


def can_grow(source: Source) -> bool:
    """Whether shards of a source, or of any source of a mixture, may join and leave between two starts."""
    if isinstance(source, MixtureSource):
        return source.mixed and any(isinstance(one, ShardSource) for one in source.sources)
    return isinstance(source, ShardSource)


def as_known(source: Source, state: Mapping[str, Any], growth: Growth, *, exactly: bool = False) -> Source:
    """The source with its shards in the order of a state, as far as ``growth`` allows; the same object if nothing changes.

    Args:
        source: The source.
        state: The state of a position on it.
        growth: What may have changed. What it does not allow is left for the position to refuse.
        exactly: Leaves out shards that the state does not know.

    Raises:
        ValueError: If a known shard was cut short or is damaged by now, or cannot be told apart from a new one.
    """
    if not isinstance(source, MixtureSource):
        return _as_known(source, state, growth, exactly)
    if not source.mixed:
        return source
    parts = []
    for name, one in zip(source.names, source.sources, strict=True):
        try:
            saved = saved_of_source(state, name) if name in state.get("sources", {}) else {}
            parts.append(_as_known(one, saved, growth, exactly))
        except ValueError as error:
            raise ValueError(f"data.mixture.{name}: {error}") from error
    is_same = all(one is part for one, part in zip(source.sources, parts, strict=True))
    return source if is_same else source.with_sources(parts)


def _as_known(source: Source, saved: Mapping[str, Any], growth: Growth, exactly: bool) -> Source:
    if "shards" not in saved or not isinstance(source, ShardSource):
        return source
    index, mine, known = source.index, source.index.shard_list, ShardList.from_state(saved["shards"])
    ends = {name.rpartition("/")[2] for name in known.names}
    if cut_short := [path for path in source.waiting if os.path.basename(path) in ends]:
        raise ValueError(
            f"the shard {cut_short[0]} of this state ends without the end mark of a tar: it was cut short. Copy or write "
            "it again."
        )
    removed = [shard for shard, _ in saved.get("removed", [])]
    missing = set(known.names) - set(mine.names) - {known.names[shard] for shard in removed}
    for name, reason in index.left_out.items():
        # A name is the shortest end of a path that no other shard has: either may be the longer one.
        if any(f"/{one}".endswith(f"/{name}") or f"/{name}".endswith(f"/{one}") for one in missing):
            raise ValueError(
                f"data.bad_shards=skip left out the shard {name} ({reason}), which this state knows. Restore it; or take "
                "it out of data.train, with data.grow_allow_removed=true."
            )
    current = np.arange(len(mine.names))
    present = np.setdiff1d(current, index.removed)
    current[list(index.removed)] = -1
    numbers = growth.numbering(known, mine.take(present), removed)
    if numbers is None:
        return source
    numbers = np.where(numbers < 0, -1, present[numbers])[: len(known.names) if exactly else None]
    return source if np.array_equal(numbers, current) else source.numbered(numbers, known)
