"""``breakpoint()`` in a task, loss or model.

* With one rank it works as always, and ``dtrain.distributed.hang`` does not limit the time at its prompt. The debugger's ``q``
  ends the run with one line.
* With several ranks it raises: each rank would stop at its own prompt, and only some have the terminal.
* In dtrain's own calls of a task, on copies of a batch, it does nothing.
"""

from __future__ import annotations

import sys
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dtrain.errors import Explained


class BreakpointRefused(Explained, RuntimeError):
    """``breakpoint()`` was called with several ranks."""


class DebuggerQuit(SystemExit):
    """The debugger was left with ``q``: the process ends with code 1. The line about the failed run is all that is shown."""

    def __str__(self) -> str:
        return "q in the debugger"


@contextmanager
def breakpoints(ranks: int) -> Iterator[None]:
    """The block trains with this many ranks.

    Raises:
        BreakpointRefused: By ``breakpoint()``, with several ranks.
        DebuggerQuit: If the debugger is left with ``q``.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise BreakpointRefused(
            f"breakpoint() with {ranks} ranks: use one, as with `dtrain train --nproc 1`, or remove the call."
        )

    with _hook(refuse if ranks > 1 else sys.breakpointhook):
        try:
            yield
        except BdbQuit:
            raise DebuggerQuit(1) from None


def without_breakpoints() -> Any:
    """A context manager in which ``breakpoint()`` does nothing, regardless of PYTHONBREAKPOINT."""
    return _hook(lambda *args, **kwargs: None)


@contextmanager
def _hook(hook: Callable[..., Any]) -> Iterator[None]:
    before, sys.breakpointhook = sys.breakpointhook, hook
    try:
        yield
    finally:
        sys.breakpointhook = before
