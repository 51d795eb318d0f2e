"""From ``sys.argv`` to a composed config to an exit code: the wrapper round ``hydra.main`` that every entry point uses.

* Hydra composes; what it refuses (unknown keys, wrong types, unknown options) is shown as one message with the nearest
  valid name, on rank 0.
* A ``ConfigError`` is shown without a traceback, on rank 0, an ``Explained`` on the rank that met it; any other exception
  with its traceback, on the rank that raised it. Either way every rank exits with a code other than 0.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from dtrain.config import resolvers, schema
from dtrain.config.errors import ConfigError, Explained, PeerFailed, in_brief
from dtrain.config.explain import (
    explain,
    number_for_an_option,
    overrides_first,
    removed,
    repeated,
    unknown_keys,
    unknown_options,
)

EXIT_FAILED = 1
EXIT_USAGE = 2


@dataclass(frozen=True)
class Composed:
    """A composed config and where it came from.

    Attributes:
        cfg: The config tree (``schema.Config``), values still interpolated on access.
        overrides: What the command line said, in its order.
        experiment: The chosen experiment; None without one.
        config_dirs: Folders given with ``--config-dir``, absolute.
    """

    cfg: Any
    overrides: tuple[str, ...]
    experiment: str | None
    config_dirs: tuple[str, ...]


def conf_dir() -> Path:
    """Where the config groups are: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def run(
    main: Callable[[Composed], Any],
    argv: Sequence[str] | None = None,
    rewrite: Callable[[list[str]], list[str]] | None = None,
) -> None:
    """Composes the config from the command line and calls ``main`` with it.

    Args:
        main: The entry point. Its exceptions end the process; what it returns is dropped.
        argv: Arguments without the program's name; None takes ``sys.argv``.
        rewrite: Turns the arguments into those that Hydra gets.

    Raises:
        SystemExit: With a code other than 0 if composing or ``main`` failed.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr: a name that it cannot show ends no run
        sys.stdout.reconfigure(errors="backslashreplace")
    schema.register()
    resolvers.register()
    arguments = list(sys.argv[1:] if argv is None else argv)
    failures: list[Exception] = []
    try:
        arguments = rewrite(arguments) if rewrite else arguments
    except ConfigError as error:
        _say(str(error))
        raise SystemExit(EXIT_USAGE) from None
    if problem := (
        repeated(arguments)
        or unknown_options(arguments)
        or number_for_an_option(arguments, conf_dir())
        or removed(arguments, conf_dir())
    ):
        _say(problem)
        raise SystemExit(EXIT_USAGE)
    arguments = overrides_first(arguments)

    def job(cfg: DictConfig) -> None:
        # Hydra turns an exception into sys.exit(1), which would hide it from torchrun's error file and from us. A user's
        # mistake is kept out of that file, and what follows from another rank's: torchrun would bury the message under its
        # tracebacks.
        try:
            composed = _composed(cfg)
            record(lambda: _noting(failures, main, composed))()
        except Exception as error:  # noqa: BLE001 - handed to the caller below
            failures.append(error)

    try:
        _compose(job, arguments)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        _say(explain(error, arguments, conf_dir()))
        raise SystemExit(EXIT_USAGE) from None
    if failures:
        _show(failures[0])
        raise SystemExit(EXIT_FAILED) from None


def require_choice(composed: Composed) -> None:
    """Refuses a config that names no data or no model, as an empty command line does.

    Raises:
        ConfigError: Lists the experiments.
    """
    missing = [key for key in ("data.train", "model") if OmegaConf.is_missing(*_parent(composed.cfg, key))]
    if missing == ["data.train"]:
        raise ConfigError(
            "data.train is not set: name your shards, 'data.train=\"/data/train-{000000..000099}.tar\"', and those to evaluate "
            "on in data.eval."
        )
    if missing:
        folders = [conf_dir(), *map(Path, composed.config_dirs)]
        experiments = sorted({path.stem for folder in folders for path in (folder / "experiment").glob("*.yaml")})
        raise ConfigError(
            f"nothing to train: {' and '.join(missing)} not set. Choose an experiment, experiment="
            f"{{{', '.join(experiments)}}}, or set data=... and model=... yourself; --help lists what there is."
        )


def rank() -> int:
    """This process's rank as the launcher set it; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def _noting(mistakes: list[Exception], main: Callable[[Composed], Any], composed: Composed) -> None:
    try:
        main(composed)
    except (ConfigError, Explained, PeerFailed) as error:
        mistakes.append(error)


def _compose(job: Callable[[DictConfig], None], arguments: list[str]) -> None:
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would otherwise print and exit with
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")(job)()
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _composed(cfg: DictConfig) -> Composed:
    for problem in unknown_keys(cfg):
        raise ConfigError(problem)
    hydra_cfg = HydraConfig.get()
    if hydra_cfg.mode == RunMode.MULTIRUN and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "--multirun: one torchrun cannot run several configs, each of its processes would start a sweep of its "
            "own. Start one torchrun for each point, for example with a shell loop."
        )
    return Composed(
        cfg=cfg,
        # As typed: an interpolation may stand for a secret.
        overrides=tuple(OmegaConf.to_container(hydra_cfg.overrides.task, resolve=False)),  # type: ignore[arg-type]
        experiment=hydra_cfg.runtime.choices.get("experiment"),
        config_dirs=tuple(
            str(Path(source.path).resolve())
            for source in hydra_cfg.runtime.config_sources
            if source.provider == "command-line"
        ),
    )


def _parent(cfg: Any, key: str) -> tuple[Any, str]:
    parent, _, name = key.rpartition(".")
    return (cfg[parent] if parent else cfg), name


def _show(error: Exception) -> None:
    if isinstance(error, PeerFailed):
        sys.stderr.write(f"dtrain: rank {rank()} stops: {in_brief(str(error))}\n")
    elif isinstance(error, (ConfigError, OmegaConfBaseException)) and not os.environ.get("DTRAIN_TRACEBACK"):
        _say(str(error))
    elif isinstance(error, Explained) and not os.environ.get("DTRAIN_TRACEBACK"):
        message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        sys.stderr.write(f"dtrain: error: {f'rank {rank()}: ' if rank() else ''}{message}\n")
    else:
        # One write: the lines of several ranks must not be mixed.
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(f"dtrain: rank {rank()} failed\n{text}")
    sys.stderr.flush()


def _say(message: str) -> None:
    if rank() == 0:
        sys.stderr.write(f"dtrain: error: {message}\n")
        sys.stderr.flush()


def resolved(cfg: Any) -> dict[str, Any]:
    """The config as plain data, all interpolations resolved.

    Raises:
        ConfigError: If a value cannot be resolved; names the key.
    """
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].removeprefix("ConfigError raised while resolving interpolation: ")
        raise ConfigError(f"{error.full_key or 'config'}: {reason}") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
