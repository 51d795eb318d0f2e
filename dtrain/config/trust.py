"""Which run directories and artefacts this user made, and what a run of somebody else may call.

A saved command line can name any function by ``_target_``, so composing a downloaded run and building its parts would run
whatever its author wrote. Therefore ``dtrain`` marks what it writes, and restricts runs without a mark.

* A *mark* is an empty file in dtrain's cache, named by the SHA-256 of the marked file. It stays with the cache: a copy of a run
  on another machine has none.
* A run without a mark is composed only if every target in its saved command line is *known*: one of the presets, or a class
  of the packages in ``_PACKAGES``. Importing a target already runs code, so an unknown one is refused before it is imported.
  The ``decoder`` of a field is a target too.
* It is refused if it names files that dtrain would write: a folder of ``data.prepare``, or links in the run directory.
* What is typed on the command line is never restricted.
"""

from __future__ import annotations

import functools
import hashlib
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from dtrain.config.cache_dir import cache_dir
from dtrain.config.compose import conf_dir
from dtrain.config.errors import ConfigError
from dtrain.config.instantiate import MOVED_TARGETS

TRUST = "--trust"
#: Packages whose classes only compute. Functions of them are known only where a preset of dtrain has them.
_PACKAGES = (
    *("torch.nn", "torch.optim"),
    *("dtrain.models", "dtrain.tasks", "dtrain.optimizers", "dtrain.training.schedule"),
    *("dtrain.data.augment", "dtrain.data.mixing"),
)
#: Sections with keys that name files to write and commands to run; these keys are left out where they stand alone.
_SECTIONS = ("run", "train", "data", "checkpoint", "parallel")
_PRESET = re.compile(r"\w[\w-]*(/\w[\w-]*)*")


def mark(content: bytes, kind: str) -> None:
    """Marks the content of a file as written by this user; without effect if the cache cannot be written.

    Args:
        content: The content.
        kind: What it is, one word; marks of different kinds are separate.
    """
    with suppress(OSError):
        file = _mark(content, kind)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def is_marked(path: Path, kind: str) -> bool:
    """Whether ``mark`` was called for a file with this content."""
    with suppress(OSError):
        return _mark(path.read_bytes(), kind).exists()
    return False


def require_known(path: Path, overrides: Sequence[str], config_dirs: Sequence[str], *, is_written: bool = True) -> None:
    """Refuses a saved command line that could run other code than dtrain's and torch's.

    Args:
        path: The file that holds it.
        overrides: Its overrides.
        config_dirs: Its folders of presets.
        is_written: Whether dtrain writes into the folder of the file, where links would lead elsewhere.

    Raises:
        ConfigError: Names the first key that is refused, and ``--trust``.
    """
    if is_written and (link := next((entry for entry in sorted(path.parent.iterdir()) if entry.is_symlink()), None)):
        raise _refused(path, f"{link.name} is a link, so dtrain would write to {link.resolve()}")
    if config_dirs:
        raise _refused(path, f"it uses presets in {config_dirs[0]}, which could run anything")
    parser = OverridesParser.create()
    for override in overrides:
        try:
            parsed = parser.parse_override(override)
            value = parsed.value()
        except HydraException as error:
            raise _refused(path, f"{override!r} is not an override of a key") from error
        key = parsed.key_or_group
        if key.split(".")[0].split("/")[0] == "hydra" or parsed.is_sweep_override():
            raise _refused(path, f"{override!r} changes Hydra itself, which could run anything")
        # A preset is a file below conf/; ".." would leave it.
        if isinstance(value, Mapping) and (key in _SECTIONS or parsed.package):
            raise _refused(path, f"{override!r} sets several keys at once, which could name files to write")
        chooses = ("." not in key or parsed.package) and not isinstance(value, Mapping)
        if chooses and not all(map(_PRESET.fullmatch, (key, *_texts(value)))):
            raise _refused(path, f"{override!r} does not name a preset of dtrain")
        for place, target in _targets(key, value):
            if not is_known(target):
                raise _refused(
                    path, f"{place} is {target!r}, which is not a target that dtrain knows and could do anything"
                )
        if "prepare" in (names := [*key.split("."), *_names(value)]) and not (names[-1] == "prepare" and value is None):
            raise _refused(path, f"{override!r} changes data.prepare, which writes files")
        for text in _texts(value):
            # A resolver can read the environment, and decode text to a mapping with a _target_.
            if "${" in re.sub(r"\$\{[\w.]+\}", "", text):
                raise _refused(path, f"{key} is {text!r}, which could read anything of your environment")


@functools.cache
def is_known(target: str) -> bool:
    """Whether a target is one of dtrain's presets, or a class of a package whose classes only compute."""
    if target in _presets():
        return not target.endswith(".prepare")  # which writes to the folder that it is given
    package = next((package for package in _PACKAGES if target.startswith(f"{package}.")), None)
    if package is None:
        return False
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError):
        return False
    # By its own module too: a package also has the names that it imports, such as dtrain.models.mlp.torch.
    return isinstance(found, type) and f"{found.__module__}.".startswith(f"{package}.")


@functools.cache
def _presets() -> frozenset[str]:
    files = [path.read_text(encoding="utf-8") for path in conf_dir().glob("**/*.yaml")]
    named = {target for text in files for target in re.findall(r"_target_: *((?:dtrain|torch)\.[\w.]+)", text)}
    return frozenset(named | {old for old, new in MOVED_TARGETS.items() if new in named})


def _targets(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """The targets in an override, each with its place in the config."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _targets(f"{key}.{name}", item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, item in enumerate(value):
            yield from _targets(f"{key}[{number}]", item)
    elif key.rpartition(".")[2] == "_target_" or (key.rpartition(".")[2] == "decoder" and value is not None):
        yield key, str(value)


def _names(value: Any) -> Iterator[str]:
    """The keys of all mappings in a value."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _names(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _names(item)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _texts(item)
    elif value is not None:
        yield str(value)


def _refused(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path}: this run was not started by you on this machine, and {reason}. Type the key yourself, or add {TRUST} if you "
        "trust whoever made the run."
    )


def _mark(content: bytes, kind: str) -> Path:
    return cache_dir() / kind / hashlib.sha256(content).hexdigest()
