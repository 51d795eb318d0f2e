"""Composes the config from a command line, and converts it to dataclasses, once: ``compose``.

* Hydra composes the config. An error in it (an unknown key, a wrong type, an unknown preset) is a ``ConfigError`` with the
  nearest valid name.
* OmegaConf objects do not leave this module: the rest of dtrain receives the dataclasses of ``schema.py``, with plain data.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dtrain.config import schema
from dtrain.config.explain import check_keys, explain
from dtrain.config.meanings import with_meanings
from dtrain.config.merge import replacing_nodes
from dtrain.config.metrics import best_mode
from dtrain.errors import (
    HIDDEN,
    ConfigError,
    names_secret,
    without_secrets_in,
)
from dtrain.files import cache_dir, read_json

# A line of YAML with a text; the groups are all before the text, and the key.
_YAML_TEXT = re.compile(r"""(\s*(?:- )*['"]?([\w.-]+)['"]?: )(?!true\n|false\n|null\n|[-+\d.e]+\n|['"]?\$\{)\S.*\n""")
#: Options of Hydra that print something instead of running.
_PRINTING = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version")


class UnresolvedValue(ConfigError):
    """An interpolation in the config refers to a key that does not exist, or its value has the wrong type."""


@dataclass(frozen=True)
class Composed:
    """A composed config and where it came from.

    Attributes:
        cfg: The config, with all interpolations resolved.
        node: The config as Hydra composed it, for ``portable``.
        overrides: The overrides of the command line, in order.
        experiment: The chosen experiment; None without one.
        config_dirs: Folders given with ``--config-dir``, absolute.
        trusted: Whether ``--trust`` was typed, or the parent process decides about trust.
    """

    cfg: schema.Config
    node: DictConfig
    overrides: tuple[str, ...]
    experiment: str | None
    config_dirs: tuple[str, ...]
    trusted: bool = False


def only_prints(arguments: Sequence[str]) -> bool:
    """Whether a command line has an option of Hydra that prints help or the config instead of running."""
    return any(argument.partition("=")[0] in _PRINTING for argument in arguments)


def require_choice(composed: Composed) -> None:
    """Refuses a config without data or model, such as the one of an empty command line.

    Raises:
        ConfigError: Lists the experiments.
    """
    cfg = composed.cfg
    missing = ["data.train"] * (cfg.data.train is None and not cfg.data.mixture) + ["model"] * (cfg.model is None)
    if missing == ["data.train"]:
        raise ConfigError(
            "data.train is not set: name your shards, 'data.train=\"/data/train-{000000..000099}.tar\"', and those to evaluate "
            "on in data.eval; or several sources in data.mixture."
        )
    if missing:
        folders = [conf_dir(), *map(Path, composed.config_dirs)]
        experiments = sorted({path.stem for folder in folders for path in (folder / "experiment").glob("*.yaml")})
        raise ConfigError(
            f"nothing to train: {' and '.join(missing)} not set. Choose an experiment, experiment="
            f"{{{', '.join(experiments)}}}, or set data=... and model=... yourself; --help lists all groups and keys."
        )


def resolved(node: DictConfig) -> dict[str, Any]:
    """A composed config as plain data, all interpolations resolved; a value that is not set stays ``???``.

    Raises:
        UnresolvedValue: If a value cannot be resolved; names the key.
    """
    try:
        container = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].removeprefix("ConfigError raised while resolving interpolation: ")
        if missing := re.match(r"Interpolation key '(.*)' not found", reason):
            reason = f"${{{missing[1]}}} refers to no key. Correct it, or set {missing[1]}=..."
        raise UnresolvedValue(f"{error.full_key or 'config'}: {reason}") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def portable(node: DictConfig) -> dict[str, Any]:
    """As ``resolved``, but with ``<dtrain.env:A>`` and ``<dtrain.cache:NAME>`` for values that depend on the machine."""
    _register_resolvers(as_written=True)
    try:
        return resolved(node)
    finally:
        _register_resolvers()


def conf_dir() -> Path:
    """The folder of the config groups: inside the package when installed from a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def _register_resolvers(*, as_written: bool = False) -> None:
    """Registers the resolvers of ``conf/``.

    ``${dtrain.env:A,B}`` is the first set variable, ``${dtrain.cache:NAME}`` a path in the cache, and ``${dtrain.classes:N}``
    the number of names in the file classes.json next to ``data.train`` or a source of the mixture, or N without such a file.
    """
    resolvers: dict[str, Callable[..., str]] = {
        "dtrain.env": _first_of_environment,
        "dtrain.cache": lambda name: str(cache_dir() / name),
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, partial(_written, name) if as_written else resolver, replace=True)
    OmegaConf.register_new_resolver("dtrain.classes", _number_of_classes, replace=True)


def _written(name: str, *arguments: str) -> str:
    return f"<{name}:{','.join(arguments)}>"


def _number_of_classes(default: int, *, _root_: DictConfig) -> int:
    data = _root_.data
    train = None if OmegaConf.is_missing(data, "train") else data.train  # a preset may have ???
    sources = [source.get("shards") for source in data.mixture.values() if isinstance(source, DictConfig)]
    for shards in sources or [train]:
        pattern = shards[0] if isinstance(shards, ListConfig) and shards else shards
        if isinstance(pattern, str):
            with suppress(OSError, ValueError):  # a damaged file is refused where the names are read
                names = read_json(Path(pattern).parent / "classes.json")
                return len(names) if isinstance(names, list) else default
    return default


def _first_of_environment(*names: str) -> str:
    for name in names:
        if value := os.environ.get(name):
            return value
    raise ConfigError(
        f"the environment variable {names[0]} is not set. Set it to the folder of the data; the first lines of the data preset "
        "say what it contains."
    )


def compose(job: Callable[[Composed], None], arguments: list[str], *, trusted: bool = False) -> None:
    """Calls ``job`` with the composed config; with ``--multirun``, once for each config.

    Options such as ``--help`` and ``--cfg`` print something instead.

    Args:
        job: Must not raise.
        arguments: The command line, options last (``explain.options_last``).
        trusted: Passed on as ``Composed.trusted``.

    Raises:
        UnresolvedValue: If an interpolation refers to no key.
        ConfigError: If the config is wrong.
    """
    refused: list[ConfigError] = []

    def checked(node: DictConfig) -> None:
        try:
            _check(node)
            composed = _composed(node, trusted)
        except ConfigError as error:  # Hydra turns an exception into sys.exit(1)
            refused.append(error)
        else:
            job(composed)

    schema.register()
    _register_resolvers()
    try:
        _call_hydra(checked, arguments)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(explain(error, arguments, conf_dir())) from error
    if refused:
        raise refused[0]


def _call_hydra(job: Callable[[DictConfig], None], arguments: list[str]) -> None:
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors, which it otherwise prints before it exits
    try:
        with replacing_nodes(), _closed_pipe(), _printed_for_people(arguments):
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")(job)()
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


@contextmanager
def _closed_pipe() -> Iterator[None]:
    """Ends the process without a message if the reader of its output has ended, as in ``--help | head``."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again
        raise SystemExit(0) from None


@contextmanager
def _printed_for_people(arguments: Sequence[str]) -> Iterator[None]:
    """Hides secrets in what ``--help``, ``--cfg`` and ``--info`` print, and explains the keys in that of ``--help``."""
    if not only_prints(arguments):
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        text = "".join(map(_without_secret, printed.getvalue().splitlines(keepends=True)))
        if {"--help", "-h"} & set(arguments):
            text = "".join(f"{line}\n" for line in with_meanings(text.splitlines()))
        sys.stdout.write(text)


def _without_secret(line: str) -> str:
    if (found := _YAML_TEXT.fullmatch(line)) and names_secret(found[2]):
        line = f"{found[1]}{HIDDEN}\n"
    return without_secrets_in(line)


def _check(node: DictConfig) -> None:
    check_keys(node)
    if HydraConfig.get().mode == RunMode.MULTIRUN and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "--multirun: one torchrun cannot run several configs, because each of its processes would start its own sweep. "
            "Start one torchrun per config, for example in a shell loop, or use `dtrain launch --multirun`."
        )


def _composed(node: DictConfig, trusted: bool) -> Composed:
    hydra_cfg = HydraConfig.get()
    cfg = schema.from_plain(schema.Config, resolved(node))
    # Saved with the run, for commands that read its records without torchmetrics, such as dtrain.report.
    cfg.checkpoint.best_mode = best_mode(cfg)
    return Composed(
        cfg=cfg,
        node=node,
        # Not resolved: an interpolation may stand for a secret.
        overrides=tuple(OmegaConf.to_container(hydra_cfg.overrides.task, resolve=False)),  # type: ignore[arg-type]
        experiment=hydra_cfg.runtime.choices.get("experiment"),
        config_dirs=tuple(
            str(Path(source.path).resolve())
            for source in hydra_cfg.runtime.config_sources
            if source.provider == "command-line"
        ),
        trusted=trusted,
    )
