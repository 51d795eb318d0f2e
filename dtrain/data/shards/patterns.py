"""Expands shard patterns to a list of shards, and names the shards.

* A *pattern* is a path or URL, a brace pattern (``train-{00000..00009}.tar``), a glob (``train-*.tar``), or a list of these
  in a file (``@shards.txt``, see ``lists``).
* A shard's *name* is the shortest end of its path that no other shard has.

Files must exist. URLs are checked when they are indexed, many at a time.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from braceexpand import braceexpand

from dtrain import urls
from dtrain.data.shards import shard_file
from dtrain.data.shards.lists import is_list, read_list
from dtrain.urls import absolute, components, is_url, local_path, redacted

_DECOMPRESS = {
    **dict.fromkeys((".tar.gz", ".tgz"), "gunzip"),
    **dict.fromkeys((".tar.bz2", ".tbz2"), "bunzip2"),
    **dict.fromkeys((".tar.xz", ".txz"), "unxz"),
    **dict.fromkeys((".tar.zst", ".tzst"), "unzstd"),
    ".tar.lz4": "unlz4",
}
_digits = re.compile(r"\d+")

Patterns = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def expand(patterns: Patterns, *, keep_missing: bool = False) -> list[str]:
    """The shards that match patterns.

    Args:
        patterns: One or several; ``~`` is the home folder.
        keep_missing: Whether named files that do not exist are returned too, for a data set that leaves out damaged shards. A
            glob must match something nevertheless.

    Returns:
        Paths and URLs, in the order of the patterns; the matches of a glob are sorted.

    Raises:
        ValueError: If a pattern matches nothing, a shard is named twice, or samples cannot be read from it by position
            (pipes, compressed tars).
        OSError: If a named file does not exist, or a folder cannot be listed.
        ModuleNotFoundError: If a package is missing for a kind of URL; names the command that installs it.
    """
    paths: list[str] = []
    for pattern in _each(patterns):
        if is_list(pattern):
            with _naming(pattern):
                for entry in read_list(pattern):
                    paths += _expand_one(entry, keep_missing)
        else:
            paths += _expand_one(pattern, keep_missing)
    if not paths:
        raise ValueError("shards: got an empty list. Name at least one, such as 'data/train-*.tar'.")
    twice = [path for path, times in Counter(map(absolute, paths)).items() if times > 1]
    if twice:
        raise ValueError(
            f"shards: {redacted(twice[0])!r} is named more than once ({len(twice)} such shards). Name each shard once, because "
            "every sample of an epoch is used exactly once."
        )
    return paths


def first_shard(patterns: Patterns) -> str:
    """The first of the shards that match patterns, without looking for most of the others; raises as ``expand``.

    A named file need not exist.
    """
    for pattern in _each(patterns):
        return expand(read_list(pattern)[:1] if is_list(pattern) else pattern, keep_missing=True)[0]
    raise ValueError("shards: got an empty list.")


def _each(patterns: Patterns) -> list[str]:
    given = [patterns] if isinstance(patterns, (str, os.PathLike)) else patterns
    return [os.fspath(pattern) for pattern in given]


@contextmanager
def _naming(pattern: str) -> Iterator[None]:
    """Adds the list to the errors of its entries."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        shown = f"@{redacted(pattern[1:])}"
        if shown in str(error):
            raise
        raise type(error)(f"{error} It is an entry of {shown}.") from error


def names(paths: Sequence[str]) -> list[str]:
    """A name for each shard: the shortest suffix of its absolute path, in whole components, that no other shard has.

    The query of a URL is not part of a name: it may be a signature that changes every day.

    Raises:
        ValueError: If a path occurs twice.
    """
    parts = [components(path) for path in paths]
    twice = [path for path, times in Counter(map(tuple, parts)).items() if times > 1]
    if twice:
        raise ValueError(f"shards: {'/'.join(twice[0])!r} occurs twice. Name each shard once.")
    found = [""] * len(paths)
    alike = list(range(len(paths)))
    length = 0
    while alike:
        length += 1
        for place in alike:
            found[place] = "/".join(parts[place][-length:])
        # Paths with different shorter suffixes cannot have the same longer one.
        times = Counter(found[place] for place in alike)
        alike = [place for place in alike if times[found[place]] > 1]
    return found


def _expand_one(pattern: str, keep_missing: bool) -> list[str]:
    _refuse_unreachable(pattern)
    pattern = os.path.expanduser(local_path(pattern))
    if is_url(pattern):
        return [url for written in _in_braces(pattern) for url in _expand_url(written)]
    if os.path.isdir(pattern):
        example = os.path.join(pattern, "*.tar")
        raise ValueError(
            f"shards: {pattern!r} is a folder, which {_contents(pattern)}. Write {example!r} for all of them."
        )
    # Before the expansion, because a file may be called a[1].tar.
    if os.path.exists(pattern):
        return [pattern]
    written = _in_braces(pattern)
    paths, missing = [], []
    for path in written:
        if os.path.exists(path) or (keep_missing and not glob.has_magic(path)):
            found = [path]  # also of a folder called a[1]
        else:
            found = _glob(path)
        paths += found
        missing += [] if found else [path]
    for path in paths:
        _refuse_unreachable(path)
    if missing:
        raise _nothing_there(pattern, written, missing)
    return paths


def _in_braces(pattern: str) -> list[str]:
    if "{" not in pattern and "}" not in pattern and "\\" not in pattern:
        return [pattern]  # most entries of a long list
    try:
        return list(braceexpand(pattern))
    except ValueError:
        opened, closed = pattern.count("{"), pattern.count("}")
        raise ValueError(
            f"shards: {redacted(pattern)!r} opens {opened} braces and closes {closed}. Write them in pairs, as in "
            "{00000..00009}."
        ) from None


def _expand_url(url: str) -> list[str]:
    found = [url]
    if "*" in redacted(url):
        found = [path for path in shard_file.list_urls(url) if not path.endswith(".idx")]
        if not found:
            raise ValueError(
                f"shards: {redacted(url)!r} matches nothing that can be listed. Correct it, or write a brace pattern."
            )
    for path in found:
        _refuse_unreachable(path)
    return found


def _glob(pattern: str) -> list[str]:
    # Index files of dtrain next to the shards would match `folder/*`.
    found = glob.iglob(pattern, recursive=True)
    return sorted(path for path in found if not path.endswith(".idx") and not os.path.isdir(path))


def _refuse_unreachable(path: str) -> None:
    if path.startswith("pipe:") or path == "-":
        raise ValueError(
            f"shards: {path!r} is a pipe. Samples cannot be read from a pipe by position, and a configuration never runs a "
            "command. Save its output to a file first."
        )
    name = redacted(path).lower()
    for ending, command in _DECOMPRESS.items():
        if name.endswith(ending):
            raise ValueError(
                f"shards: {redacted(path)!r} is compressed, so samples cannot be read from it by position. Decompress it once, "
                f"with {command}; compression hardly makes a tar of images smaller."
            )
    if is_url(path):
        urls.check_known(path)


def _nothing_there(pattern: str, written: Sequence[str], missing: Sequence[str]) -> ValueError | FileNotFoundError:
    path = missing[0]
    folder = os.path.dirname(path)
    while folder and (glob.has_magic(folder) or not os.path.isdir(folder)):
        folder = os.path.dirname(folder)
    kind: type[ValueError | FileNotFoundError]
    if len(missing) < len(written):
        kind = ValueError if glob.has_magic(path) else FileNotFoundError
        problem = f"expands to {len(written)} paths, and {len(missing)} of them match no file, the first {path!r}"
    elif glob.has_magic(path) or path != pattern:
        kind, problem = ValueError, "matches no file"
    else:
        kind, problem = FileNotFoundError, "does not exist"
    return kind(
        f"shards: {pattern!r} {problem} (looked in {os.path.abspath(folder)!r}, which {_contents(folder)})."
        f"{_guess(path, folder)} Correct it, or write the shards with `dtrain pack` first."
    )


def _tars(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder or ".") if name.endswith(".tar"))


def _contents(folder: str) -> str:
    tars = _tars(folder)
    if tars:
        return f"has {len(tars)} .tar files such as {tars[0]}"
    others = sorted(os.listdir(folder or "."))
    return f"has no .tar file but {', '.join(others[:3])}{' ...' * (len(others) > 3)}" if others else "is empty"


def _guess(path: str, folder: str) -> str:
    """A hint from files in the same folder whose names differ from this one in their numbers only."""
    if glob.has_magic(path) or os.path.dirname(path) != folder:
        return ""
    name = os.path.basename(path)
    alike = [other for other in _tars(folder) if _digits.sub("#", other) == _digits.sub("#", name)]
    if not alike:
        return ""
    for mine, theirs in zip(_digits.findall(name), _digits.findall(alike[0]), strict=True):
        if len(mine) != len(theirs):
            return f" {len(theirs)} digits instead of {len(mine)}?"
    return f" The last similar name is {alike[-1]}."
