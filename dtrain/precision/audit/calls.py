"""Calls of torch from Python, above autograd and autocast: what the user's code says, not what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dtrain.precision.nested import tensors

_LARGEST = torch.finfo(torch.float16).max
_CASTS = {"bfloat16", "double", "float", "half", "to", "type", "type_as"}
# Functions that put a number into a tensor as it is, or add it.
_PUT = {
    *(
        "add",
        "clamp",
        "clip",
        "fill",
        "full",
        "full_like",
        "iadd",
        "isub",
        "masked_fill",
        "nan_to_num",
        "new_full",
        "radd",
    ),
    *("rsub", "scalar_tensor", "setitem", "sub", "tensor", "where"),
}
_MULTIPLY = {"imul", "mul", "multiply", "rmul"}


class Calls(TorchFunctionMode):
    """Shows each call as ``show(func, args, kwargs, call)``; ``call()`` does it and gives its result."""

    def __init__(self, show: Callable[[Any, Any, dict[str, Any], Callable[[], Any]], Any]) -> None:
        self._show = show
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._show(func, args, kwargs, lambda: func(*args, **kwargs))


def plain_name(func: Any) -> str:
    """``masked_fill`` of ``Tensor.masked_fill_``, ``radd`` of ``Tensor.__radd__``."""
    return str(func.__name__).strip("_")


def casts(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call is a cast of a floating tensor, such as ``x.float()``."""
    return plain_name(func) in _CASTS and isinstance(args[0], Tensor) and args[0].is_floating_point()


def changes_dtype_in_place(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call is ``tensor.data = other`` with another dtype, which is also how ``Module.to`` works."""
    return func == torch.Tensor.data.__set__ and args[0].dtype != args[1].dtype  # type: ignore[attr-defined]


def beyond_fp16(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """The number in a call that fp16 cannot hold, where it ends up among floating values; None if there is none.

    A product counts if it is that of a mask, of zeros and ones: elsewhere a large factor may be right. The end of a range,
    ``torch.finfo(x.dtype).min``, moves with the dtype; and a tensor whose dtype is written beside it is as its author wants.
    """
    name = plain_name(func)
    if name not in _PUT | _MULTIPLY or kwargs.get("dtype") not in (None, torch.float16):
        return None
    given = list(tensors((args, kwargs)))
    dtypes = {tensor.dtype for tensor in given if tensor.is_floating_point()}
    ends = {torch.finfo(dtype).max for dtype in dtypes or (torch.float32, torch.bfloat16)}
    kinds = (int, float) if dtypes else float
    for value in (*args, *kwargs.values()):
        number = float(value) if isinstance(value, np.floating) else value
        if isinstance(number, kinds) and _LARGEST < abs(number) < math.inf and abs(number) not in ends:
            return float(number) if name in _PUT or all(map(_is_mask, given)) else None
    return None


@torch.no_grad()
def _is_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())
