"""Weights in half precision: what fits, and how modules of two precisions live together.

A module that is kept in fp32 takes its inputs in fp32 and hands on fp32. Every other module that holds weights casts what
it gets to their dtype, so that nothing is rounded for its own sake: the output of a kept head stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.precision.full_precision import keep_in_fp32


def check_range(model: nn.Module, dtype: torch.dtype, kept: Iterable[str], folded: Mapping[str, str]) -> dict[str, int]:
    """Looks whether the weights fit into ``dtype``; changes nothing.

    Args:
        model: In fp32.
        dtype: What it will be cast to.
        kept: Names of the modules that stay in fp32.
        folded: Convolution to the BatchNorm that was folded into it.

    Returns:
        Tensors with values that become zero, and how many they are.

    Raises:
        ConfigError: If a parameter is not finite, a buffer holds NaN, or a finite value is infinite in ``dtype``.
    """
    vanished = {}
    for owner, _, key, tensor in _floating(model, kept):
        name = f"{owner}.{key}" if owner else key
        origin = f" (the BatchNorm {folded[owner]} is folded into it)" if owner in folded else ""
        finite = tensor.isfinite()
        # Masks of -inf are buffers.
        usable = finite.all() if isinstance(tensor, nn.Parameter) else not tensor.isnan().any()
        if not usable:
            raise ConfigError(
                f"export: {name}{origin} holds {_count(~finite)} values that are not finite, in fp32 already. Export "
                "another checkpoint (checkpoint=STEP, weights=raw)."
            )
        cast = tensor.to(dtype)
        if not cast[finite].isfinite().all():
            largest = tensor[finite].abs().max().item()
            modules = ",".join([owner, folded[owner]] if owner in folded else [owner])
            keep = f", or keep it in fp32: 'precision.keep_fp32=[{modules}]'" if owner else ""
            wider = "export.dtype=bf16 or fp32" if dtype == torch.float16 else "export.dtype=fp32"
            raise ConfigError(
                f"export: {name}{origin} does not fit into {_short(dtype)}: its largest magnitude is {largest:g}, "
                f"{_short(dtype)} ends at {torch.finfo(dtype).max:g}. Use {wider}{keep}."
            )
        if lost := _count((cast == 0) & (tensor != 0)):
            vanished[name] = lost
    return vanished


@torch.no_grad()
def cast(model: nn.Module, dtype: torch.dtype, kept: Iterable[str]) -> None:
    """Casts parameters and floating buffers in place, those of ``kept`` modules excepted. Tied parameters stay tied."""
    kept = list(kept)
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for _, module, key, tensor in _floating(model, kept):
        # The original is held, too: its id may not be given to another tensor meanwhile.
        new = nn.Parameter(tensor.to(dtype), False) if isinstance(tensor, nn.Parameter) else tensor.to(dtype)
        _, new = done.setdefault(id(tensor), (tensor, new))
        setattr(module, key, new)
    if kept and dtype != torch.float32:
        keep_in_fp32(model, kept)
        for module in {id(module): module for _, module, _, _ in _floating(model, kept)}.values():
            module.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)


def _floating(model: nn.Module, kept: Iterable[str]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(module's name, module, key in it, tensor) of all floating parameters and buffers that are not kept in fp32."""
    roots = tuple(f"{name}." for name in kept)
    for name, module in model.named_modules():
        if f"{name}.".startswith(roots):
            continue
        own = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        yield from ((name, module, key, tensor) for key, tensor in own if tensor.is_floating_point())


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast_one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast_one, args)), {key: cast_one(value) for key, value in kwargs.items()}


def _count(mask: Tensor) -> int:
    return int(mask.sum())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
