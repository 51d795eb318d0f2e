"""A report as tables for the terminal: what computes in what, and how large the values are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtrain.precision.audit.magnitudes import SIXTEEN_BIT, Magnitudes
from dtrain.precision.audit.report import ModuleReport, Report
from dtrain.precision.audit.text import dtypes, percent, short, spread

#: With more modules than this, those that differ in one number of their names only share a row.
GROUP_ABOVE = 40


@dataclass
class Row:
    """Modules that share a row: one, or all layers of a kind."""

    name: str
    modules: list[ModuleReport] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name, and how many modules it stands for."""
        return self.name if len(self.modules) == 1 else f"{self.name} x{len(self.modules)}"

    def flops(self) -> int:
        """FLOPs of all of them."""
        return sum(module.flops for module in self.modules)

    def together(self, choose: Callable[[ModuleReport], Magnitudes]) -> Magnitudes:
        """Their values together."""
        both = Magnitudes()
        for module in self.modules:
            both.merge(choose(module))
        return both


def rows(report: Report, every_module: bool = False) -> list[Row]:
    """The modules, grouped if they are many.

    Args:
        report: The report.
        every_module: Never group.
    """
    if every_module or len(report.modules) <= GROUP_ABOVE:
        return [Row(module.name, [module]) for module in report.modules]
    families = _families([module.name for module in report.modules])
    grouped: dict[tuple[object, ...], Row] = {}
    for module in report.modules:
        name = families[module.name]
        key = (name, module.kind, module.kept, *_dtypes(module))
        grouped.setdefault(key, Row(name)).modules.append(module)
    for row in grouped.values():
        if len(row.modules) == 1:
            row.name = row.modules[0].name
    return list(grouped.values())


def dtype_table(report: Report, shown: Sequence[Row]) -> Table:
    """Compute, output and gradient dtypes, and FLOPs."""
    table = _table("What computes in what", "module", "class", "computes in", "output", "gradient")
    for heading in ("FLOPs", "in 16 bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in shown:
        first = row.modules[0]
        flops, low = row.flops(), sum(module.low_flops for module in row.modules)
        table.add_row(
            Text(row.label),
            Text(f"{first.kind} (kept)" if first.kept else first.kind),
            *_dtypes(first),
            percent(flops / report.flops) if report.flops else "",
            (percent(low / flops) or "0%") if flops else "",
        )
    return table


def range_table(title: str, shown: Sequence[Row], choose: Callable[[ModuleReport], Magnitudes]) -> Table:
    """Magnitudes in fp32 and what casts would do to them; bf16 only where it would do anything.

    Args:
        title: What they are of.
        shown: The rows; those without values are left out.
        choose: The values of a module.
    """
    values = [(row.label, magnitudes) for row in shown if (magnitudes := row.together(choose)).count]
    table = _table(title, "\nmodule")
    for heading in ("\nsmallest .. largest", "\nzero"):
        table.add_column(heading, justify="right", no_wrap=True)
    cells = [
        [Text(label), Text(spread(magnitudes)), Text(percent(magnitudes.zeros / magnitudes.count))]
        for label, magnitudes in values
    ]
    for dtype in SIXTEEN_BIT:
        if dtype == torch.bfloat16 and not any(any(vars(found.casts[dtype]).values()) for _, found in values):
            continue
        for fate, (heading, style) in _FATES.items():
            table.add_column(f"{short(dtype)}\n{heading}", justify="right", no_wrap=True)
            for line, (_, magnitudes) in zip(cells, values, strict=True):
                share = magnitudes.share(getattr(magnitudes.casts[dtype], fate))
                line.append(Text(percent(share), style=style))
    for line in cells:
        table.add_row(*line)
    return table


def print_tables(report: Report, console: Console, every_module: bool = False) -> None:
    """Prints the tables, and what their headings mean."""
    shown = rows(report, every_module)
    console.print(dtype_table(report, shown))
    console.print(range_table("Activations, in fp32", shown, lambda module: module.ranges.activations))
    console.print(range_table("Gradients of the mean loss, in fp32, unscaled", shown, lambda module: module.gradients))
    console.print(Text(_LEGEND), soft_wrap=True)


def _families(names: Sequence[str]) -> dict[str, str]:
    """Each name with one of its numbers as ``*``: of ``blocks.3.mlp.0`` that of the block, since there are more of them."""
    alike: dict[str, list[list[str]]] = defaultdict(list)
    for name in names:
        alike[_NUMBER.sub("*", name)].append(_NUMBER.findall(name))
    places = {
        pattern: max(range(len(found[0])), key=lambda place: len({numbers[place] for numbers in found}), default=-1)
        for pattern, found in alike.items()
    }
    return {name: _starred(name, places[_NUMBER.sub("*", name)]) for name in names}


def _starred(name: str, place: int) -> str:
    counted = count()
    return _NUMBER.sub(lambda number: "*" if next(counted) == place else number[0], name)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a name: what a list of modules makes
_FATES = {"lost": ("lost", "yellow"), "subnormal": ("subn.", ""), "overflow": ("overfl.", "bold red")}
_LEGEND = """zero: share of the values. Of the others a cast to 16 bits makes zero (lost), keeps fewer bits (subn.) or makes
infinity (overfl.). Gradients are those of a module's outputs and of its own parameters.
"""


def _dtypes(module: ModuleReport) -> tuple[str, str, str]:
    operations = module.operations
    return dtypes(module.compute), dtypes(operations.outputs), dtypes(operations.gradients)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", vertical="top")
    return table
