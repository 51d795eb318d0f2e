"""``breakpoint()`` in a task, loss or model.

* With one rank it works as always; ``dtrain.distributed.hang`` does not limit the time at its prompt. The debugger's ``q`` ends the run
  with one line.
* With several ranks it raises: each would stop at a prompt of its own, and only some have the terminal.
* In dtrain's own calls of a task, on copies of a batch, it does nothing.
"""

from __future__ import annotations

import sys
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dtrain.config.errors import Explained


class DebuggerError(Explained, RuntimeError):
    """The debugger was left with ``q``, or called with several ranks."""


@contextmanager
def breakpoints(ranks: int) -> Iterator[None]:
    """The block trains with this many ranks.

    Raises:
        DebuggerError: By ``breakpoint()``, with several ranks; or if the debugger is left with ``q``.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DebuggerError(
            f"breakpoint() with {ranks} ranks: use one, as with `dtrain train --nproc 1`, or remove the call."
        )

    with _hook(refuse if ranks > 1 else sys.breakpointhook):
        try:
            yield
        except BdbQuit:
            raise DebuggerError("the debugger was left with q, which ends the run. c (continue) trains on.") from None


def without_breakpoints() -> Any:
    """A context manager in which ``breakpoint()`` does nothing, whatever PYTHONBREAKPOINT says."""
    return _hook(lambda *args, **kwargs: None)


@contextmanager
def _hook(hook: Callable[..., Any]) -> Iterator[None]:
    before, sys.breakpointhook = sys.breakpointhook, hook
    try:
        yield
    finally:
        sys.breakpointhook = before
