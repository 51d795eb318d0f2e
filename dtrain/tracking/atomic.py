"""Replacing a file so that a reader, or the next start, finds the old content or the new one and never a part of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A handle on new content for ``path``, which takes the old one's place when the block ends without an error.

    Written aside in the same directory, synced, renamed; the rename is synced too. One writer at a time.

    Raises:
        OSError: If the disk refuses; ``path`` is then as it was.
    """
    aside = path.with_name(f".{path.name}.aside")
    try:
        aside.unlink(missing_ok=True)  # of a kill; or a link, through which nothing is written
        with aside.open("xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
