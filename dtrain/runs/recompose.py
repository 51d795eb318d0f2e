"""Command lines of existing runs: ``recompose`` takes what was typed for a run, and applies what is typed now.

* ``run.dir=DIR`` alone, or with changed keys, composes the command line in DIR; so do ``dtrain evaluate`` and other commands.
* ``run.fork=DIR@STEP`` without an experiment composes the command line of DIR for a new run.
* A command line that this user did not write is refused, unless ``--trust`` is typed; see ``trust``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dtrain.errors import ConfigError, as_config_error
from dtrain.files import cache_dir, read_bounded, yaml_bytes
from dtrain.runs.excluded import copy_of
from dtrain.runs.run_spec import CONFIG, OVERRIDES, RESTORE, parse_mapping
from dtrain.runs.trust import AS_TYPED, STARTED, TRUST, command_content, is_own


def take(arguments: Sequence[str], **defaults: str) -> tuple[dict[str, str], list[str]]:
    """Separates an entry point's own ``key=value`` options from the other arguments.

    Args:
        arguments: The command line.
        defaults: The options and their default values.

    Returns:
        The options, and the other arguments.
    """
    options, rest = dict(defaults), []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in options:
            options[key] = value
        else:
            rest.append(argument)
    return options, rest


def has_command_line(directory: str) -> bool:
    """Whether a directory, as written on the command line, has a run."""
    return (_as_typed(directory) / OVERRIDES).exists()


def recompose(arguments: Sequence[str]) -> list[str]:
    """The command line of the run that ``run.dir=DIR`` names, with ``arguments`` applied on top.

    The config is composed anew from the saved command line, because group choices such as ``precision=bf16`` cannot be
    applied to a resolved config. A run that this user did not start is refused, unless the arguments have ``--trust``.
    Arguments with ``--as-typed`` were recomposed by the process that started this one, and are returned without it.

    Raises:
        ConfigError: If ``run.dir`` is not given or has no run, ``overrides.yaml`` is damaged, or the run is not trusted.
    """
    if AS_TYPED in arguments:
        return [argument for argument in arguments if argument not in (TRUST, AS_TYPED)]
    trusted = TRUST in arguments
    arguments = [argument for argument in arguments if argument != TRUST]
    new = dict(argument.split("=", 1) for argument in arguments if re.match(r"[\w.+~@/]+=", argument))
    if "run.dir" not in new:
        raise ConfigError("run.dir=DIR is missing: name the directory of the run.")
    path = _as_typed(new["run.dir"]) / OVERRIDES
    if not path.exists():
        raise ConfigError(
            f"run.dir: {path.parent} is not a run directory (it has no {OVERRIDES}). Name the directory of a run; to start a "
            "new one in it, choose what to train as well, such as experiment=digits."
        )
    content, overrides, config_dirs = _saved_command(path.parent)
    if not trusted:
        _require_own(path.parent, content, overrides, config_dirs)
    copied = _copied_list(path.parent, overrides) if "data.exclude" not in new else []
    return _with_saved(
        overrides, config_dirs, [*arguments, *copied], {*new, "run.resume", *(["data.exclude"] if copied else [])}
    )


def _copied_list(directory: Path, overrides: Sequence[str]) -> list[str]:
    """``data.exclude`` with the copy in a run directory, if the file that was typed is not there any more."""
    typed = [it.partition("=")[2].strip("'\"") for it in overrides if it.startswith("data.exclude=")]
    if not typed or typed[-1] == "null" or Path(typed[-1]).expanduser().exists():
        return []
    with suppress(ConfigError, OSError, KeyError, TypeError, AttributeError):
        saved = parse_mapping(directory / CONFIG, read_bounded(directory / CONFIG))["data"]["exclude"]
        if (copy := copy_of(directory, saved)).exists():
            return [f"data.exclude='{copy.absolute()}'"]
    return []


def recompose_start(
    directory: Path, saved: Mapping[str, Sequence[str]], arguments: Sequence[str], *, left_out: Collection[str] = ()
) -> list[str]:
    """The command line of one start of a run, with ``arguments`` applied on top, as ``recompose``.

    Args:
        directory: The run's directory.
        saved: ``overrides`` and ``config_dirs`` of the start; they are trusted as ``overrides.yaml`` was when it had them.
        arguments: What was typed now.
        left_out: Further keys of the start that are not used.

    Raises:
        ConfigError: If the run is not trusted.
    """
    overrides, config_dirs = list(saved["overrides"]), list(saved["config_dirs"])
    if TRUST not in arguments:
        content = yaml_bytes({"overrides": overrides, "config_dirs": config_dirs})
        _require_own(directory, content, overrides, config_dirs)
    typed = [argument for argument in arguments if argument != TRUST]
    keys = {argument.partition("=")[0] for argument in typed}
    return _with_saved(overrides, config_dirs, typed, {*keys, "run.resume", *left_out})


def _with_saved(
    overrides: Sequence[str], config_dirs: Sequence[str], arguments: Sequence[str], left_out: Collection[str]
) -> list[str]:
    # How a start resumes is not part of the run.
    old = [it for it in overrides if it.partition("=")[0] not in left_out]
    folders = [part for folder in config_dirs for part in ("--config-dir", str(folder))]
    return [*folders, *old, *arguments]


def run_dir_of(arguments: Sequence[str]) -> Path | None:
    """The run directory that a command line names by ``run.dir``."""
    dirs = [argument.partition("=")[2] for argument in arguments if argument.startswith("run.dir=")]
    return _as_typed(dirs[-1]) if dirs else None


def recompose_if_run(arguments: list[str]) -> list[str]:
    """``recompose``, if ``run.dir`` has a run and the arguments do not choose what to train; else the arguments.

    An experiment chooses what to train, or a preset of data together with one of a model. Then nothing of the run is composed.

    Raises:
        ConfigError: If ``run.dir`` is the only argument and has no run, or as ``recompose``.
    """
    typed = [argument for argument in arguments if argument != TRUST]
    if (fork := _fork_without_choice(typed)) is not None:
        return _recompose_fork(fork, arguments)
    if AS_TYPED in typed or _uses_saved_command(typed) or (len(typed) == 1 and run_dir_of(typed) is not None):
        return recompose(arguments)
    return typed


def _fork_without_choice(typed: Sequence[str]) -> Path | None:
    """The directory that ``run.fork`` names, if its command line is the base of a new run."""
    forks = [argument.partition("=")[2] for argument in typed if argument.startswith("run.fork=")]
    if not forks or AS_TYPED in typed or chooses_what_to_train(typed) or _uses_saved_command(typed):
        return None
    return _as_typed(forks[-1].strip("'\"").rpartition("@")[0])


def _recompose_fork(directory: Path, arguments: Sequence[str]) -> list[str]:
    """The command line of a fork: that of a run without its name, directory and launcher, and what was typed."""
    if not has_command_line(str(directory)):
        raise ConfigError(
            f"run.fork: {directory} is not a run directory (it has no {OVERRIDES}). Give DIR@STEP, such as runs/digits@200."
        )
    _, overrides, config_dirs = _saved_command(directory)
    left_out = [key for key in (it.partition("=")[0] for it in overrides) if _is_of_one_run(key.lstrip("+~"))]
    return recompose_start(
        directory, {"overrides": overrides, "config_dirs": config_dirs}, arguments, left_out=left_out
    )


def _is_of_one_run(key: str) -> bool:
    return key in ("run.name", "run.dir", "run.fork", "run.fork_data", "run.max_hours") or key.split(".")[0] == "launch"


def chooses_what_to_train(arguments: Sequence[str]) -> bool:
    """Whether a command line names an experiment, or presets of data and model, and so uses no saved command line."""
    keys = {argument.partition("=")[0] for argument in arguments}
    return "experiment" in keys or {"data", "model"} <= keys


def _uses_saved_command(arguments: Sequence[str]) -> bool:
    directory = run_dir_of(arguments)
    return directory is not None and not chooses_what_to_train(arguments) and has_command_line(str(directory))


def _saved_command(directory: Path) -> tuple[bytes, list[str], list[str]]:
    """``overrides.yaml`` of a run: its bytes, the overrides, and the folders of presets."""
    path = directory / OVERRIDES
    with as_config_error(f"{path} cannot be read; restore it, or use a different run.dir"):
        content = read_bounded(path)
    saved = parse_mapping(path, content)
    lists = [saved.get(key) for key in ("overrides", "config_dirs")]
    if not all(isinstance(it, list) and all(isinstance(text, str) for text in it) for it in lists):
        raise ConfigError(f"{path}: overrides and config_dirs must be lists of texts. {RESTORE}")
    overrides, config_dirs = lists
    return content, overrides, config_dirs  # type: ignore[return-value]


def _is_own(directory: Path, content: bytes, overrides: Sequence[str], config_dirs: Sequence[str]) -> bool:
    """Whether a run has this user's mark; arguments as ``_saved_command`` returns them."""
    with as_config_error(f"run.dir: {directory} cannot be read"):
        return is_own(command_content(directory, content, config_dirs), STARTED)


def _require_own(directory: Path, content: bytes, overrides: Sequence[str], config_dirs: Sequence[str]) -> None:
    """Refuses a run without this user's mark, before anything of it is composed."""
    if not _is_own(directory, content, overrides, config_dirs):
        raise ConfigError(
            f"run.dir: {directory} was not started by you with this cache ({cache_dir()}), or its {OVERRIDES} was edited. Its "
            f"saved command can run any code. If you trust whoever made it, add {TRUST}. If it is your own run of another "
            "machine, set DTRAIN_CACHE to a folder that both machines see before you start runs."
        )


def refuse_foreign_links(directory: Path) -> None:
    """Refuses a run directory with links to other places, where dtrain would write, unless this user has started the run.

    Raises:
        ConfigError: Names the first link, and ``--trust``.
    """
    with as_config_error(f"run.dir: {directory} cannot be read"):
        links = sorted(it for it in directory.iterdir() if it.is_symlink()) if directory.is_dir() else []
        links = [it for it in links if directory.resolve() not in it.resolve().parents]  # Optuna's lock is such a link
    if links and not (has_command_line(str(directory)) and _is_own(directory, *_saved_command(directory))):
        raise ConfigError(
            f"run.dir: {links[0]} is a link, so dtrain would write to {links[0].resolve()}, and you have not started a run in "
            f"{directory} with this cache ({cache_dir()}). If you trust whoever made the link, add {TRUST}."
        )


def _as_typed(directory: str) -> Path:
    """A path without the quotes that Hydra needs."""
    return Path(directory.strip("'\"").replace("\\'", "'")).expanduser()
