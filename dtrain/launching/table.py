"""Rows of text as aligned lines."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines, their cells in columns; ``""`` without rows.

    Raises:
        ValueError: If rows differ in length.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )
