"""Atomic replacement of files and folders: after a kill or a power cut, the whole old or the whole new content exists.

* New content is *staged* beside its destination as ``.NAME.staged``, synced to the disk and renamed into place.
* A folder cannot be renamed over another one. The old folder is first renamed to ``.NAME.replaced``, and deleted when
  the new one is in place. ``restore_replaced`` puts it back after a kill between the two renames.
* Permissions follow the umask, also for files that a library created for their owner only.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_file(path: Path, *, concurrent: bool = False) -> Iterator[BinaryIO]:
    """Opens new content for a file; it replaces the old content when the block ends without an error.

    Args:
        path: The file; its folder exists. A symbolic link is replaced, not followed.
        concurrent: Whether several processes may replace the file at the same time; the last one wins. A killed process
            then leaves its staged file behind.

    Yields:
        The staged file, open for writing.

    Raises:
        OSError: On a write failure; ``path`` is unchanged.
    """
    staged = _staged(path, concurrent)
    try:
        staged.unlink(missing_ok=True)  # left by a killed process; or a link, which must not be followed
        with staged.open("xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    fsync_path(path.parent)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Makes an empty folder that replaces ``folder`` when the block ends without an error. One process at a time.

    Args:
        folder: The destination; its parent folder exists. It may exist, and is not a symbolic link.

    Yields:
        The staged folder.

    Raises:
        OSError: On a write failure; ``folder`` is unchanged.
    """
    staged, replaced = _staged(folder, False), folder.with_name(f".{folder.name}.replaced")
    _restore(replaced)
    try:
        shutil.rmtree(staged, ignore_errors=True)  # left by a killed process
        staged.mkdir()
        yield staged
        _finish(staged)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(folder, replaced)
        os.rename(staged, folder)
        fsync_path(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        _restore(replaced)


@contextmanager
def create_folder(folder: Path) -> Iterator[Path]:
    """Makes an empty folder that becomes ``folder`` when the block ends without an error, unless that exists by then.

    Several processes may do this at the same time: the first one wins, and the folders of the others are discarded.

    Args:
        folder: The destination; its parent folder exists.

    Yields:
        The staged folder.

    Raises:
        OSError: On a write failure, or if ``folder`` is a file.
    """
    staged = _staged(folder, True)
    try:
        staged.mkdir()
        yield staged
        _finish(staged)
        try:
            os.rename(staged, folder)  # fails if the folder exists and is not empty
        except OSError:
            if not folder.is_dir():
                raise
        fsync_path(folder.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def restore_replaced(parent: Path) -> None:
    """Renames back each folder that was renamed away for a new one that never arrived, because its writer was killed.

    Args:
        parent: The folder that contains them. No other process writes there.
    """
    for replaced in parent.glob(".*.replaced"):
        _restore(replaced)


def fsync_path(path: Path) -> None:
    """Syncs a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _staged(path: Path, concurrent: bool) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.staged" if concurrent else f".{path.name}.staged")


def _restore(replaced: Path) -> None:
    folder = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
    if not folder.exists():
        with suppress(FileNotFoundError):
            os.rename(replaced, folder)


def _finish(staged: Path) -> None:
    """Gives the files the read and write bits that the umask allows, and syncs everything."""
    readable = stat.S_IMODE(staged.stat().st_mode) & 0o666  # mkdir applied the umask
    for path in staged.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) | readable)
        fsync_path(path)
    fsync_path(staged)
