"""Two passes over the same batches: one that shows what a run computes in, one that shows what its values are.

The *configured* pass is the training step as it is. The *fp32* pass runs the same forward and backward without autocast
and without a loss scale, because what has underflowed in a 16-bit run can no longer be counted there. A model's own
autocast regions stay in force in both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dtrain.precision.audit.lint import Lint
from dtrain.precision.audit.operations import OperationRecorder, Operations
from dtrain.precision.audit.ranges import RangeRecorder, Ranges
from dtrain.precision.audit.report import ModuleReport, Report
from dtrain.precision.audit.scope import MODEL, TASK, ModuleScope
from dtrain.precision.policy import Precision


class NumericsAudit:
    """Watches a model while somebody else runs it.

    Args:
        model: The bare model, its kept modules already wrapped.
        precision: The policy of the run.
        device: Where the model is.
        kept: Names of the modules that ``precision.wrap_keep_fp32`` has wrapped.
    """

    def __init__(
        self, model: nn.Module, *, precision: Precision, device: torch.device, kept: Sequence[str] = ()
    ) -> None:
        self._model = model
        self._precision = precision
        self._device = device
        self._scope = ModuleScope(model)
        inside = [name for name in self._scope.names.values() if any(f"{name}.".startswith(f"{k}.") for k in kept)]
        self._kept = frozenset(inside)
        self._lint = Lint(self._scope, device.type, self._kept)
        self._operations = OperationRecorder(self._scope, self._lint, self._kept)
        self._ranges = RangeRecorder(model, self._scope)

    def watched(self, task: Callable[..., Any]) -> Callable[..., Any]:
        """``task``, a callable that runs the model's forward and the loss; only what it does is recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._scope.forward():
                return task(*args, **kwargs)

        return call

    @contextmanager
    def configured_pass(self) -> Iterator[None]:
        """Around forward and backward of the run as it is."""
        with _eager(), self._operations.recording(self._precision.compute_dtype.itemsize == 2):
            yield

    @contextmanager
    def fp32_pass(self) -> Iterator[None]:
        """Around forward and backward in fp32, of a loss that is not scaled; inputs must be fp32.

        Parameters, buffers and gradients are afterwards as they were.
        """
        no_autocast = torch.autocast(self._device.type, enabled=False)
        with _left_alone(self._model), _eager(), no_autocast, self._ranges.recording(), self._lint.fp32_run():
            yield

    def report(self) -> Report:
        """What both passes have seen so far."""
        kinds = {name: type(module).__name__ for module, name in self._scope.names.items()} | {TASK: ""}
        operations, ranges = self._operations.modules, self._ranges.modules
        with_gradients = [name for name, found in ranges.items() if found.gradients.count]
        modules = [
            ModuleReport(
                name, kinds[name], name in self._kept, operations.get(name, Operations()), ranges.get(name, Ranges())
            )
            for name in _in_order(operations, with_gradients)
        ]
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type.upper()
        return Report(
            self._precision.name,
            self._precision.compute_dtype,
            self._precision.keep_fp32,
            device,
            modules,
            self._lint.findings,
        )


def _in_order(worked: Sequence[str] | dict[str, Any], others: Sequence[str]) -> list[str]:
    """Modules in the order of their first operations, the code around the model last.

    A module that has parameters but no operations, because its parent reads them, comes after the parent.
    """
    names = [name for name in worked if name != TASK]
    for name in others:
        if name not in names:
            parent = name.rpartition(".")[0] or MODEL
            family = [i for i, other in enumerate(names) if other == parent or other.startswith(f"{parent}.")]
            names.insert(family[-1] + 1 if family else len(names), name)
    return [*names, *(name for name in worked if name == TASK)]


def _eager() -> AbstractContextManager[Any]:
    """Compiled modules run as they were written: nothing inside a compiled one can be watched."""
    # Importing dynamo takes seconds; as long as nothing else has imported it, nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Makes 16-bit parameters and buffers fp32; at the end puts back everything that a training step changes."""
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    kept = [(tensor, tensor.data) for tensor in tensors]
    for buffer in model.buffers():
        buffer.data = buffer.data.clone()  # BatchNorm writes into it
    for tensor, data in kept:
        if data.is_floating_point() and data.itemsize == 2:
            tensor.data = data.float()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        # Assigning a tensor of another type to `data` is refused while the gradient has the old one.
        for parameter, _ in gradients:
            parameter.grad = None
        for tensor, data in kept:
            tensor.data = data
        for parameter, gradient in gradients:
            parameter.grad = gradient
