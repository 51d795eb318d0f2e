"""FLOPs of one operator: matrix products, convolutions, attention and recurrent layers, two per multiply-add.

The formulas come from ``torch.utils.flop_counter``, and from below for operators that it lacks. All other operators have
none, because memory bandwidth limits them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count


def flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """FLOPs of one call of an operator, as a ``TorchDispatchMode`` observes it; None if its FLOPs are not counted."""
    added = _ADDED_FORMULAS.get(operator_name(func)) if func.namespace == "aten" else None
    if added is not None:
        return added(*args)
    formula = flop_registry.get(_packet(func))
    return None if formula is None else int(formula(*args, **kwargs, out_val=out))


def operator_name(func: Any) -> str:
    """``mm`` for ``aten.mm.default``."""
    return str(_packet(func).__name__)


def _packet(func: Any) -> Any:
    return getattr(func, "overloadpacket", func)  # a higher-order operator such as flex_attention has no overloads


def _recurrent(steps: Tensor, weights: list[Tensor], *_: Any) -> int:
    """Each weight matrix is used once per row of ``steps``, shape ``[time, rows, features]`` or ``[packed, features]``."""
    return 2 * prod(steps.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


# By the names of aten operators; called with the operator's positional arguments.
_ADDED_FORMULAS: dict[str, Callable[..., int]] = {
    "mv": lambda matrix, *_: 2 * matrix.numel(),
    "dot": lambda vector, *_: 2 * vector.numel(),
    "addmv": lambda _bias, matrix, *_: 2 * matrix.numel(),
    "addr": lambda _bias, column, row, *_: 2 * column.numel() * row.numel(),
    "_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value, *_: sdpa_flop_count(
        query.shape, key.shape, value.shape
    ),
    "_cudnn_rnn": _recurrent,
    "miopen_rnn": _recurrent,
    "mkldnn_rnn_layer": lambda steps, weight0, weight1, *_: _recurrent(steps, [weight0, weight1]),
}
