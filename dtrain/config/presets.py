"""What is wrong with a preset file, a user's own most of all, where Hydra's own words need Hydra's manual."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_type_hints

from hydra.errors import MissingConfigException

from dtrain.config.schema import Config

_PACKAGE = "# @package _global_"


def nearest(name: str, valid: Iterable[str], most: int = 12) -> str:
    """``Did you mean 'a'? Valid: a, b, c.``"""
    names = sorted(set(valid))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    shown = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    return f"{guess}Valid: {shown or 'none'}."


def groups(folders: Sequence[Path]) -> list[str]:
    """The config groups in these folders."""
    return sorted({entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry.is_dir()})


def options(group: str, folders: Sequence[Path]) -> set[str]:
    """What a group can be."""
    return {file.stem for folder in folders for file in (folder / group).glob("*.yaml")}


def named_in(error: BaseException) -> str | None:
    """The preset that Hydra was reading, such as ``experiment/mine``."""
    found = re.match(r"In '([^']+)'", str(error))
    return found[1] if found else None


def explain_preset(error: Exception, folders: Sequence[Path]) -> str | None:
    """What to change in a preset, or in where it is looked for.

    Args:
        error: What Hydra raised.
        folders: Where groups are looked for: the project's own, then the user's.

    Returns:
        None if that is not what is wrong.
    """
    preset = named_in(error)
    files = [folder / f"{preset}.yaml" for folder in folders]
    file = next((file for file in files if preset and file.is_file()), None)
    where = f"{file or preset}: " if preset else ""
    text = f"{error}\n{error.__cause__ or ''}"
    if file is not None and preset and preset.startswith("experiment/") and not _is_global(file):
        return f"{where}its keys would go below 'experiment'. Make `{_PACKAGE}` its first line."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing(str(error.missing_cfg_file), error.options, preset, where, folders)
    if found := re.search(r"Could not override '/?([^']+)'\. No match", text):
        return (
            f"{where}`override /{found[1]}`: there is no such group to override. {nearest(found[1], groups(folders))}"
        )
    if found := re.search(r"Multiple values for (\S+)\. .*: (\S+)'", text):
        return (
            f"{where}{found[1]} is chosen twice. In the defaults of a preset write `- override /{found[1]}: {found[2]}`, "
            f"on the command line {found[1]}={found[2]} without a +."
        )
    if found := re.search(r"(\S+) appears more than once in the final defaults", text):
        return f"{where}{found[1]} is chosen twice. Choose it once; several are a list: {found[1]}=[a,b]."
    if found := re.search(r"not a subclass of (\w+)\. value: (.*)", text):
        at = next((path for path, kind in _sections(Config, "") if kind.__name__ == found[1]), found[1])
        return f"{where}{at}: got {found[2]}, want keys below it, such as {at}.{first_key(at)}."
    if "Cannot merge DictConfig with ListConfig" in text:
        return f"{where}holds a list, want lines such as `train:` with keys below it."
    return None


def _missing(wanted: str, valid: Sequence[str] | None, preset: str | None, where: str, folders: Sequence[Path]) -> str:
    group, _, option = wanted.rpartition("/")
    beside = preset.rpartition("/")[0] + "/" if preset else ""
    if beside and group.startswith(beside) and group.removeprefix(beside) in groups(folders):
        inner = group.removeprefix(beside)
        return f"{where}its defaults look for {inner} below {beside[:-1]!r}. Write `- override /{inner}: {option}`."
    top, _, below = wanted.partition("/")
    if top in groups(folders):  # experiment/mine/small is mine/small of the group experiment
        group, option = top, below
    there = options(group, folders)
    for folder in folders[1:]:
        if (folder / f"{option}.yaml").is_file() and option not in there:
            return (
                f"{group}={option}: {folder} has {option}.yaml, but --config-dir wants the folder in which it is "
                f"{group}/{option}.yaml."
            )
    if wanted == "train":
        return "--config-path: there is no train.yaml. It has to be the project's own folder; --config-dir adds another one."
    if not group:
        return f"{wanted}: there is no such config to start from. Choose by group, such as experiment={wanted}."
    if preset == "train":  # not its own defaults, but experiment=[a, b] on the command line
        valid = sorted(there)
    if valid is None:
        return f"{where}its defaults name {wanted}, and there is no {wanted}.yaml. {nearest(option, there)}"
    return f"{group}={option}: there is no such {group}. {nearest(option, valid)}"


def _is_global(file: Path) -> bool:
    """As Hydra reads it: the header ends at the first line that is no ``# @``."""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.strip():
            if not re.match(r"\s*#\s*@", line):
                return False
            if re.match(r"\s*#\s*@package\b", line):
                return True
    return False


def _sections(kind: type, prefix: str) -> Iterator[tuple[str, type]]:
    """The dataclasses below one, by their dotted path."""
    for name, hint in get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield f"{prefix}{name}", hint
            yield from _sections(hint, f"{prefix}{name}.")


def first_key(path: str) -> str:
    """The first key of a section of the config, for an example."""
    kind = dict(_sections(Config, "")).get(path)
    return dataclasses.fields(kind)[0].name if kind is not None else "..."
