"""Pictures and texts of a run: ``media/<name>/step-000000050.png``, or ``.txt``.

All of them are kept: a run has some for each evaluation, of a few ten KiB each. Rank 0 writes.
"""

from __future__ import annotations

import re
from pathlib import Path

from dtrain.tracking.atomic import replacing

_PNG = b"\x89PNG\r\n\x1a\n"
_NAME = re.compile(r"\w[\w.-]*")
_FILE = re.compile(r"step-(\d+)\.(png|txt)")


def write_media(folder: Path, step: int, name: str, content: bytes | str) -> Path:
    """Writes a picture or a text, as a whole or not at all.

    Args:
        folder: ``<run.dir>/media``; made if it is not there.
        step: Attempted steps before it.
        name: What it shows, such as ``confusion``: letters, digits, ``_``, ``-`` and ``.``.
        content: The bytes of a PNG file, or text.

    Returns:
        The file.

    Raises:
        ValueError: If the name cannot be a folder's, or the content is neither a PNG file nor text.
        OSError: If the disk refuses.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"media: got the name {name!r}, want letters, digits, _, - and . only, as in 'confusion'.")
    if not isinstance(content, (bytes, str)):
        raise ValueError(
            f"media {name!r}: got a {type(content).__name__}, want the bytes of a PNG file or a text. "
            "dtrain.tracking.png.png makes them of an array."
        )
    if isinstance(content, bytes) and not content.startswith(_PNG):
        raise ValueError(f"media {name!r}: got bytes that begin with {content[:8]!r}, want those of a PNG file.")
    suffix, data = ("txt", content.encode()) if isinstance(content, str) else ("png", content)
    path = folder / name / f"step-{step:09d}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as handle:
        handle.write(data)
    return path


def cut_media_after(folder: Path, step: int) -> None:
    """Deletes what was written after ``step``, which a resumed run is about to do again."""
    for path in folder.glob("*/step-*"):
        if (found := _FILE.fullmatch(path.name)) and int(found[1]) > step:
            path.unlink()
