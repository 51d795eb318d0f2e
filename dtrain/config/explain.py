"""Turns what Hydra and OmegaConf refuse into one message: the key, the value got, what to write instead."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from dtrain.config.schema import Config


def nearest(name: str, valid: Iterable[str], most: int = 12) -> str:
    """``Did you mean 'a'? Valid: a, b, c.``"""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    shown = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    return f"{guess}Valid: {shown or 'none'}."


def explain(error: HydraException | OmegaConfBaseException, arguments: Sequence[str], conf: Path) -> str:
    """What to tell a user whose config was refused.

    Args:
        error: What Hydra or OmegaConf raised.
        arguments: The command line.
        conf: The folder of the config groups.
    """
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} cannot be read: {str(error).splitlines()[-2 if 'hydra.cc' in str(error) else -1]}. "
            "Write KEY=VALUE; quote values with braces, commas or spaces twice: 'data.train=\"shards/{000..009}.tar\"'."
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={option}: there is no such {group}. {nearest(option, error.options)}"
    cause = _root(error)
    # A key that a preset file sets has lost its attributes on the way up; its text still has them.
    in_text = re.search(r"full_key: (\S+)", str(cause))
    key = getattr(cause, "full_key", None) or (in_text and in_text[1])
    if not key:
        return str(error)
    if isinstance(cause, ValidationError) or "could not be converted" in str(cause):
        value = re.search(r"Value .*", str(cause))
        return f"{_place(error)}{key}: {value[0] if value else cause}. {_wanted(key)}"
    parent, _, name = key.rpartition(".")
    valid = set(_children(parent, arguments, conf))
    hint = nearest(name, valid)
    if parent and _schema_at(parent) is None:
        hint += f" To add it, write +{key}=..."
    return f"{_place(error)}{key}: there is no such key{f' in {parent}' if parent else ''}. {hint}"


def unknown_keys(cfg: DictConfig) -> Iterator[str]:
    """Keys that the schema does not have; Hydra's ``+key=value`` lets them in.

    Yields:
        A message for each, with the nearest valid name.
    """
    yield from _unknown(cfg, Config, "")


def repeated(arguments: Sequence[str]) -> str | None:
    """A message if one key is set twice, as an unquoted ``{000..009}`` that the shell expanded does."""
    seen: dict[str, str] = {}
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals or key.startswith("-"):
            continue
        if key in seen and seen[key] != argument:
            return (
                f"{key} is set more than once: {seen[key]} and {argument}. If it was one pattern with braces, your shell "
                f"expanded it: quote it twice, '{key}=\"shards/train-{{000..009}}.tar\"'."
            )
        seen[key] = argument
    return None


def _unknown(node: DictConfig, kind: type, prefix: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    for key in node:
        if key not in hints:
            yield f"{prefix}{key!s}: there is no such key. {nearest(str(key), hints)}"
        elif dataclasses.is_dataclass(hints[str(key)]):
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
                yield from _unknown(child, hints[str(key)], f"{prefix}{key}.")


def _place(error: BaseException) -> str:
    named = re.match(r"In '([^']+)'", str(error))
    return f"{named[1]}.yaml: " if named else ""


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _schema_at(path: str) -> type | None:
    """The dataclass at a dotted path; None where the tree is free-form."""
    kind: Any = Config
    for name in path.split(".") if path else []:
        if not dataclasses.is_dataclass(kind):
            return None
        kind = get_type_hints(kind).get(name)
    return kind if dataclasses.is_dataclass(kind) else None  # type: ignore[return-value]


def _wanted(key: str) -> str:
    parent, _, name = key.rpartition(".")
    kind = _schema_at(parent)
    hint = get_type_hints(kind).get(name) if kind else None
    if hint is None:
        return ""
    text = re.sub(r"typing\.|Optional\[(.*)\]", lambda match: f"{match[1]} or null" if match[1] else "", str(hint))
    return f"Want {getattr(hint, '__name__', text) if not text.endswith('null') else text}."


def _children(path: str, arguments: Sequence[str], conf: Path) -> list[str]:
    kind = _schema_at(path)
    if kind is not None:
        names = [field.name for field in dataclasses.fields(kind)]
        return names + ([entry.name for entry in conf.iterdir() if entry.is_dir()] if not path else [])
    # A free-form node: what the chosen groups put there.
    groups = [a for a in arguments if "=" in a and "." not in a.partition("=")[0] and not a.startswith("-")]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            node = OmegaConf.select(compose("train", groups), path)
    except (HydraException, OmegaConfBaseException):
        return []
    return [str(key) for key in node] if isinstance(node, DictConfig) else []
