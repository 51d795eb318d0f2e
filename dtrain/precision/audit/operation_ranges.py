"""Finds the operations whose results do not fit into 16 bits, with the line of the user's code that calls them.

A module's outputs do not show what happens inside its forward: in a softmax that is written as ``exp`` and ``sum``, the
result of ``exp`` overflows, though inputs and outputs of the module are small. So each operation is observed twice:

* In the *configured* pass: its dtype, and whether it returned values that are not finite although all its inputs were finite.
  That is the origin of an overflow; operations after it have inputs that are not finite.
* In the *fp32* pass: the range of its results, and how many of them a 16-bit dtype would make infinite, or zero (*lost*).

An operation is identified by its owner, its name and its line. Operations that ran in fp32 in the configured pass, such as a
loss, cannot overflow in 16 bits and are left out. Of the backward, whose operations have no line, only the first overflow of
each module is noted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dtrain.precision.audit.module_stack import TASK, ModuleStack, floating, is_work, users_line
from dtrain.precision.flops import operator_name
from dtrain.precision.modules import dtype_name

#: The dtypes to which casts are tried.
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
BACKWARD = "backward"

# Half of a dtype's smallest subnormal number: values up to it are rounded to zero.
_LOST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
# The smallest fp32 magnitudes that a cast makes infinite.
_INFINITE = {torch.float16: 65520.0, torch.bfloat16: (2 - 2.0**-8) * 2.0**127}


@dataclass
class Extent:
    """Smallest magnitude above zero and largest finite magnitude of some values."""

    smallest: float = math.inf
    largest: float = 0.0

    def include(self, other: Extent) -> None:
        """Extends this range by another range."""
        self.smallest, self.largest = min(self.smallest, other.smallest), max(self.largest, other.largest)

    def to_json(self) -> list[float] | None:
        """``[smallest, largest]``; None if all values were zero."""
        return [self.smallest, self.largest] if self.largest else None


@dataclass(frozen=True)
class OperationSite:
    """An operation in the code.

    Attributes:
        owner: Name of the module; ``(model)`` or ``(task)`` for code outside of its submodules.
        operation: Name of the operator, such as ``exp``.
        where: ``file:line`` in the user's code; ``backward`` in a backward, "" if unknown.
    """

    owner: str
    operation: str
    where: str


@dataclass
class OperationRange:
    """The values of one operation, over all calls.

    Attributes:
        dtypes: Dtypes of its results in the configured pass.
        inputs: Range of its inputs in calls whose results did not fit into 16 bits.
        outputs: Range of its results in the fp32 pass.
        count: Number of results other than zero in the fp32 pass.
        infinite: Number of results in the fp32 pass that each 16-bit dtype would make infinite.
        lost: Number of results in the fp32 pass that each 16-bit dtype would make zero.
        overflowed: Number of results in the configured pass that were not finite though all inputs were.
        in_fp32: Whether results were not finite in the fp32 pass either, though all inputs were.
    """

    dtypes: set[torch.dtype] = field(default_factory=set)
    inputs: Extent = field(default_factory=Extent)
    outputs: Extent = field(default_factory=Extent)
    count: int = 0
    infinite: dict[torch.dtype, int] = field(default_factory=lambda: dict.fromkeys(SIXTEEN_BIT, 0))
    lost: dict[torch.dtype, int] = field(default_factory=lambda: dict.fromkeys(SIXTEEN_BIT, 0))
    overflowed: int = 0
    in_fp32: bool = False

    def lost_share(self, dtype: torch.dtype) -> float:
        """Share of the results other than zero that ``dtype`` would make zero."""
        return self.lost[dtype] / self.count if self.count else 0.0


class OperationRanges:
    """Observes the operations of both passes; ``before`` and ``after`` are called around each operator.

    Args:
        stack: The running modules.

    Attributes:
        places: Range of each operation, in the order of the first calls.
    """

    def __init__(self, stack: ModuleStack) -> None:
        self.places: dict[OperationSite, OperationRange] = {}
        self._stack = stack
        self._backward_of = ""

    def backward_reached(self, owner: str) -> None:
        """Called with the gradient of a module's output: the next operations of the backward belong to this module."""
        self._backward_of = owner

    def configured(self, func: Any, args: Any, inputs: list[Tensor], out: Any) -> None:
        """Called after each operator of the configured pass.

        Args:
            func: The operator.
            args: Its positional arguments.
            inputs: Its floating-point inputs, as they were before the call.
            out: Its result.
        """
        frame, outputs = self._stack.frame, floating(out)
        if frame is not None:
            self._backward_of = TASK  # the backward begins with the loss
        is_cast = operator_name(func) == "_to_copy"
        if not (is_cast or is_work(func, inputs, outputs)) or not (inputs and outputs and outputs[0].numel()):
            return
        result = outputs[0].detach()
        not_finite = _origin_of(func, args, inputs, result)
        if frame is None and not (not_finite and self._backward_of):
            return
        if is_cast and not not_finite:
            return
        owner, where = (frame.owner, users_line()) if frame is not None else (self._backward_of, BACKWARD)
        found = self._at(owner, func, where)
        found.dtypes.add(result.dtype)
        if not_finite:
            _add_inputs(found, inputs)
            found.overflowed += not_finite

    def in_fp32(self, func: Any, args: Any, inputs: list[Tensor], out: Any) -> None:
        """Called after each operator of the fp32 pass; arguments as in ``configured``."""
        frame, outputs = self._stack.frame, floating(out)
        if frame is None or not is_work(func, inputs, outputs) or not outputs[0].numel():
            return
        found = self._at(frame.owner, func, users_line())
        size = outputs[0].detach().float().abs()
        if not _all_finite(size):
            found.in_fp32 |= bool(_origin_of(func, args, inputs, size))
            size = size.where(size.isfinite(), 0)
        extent = _extent_of(size)
        found.outputs.include(extent)
        found.count += int(size.count_nonzero())
        for dtype in SIXTEEN_BIT:
            if extent.largest >= _INFINITE[dtype]:
                found.infinite[dtype] += int((size >= _INFINITE[dtype]).sum())
            if extent.smallest <= _LOST[dtype]:
                found.lost[dtype] += int(((size > 0) & (size <= _LOST[dtype])).sum())
        if any(found.infinite.values()) or any(found.lost.values()):
            _add_inputs(found, inputs)

    def _at(self, owner: str, func: Any, where: str) -> OperationRange:
        name = operator_name(func)
        return self.places.setdefault(
            OperationSite(owner, "cast" if name == "_to_copy" else name, where), OperationRange()
        )


def to_json(place: OperationSite, found: OperationRange) -> dict[str, Any]:
    """An operation as plain data."""
    return {
        "module": place.owner,
        "operation": place.operation,
        "where": place.where,
        "dtypes": sorted(map(dtype_name, found.dtypes)),
        "inputs": found.inputs.to_json(),
        "outputs": found.outputs.to_json(),
        "overflowed": found.overflowed,
        "infinite": {dtype_name(dtype): number for dtype, number in found.infinite.items()},
        "lost": {dtype_name(dtype): found.lost_share(dtype) for dtype in SIXTEEN_BIT},
    }


def _all_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _origin_of(func: Any, args: Any, inputs: list[Tensor], result: Tensor) -> int:
    """Number of values of ``result`` that are not finite; 0 if an input is not finite either, or is an infinite number.

    A mask is filled with -inf on purpose.
    """
    if _all_finite(result):
        return 0
    if any(isinstance(value, float) and not math.isfinite(value) for value in args):
        return 0
    if not all(_all_finite(tensor) for tensor in inputs):
        return 0
    return int(result.isfinite().logical_not().sum())


def _add_inputs(found: OperationRange, inputs: list[Tensor]) -> None:
    for tensor in inputs:
        if tensor.numel():
            size = tensor.detach().float().abs()
            found.inputs.include(_extent_of(size.where(size.isfinite(), 0)))


def _extent_of(size: Tensor) -> Extent:
    """The range of magnitudes, fp32, all finite."""
    smallest = float(size.where(size > 0, torch.inf).min())
    return Extent(smallest, float(size.max()))
