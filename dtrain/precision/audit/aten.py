"""What an operation below autograd and autocast is: work or mere movement of data, and how many FLOPs it takes.

FLOPs are those of matrix products, convolutions, attention and recurrent layers, two for a multiply-add, by the formulas
of ``torch.utils.flop_counter``; the operations that it lacks are added here. Everything else counts as zero: it is bound
by memory.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from dtrain.precision.nested import tensors

#: What only moves, casts or makes values: it computes in no dtype.
_MOVES = {
    *("_reshape_copy", "_to_copy", "_unsafe_view", "clone", "copy", "copy_", "resize_", "set_", "lift", "lift_fresh"),
    *("empty_like", "full_like", "ones_like", "zeros_like", "fill", "fill_", "zero", "zero_"),
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
}


def name_of(func: Any) -> str:
    """``mm`` of ``aten.mm.default``."""
    return str(_packet(func).__name__)


def floating(values: Any) -> list[Tensor]:
    """The floating tensors in arguments or results, nested ones included, in their order."""
    return [tensor for tensor in tensors(values) if tensor.is_floating_point()]


def is_work(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether an operation computes floating values from floating values.

    Args:
        func: An ``OpOverload``, or a higher-order operator such as flex_attention's.
        inputs: Its floating arguments.
        outputs: Its floating results.
    """
    return bool(inputs and outputs) and not getattr(func, "is_view", False) and name_of(func) not in _MOVES


def flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """FLOPs of one call; None if the operation is none of those that are counted.

    Args:
        func: As for ``is_work``.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        out: What it returned.
    """
    own = _OWN.get(name_of(func)) if func.namespace == "aten" else None
    if own is not None:
        return own(*args)
    formula = flop_registry.get(_packet(func))
    return None if formula is None else int(formula(*args, **kwargs, out_val=out))


def _packet(func: Any) -> Any:
    return getattr(func, "overloadpacket", func)


class Operators(TorchDispatchMode):
    """Shows each operator below autograd and autocast, after its call, as ``show(func, args, kwargs, result)``."""

    # flex_attention is one, and compiles itself whatever the stance.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Shows nothing of the compiler's own work; asked by torch."""
        return True

    def __init__(self, show: Callable[[Any, Any, dict[str, Any], Any], None]) -> None:
        self._show = show
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._show(func, args, kwargs, out)
        return out


def _product(matrix: Tensor, *_: Any) -> int:
    return 2 * matrix.numel()


def _added_product(_bias: Tensor, matrix: Tensor, *_: Any) -> int:
    return 2 * matrix.numel()


def _outer_product(_bias: Tensor, column: Tensor, row: Tensor, *_: Any) -> int:
    return 2 * column.numel() * row.numel()


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _recurrent(steps: Tensor, weights: list[Tensor], *_: Any) -> int:
    """Each weight matrix is used once for each row of ``steps``, ``[time, rows, features]`` or ``[packed, features]``."""
    return 2 * prod(steps.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _recurrent_on_cpu(steps: Tensor, weight0: Tensor, weight1: Tensor, *_: Any) -> int:
    return _recurrent(steps, [weight0, weight1])


_OWN: dict[str, Callable[..., int]] = {
    "mv": _product,
    "dot": _product,
    "addmv": _added_product,
    "addr": _outer_product,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_cudnn_rnn": _recurrent,
    "miopen_rnn": _recurrent,
    "mkldnn_rnn_layer": _recurrent_on_cpu,
}
