"""What all pages have in common: one HTML file that loads nothing, in the light or dark theme of the browser.

A page is a template that extends ``base.html.j2``, which has the CSS. The content security policy allows the scripts of the
template only, by their hash, and no external sources. Jinja2 escapes everything that comes from a run or from data.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dtrain.report.style import THEME, count_of, format_date, format_percent, join_some, shorten

_HERE = Path(__file__).parent
_FILTERS: dict[str, Callable[..., Any]] = {
    "base64": lambda content: base64.b64encode(content).decode(),
    "count_of": count_of,
    "join_some": join_some,
    "percent": format_percent,
    "shorten": shorten,
}


def render(
    template: str,
    title: str,
    made: str,
    now: float,
    *,
    scripts: Sequence[Markup] = (),
    filters: Mapping[str, Callable[..., Any]] | None = None,
    **variables: Any,
) -> str:
    """A page as HTML.

    Args:
        template: Name of a template of this package that extends ``base.html.j2``.
        title: Heading of the page.
        made: What the page is, before its date: ``dtrain report of``.
        now: Unix seconds of the page.
        scripts: The scripts that the template contains.
        filters: Filters of the template.
        variables: Variables of the template.
    """
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {**_FILTERS, **(filters or {})}
    return environment.get_template(template).render(
        title=title,
        made=made,
        date=format_date(now),
        theme=THEME,
        scripts=scripts,
        script_hashes=[base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts],
        **variables,
    )
