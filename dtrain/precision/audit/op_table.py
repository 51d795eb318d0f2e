"""The results of an operation probe as a table for the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.precision.audit.op_probe import OpResult
from dtrain.precision.audit.text import short

_STYLES = {"16-bit": "green", "fp32": "cyan", "widest": "", "error": "bold red"}


def print_op_table(results: Sequence[OpResult], device: torch.device, console: Console) -> None:
    """Prints a row for each operation, and under the table what failed.

    Args:
        results: Those of one operation with several dtypes follow each other.
        device: Where they were tried.
        console: Where to print.
    """
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    table = Table(title=f"autocast on {where}, torch {torch.__version__}", title_justify="left", title_style="bold")
    table.box, table.pad_edge = box.SIMPLE_HEAD, False
    table.add_column("\noperation")
    by_name: dict[str, list[OpResult]] = defaultdict(list)
    for result in results:
        by_name[result.name].append(result)
    for dtype in dict.fromkeys(short(result.dtype) for result in results):
        for heading in (f"{dtype}\nautocast", "fp32\nin", f"{dtype}\nin", "mixed\nin"):
            table.add_column(heading)
    for name, row in by_name.items():
        cells = [Text(name)]
        for result in row:
            behaviour = Text(result.behaviour, style=_STYLES[result.behaviour])
            cells += [behaviour, *map(Text, (result.wide.result, result.low.result, result.mixed))]
        table.add_row(*cells)
    console.print(table)
    console.print(
        Text("Of each: the dtype that comes out. Backward ran too: gradients have the dtypes of their inputs.")
    )
    for row in by_name.values():
        # What fails in both types fails for the same reason.
        failed = next((result for result in row if result.error), None)
        if failed is not None:
            console.print(Text(f"{failed.name} in {short(failed.dtype)} {failed.error}"), soft_wrap=True)
