"""Calls an entry point with its config; every entry point uses ``run``.

* An error in the command line or config is shown on rank 0, as one message with the nearest valid name; exit code 2.
* A ``ConfigError`` of the entry point is shown without a traceback on rank 0, an ``Explained`` on the rank that raised it.
  Other exceptions are shown with their traceback on the rank that raised them. In all cases every rank exits with code 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dtrain.config.compose import Composed, UnresolvedValue, compose, only_prints
from dtrain.config.explain import check_command_line, options_last
from dtrain.distributed.torchrun import launched_rank, record_failure, torchrun_is_quiet
from dtrain.errors import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    ConfigError,
    Explained,
    PeerFailed,
    escape_on_stdout,
    in_brief,
    printable,
    without_secrets_in,
)
from dtrain.runs.trust import AS_TYPED, TRUST

T = TypeVar("T")
EXIT_FAILED = 1
_TRACEBACK = "Traceback (most recent call last):"


def run(
    main: Callable[[Composed], Any],
    argv: Sequence[str] | None = None,
    rewrite: Callable[[list[str]], list[str]] | None = None,
) -> None:
    """Composes the config from the command line and calls ``main`` with it.

    Args:
        main: The entry point. Its exceptions end the process; its return value is ignored.
        argv: Arguments without the program's name; None: those of ``sys.argv``.
        rewrite: Converts these arguments to Hydra's arguments; None: they are passed to Hydra unchanged.

    Raises:
        SystemExit: With a code other than 0, if composing or ``main`` failed.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by some daemons
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    escape_on_stdout()
    arguments = list(sys.argv[1:] if argv is None else argv)
    trusted = not {TRUST, AS_TYPED}.isdisjoint(arguments)
    failures: list[Exception] = []

    def job(composed: Composed) -> None:
        # Hydra turns an exception into sys.exit(1), so it is caught here.
        try:
            main(composed)
        except Exception as error:  # noqa: BLE001 - shown below
            failures.append(error)

    try:
        arguments = rewrite(arguments) if rewrite else arguments
        check_command_line(arguments)
        arguments = options_last(arguments)
        with suppress(OSError, RuntimeError):  # standard error has no file, or is closed
            faulthandler.enable()  # a crash in C code shows the Python stack of each thread
        compose(job, arguments, trusted=trusted)
        if only_prints(arguments):
            sys.stdout.flush()
    except BrokenPipeError:
        if not only_prints(arguments):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `--help | head` is no error, at exit neither
    except UnresolvedValue as error:
        failures.append(error)
    except ConfigError as error:
        _show_message(str(error))
        raise SystemExit(EXIT_USAGE) from None
    except KeyboardInterrupt:  # before or after the training, which handles it
        _show_text("dtrain: interrupted", launched_rank() == 0)
        raise SystemExit(EXIT_INTERRUPTED) from None
    if failures:
        _show(failures[0])
        if last_line := getattr(failures[0], "last_line", ""):  # of a run that had started
            sys.stderr.write(f"{last_line}\n")
        raise SystemExit(EXIT_FAILED) from None


def call(function: Callable[[], T]) -> T:
    """Calls a function that composes configs itself, and returns its result; errors are shown as by ``run``.

    Raises:
        SystemExit: If it raised; the code is 2 for a ``ConfigError``.
    """
    escape_on_stdout()
    try:
        return function()
    except KeyboardInterrupt:
        _show_text("dtrain: interrupted", launched_rank() == 0)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Exception as error:  # noqa: BLE001 - shown
        _show(error)
        raise SystemExit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED) from None


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json FILE``, a path or None; refuses a path where no file can be written."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write all results to FILE as JSON")


def write_json(path: Path | None, content: Any) -> None:
    """Writes the results to the file of ``--json``; does nothing if the option was not given."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def output_file(text: str) -> Path:
    """The type of an option for a file that is written at the end.

    Raises:
        argparse.ArgumentTypeError: If no file can be written there.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: is a folder, want a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent}: is not a folder, so {path.name} cannot be written there")
    return path


def _show(error: Exception) -> None:
    with_traceback = bool(os.environ.get("DTRAIN_TRACEBACK"))
    if isinstance(error, PeerFailed):
        # torchrun shows it if the rank that failed first is on another machine, so that nothing follows its message here.
        _show_text(f"dtrain: rank {launched_rank()} stops: {in_brief(str(error))}", not torchrun_is_quiet())
    elif isinstance(error, ConfigError) and not with_traceback:
        _show_message(str(error))
    elif isinstance(error, Explained) and not with_traceback:
        message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        _show_text(f"dtrain: error: {f'rank {launched_rank()}: ' if launched_rank() else ''}{message}", True)
    else:
        trace = traceback.TracebackException.from_exception(error)
        text = "".join(trace.format())
        if not with_traceback and _shorten(trace):
            trace.__notes__ = None  # they are in the first line
            text = "".join(trace.format()).replace(
                _TRACEBACK, "Traceback of your code (DTRAIN_TRACEBACK=1 shows all of it):"
            )
        notes = [" ".join(str(note).split()) for note in getattr(error, "__notes__", ())]
        first_line = ": ".join([f"dtrain: rank {launched_rank()} failed", *notes])
        _show_text(f"{first_line}\n{text.rstrip()}", True)


def _shorten(trace: traceback.TracebackException) -> bool:
    """Leaves the frames of the user's code, if there are any: those of dtrain and of installed packages hide them."""
    known = (f"{Path(__file__).parent}/", *site.getsitepackages(), sysconfig.get_path("stdlib"), "<")
    own = [frame for frame in trace.stack if not frame.filename.startswith(known)]
    earlier = [_shorten(it) for it in (trace.__cause__, trace.__context__) if it is not None]
    if own or any(earlier):  # an error that dtrain raised from one in a hook has no frame of the user
        trace.stack[:] = own
        return True
    return False


def _show_message(message: str) -> None:
    """Shows a wrong config on rank 0. srun tells nothing of the other nodes, where something else may be missing.

    PyTorchJob sets RANK in each of its pods, but not LOCAL_RANK.
    """
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0" and "TORCHELASTIC_RUN_ID" not in os.environ
    _show_text(f"dtrain: error: {message}", launched_rank() == 0 or is_first_of_node)


def _show_text(text: str, shown: bool) -> None:
    text = printable(without_secrets_in(text), keep="\n\t")
    if shown:
        sys.stderr.write(f"{text}\n")  # one write, so that the lines of several ranks are not interleaved
        sys.stderr.flush()
    record_failure(text, shown)
