"""Pictures and texts of a run: ``<run.dir>/media/<name>/step-000000050.png`` and ``.txt``."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from dtrain.tracking.run_files import folders_below, plain_files

_STEP = re.compile(r"^step-(\d+)\.(png|txt)$")
_LARGEST_PICTURE, _LARGEST_TEXT = 2_000_000, 20_000  # bytes
_ALL = 20_000_000  # bytes, of a run
_MOST_NAMES = 100
_MOST_PIXELS = 20_000_000
_DEPTH = 3


@dataclass(frozen=True)
class Medium:
    """A picture or a text, or why it is not shown.

    Attributes:
        name: What it is of: its folder below ``media``.
        step: Attempted step; None if it belongs to none.
        png: The picture.
        text: The text.
        refused: Why there is neither.
    """

    name: str
    step: int | None
    png: bytes | None = None
    text: str | None = None
    refused: str = ""


def media(run_dir: Path, gaps: list[str], newest: int = 3) -> list[Medium]:
    """The newest media of each name, by name, then by step; ``gaps`` gets what may not be read."""
    found: list[Medium] = []
    room, shown = _ALL, 0
    for folder in folders_below(run_dir / "media", _DEPTH):
        name = folder.relative_to(run_dir / "media").as_posix()
        steps = [
            (int(match[1]), path) for path in plain_files(folder, "step-*", gaps) if (match := _STEP.match(path.name))
        ]
        shown += bool(steps)
        if shown > _MOST_NAMES:
            gaps.append(f"of the pictures and texts only those of the first {_MOST_NAMES} names are shown")
            break
        for step, path in sorted(steps)[-newest:]:
            is_text = path.suffix == ".txt"
            medium = _read_text(path, name, step) if is_text else read_picture(path, name, step, room)
            room -= len(medium.png or b"")
            found.append(medium)
    return found


def read_picture(path: Path, name: str, step: int | None = None, room: int = _ALL) -> Medium:
    """A PNG, if it is one that a page can take in.

    Args:
        path: A regular file.
        name: What it is of.
        step: Attempted step, where it belongs to one.
        room: Bytes that the page has left for it.
    """
    try:
        size = path.stat().st_size
        if size > min(_LARGEST_PICTURE, room):
            return Medium(name, step, refused=f"{size:,} bytes are more than a report takes in")
        content = path.read_bytes()
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if image.width * image.height > _MOST_PIXELS:
                return Medium(name, step, refused=f"{image.width} x {image.height} pixels are too many")
            image.verify()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow's words for a broken PNG
        return Medium(name, step, refused=f"no readable PNG ({error})")
    return Medium(name, step, png=content)


def _read_text(path: Path, name: str, step: int) -> Medium:
    try:
        with path.open("rb") as file:
            return Medium(name, step, text=file.read(_LARGEST_TEXT).decode("utf-8", errors="replace"))
    except OSError as error:
        return Medium(name, step, refused=str(error))
