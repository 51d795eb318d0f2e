"""Compares what a command printed with what a page shows as its output.

* Lines that the page shows are found in what was printed, in this order; other lines may stand between them.
* In a line, ``...`` stands for any words.
* Integers have to be equal. Other numbers may differ by a tenth, or by 0.02: a CPU with other instructions rounds differently,
  and after some hundred steps a loss differs in its second digit.
* Ignored are times, rates, the share of waiting, folders above the last part of a path, and the hash in the name of a run.
"""

from __future__ import annotations

import difflib
import re

RELATIVE, ABSOLUTE = 0.1, 0.02
_VOLATILE = (
    (re.compile(r"[\d,.]+ samples/s|\b(?:wait \d+%|eta [\d:]+)"), ""),
    (re.compile(r"\b\d+(?::\d\d)+\b|\b[\d.]+ (?:ms|us|s|min|h)\b"), "TIME"),
    (re.compile(r"(?<![\w/])/(?:[^\s/:,]+/)*(?=[^\s/])"), ""),
    (re.compile(r"(?<=\w)-[0-9a-f]{8}\b"), ""),
    (re.compile(r"(?<=\d)(?= bytes\b)"), ".0"),  # sizes of files are no counts: they contain paths and versions
)
_TOKEN = re.compile(r"\.\.\.|[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|[A-Za-z_]+|\S")


def missing_lines(shown: str, printed: str) -> list[str]:
    """What a page shows and a command has not printed.

    Args:
        shown: The output block of the page.
        printed: What the command printed.

    Returns:
        The lines of ``shown`` that have not been found, each with the most similar line of ``printed``; [] if all were.
    """
    missing = []
    lines = [line for line in printed.splitlines() if line.strip()]
    at = 0
    for line in shown.splitlines():
        if line.strip() in ("", "..."):
            continue
        found = next((number for number in range(at, len(lines)) if same_line(line, lines[number])), None)
        if found is None:
            near = difflib.get_close_matches(line, lines, 1, 0.3)
            missing.append(f"{line!r}; printed: {near[0]!r}" if near else repr(line))
        else:
            at = found + 1
    return missing


def same_line(shown: str, printed: str) -> bool:
    """Whether a printed line is what a page shows."""
    ours, theirs = _tokens(shown), _tokens(printed)
    if "..." not in ours:
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    before, after = ours[: ours.index("...")], ours[len(ours) - ours[::-1].index("...") :]
    ends = [*theirs[: len(before)], *theirs[len(theirs) - len(after) :]]
    return len(theirs) >= len(before) + len(after) and all(map(_same, [*before, *after], ends))


def _tokens(line: str) -> list[str]:
    for pattern, kept in _VOLATILE:
        line = pattern.sub(kept, line)
    return _TOKEN.findall(line)


def _same(shown: str, printed: str) -> bool:
    if shown == printed:
        return True
    try:
        wanted, got = (float(text.replace(",", "")) for text in (shown, printed))
    except ValueError:
        return False
    is_count = all(re.fullmatch(r"[-+]?[\d,]+", text) for text in (shown, printed))
    return not is_count and abs(wanted - got) <= max(ABSOLUTE, RELATIVE * abs(wanted))
