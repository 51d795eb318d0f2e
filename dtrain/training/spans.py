"""Names for parts of a step, seen in a profile and nowhere else: a part costs some 100 nanoseconds while nobody looks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

#: What a step is in, when somebody looks.
STEP = "step"
#: The parts, in the order of a step.
DATA, FORWARD, BACKWARD, VOTE, OPTIMIZER = PARTS = ("data", "forward", "backward", "vote", "optimizer")

_nothing: AbstractContextManager[object] = nullcontext()
_watched = False


def span(name: str) -> AbstractContextManager[object]:
    """The block belongs to this part of a step."""
    return torch.autograd.profiler.record_function(name) if _watched else _nothing


def watch(on: bool) -> None:
    """Whether somebody looks."""
    global _watched
    _watched = on
