"""Reads the files of a run directory other than metrics: bad samples, hangs, log messages, media and evaluation results.

All of these files may come from another user. Only regular files are read, up to a limit, and only PNG data that Pillow has
verified reaches the page. Each reader appends to ``gaps`` a sentence about each file that it could not read or left out.
"""

from __future__ import annotations

import glob
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from dtrain.report.style import format_date, format_number, shorten
from dtrain.runs.history import as_float, flatten
from dtrain.runs.run_dir import bounded_lines, folders_below, plain_files, tail

_MAX_RANKS, _TAIL = 256, 200_000  # ranks whose logs are read; bytes read at the end of each
_MAX_REASONS, _MAX_SAMPLES, _MAX_HANGS = 5, 10, 8
_MAX_PICTURE, _MAX_PIXELS, _MAX_TEXT = 2_000_000, 20_000_000, 20_000  # bytes, pixels, bytes
_MAX_MEDIA, _MAX_MEDIA_NAMES, _MEDIA_DEPTH, _MEDIA_PER_NAME = 20_000_000, 100, 3, 3  # bytes of one run
_MAX_EVALUATION = 50_000_000  # bytes: a confusion matrix of 1,000 classes has a few million
_MAX_EVALUATIONS, _MAX_FACTS, _MAX_CLASSES, _MAX_PICTURES = 6, 60, 20, 4
_HIDDEN = ("config", "tables")  # of an evaluation: the page has the config, and tables are too large

_TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
_MESSAGE = re.compile(rf"^({_TIME}),\d+ (WARNING|ERROR|CRITICAL) ", re.MULTILINE)
_NEXT_MESSAGE = re.compile(rf"^{_TIME},\d+ [A-Z]+ ", re.MULTILINE)
_HANG = re.compile(rf"^({_TIME}) (.*)\n(rank \d+, step \d+: .*)\nlast samples: .*$", re.MULTILINE)
_RANK = re.compile(r"rank-(\d+)")
_MEDIUM = re.compile(r"^step-(\d+)\.(png|txt)$")


@dataclass(frozen=True)
class BadSamples:
    """Samples that could not be read.

    Attributes:
        count: Number of them.
        reasons: (reason, how often), the most frequent first.
        first: (step, key) of the first ones.
    """

    count: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    first: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Hang:
    """A hang that the watchdog of a rank detected.

    Attributes:
        time: Local date and time.
        reason: The rank, and the seconds without progress.
        places: Rank, step and running functions, one line for each rank.
    """

    time: str
    reason: str
    places: tuple[str, ...]


@dataclass(frozen=True)
class Message:
    """A warning or an error in the logs of one or more ranks.

    Attributes:
        level: ``warning``, ``error`` or ``critical``.
        text: First line, and the last line of the traceback if there is one.
        times: Local date and time of each occurrence, ascending.
        ranks: Ranks that logged it, ascending.
    """

    level: str
    text: str
    times: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Medium:
    """A picture or a text of a run, or the reason why it is not shown.

    Attributes:
        name: Folder below ``media``, or name of the file.
        step: Attempted step; None if it belongs to no step.
        png: Content of a picture.
        text: Content of a text.
        refused: Why there is neither; else empty.
    """

    name: str
    step: int | None
    png: bytes | None = None
    text: str | None = None
    refused: str = ""


@dataclass(frozen=True)
class EvaluationFile:
    """A result of ``dtrain evaluate``.

    Attributes:
        name: File name without suffix.
        facts: Name to formatted number or text.
        heading: Column names of ``classes``.
        classes: One row for each class, the lowest recall first.
        classes_left_out: Number of classes beyond the first 20.
        pictures: Pictures that belong to it.
    """

    name: str
    facts: dict[str, str]
    heading: tuple[str, ...] = ()
    classes: tuple[tuple[str, ...], ...] = ()
    classes_left_out: int = 0
    pictures: tuple[Medium, ...] = ()


def read_bad_samples(run_dir: Path, gaps: list[str]) -> BadSamples:
    """Reads ``logs/bad-rank-*.jsonl`` of all ranks."""
    count, reasons = 0, Counter[str]()
    first: list[tuple[int, str]] = []
    for path in plain_files(run_dir / "logs", "bad-rank-*.jsonl", gaps):
        for sample in _json_lines(path):
            count += 1
            reasons[shorten(str(sample.get("reason", "no reason given")), 200)] += 1
            first.append((int(as_float(sample["step"])), str(sample.get("key", "?"))))
        first = sorted(first)[:_MAX_SAMPLES]
    return BadSamples(count, tuple(reasons.most_common(_MAX_REASONS)), tuple(first))


def read_hangs(run_dir: Path, gaps: list[str]) -> list[Hang]:
    """Reads ``logs/hang-rank-*.txt``: the newest hangs, in the order of time."""
    places: dict[tuple[str, str], list[str]] = {}
    for path in plain_files(run_dir / "logs", "hang-rank-*.txt", gaps)[:_MAX_RANKS]:
        for match in _HANG.finditer(tail(path, _TAIL)):
            places.setdefault((match[1], match[2]), []).append(match[3])
    return [Hang(*key, tuple(sorted(places[key]))) for key in sorted(places)][-_MAX_HANGS:]


def read_messages(run_dir: Path, gaps: list[str]) -> list[Message]:
    """Reads warnings and errors from the ends of ``logs/rank-*.log``, equal ones joined, in the order of time."""
    paths = plain_files(run_dir / "logs", "rank-*.log", gaps)
    if len(paths) > _MAX_RANKS:
        gaps.append(f"logs of {len(paths)} ranks: only the first {_MAX_RANKS} are read")
    found = sorted(occurrence for path in paths[:_MAX_RANKS] for occurrence in _occurrences(path))
    same: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for time, rank, level, text in found:
        same.setdefault((level, text), []).append((time, rank))
    return [
        Message(*key, tuple(time for time, _ in group), tuple(sorted({rank for _, rank in group})))
        for key, group in same.items()
    ]


def read_media(run_dir: Path, gaps: list[str]) -> list[Medium]:
    """Reads the newest ``media/NAME/step-*.png`` and ``.txt`` of each name, by name, then by step."""
    found: list[Medium] = []
    room, names = _MAX_MEDIA, 0
    for folder in folders_below(run_dir / "media", _MEDIA_DEPTH):
        name = folder.relative_to(run_dir / "media").as_posix()
        files = plain_files(folder, "step-*", gaps)
        steps = sorted((int(match[1]), path) for path in files if (match := _MEDIUM.match(path.name)))
        names += bool(steps)
        if names > _MAX_MEDIA_NAMES:
            gaps.append(f"pictures and texts: only the first {_MAX_MEDIA_NAMES} names are shown")
            break
        for step, path in steps[-_MEDIA_PER_NAME:]:
            medium = _read_text(path, name, step) if path.suffix == ".txt" else _read_picture(path, name, step, room)
            room -= len(medium.png or b"")
            found.append(medium)
    return found


def read_evaluations(run_dir: Path, gaps: list[str]) -> list[EvaluationFile]:
    """Reads the newest ``evaluations/*.json``, by name. Files of other versions of dtrain are shown as far as possible."""
    paths = plain_files(run_dir / "evaluations", "*.json", gaps)
    paths = sorted(paths, key=lambda path: path.stat().st_mtime)
    if len(paths) > _MAX_EVALUATIONS:
        gaps.append(f"{len(paths)} evaluations: only the newest {_MAX_EVALUATIONS} are shown")
    found = []
    for path in sorted(paths[-_MAX_EVALUATIONS:]):
        try:
            if path.stat().st_size > _MAX_EVALUATION:
                raise ValueError(f"it is larger than {_MAX_EVALUATION:,} bytes")
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("it holds no object")
            pictures = plain_files(path.parent, f"{glob.escape(path.stem)}-*.png", gaps)[:_MAX_PICTURES]
            found.append(_evaluation(path.stem, content, tuple(_read_picture(each, each.stem) for each in pictures)))
        except (OSError, ValueError, RecursionError) as error:
            gaps.append(f"evaluations/{path.name} cannot be read ({error})")
    return found


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in bounded_lines(file):
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):  # incomplete because the process was killed
                continue
            if isinstance(content, dict) and math.isfinite(as_float(content.get("step"))):
                yield content


def _occurrences(path: Path) -> Iterator[tuple[str, int, str, str]]:
    """(time, rank, level, text) of each warning and error in a log."""
    log, name = tail(path, _TAIL), _RANK.search(path.name)
    for match in _MESSAGE.finditer(log):
        following = _NEXT_MESSAGE.search(log, match.end())
        parts = log[match.end() : following.start() if following else len(log)].strip().splitlines()
        text = shorten(parts[0]) if parts else ""
        if len(parts) > 1:
            text += f" \N{EM DASH} {shorten(parts[-1].strip())}"
        yield match[1], int(name[1]) if name else 0, match[2].lower(), text


def _read_picture(path: Path, name: str, step: int | None = None, room: int = _MAX_MEDIA) -> Medium:
    """A PNG of at most ``room`` bytes."""
    try:
        size = path.stat().st_size
        if size > min(_MAX_PICTURE, room):
            return Medium(name, step, refused=f"{size:,} bytes are too many for a report")
        content = path.read_bytes()
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.width * image.height > _MAX_PIXELS:
                return Medium(name, step, refused=f"{image.width} x {image.height} pixels are too many")
            image.verify()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # the errors of Pillow
        return Medium(name, step, refused=f"not a readable PNG ({error})")
    return Medium(name, step, png=content)


def _read_text(path: Path, name: str, step: int) -> Medium:
    try:
        with path.open("rb") as file:
            return Medium(name, step, text=file.read(_MAX_TEXT).decode("utf-8", errors="replace"))
    except OSError as error:
        return Medium(name, step, refused=str(error))


def _evaluation(name: str, content: Mapping[str, Any], pictures: tuple[Medium, ...]) -> EvaluationFile:
    leaves = flatten({key: value for key, value in content.items() if key not in _HIDDEN})
    facts = dict(
        islice(((key, _format(value)) for key, value in leaves if not isinstance(value, (dict, list))), _MAX_FACTS)
    )
    if math.isfinite(time := as_float(content.get("time"))):
        facts["time"] = format_date(time)
    classes = content.get("classes")
    rows = [row for row in classes if isinstance(row, dict) and "recall" in row] if isinstance(classes, list) else []
    rows = sorted(rows, key=lambda row: as_float(row["recall"]) if as_float(row["recall"]) >= 0 else 2.0)
    keys = list(rows[0]) if rows else []
    cells = tuple(tuple(_format(row.get(key)) for key in keys) for row in rows[:_MAX_CLASSES])
    heading = tuple(str(key).replace("_", " ") for key in keys)
    return EvaluationFile(name, facts, heading, cells, max(0, len(rows) - _MAX_CLASSES), pictures)


def _format(value: object) -> str:
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return shorten(str(value), 200)
    return format_number(as_float(value))
