"""``dtrain COMMAND ...``: all entry points as one console command; also ``python -m dtrain``.

* ``dtrain X ...`` does what ``python -m dtrain.X ...`` does, in this process and with the same exit code.
* ``dtrain train``, ``evaluate`` and ``doctor`` start torchrun on this machine for several processes: ``--nproc N``, by default
  one process for each GPU, or one on a CPU. ``dtrain replay`` starts as many as the run had.
* ``dtrain --help`` and ``--version`` import neither torch nor Hydra.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from dtrain import __version__
from dtrain.distributed.services import check_gpus, join_service
from dtrain.errors import EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, nearest, printable

COMMANDS = {
    "train": "train a model; the same command again resumes the run",
    "evaluate": "evaluate a checkpoint of a run, in one precision or several, or an artefact",
    "export": "export a checkpoint as an artefact for inference, and publish it on the Hugging Face hub",
    "predict": "classify images or continue a text with an artefact",
    "pack": "write tar shards; index or repair existing ones",
    "show": "show what a model will see, as one HTML page: samples, labels, sizes and bad samples of the data",
    "launch": "start runs and sweeps, on this machine or with SLURM; show their status and logs, stop and resume them",
    "report": "show runs, their curves and problems as one HTML page",
    "replay": "recompute steps of a run and compare them with its records",
    "trace": "show which steps of a run used a sample",
    "doctor": "check this machine, and find what limits a run",
    "completion": "print the completion script of a shell: bash, zsh or fish",
}
_ON_SEVERAL_PROCESSES = ("train", "evaluate", "doctor")
_WITHOUT_TARGETS = ("pack", "report")
_MODULES = {"trace": "replay.trace"}  # where the module is not named as the command

USAGE = f"""dtrain {__version__}: distributed PyTorch training from plain tar shards

Usage
  dtrain COMMAND [ARGUMENT ...]
  dtrain COMMAND --help

Commands
{os.linesep.join(f"  {name:12}{meaning}" for name, meaning in COMMANDS.items())}

With train, evaluate, doctor and replay
  --nproc N   number of processes that torchrun starts on this machine (default: one for each GPU, or one on a CPU; with
              replay: as many as the run had)

Example
  dtrain train --nproc 2 experiment=digits precision=bf16

Several machines: torchrun ... -m dtrain.train ..., srun, or dtrain launch launch=slurm.
"""


class UsageError(Exception):
    """A wrong command line; the message is complete."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that in ``sys.argv``; returns the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or [""]
    if name in ("--version", "-V"):
        print(_versions())
        return 0
    if name in ("--help", "-h", "help", ""):
        print(USAGE, end="")
        return 0 if name else EXIT_USAGE
    try:
        if name not in COMMANDS:
            raise UsageError(_no_such_command(name))
        if name == "completion":
            return _print_completion(rest)
        if name in _ON_SEVERAL_PROCESSES:
            join_service()
            processes, rest = _take_nproc(name, rest)
            if processes > 1 or _is_pod(name, rest):
                return _run_torchrun(name, processes, _as_typed(name, rest))
        return _run(name, rest)
    except (UsageError, ConfigError) as error:
        print(f"dtrain: error: {printable(str(error), keep=chr(10))}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("dtrain: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _versions() -> str:
    """The versions that a report of an error needs; of a checkout also its commit, with ``-dirty`` if it was changed."""
    from importlib.metadata import PackageNotFoundError, version

    from dtrain.runs.run_dir import git_output

    package = Path(__file__).resolve().parent
    # An installed package may lie in the checkout of something else, such as in its virtual environment.
    is_checkout = git_output(package, "rev-parse", "--show-toplevel") == str(package.parent)
    commit = (
        git_output(package, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") if is_checkout else None
    )
    try:
        torch = version("torch")  # importing it takes a second
    except PackageNotFoundError:
        torch = "not installed"
    of_commit = f" (commit {commit})" if commit else ""
    return f"dtrain {__version__}{of_commit}\ntorch {torch}\nPython {platform.python_version()}"


def _run(name: str, arguments: Sequence[str]) -> int:
    """``python -m dtrain.NAME ARGUMENTS`` in this process."""
    # _target_ imports the user's classes from the current folder. `python -m` searches it first; here it is searched last, so
    # that a file numpy.py in another user's run or artefact is not executed by a command that only reads.
    is_safe = getattr(sys.flags, "safe_path", False) or name in _WITHOUT_TARGETS
    if (here := os.getcwd()) not in sys.path and "" not in sys.path and not is_safe:
        sys.path.append(here)
    if name == "train" and _prints_config(arguments):
        return 0
    module = entry_point(name)
    sys.argv = [str(module.__file__), *arguments]
    return module.main() or 0


def entry_point(name: str) -> ModuleType:
    """The module of a command: ``dtrain.NAME``, or its ``__main__`` if that is a package."""
    name = _MODULES.get(name, name)
    found = importlib.util.find_spec(f"dtrain.{name}")
    is_package = found is not None and found.submodule_search_locations is not None
    return importlib.import_module(f"dtrain.{name}.__main__" if is_package else f"dtrain.{name}")


def _prints_config(arguments: Sequence[str]) -> bool:
    """Prints what ``--help``, ``--cfg`` and the like ask for, if they do, without torch, whose import takes a second."""
    from dtrain import command_line
    from dtrain.config import compose
    from dtrain.runs.recompose import recompose_if_run

    if not compose.only_prints(arguments):
        return False
    command_line.run(lambda composed: None, arguments, rewrite=recompose_if_run)
    return True


def _run_torchrun(name: str, processes: int, arguments: Sequence[str]) -> int:
    """``torchrun --standalone --nproc-per-node=PROCESSES -m dtrain NAME ARGUMENTS`` in this process.

    Without ``--standalone`` in a pod of a cluster that has set ``PET_NNODES`` and the other variables of torchrun.
    """
    from torch.distributed.run import main as torchrun

    from dtrain.distributed.torchrun import prepare_torchrun
    from dtrain.distributed.world import process_cpu_count, rendezvous_options

    # torchrun would set 1, and print a warning of five lines.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, process_cpu_count() // processes)))
    # -m dtrain, not -m dtrain.NAME, so that Ctrl-C shows no traceback while the ranks are still importing torch.
    options = [*rendezvous_options(), f"--nproc-per-node={processes}"]
    sys.argv = ["torchrun", *options, "-m", "dtrain", name, *arguments]
    prepare_torchrun()
    torchrun()
    return 0


def _as_typed(name: str, arguments: Sequence[str]) -> list[str]:
    """The whole command line for the ranks: what is read from a run directory, and whether to trust it, is decided here."""
    from dtrain.runs.recompose import recompose_if_run, refuse_foreign_links, run_dir_of, take
    from dtrain.runs.trust import AS_TYPED, TRUST

    if (directory := run_dir_of(arguments)) is None:
        return list(arguments)

    # Options of dtrain evaluate, of which ``checkpoint`` is a group of the config as well.
    names = dict.fromkeys(("checkpoint", "weights", "out"), "") if name == "evaluate" else {}
    subcommand = arguments[:1] if name == "doctor" and arguments[0].isidentifier() else []
    options, rest = take(arguments[len(subcommand) :], **names)
    try:
        whole = recompose_if_run(rest)
        if TRUST not in arguments:
            refuse_foreign_links(directory)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return [*subcommand, *(f"{key}={value}" for key, value in options.items() if value), *whole, AS_TYPED]


def _take_nproc(name: str, arguments: Sequence[str]) -> tuple[int, list[str]]:
    """The number of processes to start, and the other arguments.

    Raises:
        UsageError: If ``--nproc`` is no number, or a launcher has already started this process.
    """
    rest: list[str] = []
    given: str | None = None
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--nproc":
            given = value if equals else next(words, "")
        elif option in ("--nproc-per-node", "--nproc_per_node", "--standalone"):
            raise UsageError(f"{word}: this is an option of torchrun. dtrain {name} has --nproc N.")
        else:
            rest.append(word)
    if given is not None and not (given.isdecimal() and int(given) > 0):
        raise UsageError(f"--nproc: got {given or 'nothing'}, want a number of processes from 1 on.")
    if (launcher := _launcher()) and given is not None:
        raise UsageError(f"--nproc={given}: {launcher} has already started the processes. Leave --nproc out.")
    if given is not None:
        return int(given), rest
    return (1 if launcher or _is_single(name, rest) else _gpus() or 1), rest


def _launcher() -> str:
    """The launcher that has started this process as one of several; ``""`` without one."""
    # PyTorchJob sets RANK in its pods too, where torchrun has to start the processes; LOCAL_RANK is of a process of torchrun.
    in_pod = "PET_NNODES" in os.environ and "LOCAL_RANK" not in os.environ
    if "RANK" in os.environ and not in_pod:
        return "torchrun (RANK is set)"
    # SLURM_PROCID is also set in batch scripts and interactive shells, which are single processes.
    return f"srun ({tasks} tasks)" if (tasks := os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1" else ""


def _is_pod(name: str, arguments: Sequence[str]) -> bool:
    """Whether torchrun has to start a single process too: other pods start the others, or RANK is that of the pod."""
    if "PET_NNODES" not in os.environ or _launcher() or _is_single(name, arguments):
        return False
    from dtrain.distributed.world import rendezvous_options

    return "RANK" in os.environ or not rendezvous_options()


def _is_single(name: str, arguments: Sequence[str]) -> bool:
    """Whether a command only prints, or runs several configs one after the other: it needs no other processes."""
    from dtrain.config.compose import only_prints

    subcommand = name == "doctor" and bool({"memory", "numerics"}.intersection(arguments[:1]))
    return only_prints(arguments) or not {"--multirun", "-m"}.isdisjoint(arguments) or subcommand


def _gpus() -> int:
    import torch

    return check_gpus(torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _print_completion(arguments: Sequence[str]) -> int:
    from dtrain.completion import SHELLS, completion_script

    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise UsageError(f"completion: got {' '.join(arguments) or 'nothing'}, want one of {', '.join(SHELLS)}.")
    print(completion_script(arguments[0], COMMANDS, entry_point), end="")
    return 0


def _no_such_command(name: str) -> str:
    if "=" in name:
        return f"{name}: a command comes first, such as: dtrain train {name}"
    return f"there is no command {name!r}. {nearest(name, COMMANDS)}"


if __name__ == "__main__":
    sys.exit(main())
