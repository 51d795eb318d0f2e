"""Names of modules and parameters as their author wrote them."""

from __future__ import annotations

from collections.abc import Sequence


def plain_name(name: str) -> str:
    """A qualified name without the ``_orig_mod`` that ``torch.compile`` puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are: ``a, b and 7 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
