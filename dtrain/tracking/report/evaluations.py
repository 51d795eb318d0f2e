"""Results of ``dtrain.evaluate``: the JSON files in ``<run.dir>/evaluations``, and the pictures that belong to them.

A result is read as what it is, numbers and texts under names and a table of classes, whichever of them it has: files of other
versions are shown, too.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dtrain.tracking.columns import number
from dtrain.tracking.report.media import Medium, read_picture
from dtrain.tracking.report.wording import date, figure, shortened
from dtrain.tracking.run_files import plain_files

_LARGEST = 50_000_000  # bytes: a confusion matrix of 1,000 classes has a few million
_NEWEST = 6
_MOST_FACTS, _MOST_CLASSES, _MOST_PICTURES, _DEPTH = 60, 20, 4, 4
_NOT_TOLD = ("config", "tables")  # the page has the one, and nobody reads the other


@dataclass(frozen=True)
class Evaluation:
    """One result.

    Attributes:
        name: Of its file, without the ending.
        facts: Name to number or text, as a person reads it.
        heading: Names of the columns of ``classes``.
        classes: A row for each class, the lowest recall first, as many as one reads.
        left_out: Classes beyond these.
        pictures: Those whose file's name begins as this one's.
    """

    name: str
    facts: dict[str, str]
    heading: tuple[str, ...] = ()
    classes: tuple[tuple[str, ...], ...] = ()
    left_out: int = 0
    pictures: tuple[Medium, ...] = ()


def evaluations(run_dir: Path, gaps: list[str]) -> list[Evaluation]:
    """The newest results, by name; ``gaps`` gets what is damaged or left out."""
    paths = plain_files(run_dir / "evaluations", "*.json", gaps)
    paths = sorted(paths, key=lambda path: path.stat().st_mtime)
    if len(paths) > _NEWEST:
        gaps.append(f"of {len(paths)} evaluations the newest {_NEWEST} are shown")
    found = []
    for path in sorted(paths[-_NEWEST:]):
        try:
            if path.stat().st_size > _LARGEST:
                raise ValueError(f"it is larger than {_LARGEST:,} bytes")
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("it holds no object")
        except (OSError, ValueError, RecursionError) as error:
            gaps.append(f"evaluations/{path.name} cannot be read ({error})")
            continue
        pictures = plain_files(path.parent, f"{glob.escape(path.stem)}-*.png", gaps)[:_MOST_PICTURES]
        found.append(_evaluation(path.stem, content, [read_picture(picture, picture.stem) for picture in pictures]))
    return found


def _evaluation(name: str, content: Mapping[str, Any], pictures: Sequence[Medium]) -> Evaluation:
    told = {key: value for key, value in content.items() if key not in _NOT_TOLD}
    facts = dict(islice(_facts(told), _MOST_FACTS))
    if math.isfinite(evaluated := number(content.get("time"))):
        facts["time"] = date(evaluated)
    rows = _classes(content)
    rows = sorted(rows, key=lambda row: number(row["recall"]) if number(row["recall"]) >= 0 else 2.0)
    heading = tuple(str(key) for key in rows[0]) if rows else ()
    cells = tuple(tuple(_told(row.get(key)) for key in heading) for row in rows[:_MOST_CLASSES])
    spoken = tuple(key.replace("_", " ") for key in heading)
    return Evaluation(name, facts, spoken, cells, max(0, len(rows) - _MOST_CLASSES), tuple(pictures))


def _facts(node: Mapping[str, Any], prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and depth:
            yield from _facts(value, f"{prefix}{key}.", depth - 1)
        elif not isinstance(value, (Mapping, list)):
            yield f"{prefix}{key}", _told(value)


def _classes(node: Mapping[str, Any], depth: int = _DEPTH) -> list[Mapping[str, Any]]:
    for value in node.values():
        if isinstance(value, list) and value and all(isinstance(row, dict) and "recall" in row for row in value):
            return value
        if isinstance(value, Mapping) and depth and (found := _classes(value, depth - 1)):
            return found
    return []


def _told(value: object) -> str:
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return shortened(str(value), 200)
    return figure(number(value))
