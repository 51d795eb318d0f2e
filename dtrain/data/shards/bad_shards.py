"""Damaged shards: whether a data set is refused because of them, or is used without them.

* A shard is *damaged* if it cannot be indexed: it is cut, lacks its end mark, is no tar, is empty, or cannot be read or found.
* A damaged shard is *left out* as a whole when the data set is indexed. The data set then consists of the other shards.
* The decision is made once. A run records it in ``bad-shards.json`` in its directory; later starts, forks, replays and traces
  leave out exactly these shards, because the order of all samples depends on the number of shards.

Damage that occurs after indexing is not handled here: reading such a shard raises an error or gives bad samples.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.errors import shortened
from dtrain.files import read_json, replace_file
from dtrain.urls import components, redacted

REFUSE, SKIP = "refuse", "skip"
#: Name of the record in a run directory.
RECORD = "bad-shards.json"
#: By source of a mixture, "" without one: name of each shard that is left out to the reason.
LeftOut = Mapping[str, Mapping[str, str]]
_ALWAYS_ALLOWED = 1.0
_MOST_NAMED = 5
_percentage = re.compile(r"\s*(\d+(?:\.\d*)?)\s*%\s*").fullmatch


@dataclass(frozen=True)
class BadShards:
    """What happens to damaged shards.

    Args:
        action: ``"refuse"``: the data set is refused; ``"skip"``: they are left out.
        most: With ``"skip"``, how many shards may be left out, in a mixture counted per source. 0 allows none. A number below
            1 or a percentage (``"0.5%"``) allows that share, and always one. Any other number allows that many. None: no limit.
        left_out: Shards that are left out in any case.
        decided: Whether no other shards may be left out, because an earlier start has made the decision.
        grows: Whether shards may join or leave between starts (``data.grow``); changes only the message about a damaged shard.

    Raises:
        ValueError: If an argument is impossible.

    Example:
        >>> import os, tempfile
        >>> from dtrain.data import BadShards, ShardLoader, write_shards
        >>> samples = [{"__key__": str(n), "cls": n} for n in range(10)]
        >>> shards = [str(path) for path in write_shards(samples, tempfile.mkdtemp(), shards=2)]
        >>> os.truncate(shards[1], 700)  # damages it
        >>> options = {"global_batch_size": 5, "num_workers": 0, "bad_shards": BadShards("skip")}
        >>> ShardLoader(shards, {"cls": {"name": "label"}}, **options).source.summary()
        '5 samples in 1 shard, without 1 damaged: train-000001.tar'
    """

    action: str = REFUSE
    most: float | str | None = 0.01
    left_out: LeftOut = field(default_factory=dict)
    decided: bool = False
    grows: bool = False

    def __post_init__(self) -> None:
        if self.action not in (REFUSE, SKIP):
            raise ValueError(
                f"data.bad_shards: got {self.action!r}, want {REFUSE}, {SKIP}, or the {RECORD} of a run directory."
            )
        share_and_count("data.max_bad_shards", self.most, "shards", _ALWAYS_ALLOWED)

    @classmethod
    def from_config(cls, value: str, most: float | str | None, split: str, also: LeftOut | None = None) -> BadShards:
        """From ``data.bad_shards`` and ``data.max_bad_shards``.

        Args:
            value: ``refuse``, ``skip``, or the path of a record.
            most: See the class.
            split: ``train`` or ``eval``.
            also: Shards that are damaged on other ranks.

        Raises:
            ValueError: If a value is impossible, or the record is not one.
            OSError: If the record cannot be read.
        """
        if (path := Path(value).expanduser()).name == RECORD:
            # A run that has left out none may have no record.
            left_out = {} if path.parent.is_dir() and not path.exists() else read_record(path).get(split, {})
            return cls(SKIP, most, left_out, decided=True)
        return cls(value, most, also or {})

    @property
    def skips(self) -> bool:
        """Whether shards that are found to be damaged now are left out."""
        return self.action == SKIP and not self.decided

    def of_source(self, name: str) -> BadShards:
        """The same for one source of a mixture."""
        own = {"": self.left_out[name]} if name in self.left_out else {}
        return BadShards(self.action, self.most, own, self.decided, self.grows)

    def named_in(self, paths: Sequence[str]) -> dict[str, str]:
        """The shards among ``paths`` that are left out in any case: path to the name in ``left_out``.

        A shard's name is the shortest end of its path that no other shard has. The recorded name may be longer or shorter than
        today's, because shards may have joined or left since.

        Raises:
            ValueError: If several shards may be the one that was left out.
        """
        wanted = self.left_out.get("", {})
        if not wanted:
            return {}
        by_end = defaultdict(list)
        for name in wanted:
            by_end[name.rpartition("/")[2]].append(name)
        found: dict[str, str] = {}
        paths_of: dict[str, str] = {}
        for path in paths:
            parts = components(path)
            for name in by_end.get(parts[-1], ()):
                length = name.count("/") + 1
                if "/".join(parts[-length:]) != name:
                    continue
                if name in paths_of:
                    raise ValueError(
                        f"the shard {name} was left out by an earlier start, because it is damaged (data.bad_shards), and both "
                        f"{redacted(paths_of[name])} and {redacted(path)} may be it. Give new shards (data.grow) file names of "
                        "their own."
                    )
                paths_of[name], found[path] = path, name
        return found

    def check(self, reasons: Mapping[str, str], shards: int) -> None:
        """Checks the limit.

        Args:
            reasons: The shards that are left out, with the reasons.
            shards: All shards, including these.

        Raises:
            ValueError: If more shards are left out than allowed, or none remains.
        """
        if self.decided:
            return
        share, count = share_and_count("data.max_bad_shards", self.most, "shards", _ALWAYS_ALLOWED)
        if len(reasons) > max(count, share * shards):
            raise ValueError(
                f"{len(reasons)} of {shards} shards are damaged, more than data.max_bad_shards={self.most} allows: "
                f"{some_reasons(reasons)}. Copy them again, run `dtrain pack repair` on those that are cut, or raise the limit."
            )
        if len(reasons) == shards:
            raise ValueError(f"all {shards} shards are damaged: {some_reasons(reasons)}. Copy or write them again.")


def some_reasons(reasons: Mapping[str, str]) -> str:
    """``a.tar (why), b.tar (why) and 3 more``."""
    shown = [f"{name} ({shortened(why, 160)})" for name, why in list(reasons.items())[:_MOST_NAMED]]
    more = f" and {len(reasons) - _MOST_NAMED} more" if len(reasons) > _MOST_NAMED else ""
    return ", ".join(shown) + more


def write_record(run_dir: Path, splits: Mapping[str, LeftOut]) -> None:
    """Writes the record of a run: ``train`` and ``eval`` to the shards that they leave out, by source.

    Raises:
        OSError: On a write failure.
    """
    with replace_file(run_dir / RECORD) as file:
        file.write(json.dumps(splits, indent=1).encode() + b"\n")


def as_recorded(value: str, run_dir: Path) -> str:
    """``data.bad_shards`` for a process that uses the data as an earlier start of a run did.

    Args:
        value: ``data.bad_shards`` of the config.
        run_dir: The directory of the run.
    """
    record = run_dir.absolute() / RECORD
    return str(record) if value != REFUSE or record.exists() else value


def read_record(path: Path) -> Mapping[str, LeftOut]:
    """The content of a record, see ``write_record``.

    Raises:
        ValueError: If it is not a record.
        OSError: If it cannot be read.
    """
    try:
        found: Any = read_json(path)
        splits = {
            str(split): {str(source): {str(name): str(why) for name, why in of.items()} for source, of in it.items()}
            for split, it in found.items()
        }
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a record of damaged shards ({error}). Restore it.") from None
    return splits


def share_and_count(key: str, most: float | str | None, what: str, least: float) -> tuple[float, float]:
    """The share, and the number, that a limit of the config allows; the larger one applies.

    Args:
        key: The config key, for messages.
        most: 0, a number below 1 or a percentage for a share, any other number for a count; None for no limit.
        what: What is counted, such as ``samples``.
        least: The number that a share above 0 always allows.

    Raises:
        ValueError: If the limit is negative, not a number, or 1.0, which could mean all or one.
    """
    if most is None:
        return 0.0, math.inf
    if isinstance(most, str):
        match = _percentage(most)
        share = float(match[1]) / 100 if match else -1.0
        if not 0 <= share <= 1:
            raise ValueError(f"{key}: got {most!r}, want a percentage of all {what}, such as {key}=0.5%, or a number.")
    elif not most >= 0:
        raise ValueError(f"{key}: got {most}, want 0 or more.")
    elif isinstance(most, float) and most == 1:
        raise ValueError(f"{key}: got 1.0: all {what}, or one? Set {key}=100% for all, or {key}=1 for one.")
    elif most >= 1:
        return 0.0, most
    else:
        share = most
    return share, least if share else 0.0
