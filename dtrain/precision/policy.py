"""The precision of a run: one object that answers, so that nobody else compares precision strings.

* The *compute dtype* is what autocast uses in matmul and convolution.
* A *wire dtype* is what a loader worker hands over; it follows from a field's *role* and the compute dtype.
* The *fp32 mode* is how fp32 matmul and convolution are computed: ``ieee``, or ``tf32`` with its 10-bit mantissa.
  ``fp32`` means IEEE fp32 everywhere. cuDNN convolutions use TF32 unless told otherwise, so every preset but ``tf32``
  turns it off in both matmul and convolution; ``tf32`` turns both on.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import nn

from dtrain.config.errors import ConfigError
from dtrain.precision.full_precision import keep_in_fp32

#: What a field can be. Only ``feature`` follows the compute dtype on the wire; images travel as uint8.
ROLES = ("image", "feature", "label", "target", "coord", "weight", "id", "text", "bytes")

_COMPUTE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The precision policy of a run.

    Args:
        name: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        keep_fp32: fnmatch patterns of module names that compute in fp32 whatever the run's precision.

    Raises:
        ConfigError: If ``name`` is none of the four.
    """

    name: str
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in _COMPUTE:
            raise ConfigError(
                f"precision: got {self.name!r}, want one of {', '.join(_COMPUTE)}.{_hint(self.name, _COMPUTE)}"
            )
        if isinstance(self.keep_fp32, str):
            raise ConfigError(f"precision.keep_fp32: got the string {self.keep_fp32!r}, want a list of patterns")
        # A config hands over a list; a tuple keeps the policy hashable and picklable for the loader's workers.
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))

    @classmethod
    def of(cls, precision: str | Precision) -> Precision:
        """``precision`` itself, or the policy of that name."""
        return precision if isinstance(precision, Precision) else cls(precision)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What autocast computes in: ``torch.float32``, ``bfloat16`` or ``float16``."""
        return _COMPUTE[self.name]

    @property
    def fp32_mode(self) -> str:
        """How fp32 matmul, convolution and recurrent layers are computed: ``"ieee"`` or ``"tf32"``."""
        return "tf32" if self.name == "tf32" else "ieee"

    @property
    def scales_gradients(self) -> bool:
        """True in fp16 only: bf16 and fp32 have the same exponent range."""
        return self.compute_dtype == torch.float16

    def wire_dtype(self, role: str) -> torch.dtype | None:
        """The dtype in which a worker hands over a field of that role; None where it keeps the dtype it has.

        Coordinates, targets, weights and ids never follow the compute dtype: bf16 turns box edge 1333.3 into 1336 and
        token 50257 into 50176.

        Raises:
            ConfigError: If ``role`` is not one of ``ROLES``.
        """
        if role not in ROLES:
            raise ConfigError(f"role: got {role!r}, want one of {', '.join(ROLES)}.{_hint(role, ROLES)}")
        return {"image": torch.uint8, "feature": self.compute_dtype}.get(role)

    def autocast(self, device_type: str) -> torch.autocast:
        """Autocast in the compute dtype; disabled where that is fp32. Works as context manager and as decorator.

        Args:
            device_type: ``"cpu"``, ``"cuda"`` or another type that autocast knows.

        Raises:
            ConfigError: If there is no such device here. ``torch.autocast`` would only warn, and compute in fp32.
        """
        if self.compute_dtype == torch.float32:
            return torch.autocast(device_type, enabled=False)
        self._require_device(device_type)
        return torch.autocast(device_type, dtype=self.compute_dtype)

    def wrap_keep_fp32(self, module: nn.Module) -> list[str]:
        """Makes the submodules whose names match ``keep_fp32`` compute in fp32; parameter names stay as they are.

        Apply it to the bare model, before DDP or ``torch.compile`` prefix its names.

        Returns:
            Names of the matching submodules, in the module's order.

        Raises:
            ConfigError: If a pattern matches no submodule; names near ones.
        """
        return keep_in_fp32(module, self.keep_fp32)

    def apply(self, device: torch.device) -> list[str]:
        """Sets the fp32 mode of this process, checks that ``device`` can compute in this precision.

        Returns:
            Warnings for the banner, such as fp16 on a CPU without fp16 kernels.

        Raises:
            ConfigError: If the device has no such arithmetic; names the device and what it can do.
        """
        self._require_device(device.type)
        said = self._check_cuda(device) if device.type == "cuda" else []
        if device.type == "cpu":
            said = self._check_cpu()
        _set_fp32_mode(self.fp32_mode)
        return said

    def _require_device(self, device_type: str) -> None:
        if not torch.amp.is_autocast_available(device_type):
            raise ConfigError(f"precision={self.name}: autocast does not know the device type {device_type!r}")
        if device_type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"precision={self.name}: the device is cuda, but CUDA is not available here. Use the cpu, or install a "
                "CUDA build of torch and a driver"
            )

    def _check_cuda(self, device: torch.device) -> list[str]:
        name = torch.cuda.get_device_name(device)
        override = os.environ.get("NVIDIA_TF32_OVERRIDE")
        if override in ("0", "1") and override != str(int(self.fp32_mode == "tf32")):
            raise ConfigError(
                f"precision={self.name} wants {self.fp32_mode} fp32 arithmetic, but NVIDIA_TF32_OVERRIDE={override} in "
                "the environment forces the other: unset it"
            )
        with torch.cuda.device(device):
            native_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if self.compute_dtype == torch.bfloat16 and not native_bf16:
            raise ConfigError(
                f"precision=bf16: {name} has no bf16 arithmetic (compute capability 8.0 or newer has). It can do "
                "precision=fp16 and precision=fp32"
            )
        # bf16 and TF32 came with the same generation.
        if self.fp32_mode == "tf32" and not native_bf16:
            return [f"precision=tf32: {name} has no TF32 units; it computes in IEEE fp32"]
        return []

    def _check_cpu(self) -> list[str]:
        if self.fp32_mode == "tf32":
            return ["precision=tf32: TF32 is for GPUs; on this CPU the run computes in fp32"]
        if self.compute_dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
            return [
                "precision=fp16: this CPU has no fp16 kernels, so matmul and convolution are 10 to 35 times slower "
                "than in fp32; on a CPU use it for tests only, or take precision=bf16"
            ]
        if self.compute_dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return ["precision=bf16: this CPU has no bf16 kernels, so it will be slower than precision=fp32"]
        return []


def _set_fp32_mode(mode: str) -> None:
    # torch keeps two sets of knobs and raises where one is read while the other says something else; torch.compile and
    # `cudnn.flags()` still read the old one. So both are set: the old first, since it overwrites the new.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings")
        torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = mode == "tf32"
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = mode  # type: ignore[attr-defined]
    # oneDNN can compute fp32 in bf16 when told to. No preset means that.
    torch.backends.mkldnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.mkldnn.rnn.fp32_precision = "ieee"  # type: ignore[attr-defined]


def _hint(got: str, known: object) -> str:
    near = get_close_matches(str(got), list(known), 1)  # type: ignore[call-overload]
    return f" Did you mean {near[0]!r}?" if near else ""
