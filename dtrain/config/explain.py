"""Turns what Hydra and OmegaConf refuse into one message: the key, the value got, what to write instead."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from dtrain.config.presets import explain_preset, first_key, groups, named_in, nearest, options
from dtrain.config.schema import Config


def explain(
    error: HydraException | OmegaConfBaseException | yaml.YAMLError | ValueError, arguments: Sequence[str], conf: Path
) -> str:
    """What to tell a user whose config was refused.

    Args:
        error: What Hydra, OmegaConf or YAML raised.
        arguments: The command line.
        conf: The folder of the config groups.
    """
    if isinstance(error, yaml.YAMLError):
        return f"a preset is no YAML: {' '.join(str(error).split())}."
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} cannot be read{_why_unreadable(str(error))}. Write KEY=VALUE; quote values with braces, "
            "commas, spaces or ~ twice: 'data.train=\"shards/{000..009}.tar\"'."
        )
    folders = [conf, *_config_dirs(arguments)]
    if told := explain_preset(error, folders):
        return told
    cause = _root(error)
    # A key that a preset file sets has lost its attributes on the way up; its text still has them.
    in_text = re.search(r"full_key: (\S+)", str(cause))
    key = getattr(cause, "full_key", None) or (in_text and in_text[1])
    if not key:
        return str(error)
    preset = named_in(error)
    place = f"{preset}.yaml: " if preset else ""
    if "is not Optional" in str(cause):
        return f"{place}{key}: got null. {_wanted(key)}"
    if isinstance(cause, ValidationError) or "could not be converted" in str(cause):
        said = re.search(r"Value .*", str(cause)) or re.match(".*", str(cause))
        assert said is not None
        return f"{place}{key}: {said[0].rstrip('.')}. {_wanted(key)}"
    if key in groups(folders) and key not in get_type_hints(Config):
        return f"{place}{key} is a group, not a key. Choose from it in the defaults of a preset: `- {key}/NAME`."
    return f"{place}{_no_such(key, arguments, conf)}"


def unknown_options(arguments: Sequence[str]) -> str | None:
    """A message if the command line has an option that Hydra does not know, such as ``--precision=bf16``."""
    parser = get_args_parser()
    unknown = [option for option in parser.parse_known_args(arguments)[1] if option.startswith("-")]
    # argparse takes -precision=bf16 for -p recision=bf16.
    names = {name for action in parser._actions for name in action.option_strings}
    unknown += [said for said in arguments if re.match(r"-\w[^-]+=", said) and said.partition("=")[0] not in names]
    if not unknown:
        return None
    return (
        f"{unknown[0]}: there is no such option. Keys have no dashes: {unknown[0].lstrip('-').partition('=')[0]}=VALUE."
    )


def unknown_keys(cfg: DictConfig) -> Iterator[str]:
    """Keys that the schema does not have; Hydra's ``+key=value`` lets them in.

    Yields:
        A message for each, with the nearest valid name.
    """
    yield from _unknown(cfg, Config, "")


def overrides_first(arguments: Sequence[str]) -> list[str]:
    """The same command line for argparse, which takes no more keys after an option that comes behind the first ones."""
    known, rest = get_args_parser().parse_known_args(arguments)
    overrides = [*known.overrides, *rest]
    return [*overrides, *(argument for argument in arguments if argument not in overrides)]


def removed(arguments: Sequence[str], conf: Path) -> str | None:
    """A message if a key is taken away, as with ``~data.eval``, that every config has."""
    for argument in arguments:
        key = argument.partition("=")[0][1:]
        parent, _, name = key.rpartition(".")
        kind = _schema_at(parent)
        if not argument.startswith("~") or kind is None or key in groups([conf]):
            continue
        if name in (hints := get_type_hints(kind)):
            remedy = _below(key) if dataclasses.is_dataclass(hints[name]) else f"Set it: {key}=VALUE, or null for none."
            return f"{argument}: every config has {key}, so it cannot be taken away. {remedy}"
    return None


def repeated(arguments: Sequence[str]) -> str | None:
    """A message if one key is set twice, as an unquoted ``{000..009}`` that the shell expanded does."""
    seen: dict[str, str] = {}
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals or key.startswith("-"):
            continue
        if key in seen and seen[key] != argument:
            expanded = (
                " If it was one pattern with braces, your shell expanded it: quote it twice, "
                f"'{key}=\"shards/train-{{000..009}}.tar\"'."
            )
            said = f"{key} is set more than once: {seen[key]} and {argument}."
            return said + (expanded if key.startswith("data.") else " Keep one of them.")
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


def number_for_an_option(arguments: Sequence[str], conf: Path) -> str | None:
    """A message if a group is given a number, such as ``precision=16``, which Hydra has no words for."""
    folders = [conf, *_config_dirs(arguments)]
    for argument in arguments:
        group, _, values = argument.lstrip("+").partition("=")
        if group not in groups(folders):
            continue
        for value in values.strip("[]").split(","):
            if not re.fullmatch(r"[-+\d._e]*\d[-+\d._e]*|true|false|null", value, re.IGNORECASE):
                continue
            if value in (valid := options(group, folders)):
                return f"{argument}: a name like a number has to be quoted twice: '{group}=\"{value}\"'."
            return f"{argument}: there is no such {group}. {nearest('', valid)}"
    return None


def _why_unreadable(text: str) -> str:
    """The reason in the words of Hydra's parser, without its pictures of where."""
    reasons = [
        line for line in text.splitlines() if line.strip(" ^") and "hydra.cc" not in line and "Exception: " not in line
    ]
    return f": {reasons[-1]}" if reasons else ""


def _config_dirs(arguments: Sequence[str]) -> list[Path]:
    given = get_args_parser().parse_known_args(arguments)[0].config_dir
    return [Path(given)] if given else []


def _no_such(key: str, arguments: Sequence[str], conf: Path) -> str:
    """That there is no such key, and which one may be meant: one beside it, or one of such a name elsewhere."""
    parent, _, name = key.rpartition(".")
    valid = _children(parent, arguments, conf)
    said = f"{key}: there is no such key{f' in {parent}' if parent else ''}."
    free_form = bool(parent) and _schema_at(parent) is None
    if not difflib.get_close_matches(name, valid, cutoff=0.75):
        keys = OmegaConf.to_container(_chosen(arguments, conf), resolve=False)
        elsewhere: dict[str, str] = {}
        for path in sorted(_all_keys(keys), key=lambda path: path.count(".")):
            elsewhere.setdefault(path.rpartition(".")[2], path)
        if close := difflib.get_close_matches(name, elsewhere, n=1, cutoff=1.0 if free_form else 0.7):
            return f"{said} Did you mean {elsewhere[close[0]]}?"
    adding = f" To add it, write +{key}=..." if free_form else ""
    return f"{said} {nearest(name, valid)}{adding}" if valid else f"{said}{adding}"


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
    if dataclasses.is_dataclass(hint):
        return _below(key)
    text = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "").replace(" | None", " or null")
    return f"Want {text}."


def _below(section: str) -> str:
    return f"Set keys below it, such as {section}.{first_key(section)}."


def _children(path: str, arguments: Sequence[str], conf: Path) -> list[str]:
    kind = _schema_at(path)
    if kind is not None:
        names = [field.name for field in dataclasses.fields(kind)]
        return names + (groups([conf]) if not path else [])
    # A free-form node: what the chosen groups put there.
    node = OmegaConf.select(_chosen(arguments, conf), path)
    return [str(key) for key in node] if isinstance(node, DictConfig) else []


def _all_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of plain data."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _all_keys(value, f"{prefix}{key}.")


def _chosen(arguments: Sequence[str], conf: Path) -> DictConfig:
    """What the groups that the command line chooses put together; the schema's defaults where they cannot."""
    choices = [a for a in arguments if "=" in a and "." not in a.partition("=")[0] and not a.startswith("-")]
    known = [choice for choice in choices if choice.lstrip("+").partition("=")[0] in groups([conf])]
    searched = "".join(f"hydra.searchpath=[file://{folder.resolve()}]" for folder in _config_dirs(arguments))
    for overrides in ([*known, searched] if searched else known, []):
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(conf), version_base="1.3"), suppress(HydraException, OmegaConfBaseException):
            return compose("train", overrides)
    return OmegaConf.structured(Config)
