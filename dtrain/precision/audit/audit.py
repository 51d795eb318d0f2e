"""Records the passes of the numerics audit and reports dtypes, FLOPs and value ranges per module.

The caller runs two passes over the same batches. The *configured* pass is the unchanged training step; it shows dtypes and
FLOPs. The *fp32* pass runs the same forward and backward without autocast and without a loss scale; it shows value ranges,
which 16 bits would hide, because small values would already be zero. Autocast regions inside the model stay enabled in both
passes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from dtrain.precision.audit.lint import Lint
from dtrain.precision.audit.module_stack import MODEL, TASK, ModuleStack, PrecisionFinding
from dtrain.precision.audit.operation_ranges import OperationRange, OperationRanges, OperationSite, to_json
from dtrain.precision.audit.recorders import (
    Magnitudes,
    OperationRecorder,
    Operations,
    RangeRecorder,
    Ranges,
)
from dtrain.precision.modules import dtype_name
from dtrain.precision.policy import Precision


class NumericsAudit:
    """Records what a model does while the caller runs it.

    Args:
        model: The bare model, after ``precision.wrap_keep_fp32``.
        precision: The policy of the run.
        device: Device of the model.
        kept: Names of the modules that ``precision.wrap_keep_fp32`` has wrapped.

    Example:
        >>> import torch
        >>> from dtrain.precision import Precision
        >>> from dtrain.precision.audit import NumericsAudit
        >>> model, bf16 = torch.nn.Linear(4, 2), Precision("bf16")
        >>> audit = NumericsAudit(model, precision=bf16, device=torch.device("cpu"))
        >>> with audit.configured_pass(), bf16.autocast("cpu"):
        ...     audit.watched(lambda: model(torch.ones(8, 4)).sum())().backward()
        >>> audit.report().low_share
        1.0
    """

    def __init__(
        self, model: nn.Module, *, precision: Precision, device: torch.device, kept: Sequence[str] = ()
    ) -> None:
        self._model = model
        self._precision = precision
        self._device = device
        self._stack = ModuleStack(model)
        names = self._stack.names.values()
        self._kept = frozenset(name for name in names if any(f"{name}.".startswith(f"{parent}.") for parent in kept))
        self._lint = Lint(self._stack, device.type, self._kept)
        self._operation_ranges = OperationRanges(self._stack)
        self._operations = OperationRecorder(self._stack, self._lint, self._kept, self._operation_ranges)
        self._ranges = RangeRecorder(model, self._stack, self._operation_ranges)

    def watched(self, task: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``task``, a callable that runs the forward and the loss. Only operations inside its calls are recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._stack.forward():
                return task(*args, **kwargs)

        return call

    @contextmanager
    def configured_pass(self) -> Iterator[None]:
        """Context manager around the forward and backward of a training step in the configured precision."""
        with _eager(), self._operations.recording(self._precision.compute_dtype.itemsize == 2):
            yield

    @contextmanager
    def fp32_pass(self) -> Iterator[None]:
        """Context manager around the forward and backward in fp32; inputs must be fp32, and the loss must not be scaled.

        Parameters, buffers and gradients are restored at the end.
        """
        no_autocast = torch.autocast(self._device.type, enabled=False)
        with _restored(self._model), _eager(), no_autocast, self._ranges.recording(), self._lint.fp32_run():
            yield

    def report(self) -> Report:
        """The report of all passes so far."""
        kinds = {name: type(module).__name__ for module, name in self._stack.names.items()} | {TASK: ""}
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
            self._operation_ranges.places,
            tuple(self._stack.scripted),
        )


@dataclass
class ModuleReport:
    """The report of one module.

    Attributes:
        name: Qualified name; ``(model)`` for the outermost module, ``(task)`` for the code around it.
        kind: Name of its class; "" for the task.
        kept: Whether it computes in fp32 because of ``precision.keep_fp32``.
        operations: Its operations in the configured pass.
        ranges: Its value ranges in the fp32 pass.
    """

    name: str
    kind: str
    kept: bool
    operations: Operations
    ranges: Ranges

    @property
    def compute(self) -> list[torch.dtype]:
        """Dtypes of its matrix products and convolutions, or, if it has none, of its other operations; most used first."""
        counted = self.operations.products or self.operations.others
        return [dtype for dtype, _ in counted.most_common()]

    @property
    def flops(self) -> int:
        """FLOPs of the module without its submodules, over all audited forward passes."""
        return self.operations.products.total()

    @property
    def low_flops(self) -> int:
        """FLOPs in 16 bits, likewise."""
        return sum(number for dtype, number in self.operations.products.items() if dtype.itemsize <= 2)

    @property
    def gradients(self) -> Magnitudes:
        """Magnitudes of the gradients of its outputs and parameters."""
        return self.ranges.gradients

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        operations, ranges = self.operations, self.ranges
        return {
            "name": self.name,
            "class": self.kind,
            "kept_fp32": self.kept,
            "compute": [dtype_name(dtype) for dtype in self.compute],
            "output": [dtype_name(dtype) for dtype in operations.outputs],
            "gradient": [dtype_name(dtype) for dtype in operations.gradients],
            "flops": {dtype_name(dtype): number for dtype, number in operations.products.items()},
            "other_operations": {dtype_name(dtype): number for dtype, number in operations.others.items()},
            "largest_operand": ranges.operands,
            "activations": ranges.activations.to_json(),
            "output_gradients": ranges.output_gradients.to_json(),
            "parameter_gradients": ranges.parameter_gradients.to_json(),
        }


@dataclass
class Report:
    """The report of a model.

    Attributes:
        precision: Name of the precision of the run.
        compute_dtype: Compute dtype of autocast.
        keep_fp32: Patterns of the modules kept in fp32.
        device: Name of the device.
        modules: Modules in the order of their first operations, without those that have neither operations nor gradients.
        findings: Number of times each finding in the model's code was seen.
        operations: Range of each operation, in the order of the first calls.
        scripted: Names of ScriptModules, each of which is measured as one module.
    """

    precision: str
    compute_dtype: torch.dtype
    keep_fp32: tuple[str, ...]
    device: str
    modules: list[ModuleReport] = field(default_factory=list)
    findings: Counter[PrecisionFinding] = field(default_factory=Counter)
    operations: dict[OperationSite, OperationRange] = field(default_factory=dict)
    scripted: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of all modules."""
        return sum(module.flops for module in self.modules)

    @property
    def low_share(self) -> float:
        """Share of the FLOPs that are in 16 bits; 0 if no FLOPs were counted."""
        return sum(module.low_flops for module in self.modules) / self.flops if self.flops else 0.0

    @property
    def gradients(self) -> Magnitudes:
        """Magnitudes of the gradients of all modules."""
        return Magnitudes.total(module.gradients for module in self.modules)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "precision": self.precision,
            "keep_fp32": list(self.keep_fp32),
            "device": self.device,
            "torch": torch.__version__,
            "flops": self.flops,
            "low_precision_share": self.low_share,
            "modules": [module.to_json() for module in self.modules],
            "findings": [asdict(finding) | {"times": times} for finding, times in self.findings.items()],
            "operations": [to_json(place, found) for place, found in self.operations.items()],
        }


def _in_order(worked: Sequence[str] | dict[str, Any], others: Sequence[str]) -> list[str]:
    """Modules in the order of their first operations; the code around the model comes last.

    A module that has parameters but no operations, because its parent reads them, follows the parent.
    """
    names = [name for name in worked if name != TASK]
    for name in others:
        if name not in names:
            parent = name.rpartition(".")[0] or MODEL
            family = [i for i, other in enumerate(names) if other == parent or other.startswith(f"{parent}.")]
            names.insert(family[-1] + 1 if family else len(names), name)
    return [*names, *(name for name in worked if name == TASK)]


def _eager() -> AbstractContextManager[Any]:
    """Makes compiled modules run uncompiled: inside compiled code no operation can be observed."""
    # Importing dynamo takes seconds; unless something else has imported it, nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Casts 16-bit parameters and buffers to fp32; restores parameters, buffers and gradients at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    originals = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    for buffer in model.buffers():
        buffer.data = buffer.data.clone()  # BatchNorm writes into it
    for tensor, data in originals:
        if data.is_floating_point() and data.itemsize == 2:
            tensor.data = data.float()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        # torch refuses to assign a tensor of a different dtype to `data` while the gradient has the old one.
        for parameter, _ in gradients:
            parameter.grad = None
        for tensor, data in originals:
            tensor.data = data
        for parameter, gradient in gradients:
            parameter.grad = gradient
