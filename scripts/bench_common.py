"""What the benchmarks share: their command line, tables of medians, what was measured where, CPU time and memory."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import dtrain


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the script, with the options that all of them have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="everything once and small: shows that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the same numbers")
    return parser


def interleaved(rounds: int, contenders: Iterable[str], measure: Callable[[str], float]) -> dict[str, list[float]]:
    """Measures each contender once in every round, each round beginning with another one."""
    names = list(contenders)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(measure(name))
    return found


def spread(values: Sequence[float], decimals: int = 0) -> str:
    """``median (min-max)``."""
    middle, low, high = (f"{value:,.{decimals}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """How many times ``base``: the median of the ratios of each round, which what slows a whole round leaves alone."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines under the title and the names of the columns; the first column is text, the others end at the right."""
    lines = [[title, *columns], *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def finish(
    arguments: argparse.Namespace, results: dict[str, Any], packages: Sequence[str] = ("torch", "numpy")
) -> None:
    """Prints command, versions, machine and date; writes them with ``results`` where ``--json`` says."""
    about = {
        "command": f"python scripts/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
        "versions": ", ".join([*map(version, packages), f"Python {platform.python_version()}"]),
        "machine": f"{machine()}; load {os.getloadavg()[0]:.1f} at the end",
        "date": date.today().isoformat(),
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(about | results, indent=1))


def version(package: str) -> str:
    """Name and version of a package, or that there is none."""
    if package == "dtrain":  # a checkout need not be installed
        return f"dtrain {dtrain.__version__}"
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} not installed"


def machine() -> str:
    """What the CPU calls itself, and how many of its cores this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores"


def cpu_seconds() -> float:
    """CPU time of this process and of all that it started, those that ended included (Linux: from /proc)."""
    total, left = 0, [os.getpid()]
    while left:
        process = Path(f"/proc/{left.pop()}")
        # What ended meanwhile is in its parent's time. After the name in parentheses, which may hold anything: utime, stime,
        # and those of children waited for.
        total += sum(map(int, _text(process / "stat").rpartition(")")[2].split()[11:15]))
        for thread in process.glob("task/*"):
            left += map(int, _text(thread / "children").split())
    return total / os.sysconf("SC_CLK_TCK")


def resident_bytes() -> int:
    """Memory that this process has in RAM (Linux: from /proc)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def declare_torchvision_operators() -> None:
    """Makes a torchvision that nothing is used of importable beside a CPU build of torch: its usual wheels lack two operators.

    litdata, mosaicml-streaming and Lightning's metrics import it.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


_kept: list[torch.library.Library] = []  # a library that is dropped takes its operators with it
