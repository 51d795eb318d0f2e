"""BatchNorm merged into the convolution before it: in eval mode it only scales and shifts each channel.

Which pairs may be merged is read off the traced graph, once, at export. The pairs are kept by name, so that a freshly
built model takes the same form without being traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

#: Names of a convolution and of the BatchNorm that follows it.
Pair = tuple[str, str]

# Exactly these: a subclass may do something else in its forward.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def foldable(model: nn.Module) -> tuple[list[Pair], str | None]:
    """The pairs in which the BatchNorm sees all of the convolution's output, and nobody else does.

    Args:
        model: In eval mode.

    Returns:
        The pairs in order of execution, and why there are none although the model has BatchNorm, if it cannot be traced.
    """
    if not any(type(module) in _NORMS for module in model.modules()):
        return [], None
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # noqa: BLE001 - a forward that meets a traced value instead of a tensor may raise anything
        return (
            [],
            f"torch.fx cannot trace {type(model).__name__} ({type(error).__name__}: {str(error).splitlines()[0]})",
        )
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
            and modules[pair[1]].running_mean is not None  # without it BatchNorm uses the batch's own statistics
            and all(called[name] == 1 for name in pair)
            and not any(place.startswith((f"{pair[0]}.", f"{pair[1]}.")) for place in read)
        ):
            pairs.append(pair)
    return pairs, None


def outside(kept: Iterable[str], pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs of which neither is one of the ``kept`` modules, or lies in one."""
    within = tuple(f"{name}." for name in kept)
    return [pair for pair in pairs if not any(f"{name}.".startswith(within) for name in pair)]


@torch.no_grad()
def fold(model: nn.Module, pairs: Iterable[Pair]) -> None:
    """Merges each pair in the dtype that the model has; the BatchNorm's place is taken by an ``nn.Identity``.

    Raises:
        AttributeError: If the model has no module of that name.
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
