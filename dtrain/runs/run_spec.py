"""A run: its name, its directory with the saved config, and which configs may resume it.

* The default *name* contains a hash of everything that changes the result, so two seeds, or two lengths, are two runs. It is
  the same on every machine.
* The *identity* of a run is its model, task, optimizer class and seed, and the fingerprint of its data, which is in the
  checkpoint. A config with a different identity is refused.
* Everything else may change when a run is resumed. The changes are printed, and the new config is saved.
* *Secrets* are not saved. A secret that is written as an interpolation, ``${oc.env:NAME}``, is saved in this form; any other
  secret has to be given again to a command that composes the run from its directory.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from dtrain.config.compose import Composed, portable
from dtrain.config.schema import Config
from dtrain.distributed.torchrun import launched_rank
from dtrain.errors import HIDDEN, ConfigError, as_config_error, names_secret, without_secrets_in
from dtrain.files import parse_yaml, read_bounded
from dtrain.runs.excluded import describe, read_excluded
from dtrain.runs.hub import is_hub_url
from dtrain.runs.trust import STARTED, command_content, mark_as_own

#: Sections and keys that do not change the result of a run. They are not part of its default name, and a resumed run does not
#: report that they changed. All other keys count, as soon as they differ from the schema's default.
WITHOUT_EFFECT_ON_THE_RESULT = (
    *("run.name", "run.dir", "run.resume", "run.max_hours"),
    *("launch", "tracker", "profile", "export", "vars"),
    *("train.log_every", "checkpoint.every_steps", "checkpoint.every_minutes"),
    *("checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.only_trained"),
    *("checkpoint.mirror", "checkpoint.mirror_seconds"),
    *("data.num_workers", "data.prefetch", "data.start_method", "data.max_worker_restarts"),
    *("data.storage", "data.cache", "data.record_keys"),
    *("data.grow", "data.grow_allow_removed"),  # a run that is refused because its data changed is resumed with them
    *("parallel.timeout_start", "parallel.timeout_step"),
)
_INITIAL_WEIGHTS = ("run.weights_from", "run.warm_start.path")
CONFIG, OVERRIDES = "config.yaml", "overrides.yaml"
RESTORE = "Restore it, or use a different run.dir."
# A path from the root, from a home or from a folder above, but not the rest of a URL or of a relative path.
_FOLDER = re.compile(r"""(?<![\w/.*?})\]~-])(?:~[\w.-]*|\.\.)?/(?!/)[^\s'"`,;=()|&]*""")


@dataclass(frozen=True)
class RunSpec:
    """A run and its directory.

    Attributes:
        name: ``run.name``, or the last part of ``run.dir``, or ``<experiment>-<hash of what changes the result>``.
        dir: The run directory, absolute; it may not exist yet.
        config: The resolved config, secrets included.
        overrides: The command line it was composed from.
        config_dirs: Folders given with ``--config-dir``.
        excluded: Sample keys in the file of ``data.exclude``.
    """

    name: str
    dir: Path
    config: dict[str, Any]
    overrides: tuple[str, ...]
    config_dirs: tuple[str, ...]
    excluded: tuple[str, ...] = ()

    @classmethod
    def from_composed(cls, composed: Composed) -> RunSpec:
        """The run that a composed config describes."""
        config = asdict(composed.cfg)
        portable_config = portable(composed.node)
        excluded = read_excluded(config["data"]["exclude"]) if config["data"]["exclude"] else []
        if excluded:  # by what the list has, not by its path
            portable_config["data"]["exclude"] = describe(excluded)
        given = config["run"]["dir"]
        directory = Path(os.path.abspath(Path(given).expanduser())) if given else None
        name = config["run"]["name"] or (
            directory.name if directory else f"{composed.experiment or 'run'}-{_digest(portable_config)}"
        )
        directory = directory or Path("runs", name).absolute()
        return cls(name, directory, config, composed.overrides, composed.config_dirs, tuple(excluded))

    def changes(self) -> list[str]:
        """What this config changes in an existing run, such as ``train.max_steps: 50 -> 100``; [] for a new run.

        Keys without effect on the result are left out.

        Raises:
            ConfigError: If the directory has a run with a different identity; names every difference.
        """
        path = self.dir / CONFIG
        if not path.exists():
            return []
        saved, ours = read_mapping(path), self._saved_config()
        forbidden = list(_differences(_identity(saved), _identity(ours)))
        if forbidden:
            raise ConfigError(
                f"run.dir: {self.dir} holds a different run. It differs in\n"
                + "".join(f"    {line}\n" for line in forbidden)
                + "  Set a different run.dir (or run.name), or go back to the values on the left."
            )
        return list(_differences(_with_effect(saved), _with_effect(ours), _defaults()))

    def files(self) -> dict[str, dict[str, Any]]:
        """Name and content of ``config.yaml`` (resolved) and ``overrides.yaml`` (the command line), without secrets."""
        return {CONFIG: self._saved_config(), OVERRIDES: self.command_line()}

    def command_line(self) -> dict[str, Any]:
        """The content of ``overrides.yaml``: what was typed, without secrets."""
        overrides = [_without_secrets(override) for override in self.overrides]
        return {"overrides": overrides, "config_dirs": list(self.config_dirs)}

    def with_effect(self) -> dict[str, Any]:
        """The config without keys that have no effect on the result, and without secrets."""
        return _with_effect(self._saved_config())

    def _saved_config(self) -> dict[str, Any]:
        """The config without secrets, with a description of the excluded samples in place of the path of their list."""
        config = config_without_secrets(self.config)
        if self.excluded:
            config["data"]["exclude"] = describe(self.excluded)
        return config

    def published(self) -> dict[str, Any]:
        """The config for publication: without secrets, keys without effect on the result, and folders of this machine.

        Initial weights from the hub are pinned to the commit that the run in the directory started with.
        """
        saved = {key: self.saved_value(key) for key in _INITIAL_WEIGHTS}
        config = self.with_values({key: value for key, value in saved.items() if value is not None}).config
        return {key: without_folders(value) for key, value in _with_effect(config_without_secrets(config)).items()}

    def command(self) -> list[str]:
        """The arguments that start the run in the directory, for publication as in ``published``; [] if they are unknown."""
        saved = read_mapping(self.dir / OVERRIDES) if (self.dir / OVERRIDES).exists() else {}
        lists = (saved.get(key) for key in ("overrides", "config_dirs"))
        typed, folders = ([str(it) for it in found] if isinstance(found, list) else [] for found in lists)
        # The commit that the run began with: the branch may have moved since then.
        pinned = {key: value for key in _INITIAL_WEIGHTS if is_hub_url(str(value := self.saved_value(key)))}
        kept = [it for it in typed if not _has_no_effect(it) and it.partition("=")[0] not in pinned]
        return [
            *(word for folder in folders for word in ("--config-dir", without_folders(folder))),
            *(_rewritten(override, without_folders) for override in kept),
            *(f"{key}={value}" for key, value in pinned.items()),
        ]

    def saved_value(self, key: str) -> Any:
        """The value of a key such as ``run.weights_from`` in the directory's config.

        None if the directory has no run, or one that was started with other overrides of this key.
        """
        if not (self.dir / CONFIG).exists() or not (self.dir / OVERRIDES).exists():
            return None
        typed = [str(override) for override in read_mapping(self.dir / OVERRIDES).get("overrides") or []]
        # A section can be set as a whole, so every override in it counts.
        prefix = ".".join(key.split(".")[:2])
        if [it for it in typed if it.lstrip("+").startswith(prefix)] != [
            _without_secrets(it) for it in self.overrides if it.lstrip("+").startswith(prefix)
        ]:
            return None
        value: Any = read_mapping(self.dir / CONFIG)
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def with_values(self, values: Mapping[str, Any]) -> RunSpec:
        """The same run with different values of keys such as ``run.weights_from``; its name and overrides do not change."""
        config = copy.deepcopy(self.config)
        for key, value in values.items():
            *parents, name = key.split(".")
            section = config
            for part in parents:
                section = section[part]
            section[name] = value
        return replace(self, config=config)

    def require_same_overrides(self, of_rank0: Sequence[str]) -> None:
        """Refuses to train if this rank composes a different config than rank 0.

        Raises:
            ConfigError: If the overrides differ; names the differences.
        """
        different = {*of_rank0} ^ {*self.overrides}
        if different:
            texts = " ".join(sorted(map(_without_secrets, different)))
            raise ConfigError(
                f"rank {launched_rank()} and rank 0 do not have the same overrides: {texts}. "
                "Start all ranks with the same command."
            )

    def mark_started(self, name: str, content: bytes) -> None:
        """Remembers that this user writes ``overrides.yaml``, so that ``recompose`` does not need ``--trust``."""
        if name == OVERRIDES:
            mark_as_own(command_content(self.dir, content, self.config_dirs), STARTED)


def changed_keys(before: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What differs between two configs of ``RunSpec.with_effect``, such as ``train.max_steps: 50 -> 100``."""
    return list(_differences(before, config, _defaults()))


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file of a run directory."""
    with as_config_error(f"{path} cannot be read; restore it, or use a different run.dir"):
        content = read_bounded(path)
    return parse_mapping(path, content)


def parse_mapping(path: Path, text: bytes) -> dict[str, Any]:
    """The mapping in YAML text.

    Args:
        path: The file it is from, for messages.
        text: Its content.

    Raises:
        ConfigError: If it is not YAML of plain data, or not a mapping; names the file.
    """
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. {RESTORE}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: does not hold a config. {RESTORE}")
    return content


def config_without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without secrets: texts under keys such as ``api_key``, ``password``, ``token`` or ``auth``, and those in texts."""
    return {str(key): _clean(value, names_secret(str(key))) for key, value in config.items()}


def without_folders(value: Any) -> Any:
    """A copy in which paths of this machine are only the names of their files: ``/home/ann/x/a.tar`` becomes ``a.tar``.

    Relative paths and URLs stay, except ``file://``.
    """
    if isinstance(value, Mapping):
        return {str(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    text = re.sub(r"\bfile:/+", "/", value)
    name = ""
    if text.startswith(("/", "~")):  # the text is a path, which may have spaces; braces are those of a pattern
        folder, brace, rest = text.partition("{")
        name, text = (folder if brace else folder.rstrip("/")).rpartition("/")[2], brace + rest
    return name + _FOLDER.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], text)


def refuse_hidden(config: Mapping[str, Any], prefix: str = "") -> None:
    """Refuses a config with a secret that its run directory does not have.

    Raises:
        ConfigError: Names the key, and how to give the secret.
    """
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            refuse_hidden(value, f"{name}.")
        elif HIDDEN in (value if isinstance(value, str) else json.dumps(value, default=str)):
            raise ConfigError(
                f"{name}: got {value!r}, because a run directory has no secrets. Give the value again, {name}=..., or as "
                f"'{name}=${{oc.env:NAME}}' from an environment variable, which is saved as it is written."
            )


def _clean(value: Any, is_secret: bool, *, keeps_interpolations: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _clean(item, is_secret or names_secret(str(key)), keeps_interpolations=keeps_interpolations)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_clean(item, is_secret, keeps_interpolations=keeps_interpolations) for item in value]
    if not isinstance(value, str) or (keeps_interpolations and re.fullmatch(r"(\w+ )?\$\{.*\}", value)):
        return value
    return HIDDEN if is_secret and value else without_secrets_in(value)


def _without_secrets(override: str) -> str:
    """An override of the command line with its secrets hidden."""
    key = override.partition("=")[0]
    is_secret = any(map(names_secret, key.split(".")))

    def clean(value: Any) -> Any:
        return _clean(value, is_secret, keeps_interpolations=True)

    return _rewritten(override, clean, f"{key}='{HIDDEN}'" if is_secret else without_secrets_in(override))


def _rewritten(override: str, change: Callable[[Any], Any], otherwise: str | None = None) -> str:
    """An override with its value changed; ``otherwise``, by default only its key, if it cannot be parsed."""
    key = override.partition("=")[0]
    try:
        value = OverridesParser.create().parse_override(override).value()
    except HydraException:
        return key if otherwise is None else otherwise
    changed = change(value)
    return override if changed == value else f"{key}={_typed_value(changed)}"


def _typed_value(value: Any) -> str:
    """A value as Hydra's command line has it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_typed_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_typed_value, value))}]"
    return QuotedString(value, Quote.single).with_quotes() if isinstance(value, str) else json.dumps(value)


def _digest(config: Mapping[str, Any]) -> str:
    # Without keys at their default, so that a key of a later version does not change the name of every run.
    changed = _changed(_with_effect(config), _defaults())
    return hashlib.sha256(json.dumps(_with_text_keys(changed), sort_keys=True, default=str).encode()).hexdigest()[:8]


def _with_text_keys(value: Any) -> Any:
    """A copy that can be sorted: YAML has keys of several types in one mapping."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def _with_effect(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A copy without ``WITHOUT_EFFECT_ON_THE_RESULT``."""
    return {
        key: _with_effect(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in config.items()
        if f"{prefix}{key}" not in WITHOUT_EFFECT_ON_THE_RESULT
    }


def _has_no_effect(override: str) -> bool:
    key = override.partition("=")[0].lstrip("+~")
    # Variables have an effect where another key refers to them.
    return key.split(".")[0] != "vars" and any(
        key == name or key.startswith((f"{name}.", f"{name}/")) for name in WITHOUT_EFFECT_ON_THE_RESULT
    )


def _changed(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose values differ from ``defaults``."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value = _changed(value, default) or default
        if key not in defaults or value != default:
            changed[key] = value
    return changed


def _defaults() -> dict[str, Any]:
    return asdict(Config())


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    optimizer, run = config.get("optimizer"), config.get("run")
    return {
        "model": config.get("model"),
        "task": config.get("task"),
        "optimizer": {"_target_": optimizer.get("_target_") if isinstance(optimizer, Mapping) else optimizer},
        "run": {key: run.get(key) for key in ("seed", "fork")} if isinstance(run, Mapping) else run,
    }


def _differences(old: Any, new: Any, defaults: Any = None, path: str = "") -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in {**old, **new}:
            default = defaults.get(key) if isinstance(defaults, Mapping) else None
            # A key that is newer than the saved config is no difference while it has its default.
            if key in old or new[key] != default:
                yield from _differences(old.get(key), new.get(key), default, f"{path}.{key}" if path else str(key))
    elif not _fits(old, new):
        is_secret = any(map(names_secret, path.split(".")))
        before, now = (json.dumps(_clean(value, is_secret), default=str) for value in (old, new))
        yield f"{path}: {before} -> {now}"


def _fits(saved: Any, value: Any) -> bool:
    """Whether a saved value, of which secrets are hidden, may have been this value."""
    if isinstance(saved, list) and isinstance(value, list):
        return len(saved) == len(value) and all(map(_fits, saved, value))
    if isinstance(saved, str) and isinstance(value, str) and HIDDEN in saved:
        return re.fullmatch(".*".join(map(re.escape, saved.split(HIDDEN))), value, re.DOTALL) is not None
    return saved in (value, HIDDEN)
