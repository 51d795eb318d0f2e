"""Prints the section of CHANGELOG.md for a release, for .github/workflows/release.yml.

    python scripts/release_notes.py v0.2.0

Refused unless the tag is the version in dtrain/__init__.py, the changelog has a dated section of it, and CITATION.cff has the
same version and date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A release on GitHub is not beside the files that the changelog links to.
_LINK = re.compile(r"\]\((?!https?:|#)")
_REPOSITORY = "https://github.com/dtrain-developers/dtrain"


def notes(tag: str, package: str, changelog: str, citation: str) -> str:
    """The text of the section, with absolute links.

    Args:
        tag: Name of the git tag.
        package: Content of ``dtrain/__init__.py``.
        changelog: Content of ``CHANGELOG.md``.
        citation: Content of ``CITATION.cff``.

    Raises:
        ValueError: If they do not agree.
    """
    found = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    if found is None or tag != f"v{found[1]}":
        version = found and found[1]
        raise ValueError(
            f"the tag is {tag!r}, the version of the package {version!r}. Set __version__ in dtrain/__init__.py, or tag "
            f"v{version}."
        )
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, text = section.partition("\n")
        if heading.split()[0] == found[1]:
            dated = re.fullmatch(r"\S+ \((\d{4}-\d{2}-\d{2})\)", heading)
            if dated is None:
                raise ValueError(f"CHANGELOG.md: the heading is {heading!r}. Set the date: {found[1]} (2026-12-31).")
            for key, want in (("version", found[1]), ("date-released", dated[1])):
                got = re.search(rf"^{key}: (\S+)", citation, re.MULTILINE)
                if got is None or got[1] != want:
                    raise ValueError(
                        f"CITATION.cff: {key} is {got and got[1]!r}. Set it to that of CHANGELOG.md: {want}."
                    )
            return _LINK.sub(f"]({_REPOSITORY}/blob/{tag}/", text.strip()) + "\n"
    raise ValueError(f"CHANGELOG.md has no section {found[1]!r}. Add it: ## {found[1]} (2026-12-31).")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    try:
        print(
            notes(
                sys.argv[1],
                (ROOT / "dtrain" / "__init__.py").read_text(encoding="utf-8"),
                (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
                (ROOT / "CITATION.cff").read_text(encoding="utf-8"),
            ),
            end="",
        )
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
