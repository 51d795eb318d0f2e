"""FLOPs of a model and peak FLOP/s of a device, for MFU (model FLOPs utilisation).

* FLOPs are counted operation by operation in one extra forward.
* Peak FLOP/s come from a table, because no driver reports them. They are the manufacturer's figures, with matrix units where a
  precision has them, at boost clock, for *dense* matrices (NVIDIA's data sheets also print twice as much, for sparse ones). A
  device that is not in the table has no MFU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.data import Batch
from dtrain.precision import Precision
from dtrain.precision.flops import flops
from dtrain.training.setup.buffers import BufferGuard
from dtrain.training.setup.model import is_compiled
from dtrain.training.task import Task

_BACKWARD = 2  # forwards: one for the activation gradients, one for the weight gradients


def flops_per_row(task: Task, model: nn.Module, batch: Batch, precision: Precision, device: torch.device) -> float:
    """Floating-point operations of forward and backward for one row of a batch.

    ``dtrain.precision.flops`` says which operators are counted. The backward counts as two forwards (Chowdhery et al. 2022,
    PaLM, appendix B), so recomputed activations (``train.checkpoint_activations``) do not count, and frozen parameters count as
    trained ones.

    The task runs once more on every rank, with the bare model and a copy of the batch, which is on ``device``. It runs
    uncompiled, because the operations of compiled code cannot be observed. The model's buffers are restored.

    Returns:
        FLOPs of one row; 0 if no counted operation ran.

    Raises:
        Exception: Any exception of the task, or of torch where it does not support a dispatch mode.
    """
    buffers = BufferGuard(model)
    buffers.save()
    counter = _Counter()
    try:
        # Gradients stay enabled, since a task may differentiate in its forward.
        with _eager(model), counter, precision.autocast(device.type):
            task(model, batch.clone())
    finally:
        buffers.restore(torch.ones((), dtype=torch.bool, device=device))
    return (1 + _BACKWARD) * counter.total / len(batch.sample_keys)


def peak_flops(device: str, precision: str) -> float | None:
    """Peak FLOP/s of a device in a precision.

    Args:
        device: Name from ``torch.cuda.get_device_name``, such as ``NVIDIA H100 80GB HBM3``.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.

    Returns:
        None if the device is not in the table or has no such units.
    """
    # Whole words, since "A10" is not an A100; a part such as "RTX 4090" is several of them. "RTX 4090 Laptop" is another.
    words = f" {device.replace('-', ' ')} "
    for parts, peak in PEAKS:
        if all(f" {part} " in words for part in parts) and " Laptop " not in words:
            half = peak.half if precision == "fp16" or peak.has_bf16 else None
            found = {"fp32": peak.fp32, "tf32": peak.tf32, "bf16": half, "fp16": half}[precision]
            return found * 1e12 if found is not None else None
    return None


@dataclass(frozen=True)
class Peak:
    """Peak TFLOP/s of one device.

    Attributes:
        half: In fp16, and in bf16 where ``has_bf16``, accumulated in fp32.
        tf32: With TF32 matrix units; None without.
        fp32: In IEEE fp32.
        has_bf16: Whether bf16 is as fast as fp16.
    """

    half: float
    tf32: float | None
    fp32: float
    has_bf16: bool = True


#: Words that must all occur in torch's name of the device; the first matching row counts.
#: Sources: NVIDIA's data sheets of each product (nvidia.com/en-us/data-center, Ada and Blackwell architecture
#: white papers for GeForce); AMD's product pages of Instinct MI250X and MI300X, the former for one of its two dies.
PEAKS: tuple[tuple[tuple[str, ...], Peak], ...] = (
    (("B200",), Peak(2250.0, 1125.0, 75.0)),
    (("H200", "NVL"), Peak(835.5, 417.5, 60.0)),
    (("H200",), Peak(989.4, 494.7, 66.9)),
    (("GH200",), Peak(989.4, 494.7, 66.9)),
    (("H100", "NVL"), Peak(835.5, 417.5, 60.0)),
    (("H100", "PCIe"), Peak(756.4, 378.2, 51.2)),
    (("H100",), Peak(989.4, 494.7, 66.9)),
    (("H800", "PCIe"), Peak(756.4, 378.2, 51.2)),
    (("H800",), Peak(989.4, 494.7, 66.9)),
    (("A100",), Peak(312.0, 156.0, 19.5)),
    (("A800",), Peak(312.0, 156.0, 19.5)),
    (("A30",), Peak(165.0, 82.0, 10.3)),
    (("A40",), Peak(149.7, 74.8, 37.4)),
    (("A6000",), Peak(154.8, 77.4, 38.7)),
    (("A10G",), Peak(70.0, 35.0, 35.0)),
    (("A10",), Peak(125.0, 62.5, 31.2)),
    (("L40S",), Peak(362.05, 183.0, 91.6)),
    (("L40",), Peak(181.05, 90.5, 90.5)),
    (("L4",), Peak(121.0, 60.0, 30.3)),
    (("RTX 6000 Ada",), Peak(364.2, 182.1, 91.1)),
    (("RTX 5090",), Peak(209.5, 104.8, 104.8)),
    (("RTX 4090",), Peak(165.2, 82.6, 82.6)),
    (("RTX 3090",), Peak(71.0, 35.6, 35.6)),
    (("V100", "PCIE"), Peak(112.0, None, 14.0, has_bf16=False)),
    (("V100S",), Peak(130.0, None, 16.4, has_bf16=False)),
    (("V100",), Peak(125.0, None, 15.7, has_bf16=False)),
    (("Tesla T4",), Peak(65.0, None, 8.1, has_bf16=False)),
    (("MI300X",), Peak(1307.4, 653.7, 163.4)),
    (("MI250X",), Peak(191.5, None, 23.95)),
)


def _eager(model: nn.Module) -> AbstractContextManager[Any]:
    # Only where something is compiled: the import of the compiler takes seconds.
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()


class _Counter(TorchDispatchMode):
    """Adds up the FLOPs of all operators (``total``).

    torch's ``FlopCounterMode`` cannot be used: its count per module raises where a forward calls ``torch.autograd.grad``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.total += flops(func, args, kwargs, out) or 0
        return out
