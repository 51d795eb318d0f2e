"""Where in a user's code an operation was called."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_TORCH = f"{Path(torch.__file__).parent}/"
# What stands between an operation and the code that called it: modes, and the audit itself.
_MODES = (f"{_TORCH}utils/", f"{_TORCH}_", f"{_TORCH}overrides.py", f"{Path(__file__).parent}/")
_WRAPPERS = (_TORCH, *_MODES, str(Path(__file__).parents[1] / "full_precision.py"))


def called_by_torch() -> bool:
    """Whether the Python code that called the operation is torch's own, such as ``torch.nn.LSTM.forward``."""
    frame = _innermost_outside(_MODES)
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def users_line() -> str:
    """``file:line`` of the innermost code that is not torch's; the file relative to the working directory if it can be."""
    frame = _innermost_outside(_WRAPPERS)
    if frame is None:
        return ""
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.f_lineno}"


def _innermost_outside(places: tuple[str, ...]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(places):
        frame = frame.f_back
    return frame
