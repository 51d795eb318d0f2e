"""One line of a diagnosis, as ``dtrain.doctor`` and ``dtrain.report`` show it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtrain.config.errors import printable

#: From harmless to severe.
LEVELS = ("ok", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: What was checked, in a word or two.
        text: The result.
        level: ``ok``; ``warning``: it works, but slowly or not always; ``error``: it does not work.
        remedy: What to do, in one or more lines; empty if nothing needs to be done.
    """

    subject: str
    text: str
    level: str = "ok"
    remedy: str = ""


def as_text(findings: Iterable[Finding]) -> str:
    """One line for each finding, with its remedy below it."""
    findings = list(findings)
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"  {finding.level:<7}  {finding.subject:<{width}}  {finding.text}")
        lines += [f"  {'':<7}  {'':<{width}}  -> {remedy}" for remedy in finding.remedy.splitlines()]
    return printable("\n".join(lines), keep="\n")


def size_text(nbytes: float) -> str:
    """Bytes in binary units: ``1.5 GiB``, ``12 MiB``, ``3 KiB``, ``88 B``."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:.0f} MiB"
    return f"{nbytes / 2**10:.0f} KiB" if nbytes >= 2**10 else f"{nbytes:.0f} B"
