"""One run, one directory: its name, its frozen config, and whether a config may continue it.

* The *identity* of a run is what its parameters mean: model, task, optimizer class and seed (and the data's fingerprint,
  which the checkpoint holds). A difference there is another run and is refused.
* Everything else may change when a run goes on; the change is printed, and the new config is kept.

Only rank 0 writes here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dtrain.config.app import Composed, resolved
from dtrain.config.errors import ConfigError, users_to_fix

_CONFIG, _OVERRIDES = "config.yaml", "overrides.yaml"
_SECRET = re.compile(r"(pass(word|wd)|secret|token|api_?key|credential)s?$", re.IGNORECASE)
_HIDDEN = "<hidden>"
_RESTORE = "Restore it, or use another run.dir."
# user:password@ of a URL, and a signature or token behind its question mark
_URL_SECRET = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|(?<=[?&])([\w-]*(?:sig|signature|token|key|secret|password)=)[^&\s'\"]+", re.I
)


@dataclass(frozen=True)
class Run:
    """A run and its directory.

    Attributes:
        name: ``run.name``, or ``<experiment>-<hash of the config>``.
        dir: The run directory, absolute; it may not exist yet.
        config: The resolved config, secrets included.
        overrides: The command line it was composed from.
        config_dirs: Folders of presets it was composed with.
    """

    name: str
    dir: Path
    config: dict[str, Any]
    overrides: tuple[str, ...]
    config_dirs: tuple[str, ...]

    @classmethod
    def of(cls, composed: Composed) -> Run:
        """The run that a composed config describes."""
        config = resolved(composed.cfg)
        name = config["run"]["name"] or f"{composed.experiment or 'run'}-{_digest(config)}"
        directory = Path(config["run"]["dir"] or Path("runs") / name).expanduser().absolute()
        return cls(name, directory, config, composed.overrides, composed.config_dirs)

    def changes(self) -> list[str]:
        """What this config changes in a run that was started before: ``train.max_steps: 50 -> 100``; [] for a new one.

        Raises:
            ConfigError: If the directory belongs to another run; names every difference.
        """
        path = self.dir / _CONFIG
        if not path.exists():
            return []
        saved = _mapping(path)
        ours = without_secrets(self.config)
        forbidden = list(_differences(_identity(saved), _identity(ours)))
        if forbidden:
            raise ConfigError(
                f"run.dir: {self.dir} holds another run. It differs in\n"
                + "".join(f"    {line}\n" for line in forbidden)
                + "  Set another run.dir (or run.name), or go back to the values on the left."
            )
        return list(_differences(saved, ours))

    def save(self) -> None:
        """Writes ``config.yaml`` (resolved, without secrets) and ``overrides.yaml`` (what it was composed from).

        Raises:
            ConfigError: If they cannot be written.
        """
        source = {
            "overrides": [
                without_url_secrets(override)
                for override in self.overrides
                if not _SECRET.search(override.partition("=")[0])
            ],
            "config_dirs": list(self.config_dirs),
        }
        with users_to_fix(f"run.dir: {self.dir} cannot be written, choose another one"):
            (self.dir / "logs").mkdir(parents=True, exist_ok=True)
            _replace(self.dir / _CONFIG, yaml.safe_dump(without_secrets(self.config), sort_keys=False))
            _replace(self.dir / _OVERRIDES, yaml.safe_dump(source, sort_keys=False))


def take(arguments: Sequence[str], **defaults: str) -> tuple[dict[str, str], list[str]]:
    """Takes an entry point's own ``key=value`` options out of a command line.

    Args:
        arguments: The command line.
        defaults: The options and their values where they are not given.

    Returns:
        The options, and the arguments that are left.
    """
    options, rest = dict(defaults), []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in options:
            options[key] = value
        else:
            rest.append(argument)
    return options, rest


def is_run(directory: str) -> bool:
    """Whether a directory, as a command line names it, holds a run that was started."""
    return (_as_typed(directory) / _OVERRIDES).exists()


def recompose(arguments: Sequence[str]) -> list[str]:
    """The command line of the run that ``run.dir=DIR`` names, with ``arguments`` applied on top.

    A resolved config cannot take ``precision=bf16`` any more, so what is kept and composed anew is the command line.

    Raises:
        ConfigError: If ``run.dir`` is not given or holds no run, or the file that says how it was started is damaged.
    """
    given = dict(argument.split("=", 1) for argument in arguments if re.match(r"[\w.+~@/]+=", argument))
    if "run.dir" not in given:
        raise ConfigError("run.dir=DIR is missing: name the directory of the run.")
    path = _as_typed(given["run.dir"]) / _OVERRIDES
    if not path.exists():
        raise ConfigError(f"run.dir: {path.parent} is no run directory (it has no {_OVERRIDES}).")
    saved = _mapping(path)
    overrides, config_dirs = (saved.get(key) for key in ("overrides", "config_dirs"))
    if not isinstance(overrides, list) or not isinstance(config_dirs, list):
        raise ConfigError(f"{path}: lacks the lists overrides and config_dirs. {_RESTORE}")
    kept = [override for override in map(str, overrides) if override.partition("=")[0] not in given]
    folders = [part for folder in config_dirs for part in ("--config-dir", str(folder))]
    return [*folders, *kept, *arguments]


def recompose_if_run(arguments: list[str]) -> list[str]:
    """The command line of the run in ``run.dir``, if there is one and no experiment is named; else as it is.

    Raises:
        ConfigError: If there is nothing but a ``run.dir``, and it holds no run.
    """
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("run.dir=")]
    chosen = any(argument.startswith("experiment=") for argument in arguments)
    if not named or chosen or (len(arguments) > 1 and not is_run(named[0])):
        return arguments
    return recompose(arguments)


def _mapping(path: Path) -> dict[str, Any]:
    """What a file of a run directory holds."""
    with users_to_fix(f"{path} cannot be read; restore it, or use another run.dir"):
        text = path.read_text(encoding="utf-8")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML ({error}). {_RESTORE}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: does not hold a config. {_RESTORE}")
    return content


def _as_typed(directory: str) -> Path:
    """A path whose quotes were for Hydra."""
    return Path(directory.strip("'\"").replace("\\'", "'")).expanduser()


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which values of keys such as ``api_key``, ``password`` or ``token`` are hidden, and those in URLs."""

    def clean(key: str, value: Any) -> Any:
        if _SECRET.search(key) and isinstance(value, str):
            return _HIDDEN
        if isinstance(value, Mapping):
            return {str(k): clean(str(k), v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean("", item) for item in value]
        return without_url_secrets(value) if isinstance(value, str) else value

    return {key: clean(key, value) for key, value in config.items()}


def without_url_secrets(text: str) -> str:
    """A text in which the passwords, signatures and tokens of its URLs are hidden."""
    return _URL_SECRET.sub(lambda found: f"{found[1] or ''}{_HIDDEN}", text)


def _digest(config: Mapping[str, Any]) -> str:
    # Where a run is, how it is started and watched, and when it ends do not make it another run.
    train = {key: value for key, value in config["train"].items() if not key.startswith("max_")}
    apart = ("run", "launch", "tracker", "profile", "export", "faults")
    kept = {key: value for key, value in config.items() if key not in apart} | {"train": train}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    optimizer, run = config.get("optimizer"), config.get("run")
    return {
        "model": config.get("model"),
        "task": config.get("task"),
        "optimizer": {"_target_": optimizer.get("_target_") if isinstance(optimizer, Mapping) else optimizer},
        "run": {"seed": run.get("seed") if isinstance(run, Mapping) else run},
    }


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    elif old != new:
        yield f"{path}: {json.dumps(old, default=str)} -> {json.dumps(new, default=str)}"


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # an empty file after a power cut would refuse the run
    os.replace(aside, path)
