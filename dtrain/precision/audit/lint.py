"""Code in a forward that is right in fp32 only, found in its calls of torch.

* *Created*: a floating tensor made from nothing, or from integers, in fp32. It does not follow the compute dtype, so that
  the model fails under ``.half()`` and what touches the tensor becomes fp32.
* *Constant*: a number that fp16 cannot hold, such as -1e9, is put into a tensor: a mask of it is an error in fp16, or an
  infinity, and NaN where it masks a whole row.
* *Fixed*: a cast or a new tensor whose 16-bit dtype is written in the code, whatever the run computes in.
* *Raised*: a cast of 16-bit values to fp32 whose module hands on fp32.
* *In place*: ``tensor.data = ...`` of another dtype, ``module.half()``: the weights are other ones from then on.

Constants are no matter in a module that casts up itself, since it knows what it does. The fixed ones come from the run in
fp32, where ``x.to(other.dtype)`` does nothing; all others from the run as it is configured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dtrain.precision.audit.aten import floating
from dtrain.precision.audit.calls import Calls, beyond_fp16, casts, changes_dtype_in_place, plain_name
from dtrain.precision.audit.finding import Finding
from dtrain.precision.audit.scope import MODEL, TASK, Frame, ModuleScope
from dtrain.precision.audit.source import called_by_torch, users_line

WIDE = (torch.float32, torch.float64)


class Lint:
    """Looks at forward passes.

    Args:
        scope: Says which module is running.
        device_type: Where the model is.
        kept: Names of all modules that compute in fp32 because the config says so.

    Attributes:
        findings: How often each was seen.
        autocast: Whether autocast was on at the last call. Asked here, since inside an operator that it has lowered it
            is off.
    """

    def __init__(self, scope: ModuleScope, device_type: str, kept: Collection[str] = ()) -> None:
        self.findings: Counter[Finding] = Counter()
        self.autocast = False
        self._scope = scope
        self._device_type = device_type
        self._kept = frozenset(kept)
        self._sixteen_bit = False
        self._handed_on: list[tuple[Finding, list[Tensor]]] = []

    @contextmanager
    def configured_run(self, sixteen_bit: bool) -> Iterator[None]:
        """Around forward passes of the run as it is.

        Args:
            sixteen_bit: Whether autocast lowers the precision.
        """
        self._sixteen_bit = sixteen_bit
        self._handed_on.clear()
        with Calls(self._on_configured):
            yield

    @contextmanager
    def fp32_run(self) -> Iterator[None]:
        """Around forward passes in fp32, without autocast but for the model's own."""
        with Calls(self._on_fp32):
            yield

    def on_output(self, frame: Frame, outputs: list[Tensor]) -> None:
        """A module of the configured run returns these floating tensors."""
        wide = [output for output in outputs if output.dtype in WIDE]
        if frame.owner != MODEL:
            self._handed_on += [(finding, wide) for finding in frame.raised if wide]
            return
        # Logits are cast up to leave the model, which is no fault.
        results = {output.untyped_storage().data_ptr() for output in wide}
        for finding, handed_on in self._handed_on:
            if not any(output.untyped_storage().data_ptr() in results for output in handed_on):
                self.findings[finding] += 1
        self._handed_on.clear()

    def _on_fp32(self, func: Any, args: Any, kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        result, frame = call(), self._scope.frame
        if (
            frame is not None
            and frame.owner != TASK
            and isinstance(result, Tensor)
            and _is_16_bit(result)
            and not any(map(_is_16_bit, floating((args, kwargs))))
            and not torch.is_autocast_enabled(self._device_type)
        ):
            self._find("fixed", frame, func, result, str(result.dtype).removeprefix("torch."))
        return result

    def _on_configured(self, func: Any, args: Any, kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        self.autocast = torch.is_autocast_enabled(self._device_type)
        frame = self._scope.frame
        if frame is None or frame.owner == TASK:
            return call()
        inputs = floating((args, kwargs))
        if changes_dtype_in_place(func, args):
            old, new = (str(tensor.dtype).removeprefix("torch.") for tensor in args)
            self._find("in place", frame, func, args[1], f"{old} becomes {new}")
        # Before the call, which may fail for it.
        elif (number := beyond_fp16(func, args, kwargs)) is not None and self._matters(frame, inputs):
            self._find("constant", frame, func, next(iter((*args, *kwargs.values()))), f"{number:g}")
        result = call()
        if isinstance(result, Tensor) and result.dtype in WIDE:
            if casts(func, args):
                self._on_cast_up(func, args[0], result, frame)
            elif not inputs and (self.autocast or not self._sixteen_bit) and not called_by_torch():
                self._on_created(func, kwargs, result, frame)
        return result

    def _matters(self, frame: Frame, inputs: list[Tensor]) -> bool:
        """Whether a large constant beside these tensors would be one in fp16 too."""
        if called_by_torch() or frame.owner in self._kept:
            return False
        in_fp32_on_purpose = frame.casts_up or (self._sixteen_bit and not self.autocast)
        return not in_fp32_on_purpose or any(map(_is_16_bit, inputs))

    def _on_cast_up(self, func: Any, before: Tensor, result: Tensor, frame: Frame) -> None:
        if called_by_torch():
            return
        frame.casts_up = True
        if _is_16_bit(before) and self.autocast and frame.owner not in self._kept:
            frame.raised.append(self._finding("raised", frame, func, result))

    def _on_created(self, func: Any, kwargs: dict[str, Any], result: Tensor, frame: Frame) -> None:
        explicit = kwargs.get("dtype") is not None
        # In an fp32 run nobody can tell `dtype=x.dtype` from `dtype=torch.float32`.
        if self._sixteen_bit or not explicit:
            note = f"dtype={kwargs['dtype']}".replace("torch.", "") if explicit else ""
            self._find("created", frame, func, result, note)

    def _find(self, kind: str, frame: Frame, func: Any, about: Any, note: str = "") -> None:
        self.findings[self._finding(kind, frame, func, about, note)] += 1

    def _finding(self, kind: str, frame: Frame, func: Any, about: Any, note: str = "") -> Finding:
        operation = ".data =" if kind == "in place" else plain_name(func)
        shape = tuple(about.shape) if isinstance(about, Tensor) else ()
        return Finding(kind, frame.owner, operation, users_line(), shape, note)


def _is_16_bit(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize == 2
