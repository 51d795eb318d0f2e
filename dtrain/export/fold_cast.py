"""The changes that an export makes to a trained model: BatchNorm folding and half-precision weights.

* *Folding* merges a BatchNorm, which in eval mode only scales and shifts each channel, into the convolution before it.
  ``foldable`` finds the *pairs* in the traced graph once, at export. Artefacts store the pairs by name, so that a freshly
  built model is folded without being traced.
* *Casting* changes the dtype of all weights except in modules that stay in fp32 (``precision.keep_fp32``). Such a
  module takes and returns fp32; every other module with weights casts its inputs to their dtype, so that the output of an
  fp32 head is not rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from dtrain.errors import ConfigError
from dtrain.precision.modules import dtype_name
from dtrain.precision.policy import keep_in_fp32

#: Names of a convolution and of the BatchNorm that follows it.
Pair = tuple[str, str]

# Exactly these classes: a subclass may do something else in its forward.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def foldable(model: nn.Module) -> tuple[list[Pair], str | None]:
    """Finds the pairs in which the BatchNorm is the only user of the convolution's output, in a model in eval mode.

    Returns:
        The pairs in order of execution; and the reason if the model has BatchNorm but cannot be traced, else None.
    """
    if not any(type(module) in _NORMS for module in model.modules()):
        return [], None
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # noqa: BLE001 - forward is user code and may raise anything when traced
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return [], f"torch.fx cannot trace {type(model).__name__} ({reason})"
    modules = dict(model.named_modules())
    called = Counter(node.target for node in graph.nodes if node.op == "call_module")
    read = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    pairs = []
    for norm in graph.nodes:
        conv = norm.args[0] if norm.op == "call_module" and norm.args else None
        if not isinstance(conv, fx.Node) or conv.op != "call_module" or len(conv.users) > 1:
            continue
        pair = (str(conv.target), str(norm.target))
        if (
            type(modules[pair[0]]) in _CONVOLUTIONS
            and type(modules[pair[1]]) in _NORMS
            and modules[pair[1]].running_mean is not None  # otherwise BatchNorm uses the statistics of each batch
            and all(called[name] == 1 for name in pair)
            and not any(attribute.startswith((f"{pair[0]}.", f"{pair[1]}.")) for attribute in read)
        ):
            pairs.append(pair)
    return pairs, None


def pairs_outside(modules: Iterable[str], pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs of which neither part is one of ``modules`` or inside one."""
    prefixes = tuple(f"{name}." for name in modules)
    return [pair for pair in pairs if not any(f"{name}.".startswith(prefixes) for name in pair)]


@torch.no_grad()
def fold(model: nn.Module, pairs: Iterable[Pair]) -> None:
    """Merges each pair in the model's dtype and replaces the BatchNorm by an ``nn.Identity``.

    Raises:
        AttributeError: If the model has no module of a given name.
    """
    for conv_name, norm_name in pairs:
        conv, norm = model.get_submodule(conv_name), model.get_submodule(norm_name)
        conv.weight, conv.bias = fuse_conv_bn_weights(
            conv.weight,  # type: ignore[arg-type]
            conv.bias,  # type: ignore[arg-type]
            norm.running_mean,  # type: ignore[arg-type]
            norm.running_var,  # type: ignore[arg-type]
            norm.eps,  # type: ignore[arg-type]
            norm.weight,  # type: ignore[arg-type]
            norm.bias,  # type: ignore[arg-type]
        )
        model.set_submodule(norm_name, nn.Identity())


def check_fits_dtype(
    model: nn.Module, dtype: torch.dtype, keep_fp32: Iterable[str], folded: Mapping[str, str]
) -> dict[str, int]:
    """Checks that the weights fit into ``dtype``.

    Args:
        model: In fp32.
        dtype: Dtype to which it will be cast.
        keep_fp32: Names of the modules that stay in fp32.
        folded: Name of a convolution to the name of the BatchNorm that was folded into it.

    Returns:
        Name of a tensor to the number of its values that become zero, if there are any.

    Raises:
        ConfigError: If a parameter is not finite, a buffer holds NaN, or a finite value overflows in ``dtype``.
    """
    became_zero = {}
    for owner, _, key, tensor in _floating_tensors(model, keep_fp32):
        name = f"{owner}.{key}" if owner else key
        origin = f" (the BatchNorm {folded[owner]} is folded into it)" if owner in folded else ""
        finite = tensor.isfinite()
        # A buffer may be a mask of -inf.
        usable = finite.all() if isinstance(tensor, nn.Parameter) else not tensor.isnan().any()
        if not usable:
            raise ConfigError(
                f"export: {name}{origin} holds {int((~finite).sum())} values that are not finite in fp32. Export a "
                "different checkpoint (checkpoint=STEP, weights=raw)."
            )
        rounded = tensor.to(dtype)
        if not rounded[finite].isfinite().all():
            largest = tensor[finite].abs().max().item()
            modules = ",".join([owner, folded[owner]] if owner in folded else [owner])
            keep = f", or keep it in fp32: 'precision.keep_fp32=[{modules}]'" if owner else ""
            wider = "export.dtype=bf16 or fp32" if dtype == torch.float16 else "export.dtype=fp32"
            short = dtype_name(dtype)
            raise ConfigError(
                f"export: {name}{origin} does not fit into {short}: its largest magnitude is {largest:g}, the largest "
                f"{short} number is {torch.finfo(dtype).max:g}. Use {wider}{keep}."
            )
        if count := int(((rounded == 0) & (tensor != 0)).sum()):
            became_zero[name] = count
    return became_zero


@torch.no_grad()
def cast(model: nn.Module, dtype: torch.dtype, keep_fp32: Iterable[str]) -> None:
    """Casts parameters and floating-point buffers in place, except in ``keep_fp32`` modules. Tied parameters stay tied."""
    keep_fp32 = list(keep_fp32)
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for _, module, key, tensor in _floating_tensors(model, keep_fp32):
        new = nn.Parameter(tensor.to(dtype), False) if isinstance(tensor, nn.Parameter) else tensor.to(dtype)
        # A reference to the original keeps its id from being reused for another tensor.
        _, new = done.setdefault(id(tensor), (tensor, new))
        setattr(module, key, new)
    if keep_fp32 and dtype != torch.float32:
        keep_in_fp32(model, keep_fp32)
        for module in {id(module): module for _, module, _, _ in _floating_tensors(model, keep_fp32)}.values():
            module.register_forward_pre_hook(partial(cast_inputs, dtype), with_kwargs=True)


def _floating_tensors(model: nn.Module, keep_fp32: Iterable[str]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(name of the module, module, key in it, tensor) of all floating-point tensors outside ``keep_fp32`` modules."""
    prefixes = tuple(f"{name}." for name in keep_fp32)
    for name, module in model.named_modules():
        if f"{name}.".startswith(prefixes):
            continue
        tensors = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        yield from ((name, module, key, tensor) for key, tensor in tensors if tensor.is_floating_point())


def cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook that casts floats among the arguments."""

    def cast_one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast_one, args)), {key: cast_one(value) for key, value in kwargs.items()}
