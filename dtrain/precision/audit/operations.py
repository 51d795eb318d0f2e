"""What a run computes in, as it is configured: dtypes and FLOPs of every module, and fp32 where nobody asked for it.

* The *compute dtype* of a matrix product or convolution is that of its operands, after autocast; of any other operation
  that of its result.
* *Promoted*: an operation whose result is fp32 because one operand is, while another is 16-bit.
* *Product*: a matrix product or convolution in fp32.

Both are looked for in a model's forward only: a loss belongs in fp32. What its code does is looked at by ``lint``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dtrain.precision.audit.aten import Operators, floating, flops, is_work, name_of
from dtrain.precision.audit.finding import Finding
from dtrain.precision.audit.gradients import on_gradient
from dtrain.precision.audit.lint import WIDE, Lint
from dtrain.precision.audit.scope import TASK, Frame, ModuleScope
from dtrain.precision.audit.source import users_line


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
        lint: Looks at the same passes; gets the findings, ``promoted`` and ``product`` only where something is 16-bit.
        kept: Names of all modules that compute in fp32 because the config says so.

    Attributes:
        modules: By owner, in the order of their first operations.
    """

    def __init__(self, scope: ModuleScope, lint: Lint, kept: Collection[str] = ()) -> None:
        self.modules: dict[str, Operations] = {}
        self._scope = scope
        self._lint = lint
        self._kept = frozenset(kept)
        self._sixteen_bit = False
        self._gradient_hooks = ExitStack()

    @contextmanager
    def recording(self, sixteen_bit: bool) -> Iterator[None]:
        """Around forward and backward passes.

        Args:
            sixteen_bit: Whether autocast lowers the precision.
        """
        self._sixteen_bit = sixteen_bit
        with (
            ExitStack() as self._gradient_hooks,
            self._scope.watched(self._on_output),
            self._lint.configured_run(sixteen_bit),
            Operators(self._on_operator),
        ):
            yield

    def _on_output(self, frame: Frame, outputs: list[Tensor], in_forward: bool) -> None:
        if in_forward:
            self._lint.on_output(frame, outputs)
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
        if not self._sixteen_bit or frame.owner == TASK or outputs[0].dtype not in WIDE or frame.owner in self._kept:
            return
        if number is not None:
            note = "" if self._lint.autocast else "autocast is off here"
            self._find("product", frame.owner, name_of(func), outputs[0], note)
        elif self._lint.autocast and _mixes(inputs):
            self._find("promoted", frame.owner, name_of(func), outputs[0])

    def _find(self, kind: str, owner: str, operation: str, result: Tensor, note: str = "") -> None:
        self._lint.findings[Finding(kind, owner, operation, users_line(), tuple(result.shape), note)] += 1


def _mixes(tensors: Collection[Tensor]) -> bool:
    """Whether 16-bit and wider tensors meet. A number in a tensor of no dimension promotes nothing."""
    widths = {tensor.itemsize for tensor in tensors if tensor.dim()}
    return 2 in widths and bool(widths & {4, 8})
