"""Lists of shards: ``@shards.txt`` in place of a pattern.

* A *list* is a text file with one path, URL or pattern per line, or a JSON file (``.json``) with an array of them. Empty lines
  and lines that begin with ``#`` do not count.
* An *entry* that is relative is relative to the folder of the list, which may be moved together with its shards.

Only the entries matter: two lists with the same entries are the same data set. A list does not name other lists.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from dtrain.data.shards.shard_file import RemoteFile
from dtrain.files import MAX_JSON_BYTES, read_bounded
from dtrain.urls import is_url, local_path, redacted

_MARK = "@"


def is_list(pattern: str) -> bool:
    """Whether a pattern names a list. A shard whose own name begins with ``@`` is written ``./@x.tar``."""
    return pattern.startswith(_MARK)


def read_list(pattern: str) -> list[str]:
    """The entries of a list, as patterns.

    Args:
        pattern: ``@`` and the path or URL of the list.

    Returns:
        Paths, URLs and patterns, in their order; at least one.

    Raises:
        ValueError: If the list has no entry, is not text or JSON of the expected form, is too large, or names a list.
        OSError: If it cannot be read.
    """
    path = os.path.expanduser(local_path(pattern.removeprefix(_MARK)))
    shown = f"{_MARK}{redacted(path)}"
    if not path:
        raise ValueError("shards: '@' names no list. Write the path of a file after it, such as @shards.txt.")
    content = _content(path, shown)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"shards: {shown!r} has more than {MAX_JSON_BYTES:,} bytes. Divide it into several lists.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"shards: {shown!r} is not UTF-8 text ({error}). A list is a text file; a shard is named without '@'."
        ) from None
    found = _from_json(text, shown) if redacted(path).lower().endswith(".json") else list(_lines(text))
    if not found:
        raise ValueError(f"shards: {shown!r} has no entry. Write one path, URL or pattern per line.")
    if nested := next(filter(is_list, found), None):
        raise ValueError(f"shards: {shown!r} names the list {nested!r}. Write the shards of that list in it.")
    folder = redacted(path).rpartition("/")[0] if is_url(path) else os.path.dirname(path)
    return [_joined(folder, entry) for entry in found] if folder else found


def _content(path: str, shown: str) -> bytes:
    if is_url(path):
        pieces: list[bytes] = []
        with closing(RemoteFile(path)) as file:
            if file.size > MAX_JSON_BYTES:
                return bytes(MAX_JSON_BYTES + 1)

            def take(stream: Iterator[bytes]) -> None:
                pieces[:] = stream

            file.read_whole(take)
        return b"".join(pieces)
    try:
        return read_bounded(Path(path), MAX_JSON_BYTES)
    except FileNotFoundError:
        where = os.path.dirname(os.path.abspath(path))
        raise FileNotFoundError(
            f"shards: the list {shown!r} does not exist (looked in {where!r}). Correct its path; a shard is named without '@'."
        ) from None
    except OSError as error:
        raise OSError(f"shards: the list {shown!r} cannot be read: {error.strerror or error}.") from error


def _lines(text: str) -> Iterator[str]:
    for line in text.split("\n"):  # not splitlines(), which also splits at characters that a name may have
        entry = line.strip()
        if entry and not entry.startswith("#"):
            yield entry


def _from_json(text: str, shown: str) -> list[str]:
    want = 'want an array of texts, such as ["a.tar", "b.tar"]'
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"shards: {shown!r} is not JSON ({error}), {want}.") from None
    if not isinstance(found, list):
        raise ValueError(f"shards: {shown!r} holds {type(found).__name__}, {want}.")
    for number, entry in enumerate(found):
        if not isinstance(entry, str) or not entry.strip():
            raise ValueError(f"shards: entry {number} of {shown!r} is {str(entry)[:40]!r}, {want}.")
    return found


def _joined(folder: str, entry: str) -> str:
    if is_url(entry) or entry.startswith(("/", "~", "pipe:")) or entry == "-":
        return entry
    if is_url(folder):
        return f"{folder}/{entry}"
    # A folder may have characters that a pattern would expand.
    return os.path.join(glob.escape(folder) if glob.has_magic(entry) else folder, entry)
