"""Reading YAML and other files that somebody else may have written: bounded in size, memory and depth."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import yaml

_MAX_BYTES = 4 << 20
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
    if len(content) > _MAX_BYTES:
        raise ValueError(f"has {len(content):,} bytes, more than {_MAX_BYTES:,}")
    try:
        text = content.decode("utf-8")
        reason = _unsafe(text)
        document = yaml.safe_load(text) if not reason else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or the 31st of February
        raise ValueError(f"is not valid YAML ({next(iter(str(error).splitlines()), '')})") from error
    if reason:
        raise ValueError(f"{reason}, which dtrain does not write")
    return document


def read_bounded(path: Path) -> bytes:
    """The bytes of a file that is to be parsed; of a larger one only so many that ``parse_yaml`` refuses them.

    Raises:
        OSError: If it cannot be read, or is no regular file, such as a pipe that would keep the reader waiting.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return file.read(_MAX_BYTES + 1)


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
