"""Files: replaced atomically, appended, locked, and read safely; and the cache folder.

* New content is *staged* next to its destination as ``.NAME.staged``, synced to the disk and renamed into place. After a kill
  or a power cut, the whole old or the whole new content exists.
* A folder cannot be renamed over an existing one. The old folder is first renamed to ``.NAME.replaced``, and deleted when
  the new one is in place. ``restore_replaced`` puts it back after a kill between the two renames.
* A run directory may be a copy of unknown origin. So a symbolic link in place of a file is replaced or refused, and never
  followed when writing; a pipe or a device is refused, because reading it could block or never end. Folders may be links. YAML
  and JSON are limited in size and depth.
* Permissions follow the umask, also for files that a library created for their owner only.
* A folder or file is *own* if nobody but this user and root may write to it. In a cache, dtrain trusts only own files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

import yaml

#: Errors of a file system without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
#: Largest YAML file that is read.
MAX_BYTES = 4 << 20
MAX_JSON_BYTES = 64 << 20  # the names of millions of classes
_MAX_DEPTH = 50  # configs are some ten levels deep; Python's recursion ends at about a thousand


def cache_dir() -> Path:
    """``$DTRAIN_CACHE``, else ``$XDG_CACHE_HOME/dtrain``, else ``~/.cache/dtrain``; it may not exist."""
    if folder := os.environ.get("DTRAIN_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dtrain"


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
    # A folder of that name was not made by dtrain, so it is kept.
    staged = _staged(path, concurrent or _staged(path, False).is_dir())
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
def replace_folder(folder: Path, filled: Path | None = None) -> Iterator[Path]:
    """Makes an empty folder that replaces ``folder`` when the block ends without an error. One process at a time.

    Args:
        folder: The destination; its parent folder exists. A symbolic link is replaced, not followed.
        filled: An existing folder next to it to use instead of an empty one. It is deleted after an error too.

    Yields:
        The staged folder.

    Raises:
        OSError: On a write failure; ``folder`` is unchanged.
    """
    staged, replaced = filled or _staged(folder, False), folder.with_name(f".{folder.name}.replaced")
    _restore(replaced)
    try:
        if filled is None:
            remove(staged)  # left by a killed process
            staged.mkdir()
        yield staged
        _finish(staged)
        if os.path.lexists(folder):
            remove(replaced)
            os.rename(folder, replaced)
        os.rename(staged, folder)
        fsync_path(folder.parent)
        remove(replaced)
    finally:
        remove(staged)
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


def remove(path: Path) -> None:
    """Deletes a file, a link or a folder with its content, if it exists and the file system allows it; follows no link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


# -- own folders and files


def own_folder(folder: Path) -> Path:
    """Where this user keeps what others must not alter: ``folder``, or its subfolder ``dtrain-UID`` if others may write it.

    It may not exist yet. The subfolder may be somebody else's, or a link, so open it without following one and ask ``is_own``.
    """
    try:
        return folder if is_own(os.stat(folder)) else folder / f"dtrain-{os.geteuid()}"
    except OSError:
        return folder  # it is created


def is_own(status: os.stat_result) -> bool:
    """Whether nobody but this user, and root, may write a file or folder."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_own_file(status: os.stat_result) -> bool:
    """Whether it is a regular file that is own, and has one name only."""
    # A file with two names may be another file of this user, which must not be written.
    return stat.S_ISREG(status.st_mode) and is_own(status) and status.st_nlink <= 1


# -- appending, locking, cutting


def open_to_append(path: Path) -> BinaryIO:
    """Opens a regular file for appending; creates it if it does not exist. Its folder exists.

    Raises:
        OSError: On a failure; also if it is a symbolic link or not a regular file.
    """
    return os.fdopen(regular_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW), "ab")


def try_lock(file: IO[Any], *, shared: bool = False, without_locks: bool = True) -> bool:
    """Locks an open file until it is closed, unless another process holds its lock. Does not wait.

    Args:
        file: The file.
        shared: Whether several processes may hold the lock together.
        without_locks: The answer on a file system without locks.

    Returns:
        Whether this process holds the lock.

    Raises:
        OSError: If locking fails for any other reason.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return without_locks
    return True


def cut_lines(path: Path, is_kept: Callable[[bytes], bool]) -> int:
    """Moves lines of a file to the end of ``cut-NAME`` next to it.

    The cut lines are synced before the file is replaced. A kill between the two leaves them in both files.

    Args:
        path: The file; it need not exist. It is not touched if all lines are kept.
        is_kept: Gets each line with its end; returns the same for the same line.

    Returns:
        Number of lines cut.

    Raises:
        OSError: On a failure; ``path`` is unchanged.
    """
    try:
        lines = open_regular(path)
    except FileNotFoundError:
        return 0
    with lines:
        number = sum(not is_kept(line) for line in lines)
        if number:
            lines.seek(0)
            with open_to_append(path.with_name(f"cut-{path.name}")) as cut:
                cut.writelines(line.rstrip(b"\n") + b"\n" for line in lines if not is_kept(line))
                cut.flush()
                os.fsync(cut.fileno())
            lines.seek(0)
            with replace_file(path) as new:
                new.writelines(line for line in lines if is_kept(line))
    return number


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
    if not os.path.lexists(folder):
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


def parse_yaml(content: bytes) -> Any:
    """The plain data of a YAML document.

    Args:
        content: The document, UTF-8, of at most 4 MiB.

    Raises:
        ValueError: If it is larger, is not YAML, has aliases or tags, or is nested too deeply. The message is one line.

    Example:
        >>> parse_yaml(b"overrides: [train.max_steps=5]")
        {'overrides': ['train.max_steps=5']}
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"has {len(content):,} bytes, more than {MAX_BYTES:,}")
    try:
        text = content.decode("utf-8")
        reason = _unsafe(text)
        document = yaml.safe_load(text) if not reason else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or the 31st of February
        raise ValueError(f"is not valid YAML ({next(iter(str(error).splitlines()), '')})") from error
    if reason:
        raise ValueError(f"{reason}, which dtrain does not write")
    return document


def yaml_bytes(content: dict[str, Any]) -> bytes:
    """Plain data as YAML, in the order of their keys."""
    return yaml.safe_dump(content, sort_keys=False).encode()


def read_json(path: Path) -> Any:
    """The plain data of a JSON file of at most 64 MiB.

    Raises:
        OSError: If it cannot be read, or is not a regular file.
        ValueError: If it is larger, is not JSON, or is nested too deeply. The message is one line.
    """
    content = read_bounded(path, MAX_JSON_BYTES)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES:,} bytes")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_bounded(path: Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a file to parse, at most ``most + 1`` of them, so that the caller can refuse a larger file.

    Raises:
        OSError: As ``open_regular``.
    """
    with open_regular(path) as file:
        return file.read(most + 1)


def size_and_hash(path: Path) -> dict[str, Any]:
    """The ``size`` in bytes and the ``sha256`` of a regular file.

    Raises:
        OSError: As ``open_regular``.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
        return {"size": file.tell(), "sha256": digest.hexdigest()}


def link_or_copy(path: Path, to: Path) -> None:
    """Makes a hard link to a file that never changes; a copy on a file system without hard links.

    Raises:
        OSError: If neither is possible.
    """
    try:
        os.link(path, to)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, to)


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading.

    Raises:
        OSError: On a failure; also if it is not a regular file, such as a pipe, which would block the caller.
    """
    return os.fdopen(regular_descriptor(path, os.O_RDONLY), "rb")


def regular_descriptor(path: Path, flags: int) -> int:
    """``os.open`` for regular files.

    Raises:
        OSError: On a failure; also if it is not a regular file, or a symbolic link and ``flags`` has ``O_NOFOLLOW``.
    """
    try:
        # O_NONBLOCK: opening a pipe does not wait for its other end.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def _not_regular(path: Path) -> OSError:
    kind = "a symbolic link" if path.is_symlink() else "not a regular file"
    return OSError(errno.EINVAL, f"it is {kind}, so dtrain does not use it. Delete or replace it", str(path))


def _unsafe(text: str) -> str:
    """Why loading this YAML could exhaust memory or raise an unexpected error; ``""`` if it is safe."""
    depth = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent):  # a few lines of aliases of aliases are a billion values
            return "has YAML aliases"
        if getattr(event, "tag", None) is not None:  # `!!bool maybe` is a KeyError, `!!int ""` an IndexError
            return "has YAML tags"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            return f"is nested more than {_MAX_DEPTH} levels deep"
    return ""
