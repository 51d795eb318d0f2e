"""Reading files of a run directory that may be somebody else's: regular ones only, and only so much of each."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

#: Bytes of a line that are kept: a record has some thousand.
LONGEST_LINE = 2**20


def is_plain(path: Path) -> bool:
    """Whether this is a regular file: no link to somewhere else, no pipe that keeps its reader for ever."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def may_be_read(path: Path, gaps: list[str], absent: str, most: int | None = None) -> bool:
    """Whether this is a regular file of a size that makes sense; ``gaps`` gets why not.

    Args:
        path: The file.
        gaps: Gets a sentence if it may not.
        absent: That sentence where there is nothing of this name.
        most: Bytes.
    """
    if not os.path.lexists(path):
        gaps.append(absent)
    elif not is_plain(path):
        gaps.append(f"{path.name} is a link or no file, so it is not read")
    elif most is not None and path.stat().st_size > most:
        gaps.append(f"{path.name} is larger than {most:,} bytes, so it is not what its name says")
    else:
        return True
    return False


def plain_files(folder: Path, pattern: str, gaps: list[str]) -> list[Path]:
    """Regular files of a folder that is no link, sorted by name; ``gaps`` gets those that may not be read."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    if not os.access(folder, os.R_OK | os.X_OK):
        gaps.append(f"{folder.name} may not be read by this user")
        return []
    found = sorted(path for path in folder.glob(pattern) if is_plain(path))
    gaps += [
        f"{folder.name}/{path.name} may not be read by this user" for path in found if not os.access(path, os.R_OK)
    ]
    return [path for path in found if os.access(path, os.R_OK)]


def lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is longer than ``LONGEST_LINE``, its beginning, without an end of line."""
    while line := file.readline(LONGEST_LINE):
        yield line
        while len(line) == LONGEST_LINE and not line.endswith(b"\n"):  # what is left of it
            line = file.readline(LONGEST_LINE)


def tail(path: Path, most: int) -> str:
    """The last bytes of a text file, from the start of a line on."""
    with path.open("rb") as file:
        skipped = max(0, path.stat().st_size - most)
        file.seek(skipped)
        text = file.read(most).decode("utf-8", errors="replace")
    return text.partition("\n")[2] if skipped else text


def folders_below(folder: Path, depth: int) -> Iterator[Path]:
    """Folders below ``folder``, not through links, at most so many levels down, sorted."""
    if depth == 0 or folder.is_symlink() or not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield path
            yield from folders_below(path, depth - 1)
