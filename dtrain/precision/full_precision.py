"""Modules that compute in fp32 inside a lower-precision run.

A kept module gets a subclass of its own class, as FSDP2 and ``torch.nn.utils.parametrize`` do it, whose ``forward``
switches autocast off and casts floating inputs up. Parameter names, hooks, ``isinstance``, deep copies and
``torch.compile`` go on as before. Its outputs are fp32; the next autocast operation casts them down again.

A parent that reads its child's weights instead of calling it (``nn.MultiheadAttention`` and its ``out_proj``) bypasses
the child's ``forward``: keep the parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.precision.scripted import refuse_scripted


def keep_in_fp32(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Makes the submodules whose qualified names match one of ``patterns`` (fnmatch) compute in fp32.

    Returns:
        Names of the matching submodules, in the module's order.

    Raises:
        ConfigError: If a pattern matches no submodule, naming near ones, or a ScriptModule.
    """
    named: dict[str, nn.Module] = {name: child for name, child in module.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            model = type(module).__name__
            raise ConfigError(
                f"precision.keep_fp32: {pattern!r} matches no submodule of {model}. {_near(pattern, named)}"
            )
    kept = [name for name in named if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in kept:
        child = named[name]
        refuse_scripted(child, name, "precision.keep_fp32")
        if not isinstance(child, _KeptInFp32):
            child.__class__ = _kept(type(child))  # type: ignore[arg-type]
    return kept


class _KeptInFp32:
    """Marks the classes that ``_kept`` makes."""


@cache
def _kept(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls`` that computes in fp32."""

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


def _near(pattern: str, names: Mapping[str, object]) -> str:
    near = get_close_matches(pattern.replace("*", ""), list(names), n=5, cutoff=0.4) or list(names)[:5]
    return f"Near names: {', '.join(near)}" if near else "It has no submodules"
