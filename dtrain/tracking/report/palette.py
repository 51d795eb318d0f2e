"""Colours that charts and page share, in light and in dark.

Charts are drawn in the light ones; in the page each becomes a CSS variable, so that the reader's theme decides. The runs'
colours are told apart by people who do not see all colours (Okabe and Ito 2008), without the yellow, which white swallows.
"""

from __future__ import annotations

import re

INK, GRID, BAD = "#1b1b1c", "#b0b0b1", "#b00020"
RUNS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
DASHES = ("-", "--", ":", "-.")
_SVG_DASHES = ("", "6 3", "2 2", "6 2 2 2")

#: CSS variable to its colour in light and in dark.
THEMES = {
    "ink": (INK, "#e4e4e2"),
    "paper": ("#ffffff", "#16181b"),
    "soft": ("#606063", "#a3a3a5"),
    "line": ("#dcdcde", "#35383d"),
    "panel": ("#f5f5f6", "#1e2125"),
    "grid": (GRID, "#5a5d63"),
    "bad": (BAD, "#ff7a85"),
    "good": ("#1a7f37", "#4fc36f"),
    "warn": ("#8a5a00", "#e0a63a"),
    "run-0": (RUNS[0], "#3f9fe0"),
    "run-1": (RUNS[1], "#f4813a"),
    "run-2": (RUNS[2], "#2cc295"),
    "run-3": (RUNS[3], "#e39ac3"),
    "run-4": (RUNS[4], "#a8dcff"),
    "run-5": (RUNS[5], "#f2b632"),
    "run-6": (RUNS[6], "#f2f2f2"),
}
_VARIABLES = {light: f"var(--{name})" for name, (light, _) in THEMES.items()}
_HEX = re.compile(r"#[0-9a-f]{6}\b")


def style_sheet() -> str:
    """The variables as CSS, for whichever theme the reader has chosen."""
    light, dark = (";".join(f"--{name}:{colours[i]}" for name, colours in THEMES.items()) for i in (0, 1))
    return (
        f":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )


def themed(svg: str) -> str:
    """SVG whose colours, where they are of this palette, follow the reader's theme."""
    return _HEX.sub(lambda match: _VARIABLES.get(match[0], match[0]), svg)


def colour(number: int) -> str:
    """Of a run by its place."""
    return RUNS[number % len(RUNS)]


def dashes(number: int) -> str:
    """Of a run by its place, as matplotlib names them; they differ where colours repeat."""
    return DASHES[number // len(RUNS) % len(DASHES)]


def line_key(number: int) -> str:
    """A short piece of a run's line, as inline SVG for a legend."""
    dash = _SVG_DASHES[number // len(RUNS) % len(DASHES)]
    return (
        '<svg class="key" viewBox="0 0 26 8" aria-hidden="true"><line x1="1" x2="25" y1="4" y2="4" '
        f'style="stroke:{_VARIABLES[colour(number)]};stroke-width:3;stroke-dasharray:{dash or "none"}"/></svg>'
    )


def patch_key(hex_colour: str) -> str:
    """A square of a colour of this palette, as inline SVG for a legend."""
    return (
        '<svg class="key" viewBox="0 0 26 8" aria-hidden="true"><rect x="9" width="8" height="8" '
        f'style="fill:{_VARIABLES[hex_colour]}"/></svg>'
    )
