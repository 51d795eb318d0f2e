"""Records what each module does in its forward and backward: dtypes, FLOPs, and the range of its values.

* ``OperationRecorder`` observes a pass in the configured precision. The *compute dtype* of a matrix product or convolution is
  the dtype of its operands, after autocast; of any other operation, the dtype of its result. It reports *promoted* operations
  (the result is fp32 because one operand is, while another has 16 bits) and *products* (matrix products and convolutions in
  fp32), in the model's forward only: a loss belongs in fp32.
* ``RangeRecorder`` observes a pass in fp32. *Activations* of a module are its floating-point outputs and the results of the
  matrix products and convolutions inside it: what a 16-bit run would hold in 16 bits. *Operands* are the inputs of those,
  weights included, which autocast casts down first. *Gradients* are taken with respect to the module's outputs and its own
  parameters, before anything is accumulated.
* ``Magnitudes`` sums up values. A value is *lost* if a cast to 16 bits makes it zero, *subnormal* if it keeps fewer bits than
  the other values of the dtype, and it *overflows* if it becomes infinite. All three are counted by casting fp32 values.
  Shares are shares of the finite values other than zero: zeros (of a ReLU, of a masked row) are not at risk. A histogram
  over powers of two shows what a loss scale would change, without one more pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.precision.audit.lint import WIDE, Lint
from dtrain.precision.audit.module_stack import (
    TASK,
    Frame,
    ModuleStack,
    Operators,
    floating,
    is_work,
    on_gradient,
)
from dtrain.precision.audit.operation_ranges import SIXTEEN_BIT, OperationRanges
from dtrain.precision.flops import flops, operator_name
from dtrain.precision.modules import dtype_name

_FP16_MAX = torch.finfo(torch.float16).max
# Exponent of half of fp16's smallest subnormal 2**-24: values up to it, ties included, are rounded to zero.
_FP16_LOST = -25
_FP16_NORMAL = -14
# fp32 magnitudes are in (2**-150, 2**128]; bin i of the histogram counts those in (2**(i - 151), 2**(i - 150)].
_BINS, _OFFSET = 279, 150
_PIECE = 2**24  # values processed at once


@dataclass
class Magnitudes:
    """Magnitudes of the values of all added tensors.

    Attributes:
        count: Number of values.
        zeros: Number of zeros.
        infinite: Number of infinities.
        nan: Number of NaNs.
        largest: Largest finite magnitude; 0 if there is none.
        smallest: Smallest finite magnitude above zero; inf if there is none.
        casts: How many values a cast to each of ``SIXTEEN_BIT`` makes ``lost``, ``subnormal`` and ``overflow``.
        histogram: Number of finite values other than zero, by power of two; int64, shape ``[279]``, on the CPU.
    """

    count: int = 0
    zeros: int = 0
    infinite: int = 0
    nan: int = 0
    largest: float = 0.0
    smallest: float = math.inf
    casts: dict[torch.dtype, Counter[str]] = field(
        default_factory=lambda: {dtype: Counter(lost=0, subnormal=0, overflow=0) for dtype in SIXTEEN_BIT}
    )
    histogram: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))

    @property
    def nonzero(self) -> int:
        """Number of finite values other than zero."""
        return self.count - self.zeros - self.infinite - self.nan

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """Adds the values of a floating-point tensor of any shape; waits for its device."""
        # In pieces: the audited run may leave little memory for copies.
        for piece in tensor.detach().flatten().split(_PIECE):
            self._add(piece.float().abs())

    def _add(self, size: Tensor) -> None:
        values = size[size.isfinite() & (size > 0)]
        self.count += size.numel()
        self.zeros += int((size == 0).sum())
        self.infinite += int(size.isinf().sum())
        self.nan += int(size.isnan().sum())
        if not values.numel():
            return
        self.largest = max(self.largest, float(values.max()))
        self.smallest = min(self.smallest, float(values.min()))
        for dtype, cast in self.casts.items():
            after = values.to(dtype)
            cast["lost"] += int((after == 0).sum())
            cast["subnormal"] += int(((after > 0) & (after < torch.finfo(dtype).tiny)).sum())
            cast["overflow"] += int(after.isinf().sum())
        mantissa, exponent = torch.frexp(values)
        # frexp counts a power of two with the values above it; rounding treats it like those below it.
        bins = exponent.long() - (mantissa == 0.5).long() + _OFFSET
        self.histogram += torch.bincount(bins, minlength=_BINS).cpu()

    @classmethod
    def total(cls, parts: Iterable[Magnitudes]) -> Magnitudes:
        """The magnitudes of the values of all parts."""
        total = cls()
        for part in parts:
            total.count += part.count
            total.zeros += part.zeros
            total.infinite += part.infinite
            total.nan += part.nan
            total.largest = max(total.largest, part.largest)
            total.smallest = min(total.smallest, part.smallest)
            for dtype, cast in total.casts.items():
                cast.update(part.casts[dtype])
            total.histogram += part.histogram
        return total

    def share(self, number: int) -> float:
        """``number`` as a share of the finite values other than zero; 0 if there are none."""
        return number / self.nonzero if self.nonzero else 0.0

    def lost_in_fp16(self, scale: float) -> int:
        """Number of values that fp16 would make zero if all were multiplied by ``scale``, a power of two, first."""
        return int(self.histogram[: _bins_up_to(_FP16_LOST, scale)].sum())

    def small_in_fp16(self, scale: float) -> int:
        """Number of values that would be at or below fp16's smallest normal number, but not zero, with ``scale``."""
        return int(self.histogram[_bins_up_to(_FP16_LOST, scale) : _bins_up_to(_FP16_NORMAL, scale)].sum())

    def scale_for_fp16(self, headroom: float) -> float | None:
        """The largest power of two that keeps all values in fp16's range; None if all values are zero.

        Args:
            headroom: Factor by which the largest value may still grow.
        """
        if not self.nonzero:
            return None
        return float(2.0 ** math.floor(math.log2(_FP16_MAX / headroom / self.largest)))

    def to_json(self) -> dict[str, Any]:
        """Counts, range and shares as plain data; ``smallest`` is null if there is no finite value other than zero."""
        return {
            "count": self.count,
            "zeros": self.zeros,
            "infinite": self.infinite,
            "nan": self.nan,
            "largest": self.largest,
            "smallest": self.smallest if self.nonzero else None,
            **{
                dtype_name(dtype): {key: self.share(number) for key, number in cast.items()}
                for dtype, cast in self.casts.items()
            },
        }


@dataclass
class Operations:
    """The operations of one module, as counts by dtype.

    Attributes:
        products: FLOPs, by compute dtype.
        others: Number of operations without counted FLOPs, by compute dtype.
        outputs: Number of outputs, by dtype.
        gradients: Number of gradients of the outputs, by dtype.
    """

    products: Counter[torch.dtype] = field(default_factory=Counter)
    others: Counter[torch.dtype] = field(default_factory=Counter)
    outputs: Counter[torch.dtype] = field(default_factory=Counter)
    gradients: Counter[torch.dtype] = field(default_factory=Counter)


class OperationRecorder:
    """Records the operations of forward passes.

    Args:
        stack: The running modules.
        lint: Observes the same passes and collects the findings; ``promoted`` and ``product`` in 16-bit runs only.
        kept: Names of the modules that compute in fp32 because of ``precision.keep_fp32``.
        operations: Observes the operations of the same passes.

    Attributes:
        modules: Operations by owner, in the order of the first operation.
    """

    def __init__(self, stack: ModuleStack, lint: Lint, kept: Collection[str], operations: OperationRanges) -> None:
        self.modules: dict[str, Operations] = {}
        self._stack = stack
        self._operation_ranges = operations
        self._lint = lint
        self._kept = kept
        self._sixteen_bit = False
        self._gradient_hooks = ExitStack()

    @contextmanager
    def recording(self, sixteen_bit: bool) -> Iterator[None]:
        """Context manager around forward and backward passes.

        Args:
            sixteen_bit: Whether the compute dtype has 16 bits.
        """
        self._sixteen_bit = sixteen_bit
        with (
            ExitStack() as self._gradient_hooks,
            self._stack.watched(self._on_output),
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
            # A reentrant checkpoint runs its first forward without gradients; they come from the recomputation.
            if output.requires_grad:
                handle = on_gradient(output, partial(self._on_gradient, frame.owner, module))
                self._gradient_hooks.callback(handle.remove)

    def _on_gradient(self, owner: str, module: Operations, gradient: Tensor) -> None:
        module.gradients[gradient.dtype] += 1
        self._operation_ranges.backward_reached(owner)

    def _on_operator(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], out: Any) -> None:
        self._operation_ranges.configured(func, args, inputs, out)
        frame, outputs = self._stack.frame, floating(out)
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
            self._lint.add("product", frame, operator_name(func), outputs[0], note)
        elif self._lint.autocast and _mixes(inputs):
            self._lint.add("promoted", frame, operator_name(func), outputs[0])


@dataclass
class Ranges:
    """The ranges of one module's values in fp32.

    Attributes:
        activations: Outputs, and results of matrix products and convolutions.
        output_gradients: Gradients of the outputs.
        parameter_gradients: Gradients of the module's own parameters.
        operands: Largest finite magnitude among the inputs of matrix products and convolutions.
    """

    activations: Magnitudes = field(default_factory=Magnitudes)
    output_gradients: Magnitudes = field(default_factory=Magnitudes)
    parameter_gradients: Magnitudes = field(default_factory=Magnitudes)
    operands: float = 0.0

    @property
    def gradients(self) -> Magnitudes:
        """Gradients of outputs and parameters together."""
        return Magnitudes.total([self.output_gradients, self.parameter_gradients])


class RangeRecorder:
    """Measures the values of forward and backward passes.

    Args:
        model: The bare model.
        stack: The running modules.
        operations: Observes the operations of the same passes.

    Attributes:
        modules: Ranges by owner.
    """

    def __init__(self, model: nn.Module, stack: ModuleStack, operations: OperationRanges) -> None:
        self.modules: dict[str, Ranges] = {}
        self._operation_ranges = operations
        self._model = model
        self._stack = stack
        self._gradient_hooks = ExitStack()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager around forward and backward passes in fp32, with a loss that is not scaled."""
        with ExitStack() as self._gradient_hooks, self._stack.watched(self._on_output), Operators(self._on_operator):
            owned: set[nn.Parameter] = set()
            for module, name in self._stack.names.items():
                for parameter in self._stack.parameters(module):
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
            # A reentrant checkpoint runs its first forward without gradients; they come from the recomputation.
            if output.requires_grad:
                self._on_gradient(output, ranges.output_gradients)

    def _on_operator(self, func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], out: Any) -> None:
        self._operation_ranges.in_fp32(func, args, inputs, out)
        frame, outputs = self._stack.frame, floating(out)
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


def _bins_up_to(power: int, scale: float) -> int:
    """Number of histogram bins whose values are at most ``2**power`` after multiplication by ``scale``."""
    return max(power - int(math.log2(scale)) + _OFFSET + 1, 0)


def _mixes(tensors: Collection[Tensor]) -> bool:
    """Whether 16-bit and wider tensors are mixed. Tensors without dimensions do not promote others."""
    widths = {tensor.itemsize for tensor in tensors if tensor.dim()}
    return 2 in widths and bool(widths & {4, 8})


@torch.no_grad()
def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    size = tensor.detach().float().abs()
    return float(size.where(size.isfinite(), 0).max())
