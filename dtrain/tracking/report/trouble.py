"""What trouble has left in ``<run.dir>/logs``: bad samples, hangs, and the warnings and errors of all ranks."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.tracking.columns import number
from dtrain.tracking.report.wording import shortened
from dtrain.tracking.run_files import lines, plain_files, tail

_MOST_RANKS = 256  # whose logs are read
_TAIL = 200_000  # bytes of each
_STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
_MESSAGE = re.compile(rf"^({_STAMP}),\d+ (WARNING|ERROR|CRITICAL) ", re.MULTILINE)
_NEXT = re.compile(rf"^{_STAMP},\d+ [A-Z]+ ", re.MULTILINE)
_HANG = re.compile(rf"^({_STAMP}) (.*)\n(rank \d+, step \d+: .*)\nlast samples: (.*)$", re.MULTILINE)
_RANK = re.compile(r"rank-(\d+)")


@dataclass(frozen=True)
class BadSamples:
    """The samples that could not be read.

    Attributes:
        count: How many the ledgers name.
        reasons: How often which reason was given, the most frequent first.
        first: (step, key, reason) of the first ones.
    """

    count: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    first: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True)
class Hang:
    """A rank that said where it was when the run hung.

    Attributes:
        when: Local date and time.
        why: Who declared it, and after how long.
        place: Rank, step and functions.
        samples: Keys of what it was handed last, as JSON.
    """

    when: str
    why: str
    place: str
    samples: str


@dataclass(frozen=True)
class Message:
    """A warning or an error in a rank's log.

    Attributes:
        when: Local date and time.
        rank: Whose.
        level: ``WARNING``, ``ERROR`` or ``CRITICAL``.
        text: Its first line, and the last line of the traceback if it has one.
    """

    when: str
    rank: int
    level: str
    text: str


def bad_samples(run_dir: Path, gaps: list[str], most: int = 10) -> BadSamples:
    """Reads the ledgers of all ranks; the first ``most`` samples are kept. ``gaps`` gets what cannot be read."""
    count, reasons = 0, Counter[str]()
    first: list[tuple[int, str, str]] = []
    for path in plain_files(run_dir / "logs", "bad-rank-*.jsonl", gaps):
        for line in _lines(path):
            count += 1
            reasons[shortened(str(line.get("reason", "no reason given")), 200)] += 1
            first.append((int(number(line["step"])), str(line.get("key", "?")), str(line.get("reason", ""))))
        first = sorted(first)[:most]
    return BadSamples(count, tuple(reasons.most_common(5)), tuple(first))


def hangs(run_dir: Path, gaps: list[str], most: int = 64) -> list[Hang]:
    """What ranks wrote when the run hung, the newest ``most``, in the order of time and rank; ``gaps`` as above."""
    found = [
        Hang(*match.groups())
        for path in plain_files(run_dir / "logs", "hang-rank-*.txt", gaps)[:_MOST_RANKS]
        for match in _HANG.finditer(tail(path, _TAIL))
    ]
    return sorted(found, key=lambda hang: (hang.when, hang.place))[-most:]


def messages(run_dir: Path, gaps: list[str]) -> list[Message]:
    """Warnings and errors of all ranks, in the order of time; ``gaps`` gets what is not read."""
    paths = plain_files(run_dir / "logs", "rank-*.log", gaps)
    if len(paths) > _MOST_RANKS:
        gaps.append(f"of {len(paths)} ranks' logs the first {_MOST_RANKS} are read")
    found = [message for path in paths[:_MOST_RANKS] for message in _messages(path)]
    return sorted(found, key=lambda message: (message.when, message.rank))


def _messages(path: Path) -> Iterator[Message]:
    text, name = tail(path, _TAIL), _RANK.search(path.name)
    for match in _MESSAGE.finditer(text):
        after = _NEXT.search(text, match.end())
        lines = text[match.end() : after.start() if after else len(text)].strip().splitlines()
        told = shortened(lines[0]) if lines else ""
        if len(lines) > 1:
            told += f" \N{EM DASH} {shortened(lines[-1].strip())}"
        yield Message(match[1], int(name[1]) if name else 0, match[2], told)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in lines(file):
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):  # cut short by a kill
                continue
            if isinstance(content, dict) and math.isfinite(number(content.get("step"))):
                yield content
