"""What a run computes in, as it is configured: dtypes and FLOPs of every module, and fp32 where nobody asked for it.

* The *compute dtype* of a matrix product or convolution is that of its operands, after autocast; of any other operation
  that of its result.
* *Created*: a floating tensor made from nothing, or from integers, in fp32. It does not follow the compute dtype, so that
  the model fails under ``.half()`` and what touches the tensor becomes fp32.
* *Promoted*: an operation whose result is fp32 because one operand is, while another is 16-bit.
* *Product*: a matrix product or convolution in fp32.

All three are looked for in a model's forward only: a loss belongs in fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dtrain.precision.audit.aten import Operators, floating, flops, is_work, name_of
from dtrain.precision.audit.gradients import on_gradient
from dtrain.precision.audit.scope import TASK, Frame, ModuleScope
from dtrain.precision.audit.source import called_by_torch, users_line

_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Finding:
    """fp32 where nobody asked for it.

    Attributes:
        kind: ``created``, ``promoted`` or ``product``.
        owner: The module.
        operation: Such as ``zeros``.
        where: ``file:line`` in the user's code, or "".
        shape: Of the result.
        note: What else there is to say, or "".
    """

    kind: str
    owner: str
    operation: str
    where: str
    shape: tuple[int, ...]
    note: str = ""


@dataclass
class Operations:
    """What one module did.

    Attributes:
        products: FLOPs by compute dtype.
        others: Numbers of operations that are not counted in FLOPs, by compute dtype.
        outputs: Dtypes of what the module returned.
        gradients: Dtypes of the gradients that arrived for it.
    """

    products: Counter[torch.dtype] = field(default_factory=Counter)
    others: Counter[torch.dtype] = field(default_factory=Counter)
    outputs: Counter[torch.dtype] = field(default_factory=Counter)
    gradients: Counter[torch.dtype] = field(default_factory=Counter)


class OperationRecorder:
    """Records the operations of forward passes.

    Args:
        scope: Says which module is running.
        device_type: Where the model is.
        kept: Names of all modules that compute in fp32 because the config says so.

    Attributes:
        modules: By owner, in the order of their first operations.
        findings: How often each was seen; without ``promoted`` and ``product`` where nothing is 16-bit anyway.
    """

    def __init__(self, scope: ModuleScope, device_type: str, kept: Collection[str] = ()) -> None:
        self.modules: dict[str, Operations] = {}
        self.findings: Counter[Finding] = Counter()
        self._scope = scope
        self._device_type = device_type
        self._kept = frozenset(kept)
        self._autocast = False
        self._sixteen_bit = False
        self._gradient_hooks = ExitStack()

    @contextmanager
    def recording(self, sixteen_bit: bool) -> Iterator[None]:
        """Around forward and backward passes.

        Args:
            sixteen_bit: Whether autocast lowers the precision.
        """
        self._sixteen_bit = sixteen_bit
        modes = _Functions(self._on_function), Operators(self._on_operator)
        with ExitStack() as self._gradient_hooks, self._scope.watched(self._on_output), modes[0], modes[1]:
            yield

    def _on_output(self, frame: Frame, outputs: list[Tensor], in_forward: bool) -> None:
        module = self.modules.get(frame.owner)
        if module is None:
            return
        for output in outputs:
            if in_forward:
                module.outputs[output.dtype] += 1
            # A reentrant checkpoint runs its forward without gradients: those of its modules come from the second run.
            if output.requires_grad:
                handle = on_gradient(output, lambda gradient: module.gradients.update([gradient.dtype]))
                self._gradient_hooks.callback(handle.remove)

    def _on_function(self, func: Any, args: Any, kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        # Asked here, since inside an operator that autocast has lowered it is off.
        self._autocast = torch.is_autocast_enabled(self._device_type)
        result, frame = call(), self._scope.frame
        if (
            isinstance(result, Tensor)
            and result.dtype in _WIDE
            and frame is not None
            and frame.owner != TASK
            and (self._autocast or not self._sixteen_bit)
            and not floating((args, kwargs))
            and not called_by_torch()
        ):
            explicit = kwargs.get("dtype") is not None
            # In an fp32 run nobody can tell `dtype=x.dtype` from `dtype=torch.float32`.
            if self._sixteen_bit or not explicit:
                note = f"dtype={kwargs['dtype']}".replace("torch.", "") if explicit else ""
                self._find("created", frame.owner, func.__name__, result, note)
        return result

    def _on_operator(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        frame = self._scope.frame
        inputs, outputs = floating((args, kwargs)), floating(out)
        if frame is None or not is_work(func, inputs, outputs):
            return
        module = self.modules.setdefault(frame.owner, Operations())
        number = flops(func, args, kwargs, out)
        if number is None:
            module.others[outputs[0].dtype] += 1
        else:
            module.products[inputs[0].dtype] += number
        if not self._sixteen_bit or frame.owner == TASK or outputs[0].dtype not in _WIDE or frame.owner in self._kept:
            return
        if number is not None:
            note = "" if self._autocast else "autocast is off here"
            self._find("product", frame.owner, name_of(func), outputs[0], note)
        elif self._autocast and _mixes(inputs):
            self._find("promoted", frame.owner, name_of(func), outputs[0])

    def _find(self, kind: str, owner: str, operation: str, result: Tensor, note: str = "") -> None:
        self.findings[Finding(kind, owner, operation, users_line(), tuple(result.shape), note)] += 1


def _mixes(tensors: Collection[Tensor]) -> bool:
    """Whether 16-bit and wider tensors meet. A number in a tensor of no dimension promotes nothing."""
    widths = {tensor.itemsize for tensor in tensors if tensor.dim()}
    return 2 in widths and bool(widths & {4, 8})


class _Functions(TorchFunctionMode):
    """Shows each call of torch from Python."""

    def __init__(self, show: Callable[[Any, Any, dict[str, Any], Callable[[], Any]], Any]) -> None:
        self._show = show
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._show(func, args, kwargs, lambda: func(*args, **kwargs))
