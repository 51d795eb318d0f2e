"""How large a model's activations and gradients are in fp32, module by module.

* *Activations* of a module are its floating outputs and the results of the matrix products and convolutions inside it:
  what a 16-bit run would hold in 16 bits.
* *Operands* are what goes into those, weights included: autocast casts them down first.
* *Gradients* are those that arrive for the module's outputs and those of its own parameters, in the pass that made them
  and before anything is added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.precision.audit.aten import Operators, floating, flops, is_work
from dtrain.precision.audit.gradients import on_gradient
from dtrain.precision.audit.magnitudes import Magnitudes
from dtrain.precision.audit.scope import Frame, ModuleScope


@dataclass
class Ranges:
    """What one module's values are like.

    Attributes:
        activations: See above.
        output_gradients: See above.
        parameter_gradients: See above.
        operands: The largest finite magnitude that goes into a matrix product or convolution.
    """

    activations: Magnitudes = field(default_factory=Magnitudes)
    output_gradients: Magnitudes = field(default_factory=Magnitudes)
    parameter_gradients: Magnitudes = field(default_factory=Magnitudes)
    operands: float = 0.0

    @property
    def gradients(self) -> Magnitudes:
        """Those of outputs and parameters together."""
        both = Magnitudes()
        both.merge(self.output_gradients)
        both.merge(self.parameter_gradients)
        return both


class RangeRecorder:
    """Measures forward and backward passes.

    Args:
        model: The bare model.
        scope: Says which of its modules is running.

    Attributes:
        modules: By owner.
    """

    def __init__(self, model: nn.Module, scope: ModuleScope) -> None:
        self.modules: dict[str, Ranges] = {}
        self._model = model
        self._scope = scope
        self._gradient_hooks = ExitStack()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around forward and backward passes in fp32, with a loss that is not scaled."""
        with ExitStack() as self._gradient_hooks, self._scope.watched(self._on_output), Operators(self._on_operator):
            owned: set[nn.Parameter] = set()
            for module, name in self._scope.names.items():
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad and parameter not in owned:
                        owned.add(parameter)
                        self._on_gradient(parameter, self._of(name).parameter_gradients)
            yield

    def _on_output(self, frame: Frame, outputs: list[Tensor], in_forward: bool) -> None:
        ranges = self.modules.get(frame.owner)
        if ranges is None:
            return
        for output in outputs:
            if in_forward and not frame.is_product(output):
                ranges.activations.add(output)
            # A reentrant checkpoint runs its forward without gradients: those of its modules come from the second run.
            if output.requires_grad:
                self._on_gradient(output, ranges.output_gradients)

    def _on_operator(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        frame = self._scope.frame
        inputs, outputs = floating((args, kwargs)), floating(out)
        if frame is None or not is_work(func, inputs, outputs):
            return
        ranges = self._of(frame.owner)
        if flops(func, args, kwargs, out) is None:
            return
        ranges.operands = max([ranges.operands, *map(_largest, inputs)])
        ranges.activations.add(outputs[0])
        frame.products.append((outputs[0], outputs[0]._version))

    def _on_gradient(self, tensor: Tensor, magnitudes: Magnitudes) -> None:
        self._gradient_hooks.callback(on_gradient(tensor, magnitudes.add).remove)

    def _of(self, owner: str) -> Ranges:
        return self.modules.setdefault(owner, Ranges())


@torch.no_grad()
def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    size = tensor.detach().float().abs()
    return float(size.where(size.isfinite(), 0).max())
