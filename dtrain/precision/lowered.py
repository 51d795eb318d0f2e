"""Modules that compute in 16 bit in a run that does not: by autocast regions, casts or weights of their own.

They keep that meaning, as in any torch program. But whoever chose fp32 should know of them, so the first window of an fp32
run is looked at, once: every torch function that makes 16-bit numbers of wider ones or of weights, and which module called it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dtrain.precision.names import plain_name, some
from dtrain.precision.nested import tensors
from dtrain.precision.scripted import hookable

_LOWER = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_NAMED = 8


class LoweredModules(TorchFunctionMode):
    """Notes the modules that compute in 16 bit while it is entered; the model runs uncompiled then.

    Args:
        model: The bare model.
        device_type: Where it computes.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        super().__init__()
        self._model = model
        self._device_type = device_type
        self._running: list[tuple[str, bool]] = []  # name, and whether a region of its caller was open already
        self._found: dict[str, str] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> LoweredModules:
        # Compiled code does not call hooks that came after it.
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
            given = [tensor for tensor in tensors((args, kwargs)) if tensor.is_floating_point()]
            # A function that only goes on with what came to it in 16 bit has lowered nothing.
            if any(tensor.dtype not in _LOWER for tensor in given) or all(type(t) is nn.Parameter for t in given):
                self._found.setdefault(self._owner(), lower)
        return result

    def warnings(self) -> list[str]:
        """A sentence if there are such modules; the first that computed comes first."""
        if not self._found:
            return []
        named = [f"{name} in {dtype}" for name, dtype in self._found.items()]
        how = "by autocast, casts or weights of their own"
        return [f"precision: this run computes in fp32, but {some(named, _NAMED)}, {how}"]

    def _owner(self) -> str:
        """The innermost running module whose caller had not lowered the precision already: it opened the region."""
        return next((name for name, already in reversed(self._running) if not already), "the task")

    def _begin(self, name: str, module: nn.Module, args: Any) -> None:
        enabled = torch.is_autocast_enabled(self._device_type)
        self._running.append((name, enabled and torch.get_autocast_dtype(self._device_type) in _LOWER))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
