"""The precision policy of a run: transfer dtypes, autocast, loss scaling, fp32 modules.

Other code asks the policy and never compares names of precisions.

* The *compute dtype* is what autocast uses in matmul and convolution.
* The *transfer dtype* of a field is the dtype in which a loader worker sends it to the trainer. It follows from the field's
  *role* and the compute dtype.
* The *fp32 mode* is how fp32 matmul and convolution are computed: ``ieee``, or ``tf32`` with a 10-bit mantissa. cuDNN uses
  TF32 in convolutions by default; every precision but ``tf32`` turns it off in both matmul and convolution.
* *Kept* modules (``precision.keep_fp32``) compute in fp32 inside a lower-precision run. The class of a kept module is
  replaced by a subclass, as in FSDP2 and ``torch.nn.utils.parametrize``. Its ``forward`` disables autocast and casts
  floating-point inputs to fp32. Parameter names, hooks, ``isinstance``, deep copies and ``torch.compile`` still work.
  Its outputs are fp32; the next autocast operation casts them down again.

A parent that reads its child's weights instead of calling it (``nn.MultiheadAttention`` and its ``out_proj``) bypasses the
child's ``forward``: keep the parent.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError, near_names
from dtrain.precision.modules import refuse_scripted

#: The roles of fields. Images and video are transferred as uint8, features and audio in the compute dtype, all others in the
#: dtype they have.
ROLES = (
    *("image", "video", "audio", "feature", "label", "target", "coord", "weight", "id", "text", "bytes"),
    *("mask", "boxes"),
)

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_COMPUTE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The precision policy of a run.

    Example:
        >>> import torch
        >>> from dtrain.precision import Precision
        >>> bf16 = Precision("bf16", keep_fp32=("1",))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> bf16.wrap_keep_fp32(model)
        ['1']
        >>> with bf16.autocast("cpu"):
        ...     print(model[0](torch.ones(1, 4)).dtype, model(torch.ones(1, 4)).dtype)
        torch.bfloat16 torch.float32

    Args:
        name: ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        keep_fp32: Patterns (fnmatch) of the names of modules that compute in fp32 in every precision.
        loss_scaling: Whether fp16 has a loss scale; the other precisions need none.

    Raises:
        ConfigError: If ``name`` is not one of the four (names the nearest one), or ``keep_fp32`` is a string.
    """

    name: str
    keep_fp32: tuple[str, ...] = ()
    loss_scaling: bool = True

    def __post_init__(self) -> None:
        if self.name not in _COMPUTE:
            raise ConfigError(
                f"precision: got {self.name!r}, want one of {', '.join(_COMPUTE)}.{_hint(self.name, _COMPUTE)}"
            )
        if isinstance(self.keep_fp32, str):
            raise ConfigError(f"precision.keep_fp32: got the string {self.keep_fp32!r}, want a list of patterns")
        # A config contains a list; a tuple makes the policy hashable.
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))

    @classmethod
    def parse(cls, precision: str | Precision) -> Precision:
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
        """Whether gradients are multiplied by a loss scale: in fp16 only, since bf16 has the exponent range of fp32."""
        return self.compute_dtype == torch.float16 and self.loss_scaling

    def transfer_dtype(self, role: str) -> torch.dtype | None:
        """The dtype in which a loader worker sends a field of this role; None if the field keeps its dtype.

        Coordinates, targets, weights and ids never follow the compute dtype: bf16 rounds a box edge of 1333.3 to 1336 and
        token 50257 to 50176.

        Raises:
            ConfigError: If ``role`` is not one of ``ROLES``; names the nearest one.
        """
        if role not in ROLES:
            raise ConfigError(f"role: got {role!r}, want one of {', '.join(ROLES)}.{_hint(role, ROLES)}")
        visual, inputs = dict.fromkeys(("image", "video"), torch.uint8), ("feature", "audio")
        return (visual | dict.fromkeys(inputs, self.compute_dtype)).get(role)

    def autocast(self, device_type: str) -> torch.autocast:
        """Autocast in the compute dtype; disabled if that is fp32. Works as a context manager and as a decorator.

        Args:
            device_type: ``"cpu"``, ``"cuda"`` or any other type that ``torch.autocast`` supports.

        Raises:
            ConfigError: If ``torch.autocast`` does not support the type, or no such device is available. ``torch.autocast``
                itself would only warn and compute in fp32.
        """
        if self.compute_dtype == torch.float32:
            return torch.autocast(device_type, enabled=False)
        self._require_device(device_type)
        return torch.autocast(device_type, dtype=self.compute_dtype)

    def wrap_keep_fp32(self, module: nn.Module) -> list[str]:
        """``keep_in_fp32(module, self.keep_fp32)``; call it with the bare model, whose names have no prefixes."""
        return keep_in_fp32(module, self.keep_fp32)

    def apply(self, device: torch.device) -> list[str]:
        """Checks that ``device`` can compute in this precision and sets the fp32 mode of this process.

        Returns:
            Warnings, one line each, for example about fp16 on a CPU without fp16 kernels.

        Raises:
            ConfigError: If the device does not support this precision; names the device and the precisions that it supports.
        """
        self._require_device(device.type)
        found: list[str] = []
        if device.type == "cuda":
            found = self._check_cuda(device)
        elif device.type == "cpu":
            found = self._check_cpu()
        _set_fp32_mode(self.fp32_mode)
        if self.compute_dtype == torch.float16 and not self.loss_scaling:
            found.append(
                "precision.loss_scale=none: gradients are not scaled, so those below 3e-8 become zero in fp16 and those below "
                "6e-5 lose bits. Remove it, or set precision=bf16, unless you want to see that"
            )
        return found

    def slow_layers(self, model: nn.Module, device: torch.device) -> list[str]:
        """A warning if layers of the model train much more slowly in this precision than in fp32; [] if there are none.

        These are convolutions in fp16 on a CPU with fp16 kernels: most such CPUs have none for the gradients of their weights
        and biases. About CPUs without fp16 kernels, ``apply`` warns.
        """
        if self.compute_dtype != torch.float16 or device.type != "cpu" or self._check_cpu():
            return []
        kept: list[str] = []
        slow: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, _KeptInFp32):
                kept.append(f"{name}.")
            is_convolution = isinstance(module, _CONVOLUTIONS) and not f"{name}.".startswith(tuple(kept))
            if is_convolution and any(parameter.requires_grad for parameter in module.parameters()):
                slow.append(name or type(module).__name__)
        if not slow:
            return []
        others = {1: "", 2: " and 1 other"}.get(len(slow), f" and {len(slow) - 1} others")
        return [
            f"precision=fp16: most CPUs have no fast fp16 kernel for the gradients of convolutions ({slow[0]!r}{others}). A "
            "network that consists of them takes 15 to 115 times as long as in fp32. Set precision=bf16"
        ]

    def _require_device(self, device_type: str) -> None:
        if not torch.amp.is_autocast_available(device_type):
            raise ConfigError(f"precision={self.name}: torch.autocast does not support the device type {device_type!r}")
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
                "the environment forces the opposite. Unset that variable"
            )
        with torch.cuda.device(device):
            native_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if self.compute_dtype == torch.bfloat16 and not native_bf16:
            raise ConfigError(
                f"precision=bf16: {name} has no bf16 arithmetic, which needs compute capability 8.0 or newer. Use "
                "precision=fp16 or precision=fp32"
            )
        # bf16 and TF32 arrived with the same GPU generation (Ampere).
        if self.fp32_mode == "tf32" and not native_bf16:
            return [f"precision=tf32: {name} has no TF32 units; it computes in IEEE fp32"]
        return []

    def _check_cpu(self) -> list[str]:
        # torch has no public way to ask whether a CPU has 16-bit kernels.
        if self.fp32_mode == "tf32":
            return ["precision=tf32: TF32 is for GPUs; on this CPU the run computes in fp32"]
        if self.compute_dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
            return [
                "precision=fp16: this CPU has no fp16 kernels, so matmul and convolution are 10 to 35 times slower "
                "than in fp32. Use it on this CPU for tests only, or set precision=bf16"
            ]
        if self.compute_dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return ["precision=bf16: this CPU has no bf16 kernels, so it will be slower than precision=fp32"]
        return []


def keep_in_fp32(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Makes the submodules whose qualified names match one of ``patterns`` (fnmatch) compute in fp32.

    Calling it again with the same patterns changes nothing.

    Args:
        module: The model; its submodules are changed in place.
        patterns: Patterns (fnmatch) of qualified names; ``*`` also matches dots.

    Returns:
        Names of the matching submodules, in the module's order.

    Raises:
        ConfigError: If a pattern matches no submodule (lists similar names), or matches a ScriptModule.
    """
    named: dict[str, nn.Module] = {name: child for name, child in module.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            model = type(module).__name__
            raise ConfigError(
                f"precision.keep_fp32: {pattern!r} matches no submodule of {model}. {near_names(pattern, named)}"
            )
    kept = [name for name in named if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in kept:
        child = named[name]
        refuse_scripted(child, name, "precision.keep_fp32")
        if not isinstance(child, _KeptInFp32):
            child.__class__ = _kept_class(type(child))  # type: ignore[arg-type]
    return kept


class _KeptInFp32:
    """Marks the classes that ``_kept_class`` creates."""


@cache
def _kept_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls`` that computes in fp32; always the same, so that modules of one class keep one class."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device_type = _device_type(chain(self.parameters(), args, kwargs.values()))
        with torch.autocast(device_type, enabled=False):
            return cls.forward(self, *_cast_up(args), **_cast_up(kwargs))

    return type(cls.__name__, (_KeptInFp32, cls), {"forward": forward, "__module__": cls.__module__})


def _device_type(values: Iterable[Any]) -> str:
    return next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")


def _cast_up(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if type(value) is dict:
        return {key: _cast_up(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_cast_up, value))
    if type(value) in (list, tuple):
        return type(value)(map(_cast_up, value))
    return value


def _set_fp32_mode(mode: str) -> None:
    # torch has an old and a new set of switches and raises if one is read while they disagree; torch.compile and
    # `cudnn.flags()` still read the old set. So set both, the old one first, because setting it overwrites the new one.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings")
        torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = mode == "tf32"
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = mode  # type: ignore[attr-defined]
    # oneDNN can compute fp32 convolutions in bf16; no precision of dtrain allows that.
    torch.backends.mkldnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.backends.mkldnn.rnn.fp32_precision = "ieee"  # type: ignore[attr-defined]


def _hint(got: str, known: object) -> str:
    near = get_close_matches(str(got), list(known), 1)  # type: ignore[call-overload]
    return f" Did you mean {near[0]!r}?" if near else ""
