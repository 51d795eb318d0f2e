"""Finds code in a model's forward that is correct in fp32 only, by observing its calls of torch.

* *Created*: a floating-point tensor made from nothing, or from integers, in fp32. It does not follow the compute dtype: the
  model fails under ``.half()``, and results computed with the tensor become fp32.
* *Constant*: a number that fp16 cannot hold, such as -1e9, is written into a tensor. In fp16 that is an error, or an
  infinity; as a mask of a whole row it gives NaN.
* *Fixed*: a cast or a new tensor whose 16-bit dtype is written in the code, in every precision of the run.
* *Raised*: a cast of 16-bit values to fp32 in a module that returns fp32.
* *In place*: ``tensor.data = ...`` with a different dtype, or ``module.half()``, which change the weights for good.
* *Naive*: the logarithm of a softmax or sigmoid, which is the logarithm of zero for confident predictions; a softmax written as
  ``exp`` and a division, which overflows for inputs above 11 in fp16. They are sought in the task as well.

Constants are not reported in a module that casts to fp32 itself: its author knows the ranges. *Fixed* places are taken from
the fp32 pass, in which ``x.to(other.dtype)`` does nothing; all others from the pass in the configured precision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from dtrain.precision.audit.module_stack import (
    MODEL,
    TASK,
    Frame,
    ModuleStack,
    PrecisionFinding,
    called_by_torch,
    floating,
    users_line,
)
from dtrain.precision.modules import tensors

WIDE = (torch.float32, torch.float64)

_LARGEST = torch.finfo(torch.float16).max
_CASTS = {"bfloat16", "double", "float", "half", "to", "type", "type_as"}
# Functions that write a number into a tensor or add it.
_PUT = {"add", "clamp", "clip", "fill", "full", "full_like", "iadd", "isub", "masked_fill", "nan_to_num", "new_full"}
_PUT |= {"radd", "rsub", "scalar_tensor", "setitem", "sub", "tensor", "where"}
_MULTIPLY = {"imul", "mul", "multiply", "rmul"}
# What a value was computed by, for the naive forms; functions that do not change that; and what to use instead.
_ORIGINS = {"softmax": "softmax", "sigmoid": "sigmoid", "exp": "exp"}
_PASSED_ON = _CASTS | {"add", "radd", "clamp", "clamp_min", "clip", "gather", "getitem", "squeeze", "unsqueeze"}
_SHIFTED = {"sub", "rsub", "isub", "neg", "softplus", "log_softmax", "logsigmoid"}
_STABLE = {
    ("log", "softmax"): "log_softmax or cross_entropy",
    ("log", "sigmoid"): "logsigmoid or binary_cross_entropy_with_logits",
    ("log", "1 - sigmoid"): "logsigmoid(-x) or binary_cross_entropy_with_logits",
    ("div", "exp"): "softmax, or subtract the maximum first",
    ("truediv", "exp"): "softmax, or subtract the maximum first",
    ("log", "sum of exp"): "logsumexp",
}


class Lint:
    """Collects findings from forward passes.

    Args:
        stack: The running modules.
        device_type: Type of the device of the model.
        kept: Names of the modules that compute in fp32 because of ``precision.keep_fp32``.

    Attributes:
        findings: Number of times each finding was seen.
        autocast: Whether autocast was enabled at the last call of a torch function. Inside an operation that autocast
            has lowered, torch reports it as disabled.
    """

    def __init__(self, stack: ModuleStack, device_type: str, kept: Collection[str]) -> None:
        self.findings: Counter[PrecisionFinding] = Counter()
        self.autocast = False
        self._stack = stack
        self._device_type = device_type
        self._kept = kept
        self._sixteen_bit = False
        self._wide_outputs: list[tuple[PrecisionFinding, list[Tensor]]] = []
        self._origins = WeakIdKeyDictionary()  # tensor: what computed it, a value of _ORIGINS or "shifted"

    @contextmanager
    def configured_run(self, sixteen_bit: bool) -> Iterator[None]:
        """Context manager around forward passes in the configured precision, whose compute dtype may have 16 bits."""
        self._sixteen_bit = sixteen_bit
        self._wide_outputs.clear()
        with _TorchCalls(self._on_configured):
            yield

    @contextmanager
    def fp32_run(self) -> Iterator[None]:
        """Context manager around forward passes in fp32, with no autocast but the model's own."""
        with _TorchCalls(self._on_fp32):
            yield

    def on_output(self, frame: Frame, outputs: list[Tensor]) -> None:
        """Called when a module returns floating-point tensors in the configured precision."""
        wide = [output for output in outputs if output.dtype in WIDE]
        if frame.owner != MODEL:
            self._wide_outputs += [(finding, wide) for finding in frame.raised if wide]
            return
        # Outputs of the whole model, such as logits, are cast to fp32 on purpose.
        results = {output.untyped_storage().data_ptr() for output in wide}
        for finding, outputs_of_module in self._wide_outputs:
            if not any(output.untyped_storage().data_ptr() in results for output in outputs_of_module):
                self.findings[finding] += 1
        self._wide_outputs.clear()

    def add(self, kind: str, frame: Frame, operation: str, about: Any, note: str = "") -> None:
        """Counts a finding of this kind about a tensor, at the line of the user's code that is running."""
        self.findings[_finding(kind, frame, operation, about, note)] += 1

    def _on_fp32(self, func: Any, args: Any, kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        result, frame = call(), self._stack.frame
        if (
            frame is not None
            and frame.owner != TASK
            and isinstance(result, Tensor)
            and _is_16_bit(result)
            and not any(map(_is_16_bit, floating((args, kwargs))))
            and not torch.is_autocast_enabled(self._device_type)
        ):
            self.add("fixed", frame, _function_name(func), result, str(result.dtype).removeprefix("torch."))
        return result

    def _on_configured(self, func: Any, args: Any, kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        self.autocast = torch.is_autocast_enabled(self._device_type)
        frame = self._stack.frame
        if frame is not None and not called_by_torch():
            self._seek_naive(func, args, frame)
        if frame is None or frame.owner == TASK:
            return self._with_origin(func, args, call())
        inputs = floating((args, kwargs))
        if _changes_dtype_in_place(func, args):
            old, new = (str(tensor.dtype).removeprefix("torch.") for tensor in args)
            self.add("in place", frame, ".data =", args[1], f"{old} becomes {new}")
        # Before the call, which may fail because of the constant.
        elif (number := _beyond_fp16(func, args, kwargs)) is not None and self._matters(frame, inputs):
            self.add("constant", frame, _function_name(func), next(iter((*args, *kwargs.values()))), f"{number:g}")
        result = self._with_origin(func, args, call())
        if isinstance(result, Tensor) and result.dtype in WIDE:
            if _casts(func, args):
                self._on_cast_up(func, args[0], result, frame)
            elif not inputs and (self.autocast or not self._sixteen_bit) and not called_by_torch():
                self._on_created(func, kwargs, result, frame)
        return result

    def _seek_naive(self, func: Any, args: Sequence[Any], frame: Frame) -> None:
        if args and isinstance(args[0], Tensor) and frame.owner not in self._kept:
            form = (_function_name(func), self._origins.get(args[0], ""))
            if form in _STABLE:
                self.add("naive", frame, f"{form[0]} of {form[1]}", args[0], f"use {_STABLE[form]}")

    def _with_origin(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        """Notes what computed ``result``, and returns it."""
        if not (args and isinstance(args[0], Tensor) and isinstance(result, Tensor) and result.is_floating_point()):
            return result
        name, before = _function_name(func), self._origins.get(args[0])
        if name == "rsub" and before == "sigmoid":
            self._origins[result] = "1 - sigmoid"
        elif name in _SHIFTED:
            self._origins[result] = "shifted"
        elif name == "sum" and before == "exp":
            self._origins[result] = "sum of exp"
        elif name in _PASSED_ON and before is not None:
            self._origins[result] = before
        elif name in _ORIGINS and not (name == "exp" and before == "shifted"):
            self._origins[result] = _ORIGINS[name]
        return result

    def _matters(self, frame: Frame, inputs: list[Tensor]) -> bool:
        """Whether a large constant used with these tensors would meet fp16 values in an fp16 run."""
        if called_by_torch() or frame.owner in self._kept:
            return False
        in_fp32_on_purpose = frame.casts_up or (self._sixteen_bit and not self.autocast)
        return not in_fp32_on_purpose or any(map(_is_16_bit, inputs))

    def _on_cast_up(self, func: Any, before: Tensor, result: Tensor, frame: Frame) -> None:
        if called_by_torch():
            return
        frame.casts_up = True
        if _is_16_bit(before) and self.autocast and frame.owner not in self._kept:
            frame.raised.append(_finding("raised", frame, _function_name(func), result))

    def _on_created(self, func: Any, kwargs: dict[str, Any], result: Tensor, frame: Frame) -> None:
        explicit = kwargs.get("dtype") is not None
        # In an fp32 run `dtype=x.dtype` and `dtype=torch.float32` look the same.
        if self._sixteen_bit or not explicit:
            note = f"dtype={kwargs['dtype']}".replace("torch.", "") if explicit else ""
            self.add("created", frame, _function_name(func), result, note)


def _finding(kind: str, frame: Frame, operation: str, about: Any, note: str = "") -> PrecisionFinding:
    shape = tuple(about.shape) if isinstance(about, Tensor) else ()
    return PrecisionFinding(kind, frame.owner, operation, users_line(), shape, note)


class _TorchCalls(TorchFunctionMode):
    """Replaces each call of a torch function, above autograd and autocast, by ``on_call(func, args, kwargs, call)``."""

    def __init__(self, on_call: Callable[[Any, Any, dict[str, Any], Callable[[], Any]], Any]) -> None:
        self._on_call = on_call
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._on_call(func, args, kwargs, lambda: func(*args, **kwargs))


def _function_name(func: Any) -> str:
    """``masked_fill`` for ``Tensor.masked_fill_``, ``radd`` for ``Tensor.__radd__``."""
    return str(func.__name__).strip("_")


def _casts(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call casts a floating-point tensor, such as ``x.float()``."""
    return _function_name(func) in _CASTS and isinstance(args[0], Tensor) and args[0].is_floating_point()


def _changes_dtype_in_place(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call is ``tensor.data = other`` with a different dtype, which is also how ``Module.to`` works."""
    return bool(func == torch.Tensor.data.__set__ and args[0].dtype != args[1].dtype)  # type: ignore[attr-defined]


def _beyond_fp16(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """The number in a call that fp16 cannot hold and that becomes a floating-point value; None if there is none.

    A factor counts only if it multiplies a mask (zeros and ones); elsewhere a large factor may be right. Not counted are the
    limits of a dtype, since ``torch.finfo(x.dtype).min`` follows the dtype, and tensors with an explicit dtype.
    """
    name = _function_name(func)
    if name not in _PUT | _MULTIPLY or kwargs.get("dtype") not in (None, torch.float16):
        return None
    inputs = list(tensors((args, kwargs)))
    dtypes = {tensor.dtype for tensor in inputs if tensor.is_floating_point()}
    ends = {torch.finfo(dtype).max for dtype in dtypes or (torch.float32, torch.bfloat16)}
    kinds = (int, float) if dtypes else float
    for value in (*args, *kwargs.values()):
        number = float(value) if isinstance(value, np.floating) else value
        if isinstance(number, kinds) and _LARGEST < abs(number) < math.inf and abs(number) not in ends:
            return float(number) if name in _PUT or all(map(_is_mask, inputs)) else None
    return None


@torch.no_grad()
def _is_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def _is_16_bit(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize == 2
