"""The precision of a run: one object that answers, so that nobody else compares precision strings.

* The *compute dtype* is what autocast uses in matmul and convolution.
* A *wire dtype* is what a loader worker hands over; it follows from a field's *role* and the compute dtype.
* ``fp32`` means IEEE fp32 everywhere. cuDNN convolutions use TF32 unless told otherwise, so the preset turns it off in
  both matmul and convolution; ``tf32`` turns both on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

#: What a field can be. Only ``feature`` follows the compute dtype on the wire; images travel as uint8.
ROLES = ("image", "feature", "label", "target", "coord", "weight", "id", "text", "bytes")


@dataclass(frozen=True)
class Precision:
    """The precision policy of a run.

    Args:
        name: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        keep_fp32: fnmatch patterns of module names that compute in fp32 whatever the run's precision.

    Raises:
        ValueError: If ``name`` is none of the four.
    """

    name: str
    keep_fp32: tuple[str, ...] = ()

    @classmethod
    def of(cls, precision: str | Precision) -> Precision:
        """``precision`` itself, or the policy of that name."""
        raise NotImplementedError

    @property
    def compute_dtype(self) -> torch.dtype:
        """What autocast computes in: ``torch.float32``, ``bfloat16`` or ``float16``."""
        raise NotImplementedError

    @property
    def scales_gradients(self) -> bool:
        """True in fp16 only: bf16 and fp32 have the same exponent range."""
        raise NotImplementedError

    def wire_dtype(self, role: str) -> torch.dtype | None:
        """The dtype in which a worker hands over a field of that role; None where it keeps the dtype it has.

        Raises:
            ValueError: If ``role`` is not one of ``ROLES``.
        """
        raise NotImplementedError

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Autocast in the compute dtype; disabled where that is fp32. Works as context manager and as decorator."""
        raise NotImplementedError

    def apply(self, device: torch.device) -> list[str]:
        """Sets TF32 for matmul and convolution, checks that ``device`` can compute in this precision.

        Returns:
            Warnings for the banner, such as fp16 on a CPU without fp16 kernels.

        Raises:
            ValueError: If the device has no such arithmetic; names the device and what it can do.
        """
        raise NotImplementedError
