"""What autocast does with an operation on this device and this torch: tried, never listed from memory.

Each operation is called under autocast on fp32 inputs, on 16-bit inputs, and on *mixtures*: parameters in fp32, as a run
keeps them, one activation in fp32 and the others in 16 bits, and the other way round. Of each call the dtype of the result
is noted, and whether its backward gives every input a gradient of that input's dtype. The *behaviour* follows from all:

* ``16-bit``: 16 bits come out whatever goes in.
* ``fp32``: fp32 comes out whatever goes in.
* ``widest``: the result follows the widest activation, or the only one, or the widest input of all.
* ``error``: a call fails, forward or backward, or the results follow none of these rules.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtrain.precision.audit.op_cases import OpCase, op_cases
from dtrain.precision.audit.text import dtypes, short

_WIDE = torch.float32


@dataclass(frozen=True)
class Call:
    """One call of an operation under autocast.

    Attributes:
        inputs: Dtypes of its floating inputs, activations first.
        activations: How many of them are activations.
        output: Dtype of its result; None if forward failed.
        gradients: Dtypes of the inputs' gradients; empty if forward or backward failed.
        error: First line of what was raised; "" if nothing was.
    """

    inputs: tuple[torch.dtype, ...]
    activations: int
    output: torch.dtype | None = None
    gradients: tuple[torch.dtype, ...] = ()
    error: str = ""

    @property
    def result(self) -> str:
        """``bf16``, ``fp32`` or ``error``."""
        return short(self.output) if self.output is not None and self.gradients == self.inputs else "error"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "inputs": [short(dtype) for dtype in self.inputs],
            "output": None if self.output is None else short(self.output),
            "gradients": [short(dtype) for dtype in self.gradients],
            "error": self.error,
        }


@dataclass(frozen=True)
class OpResult:
    """What autocast does with one operation.

    Attributes:
        name: The operation.
        dtype: The 16-bit type that autocast was given.
        wide: The call with fp32 inputs.
        low: The call with 16-bit inputs.
        mixtures: The others; none if there is one input only.
    """

    name: str
    dtype: torch.dtype
    wide: Call
    low: Call
    mixtures: tuple[Call, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        """All of them."""
        return (self.wide, self.low, *self.mixtures)

    @property
    def behaviour(self) -> str:
        """``16-bit``, ``fp32``, ``widest`` or ``error``; see above."""
        low, outputs = short(self.dtype), [call.result for call in self.calls]
        follows = [["fp32" if _WIDE in seen else low for seen in inputs] for inputs in self._seen()]
        rules = {"16-bit": [[low] * len(outputs)], "fp32": [["fp32"] * len(outputs)], "widest": follows}
        return next((name for name, expected in rules.items() if outputs in expected), "error")

    @property
    def mixed(self) -> str:
        """Results of the mixtures: ``fp32``, or ``fp32/error`` where they differ; "" if there are none."""
        return "/".join(sorted({call.result for call in self.mixtures}))

    @property
    def error(self) -> str:
        """The first call that failed: its inputs and what was raised; "" if none did."""
        failed = next((call for call in self.calls if call.error), None)
        return "" if failed is None else f"({', '.join(map(short, failed.inputs))}): {failed.error}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "operation": self.name,
            "autocast": short(self.dtype),
            "behaviour": self.behaviour,
            "calls": [call.to_json() for call in self.calls],
        }

    def _seen(self) -> tuple[list[tuple[torch.dtype, ...]], ...]:
        """What the results may follow: the activations, or all inputs."""
        return [call.inputs[: call.activations] for call in self.calls], [call.inputs for call in self.calls]


def probe(case: OpCase, dtype: torch.dtype, device: torch.device) -> OpResult:
    """Tries one operation.

    Args:
        case: The operation.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        device: Where.
    """
    parameters = len(case.parameters)
    alike = [tuple([wanted] * (len(case.activations) + parameters)) for wanted in (_WIDE, dtype)]
    mixed = [(*activations, *[_WIDE] * parameters) for activations in _mixtures(len(case.activations), dtype)]
    mixed = [inputs for inputs in dict.fromkeys(mixed) if inputs not in alike]
    wide, low, *mixtures = (_call(case, inputs, dtype, device) for inputs in [*alike, *mixed])
    return OpResult(case.name, dtype, wide, low, tuple(mixtures))


def probe_all(device: torch.device, dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16)) -> list[OpResult]:
    """Tries all operations that dtrain knows of, in the order of ``op_cases``, each with every dtype."""
    return [probe(case, dtype, device) for case in op_cases() for dtype in dtypes]


def _mixtures(number: int, dtype: torch.dtype) -> Iterator[tuple[torch.dtype, ...]]:
    for odd, rest in ((_WIDE, dtype), (dtype, _WIDE)):
        for place in range(number):
            yield tuple(odd if i == place else rest for i in range(number))


def _call(case: OpCase, inputs: tuple[torch.dtype, ...], dtype: torch.dtype, device: torch.device) -> Call:
    generator = torch.Generator().manual_seed(0)
    # Between 0.1 and 0.9: a logarithm, a square root and a probability can take that.
    tensors = [
        (0.1 + 0.8 * torch.rand(shape, generator=generator)).to(device, wanted).requires_grad_()
        for shape, wanted in zip((*case.activations, *case.parameters), inputs, strict=True)
    ]
    output, number = None, len(case.activations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an operation is deprecated or slow is not the question
        try:
            with torch.autocast(device.type, dtype=dtype):
                output = case.call(*tensors)
            output.float().sum().backward()
        except (RuntimeError, ValueError, AttributeError) as error:  # the last: this torch has no such operation
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            return Call(inputs, number, None if output is None else output.dtype, (), message)
    gradients = tuple(tensor.grad.dtype for tensor in tensors if tensor.grad is not None)
    missing = "" if gradients == inputs else f"gradients are {dtypes(gradients) or 'missing'}"
    return Call(inputs, number, output.dtype, gradients, missing)
