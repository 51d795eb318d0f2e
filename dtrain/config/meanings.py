"""The meanings of keys, from the comments in ``schema.py``: for docs/config.md, and for ``dtrain train --help``.

A meaning is the comment behind a field, or the one above it; that of a section is the docstring of its class.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import shutil
import textwrap
import tokenize
from collections.abc import Iterator, Sequence

from dtrain.config import schema

# A key of Hydra's YAML, and a line that only names a key in full.
_YAML_KEY = re.compile(r"( *)([\w-]+):(?: (.*))?")
_NAMED_KEY = re.compile(r"  ([a-z_]+\.[a-z_.]+)")
_COLUMN = 36  # of the meanings in the help
_NARROWEST = 120  # characters of a line of the help, if the terminal has fewer or there is none


def meanings(kind: type) -> dict[str, str]:
    """The comment of each field of a dataclass: behind it, or on the lines above; ``""`` without one.

    Raises:
        OSError: If Python has no source of the class.
    """
    source = textwrap.dedent(inspect.getsource(kind))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    found, after = {}, node.lineno
    for statement in node.body:
        end = statement.end_lineno or statement.lineno
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = " ".join(
                comments[line] for line in range(after + 1, end + 1) if line in comments
            )
        after = end
    return found


def section_meaning(kind: type) -> str:
    """The docstring of a section as one line."""
    return " ".join((inspect.getdoc(kind) or "").split()).replace("``", "`")


def all_meanings(kind: type = schema.Config, prefix: str = "") -> dict[str, str]:
    """The meanings of all keys by their full names, and the first sentences of those of the sections.

    Raises:
        OSError: As ``meanings``.
    """
    found = {}
    inside = schema.key_types(kind)
    for name, meaning in meanings(kind).items():
        key, section = f"{prefix}{name}", inside[name]
        if dataclasses.is_dataclass(section):
            assert isinstance(section, type)
            found[key] = re.split(r"(?<=\.) ", section_meaning(section))[0]
            found |= all_meanings(section, f"{key}.")
        else:
            found[key] = meaning
    return found


def with_meanings(lines: Sequence[str]) -> Iterator[str]:
    """The lines of Hydra's help, with the meaning of each key of its config as a comment.

    A line that only names a key in full gets its value and its meaning.

    Args:
        lines: Without line ends; the config is YAML with an indentation of two.
    """
    try:
        found = all_meanings()
    except OSError:  # an installation without source files
        found = {}
    keys = list(_keys(lines))
    values = {key: value for key, value in keys if value is not None}
    width = max(_NARROWEST, shutil.get_terminal_size((_NARROWEST, 0)).columns)
    for line, (key, _) in zip(lines, keys, strict=True):
        if (named := _NAMED_KEY.fullmatch(line)) and named[1] in found:
            key = named[1]
            line = f"  {key}={values.get(key, '')}"
        yield from _commented(line, found.get(key, ""), width)


def _keys(lines: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """For each line the full name of its key and the value behind it; ``("", None)`` if it is no line of the config."""
    path: list[str] = []
    for line in lines:
        match = _YAML_KEY.fullmatch(line)
        if match is None:
            yield "", None
            continue
        path = [*path[: len(match[1]) // 2], match[2]]
        yield ".".join(path), match[3]


def _commented(line: str, meaning: str, width: int) -> Iterator[str]:
    if not meaning:
        yield line
        return
    first, *others = textwrap.wrap(meaning, width - _COLUMN - 2, break_long_words=False, break_on_hyphens=False)
    if len(line) >= _COLUMN:
        yield line
        others = [first, *others]
    else:
        yield f"{line:<{_COLUMN}}# {first}"
    for text in others:
        yield f"{'':<{_COLUMN}}# {text}"
