"""Composes the config from the command line and calls an entry point with it; every entry point uses ``run``.

* Hydra composes the config. An error in it (an unknown key, a wrong type, an unknown preset) is shown on rank 0, as one
  message with the nearest valid name.
* A ``ConfigError`` is shown without a traceback on rank 0, an ``Explained`` on the rank that raised it. Other exceptions are
  shown with their traceback on the rank that raised them. In all cases every rank exits with a code other than 0.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import os
import re
import site
import sys
import sysconfig
import traceback
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
from dtrain.config.bounded_files import read_json
from dtrain.config.cache_dir import cache_dir
from dtrain.config.errors import (
    HIDDEN,
    SECRET_KEY,
    ConfigError,
    Explained,
    PeerFailed,
    escape_on_stdout,
    in_brief,
    printable,
    without_secrets_in,
)
from dtrain.config.explain import check_arguments, check_keys, explain, options_last
from dtrain.config.merge import replacing_nodes
from dtrain.config.torchrun_errors import EXIT_USAGE, record_failure, torchrun_is_quiet
from dtrain.config.trust import AS_TYPED, TRUST

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
# A line of YAML with a text; the groups are all before the text, and the key.
_YAML_TEXT = re.compile(r"""(\s*(?:- )*['"]?([\w.-]+)['"]?: )(?!true\n|false\n|null\n|[-+\d.e]+\n|['"]?\$\{)\S.*\n""")
#: Options of Hydra that print something instead of running.
_PRINTING = ("--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version")


@dataclass(frozen=True)
class Composed:
    """A composed config and where it came from.

    Attributes:
        cfg: The config, with all interpolations resolved.
        node: The config as Hydra composed it, for ``portable``.
        overrides: The overrides of the command line, in their order.
        experiment: The chosen experiment; None without one.
        config_dirs: Folders given with ``--config-dir``, absolute.
        trusted: Whether ``--trust`` was typed, or the process that started this one decides about that.
    """

    cfg: schema.Config
    node: DictConfig
    overrides: tuple[str, ...]
    experiment: str | None
    config_dirs: tuple[str, ...]
    trusted: bool = False


def run(
    main: Callable[[Composed], Any],
    argv: Sequence[str] | None = None,
    rewrite: Callable[[list[str]], list[str]] | None = None,
) -> None:
    """Composes the config from the command line and calls ``main`` with it.

    Args:
        main: The entry point. Its exceptions end the process; its return value is ignored.
        argv: Arguments without the program's name; None takes ``sys.argv``.
        rewrite: Converts the arguments to those for Hydra.

    Raises:
        SystemExit: With a code other than 0, if composing or ``main`` failed.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by some daemons
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    escape_on_stdout()
    schema.register()
    _register_resolvers()
    arguments = list(sys.argv[1:] if argv is None else argv)
    trusted = not {TRUST, AS_TYPED}.isdisjoint(arguments)
    refused: list[ConfigError] = []
    failures: list[Exception] = []
    try:
        arguments = rewrite(arguments) if rewrite else arguments
        check_arguments(arguments)
    except ConfigError as error:
        _show_message(str(error))
        raise SystemExit(EXIT_USAGE) from None
    arguments = options_last(arguments)
    with suppress(OSError, RuntimeError):  # standard error has no file, or is closed
        faulthandler.enable()  # a crash in C code shows the Python stack of each thread

    def job(node: DictConfig) -> None:
        # Hydra turns an exception into sys.exit(1), so it is caught here.
        try:
            _check(node)
        except ConfigError as error:
            refused.append(error)
            return
        try:
            main(_composed(node, trusted))
        except Exception as error:  # noqa: BLE001 - shown below
            failures.append(error)

    try:
        _compose(job, arguments)
        if only_prints(arguments):
            sys.stdout.flush()
    except BrokenPipeError:
        if not only_prints(arguments):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `--help | head` is no error, at exit neither
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        _show_message(explain(error, arguments, conf_dir()))
        raise SystemExit(EXIT_USAGE) from None
    except KeyboardInterrupt:  # before or after the training, which handles it
        _show_text("dtrain: interrupted", rank() == 0)
        raise SystemExit(EXIT_INTERRUPTED) from None
    for errors, code in ((refused, EXIT_USAGE), (failures, EXIT_FAILED)):
        if errors:
            _show(errors[0])
            if last_line := getattr(errors[0], "last_line", ""):  # of a run that had started
                sys.stderr.write(f"{last_line}\n")
            raise SystemExit(code) from None


def only_prints(arguments: Sequence[str]) -> bool:
    """Whether a command line has an option of Hydra that prints help or the config instead of running."""
    return any(argument.partition("=")[0] in _PRINTING for argument in arguments)


def require_choice(composed: Composed) -> None:
    """Refuses a config without data or model, such as that of an empty command line.

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
        ConfigError: If a value cannot be resolved; names the key.
    """
    try:
        container = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].removeprefix("ConfigError raised while resolving interpolation: ")
        if missing := re.match(r"Interpolation key '(.*)' not found", reason):
            reason = f"${{{missing[1]}}} leads to no key. Correct it, or set {missing[1]}=..."
        raise ConfigError(f"{error.full_key or 'config'}: {reason}") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def portable(node: DictConfig) -> dict[str, Any]:
    """As ``resolved``, but ``${dtrain.env:A}`` and ``${dtrain.cache:NAME}`` get no value, which would depend on the machine."""
    _register_resolvers(as_written=True)
    try:
        return resolved(node)
    finally:
        _register_resolvers()


def conf_dir() -> Path:
    """The folder of the config groups: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def rank() -> int:
    """This process's rank as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json FILE``, a path or None; refuses a path where no file can be written."""
    parser.add_argument("--json", type=_json_file, metavar="FILE", help="also write all results to FILE as JSON")


def write_json(path: Path | None, content: Any) -> None:
    """Writes the results to the file of ``--json``; does nothing if the option was not given."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _json_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: is a folder, want a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent}: is not a folder, so {path.name} cannot be written there")
    return path


def _register_resolvers(*, as_written: bool = False) -> None:
    """Registers the resolvers of ``conf/``.

    ``${dtrain.env:A,B}`` is the first set variable, ``${dtrain.cache:NAME}`` a path in the cache, and ``${dtrain.classes:N}``
    the number of names in the file classes.json beside ``data.train`` or a source of the mixture, or N without such a file.
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


def _compose(job: Callable[[DictConfig], None], arguments: list[str]) -> None:
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors, which it otherwise prints before it exits
    try:
        with replacing_nodes(), _closed_pipe(), _secrets_not_printed(only_prints(arguments)):
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
def _secrets_not_printed(is_printing: bool) -> Iterator[None]:
    """Hides secrets in what ``--cfg`` and ``--info`` print."""
    if not is_printing:
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines(keepends=True):
            if (found := _YAML_TEXT.fullmatch(line)) and SECRET_KEY.search(found[2]):
                line = f"{found[1]}{HIDDEN}\n"
            sys.stdout.write(without_secrets_in(line))


def _check(node: DictConfig) -> None:
    check_keys(node)
    if HydraConfig.get().mode == RunMode.MULTIRUN and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "--multirun: one torchrun cannot run several configs, because each of its processes would start its own sweep. "
            "Start one torchrun per config, for example in a shell loop, or use `python -m dtrain.launch --multirun`."
        )


def _composed(node: DictConfig, trusted: bool) -> Composed:
    hydra_cfg = HydraConfig.get()
    return Composed(
        cfg=schema.from_plain(schema.Config, resolved(node)),
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


def _show(error: Exception) -> None:
    with_traceback = bool(os.environ.get("DTRAIN_TRACEBACK"))
    if isinstance(error, PeerFailed):
        # torchrun shows it if the rank that failed first is on another machine, so that nothing follows its message here.
        _show_text(f"dtrain: rank {rank()} stops: {in_brief(str(error))}", not torchrun_is_quiet())
    elif isinstance(error, (ConfigError, OmegaConfBaseException)) and not with_traceback:
        _show_message(str(error))
    elif isinstance(error, Explained) and not with_traceback:
        message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        _show_text(f"dtrain: error: {f'rank {rank()}: ' if rank() else ''}{message}", True)
    else:
        trace = traceback.TracebackException.from_exception(error)
        if not with_traceback:
            _shorten(trace)
        _show_text(f"dtrain: rank {rank()} failed\n{''.join(trace.format()).rstrip()}", True)


def _shorten(trace: traceback.TracebackException) -> None:
    """Leaves out the frames of dtrain and of installed packages before the first one of the user's code, if there is one."""
    # torch's wrappers, such as that of no_grad, are between frames of dtrain.
    known = (f"{Path(__file__).parents[1]}/", *site.getsitepackages(), sysconfig.get_path("stdlib"), "<")
    first = next((number for number, frame in enumerate(trace.stack) if not frame.filename.startswith(known)), None)
    if first is not None:
        del trace.stack[:first]
    for earlier in (trace.__cause__, trace.__context__):
        if earlier is not None:
            _shorten(earlier)


def _show_message(message: str) -> None:
    """Shows a wrong config on rank 0. srun tells nothing of the other nodes, where something else may be missing.

    PyTorchJob sets RANK in each of its pods, but not LOCAL_RANK.
    """
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0" and "TORCHELASTIC_RUN_ID" not in os.environ
    _show_text(f"dtrain: error: {message}", rank() == 0 or is_first_of_node)


def _show_text(text: str, shown: bool) -> None:
    text = printable(without_secrets_in(text), keep="\n\t")
    if shown:
        sys.stderr.write(f"{text}\n")  # one write, so that the lines of several ranks are not interleaved
        sys.stderr.flush()
    record_failure(text, shown)
