"""Tables whose numbers stand below one another, as lines for a terminal or as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dtrain.tracking.history import printable
from dtrain.tracking.report.tables import table

_NONE, _PLAIN_NONE = "\N{EN DASH}", "-"  # a terminal need not know the former


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: Its heading.
        cells: One for each row; ``""`` where there is nothing.
        is_number: Whether its cells are numbers, which are aligned to the right.
    """

    head: str
    cells: Sequence[str]
    is_number: bool = True


def as_text(columns: Sequence[Column], mark: str = " ") -> Iterator[str]:
    """The lines of a table for a terminal.

    Args:
        columns: The table.
        mark: One character, put before the first row.
    """
    filled = [[printable(cell) or _PLAIN_NONE for cell in (column.head, *column.cells)] for column in columns]
    widths = [max(map(len, cells)) for cells in filled]
    for place, cells in enumerate(zip(*filled, strict=True)):
        padded = (
            f"{cell:>{width}}" if column.is_number else f"{cell:<{width}}"
            for cell, width, column in zip(cells, widths, columns, strict=True)
        )
        yield f"{mark if place == 1 else ' '} {'  '.join(padded)}".rstrip()


def as_html(columns: Sequence[Column], keys: Sequence[str] = (), best: bool = False) -> str:
    """The table as HTML.

    Args:
        columns: The table.
        keys: HTML that goes before the first cell of each row; empty for none.
        best: Whether the first row is marked as the best one.
    """
    rows = [
        [escape(cell or _NONE) for cell in cells] for cells in zip(*(column.cells for column in columns), strict=True)
    ]
    if best:
        rows[0][0] = f'<b class="badge ok">best</b> {rows[0][0]}'
    for row, key in zip(rows, keys, strict=False):
        row[0] = key + row[0]
    kinds = ["number" if column.is_number else "text" for column in columns]
    return table([escape(column.head) for column in columns], rows, kinds, marked=0 if best else None)
