"""Hooks on the gradients of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle


def on_gradient(tensor: Tensor, call: Callable[[Tensor], None]) -> RemovableHandle:
    """Calls ``call`` with the gradient of ``tensor`` as it is now, whatever is done in place to it later.

    Args:
        tensor: Requires a gradient.
        call: Gets a tensor with as many elements as ``tensor``.
    """
    base = tensor._base
    if base is None or base.grad_fn is None or base.numel() != tensor.numel():
        return tensor.register_hook(call)
    # A view (of three dimensions, such as a Linear returns) that is changed in place gets a new place in the graph and
    # loses its hooks; what made its base stays where it was.
    number = base.output_nr

    def before(gradients: tuple[Any, ...]) -> None:
        if gradients[number] is not None:
            call(gradients[number])

    handle: RemovableHandle = base.grad_fn.register_prehook(before)
    return handle
