"""Reading files that somebody else may have written: regular files only; YAML and JSON bounded in size and depth."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml

#: Of a YAML file.
MAX_BYTES = 4 << 20
MAX_JSON_BYTES = 64 << 20  # the names of millions of classes
_MAX_DEPTH = 50  # configs are some ten levels deep; Python's recursion ends at about a thousand


def parse_yaml(content: bytes) -> Any:
    """The plain data of a YAML document.

    Args:
        content: The document, UTF-8, of at most 4 MiB.

    Raises:
        ValueError: If it is larger, no YAML, has aliases or tags, or is nested too deeply. The message is one line.

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


def read_json(path: Path) -> Any:
    """The plain data of a JSON file of at most 64 MiB.

    Raises:
        OSError: If it cannot be read, or is no regular file.
        ValueError: If it is larger, no JSON, or nested too deeply. The message is one line.
    """
    content = read_bounded(path, MAX_JSON_BYTES)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES:,} bytes")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_bounded(path: Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a file that is to be parsed; of one with more than ``most`` only one more, so that the caller refuses it.

    Raises:
        OSError: As ``open_regular``.
    """
    with open_regular(path) as file:
        return file.read(most + 1)


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
