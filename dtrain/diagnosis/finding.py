"""One line of a diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LEVELS = ("ok", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """What was looked at, what it is, and what to do about it.

    Attributes:
        subject: A word or two.
        text: What was found.
        level: ``ok``; ``warning``: it works, but slowly, or not always; ``error``: it will not work.
        remedy: What to do, in a line or several; empty where there is nothing to do.
    """

    subject: str
    text: str
    level: str = "ok"
    remedy: str = ""


def as_text(findings: Iterable[Finding]) -> str:
    """A line for each finding, its remedy under it."""
    findings = list(findings)
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"  {finding.level:<7}  {finding.subject:<{width}}  {finding.text}")
        lines += [f"  {'':<7}  {'':<{width}}  -> {remedy}" for remedy in finding.remedy.splitlines()]
    return "\n".join(lines)


def size_text(nbytes: float) -> str:
    """``1.5 GiB``, ``12 MiB``, ``3 KiB``."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.0f} KiB"
