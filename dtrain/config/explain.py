"""Explains what Hydra and OmegaConf refuse as one clear line: the key or preset, the value, and the remedy.

The mistakes that users make, in the order of this file:

1. An argument that cannot be parsed, or that Hydra would misunderstand: an option instead of a key (``--precision=bf16``), or a
   pattern that the shell has expanded to several values of one key. A preset that is not YAML.
2. A preset that does not exist, or lacks its ``# @package _global_``.
3. A misspelt key.
4. A key in the wrong group, such as ``max_steps=3`` for ``train.max_steps=3``.
5. A value of the wrong type, or a section that is set to a value.

All other errors are shown in Hydra's own words. ``instantiate`` explains a ``_target_`` that cannot be imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal import utils as hydra_utils
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from dtrain.config.instantiate import OWN_KEYS
from dtrain.config.merge import CLASS_GROUPS, replacing_nodes
from dtrain.config.schema import Config, key_types
from dtrain.errors import ConfigError, nearest

_PACKAGE = re.compile(r"(\s*#\s*@.*\n)*\s*#\s*@package\b")  # Hydra's header ends at the first line that is not `# @`
_QUOTE = "quote it twice: 'data.train=\"shards/{000..009}.tar\"'"


class _HydraParser(argparse.ArgumentParser):
    """Accepts the help text of Hydra 1.3 that is not a string, which Python 3.14 refuses where an option is declared."""

    def _check_help(self, action: argparse.Action) -> None:
        pass


# For Hydra alone; get_args_parser and hydra.main look the module up there.
hydra_utils.argparse = SimpleNamespace(**vars(argparse) | {"ArgumentParser": _HydraParser})  # type: ignore[assignment]


def check_command_line(arguments: Sequence[str]) -> None:
    """Checks the command line for arguments that Hydra would misunderstand.

    Raises:
        ConfigError: Names the first one.
    """
    unknown = [text for text in get_args_parser().parse_known_args(arguments)[1] if text.startswith("-")]
    seen: dict[str, str] = {}
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        # argparse would read -precision=bf16 as -p recision=bf16.
        if argument in unknown or (re.match(r"-\w\w+=", argument) and key not in ("-cd", "-cn", "-cp")):
            raise ConfigError(f"{argument}: there is no such option. Keys have no dashes: {key.lstrip('-')}=VALUE.")
        if key.startswith("~") and _wanted(name := key[1:]):
            # null is not possible for model and task, whose preset a _target_ replaces.
            instead = f"{name}=NAME, or {name}._target_=package.Name" if name in CLASS_GROUPS else f"{name}=null"
            raise ConfigError(
                f"{argument}: every config has {name}, so it cannot be removed. Set it instead, such as {instead}."
            )
        if equals and not key.startswith("-") and seen.setdefault(key, argument) != argument:
            # Hydra would use the last one: unquoted, a pattern of shards would become its last shard.
            expanded = f"If your shell expanded a pattern with braces, {_QUOTE}." if key.startswith("data.") else ""
            raise ConfigError(
                f"{key} is set more than once: {seen[key]} and {argument}. {expanded or 'Keep one of them.'}"
            )


def explain(
    error: HydraException | OmegaConfBaseException | yaml.YAMLError | ValueError, arguments: Sequence[str], conf: Path
) -> str:
    """The message for a config that was refused.

    Args:
        error: The exception of Hydra, OmegaConf or YAML.
        arguments: The command line.
        conf: The folder of the config groups.
    """
    text = " ".join(str(error).split())
    if isinstance(error, yaml.YAMLError):
        return f"a preset is not valid YAML: {text}."
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be parsed. Write KEY=VALUE. If the value has braces, commas, spaces or ~, {_QUOTE}."
    own = get_args_parser().parse_known_args(arguments)[0].config_dir
    folders = [conf, *([Path(own)] if own else [])]
    found = re.match(r"In '([^']+)'", text)
    preset = found[1] if found and found[1] != "train" else None  # train.yaml is dtrain's own
    if found := re.match(r"Ambiguous value for argument '(([^=]+)=(.*?))' 1\. ", text):
        argument, key, values = found.groups()
        return (
            f"{argument}: several values. A sweep over them needs -m (dtrain launch -m ...). "
            f"A list is written {key}=[{values}], and a text with a comma is quoted twice: '{key}=\"{values}\"'."
        )
    if "Config group override must be" in text:
        return _explain_number(arguments, folders) or text
    return _explain_preset(error, preset, folders) or _explain_key(error, preset, arguments, folders) or text


def check_keys(cfg: DictConfig) -> None:
    """Checks a composed config for keys that the schema does not have; Hydra's ``+key=value`` adds them.

    Raises:
        ConfigError: Names the first one and the nearest valid name.
    """
    _check_section(cfg, Config, "")


def options_last(arguments: Sequence[str]) -> list[str]:
    """The arguments with all overrides before the options: argparse accepts no further overrides after an option."""
    known, rest = get_args_parser().parse_known_args(arguments)
    overrides = [*known.overrides, *rest]
    return [*overrides, *(argument for argument in arguments if argument not in overrides)]


# -- presets


def _explain_preset(error: Exception, preset: str | None, folders: Sequence[Path]) -> str | None:
    """The message for a preset that does not exist or lacks its package; None for other errors."""
    file = next((path for folder in folders if preset and (path := folder / f"{preset}.yaml").is_file()), None)
    if file is not None and file.parent.name == "experiment" and not _PACKAGE.match(file.read_text(errors="replace")):
        return f"{file}: its keys would go below 'experiment'. Make `# @package _global_` its first line."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if group and (presets := _presets(group, folders)):
            return (
                f"{f'{file}: ' if file else ''}{group}={option}: there is no such {group}. {nearest(option, presets)}"
            )
    return None


def _explain_number(arguments: Sequence[str], folders: Sequence[Path]) -> str | None:
    """The message for a preset that is chosen by a number, such as ``precision=16``."""
    for argument in arguments:
        group, _, value = argument.partition("=")
        if group in _groups(folders) and re.fullmatch(r"[\d._]+|true|false|null", value, re.IGNORECASE):
            if value.lower() == "null":
                own = (
                    f" For a class of your own, write {group}._target_=package.Class." if group in CLASS_GROUPS else ""
                )
                return f"{argument}: a preset is needed. {nearest('', _presets(group, folders))}{own}"
            quoted = f"A preset named like a number has to be quoted twice: '{group}=\"{value}\"'."
            return f"{argument}: want the name of a preset. {nearest('', _presets(group, folders))} {quoted}"
    return None


def _presets(group: str, folders: Sequence[Path]) -> set[str]:
    return {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}


def _groups(folders: Sequence[Path]) -> list[str]:
    return sorted({entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry.is_dir()})


# -- keys and values


def _explain_key(error: Exception, preset: str | None, arguments: Sequence[str], folders: Sequence[Path]) -> str | None:
    """The message for a key that does not exist or has a wrong value; None if the error names no key."""
    where = f"{preset}.yaml: " if preset else ""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause)
    if found := re.search(r"not a subclass of (\w+)\. value: (.*)", text):
        section = next((path for path, kind in _sections(Config) if kind.__name__ == found[1]), found[1])
        return f"{where}{section}: got {found[2]}. {_wanted(section)}"
    # The error for a key in a preset has no attribute; its text has the key.
    in_text = re.search(r"full_key: (\S+)", text)
    key = getattr(cause, "full_key", None) or (in_text and in_text[1])
    if not key:
        return None
    if "is not Optional" in text:
        return f"{where}{key}: got null. {_wanted(key)}"
    if isinstance(cause, ValidationError) or "could not be converted" in text:
        reason = re.search(r"Value .*", text)
        return f"{where}{key}: {(reason[0] if reason else text.splitlines()[0]).rstrip('.')}. {_wanted(key)}"
    if key in _groups(folders) and key not in key_types(Config):
        return f"{where}{key} is a group, not a key. Choose from it in the defaults of a preset: `- {key}/NAME`."
    return f"{where}{_no_such_key(key, arguments, folders)}"


def _no_such_key(key: str, arguments: Sequence[str], folders: Sequence[Path]) -> str:
    """Suggests a key in the same section, or a key of a similar name elsewhere."""
    parent, _, name = key.rpartition(".")
    chosen = _chosen(arguments, folders)
    keys = sorted(_all_keys(OmegaConf.to_container(chosen, resolve=False)), key=_depth)
    beside = [path.rpartition(".")[2] for path in keys if path.rpartition(".")[0] == parent]
    beside += [] if parent else _groups(folders)
    message = f"{key}: there is no such key{f' in {parent}' if parent else ''}."
    # The keys below a _target_ are the arguments of a class, so further ones may be added.
    free_form = bool(parent) and _section_at(parent) is None
    known = _argument_names(chosen, parent) if free_form else set()
    beside += {*known, *OWN_KEYS.get(parent, ())} - {"params"}  # the caller gives it
    adding = f" To add it, write +{key}=..." if free_form and not known else ""
    if not difflib.get_close_matches(name, beside, cutoff=0.75):
        elsewhere = {path.rpartition(".")[2]: path for path in reversed(keys)}  # the shallowest one counts
        if close := difflib.get_close_matches(name, elsewhere, n=1, cutoff=1.0 if free_form else 0.7):
            return f"{message} Did you mean {elsewhere[close[0]]}?"
    adding = adding if parent else _own_value(name)
    return f"{message} {nearest(name, beside)}{adding}" if beside else f"{message}{adding}"


def _argument_names(cfg: DictConfig, path: str) -> set[str]:
    """The arguments of the class at a path; empty if it takes any, or is not known."""
    with suppress(Exception):  # without a hint, the message is still complete
        parameters = inspect.signature(get_object(OmegaConf.select(cfg, path)["_target_"])).parameters.values()
        if not any(it.kind is it.VAR_KEYWORD for it in parameters):
            return {it.name for it in parameters}
    return set()


def _own_value(name: str) -> str:
    return f" A value of your own goes into vars: vars.{name}=..."


def _chosen(arguments: Sequence[str], folders: Sequence[Path]) -> DictConfig:
    """The config of the presets that the command line chooses; the schema if they cannot be composed."""
    choices = [text for text in arguments if "=" in text and text.lstrip("+").partition("=")[0] in _groups(folders)]
    choices += [f"hydra.searchpath=[file://{folder.resolve()}]" for folder in folders[1:]]
    GlobalHydra.instance().clear()
    with (
        replacing_nodes(),
        initialize_config_dir(str(folders[0]), version_base="1.3"),
        suppress(HydraException, OmegaConfBaseException),
    ):
        return compose("train", choices)
    schema: DictConfig = OmegaConf.structured(Config)
    return schema


def _all_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of plain data."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _all_keys(value, f"{prefix}{key}.")


def _depth(key: str) -> int:
    return key.count(".")


def _check_section(node: DictConfig, kind: type, prefix: str) -> None:
    hints = key_types(kind)
    for key in map(str, node):
        if key not in hints:
            own = "" if prefix else _own_value(key)
            raise ConfigError(f"{prefix}{key}: there is no such key. {nearest(key, hints)}{own}")
        if dataclasses.is_dataclass(hints[key]):
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
                _check_section(child, hints[key], f"{prefix}{key}.")


def _sections(kind: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """The dataclasses of the schema below one, by dotted path."""
    for name, hint in key_types(kind).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield f"{prefix}{name}", hint
            yield from _sections(hint, f"{prefix}{name}.")


def _section_at(path: str) -> Any:
    """The dataclass of the schema at a dotted path; None for a key, and below a ``_target_``."""
    return {"": Config, **dict(_sections(Config))}.get(path)


def _wanted(key: str) -> str:
    """The type of a key, or that a section has keys; ``""`` for a key that the schema does not have."""
    if (section := _section_at(key)) is not None:
        return f"Set keys below it, such as {key}.{dataclasses.fields(section)[0].name}."
    parent, _, name = key.rpartition(".")
    hint = key_types(kind).get(name) if (kind := _section_at(parent)) is not None else None
    plain = isinstance(hint, type) and not get_args(hint)  # in Python 3.10, list[str] is a type, too
    text = getattr(hint, "__name__", "") if plain else str(hint).replace("typing.", "").replace(" | None", " or null")
    return f"Want {text}." if hint is not None else ""
