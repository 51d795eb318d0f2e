"""Tensors inside what modules and functions take and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in ``value``: itself, or those in it where it is a nest of mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
        return
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        yield from tensors(item)
