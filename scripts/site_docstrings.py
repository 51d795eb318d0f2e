"""Docstrings on the API pages of the site: names in double backticks become links, and each entry links to its source.

A griffe extension, named in mkdocs.yml. A name is looked up as Python would in the place of the docstring, then among the
names that the packages of dtrain export.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_REPOSITORY = "https://github.com/dtrain-developers/dtrain/blob/main"
_NAME = re.compile(r"``([A-Za-z_][\w.]*)((?:\(\))?)``")
# "Looked up::" and an indented block is a block of code in reStructuredText; Markdown needs a single colon.
_COLONS = re.compile(r"(?<=\w)::$", re.MULTILINE)
# griffe knows blocks of ``>>>`` in a section of this name.
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Links(griffe.Extension):
    """Rewrites all docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by griffe."""
        exported = {
            name: member.canonical_path
            for package in pkg.modules.values()
            for name, member in package.members.items()
            if member.is_alias and package.exports is not None and name in package.exports
        }
        self._visit(pkg, exported)

    def _visit(self, place: griffe.Object, exported: dict[str, str]) -> None:
        if place.docstring is not None:
            text = _EXAMPLE.sub("Examples:", _COLONS.sub(":", place.docstring.value))
            text = _NAME.sub(lambda match: _link(match[1], match[2], place, exported), text)
            if place.is_class or place.is_function:
                lines = f"#L{place.lineno}-L{place.endlineno}"
                text += f"\n\n[source]({_REPOSITORY}/{place.relative_package_filepath}{lines}){{ .source }}"
            place.docstring.value = text
        for member in place.members.values():
            if not member.is_alias:
                self._visit(member, exported)  # type: ignore[arg-type]


def _link(name: str, call: str, place: griffe.Object, exported: dict[str, str]) -> str:
    """A link to the entry of a name, or the name as code if there is none."""
    code = f"``{name}{call}``"
    if isinstance(place, (griffe.Class, griffe.Function)) and name in place.parameters:
        return code
    first, dot, rest = name.partition(".")
    try:
        path = place.resolve(first) + dot + rest
    except griffe.NameResolutionError:
        path = exported.get(first, "") + dot + rest
    # "optional": no warning if the name has no entry on any page.
    return f"<autoref identifier='{path}' optional>{code}</autoref>" if path.startswith("dtrain.") else code
