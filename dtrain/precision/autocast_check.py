"""Reports the modules of an fp32 run that compute in 16 bits, because of their own autocast regions, casts or weights.

Such modules work as in any torch program, but a user who chose fp32 should know about them. The first accumulation window
of an fp32 run is therefore checked. A module is reported if it calls a torch function that returns 16-bit values computed
from wider ones or from weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dtrain.precision.modules import first_names, hookable, plain_name, tensors

_LOWER = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_NAMED = 8


class AutocastCheck(TorchFunctionMode):
    """Context manager that records the modules that compute in 16 bits; inside it the model runs uncompiled.

    Args:
        model: The bare model.
        device_type: Type of the device on which it computes.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        super().__init__()
        self._model = model
        self._device_type = device_type
        self._running: list[tuple[str, bool]] = []  # name; whether autocast lowered precision around its call
        self._found: dict[str, str] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> AutocastCheck:
        # Compiled code does not call hooks that were registered after its compilation.
        self._hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in hookable(self._model):
            begin = partial(self._begin, f"{plain_name(name) or 'the model'} ({type(module).__name__})")
            for handle in (
                module.register_forward_pre_hook(begin),
                module.register_forward_hook(self._end, always_call=True),
            ):
                self._hooks.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._hooks.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        lower = next((_LOWER[tensor.dtype] for tensor in tensors(result) if tensor.dtype in _LOWER), None)
        if lower is not None:
            inputs = [tensor for tensor in tensors((args, kwargs)) if tensor.is_floating_point()]
            # If all inputs were computed in 16 bits, an earlier function lowered the precision.
            if any(tensor.dtype not in _LOWER for tensor in inputs) or all(type(t) is nn.Parameter for t in inputs):
                self._found.setdefault(self._owner(), lower)
        return result

    def warnings(self) -> list[str]:
        """One warning that names the modules in the order in which they ran; [] if there are none."""
        if not self._found:
            return []
        named = [f"{name} in {dtype}" for name, dtype in self._found.items()]
        how = "by autocast, casts or weights of their own"
        return [f"precision: this run computes in fp32, but {first_names(named, _NAMED)}, {how}"]

    def _owner(self) -> str:
        """The innermost module that was called outside of autocast: it opened the region, if there is one."""
        return next((name for name, already in reversed(self._running) if not already), "the task")

    def _begin(self, name: str, module: nn.Module, args: Any) -> None:
        enabled = torch.is_autocast_enabled(self._device_type)
        self._running.append((name, enabled and torch.get_autocast_dtype(self._device_type) in _LOWER))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
