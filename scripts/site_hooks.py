"""Hooks of mkdocs.yml: pages from outside ``docs/``, and links that work on GitHub and on the site.

* README.md and the other files of ``COPIES`` are pages of the site too; so is what ``scripts/site_pages.py`` writes.
* A link from a page to a file that is no page of the site becomes a link to the repository. One to a file that does not
  exist ends the build. A link to an address of the site becomes one inside the site that is built.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
#: Pages written by scripts/site_pages.py.
GENERATED = ROOT / "build" / "site_pages"
#: Files of the repository that are pages of the site, under another name.
COPIES = {
    "README.md": "getting_started.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security_policy.md",
}
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside ``docs/``."""
    for source, uri in COPIES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    for name in ("commands.md", "report.html"):
        if not (GENERATED / name).is_file():
            raise PluginError(
                f"{GENERATED / name}: missing. Run `bash scripts/site.sh`, or `python scripts/site_pages.py`."
            )
        files.append(File.generated(config, name, abs_src_path=str(GENERATED / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Turns the links of a page into those of the site."""
    name = next((source for source, uri in COPIES.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")
    if name == "README.md":
        markdown = markdown.replace("# dtrain\n", "# Getting started\n", 1)
    parts = _CODE.split(markdown)
    for number in range(0, len(parts), 2):  # the parts at odd places are code
        parts[number] = _LINK.sub(lambda match: f"]({_target(match[1], name, page, config, files)})", parts[number])
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Links full names of Python, such as ``dtrain.data.ShardLoader``, to their entries on the API pages, if they have one."""
    return re.sub(
        r"<code>(dtrain(?:\.\w+){2,})</code>", r"<autoref identifier='\1' optional><code>\1</code></autoref>", html
    )


def on_post_page(output: str, **_: Any) -> str:
    """Leaves out the theme's request to GitHub for the number of stars."""
    return output.replace('data-md-component="source"', "")


def _target(link: str, name: str, page: Page, config: Any, files: Files) -> str:
    """The link of a page of the repository, ``name``, as one of the site's page."""
    path, hash_, anchor = link.partition("#")
    if link.startswith(config.site_url):
        url = path.removeprefix(config.site_url) or "./"
        found = next((file.src_uri for file in files if file.url == url), None)
        if found is None:
            raise PluginError(f"{name}: {link} is no page of the site.")
        return posixpath.relpath(found, posixpath.dirname(page.file.src_uri)) + hash_ + anchor
    if not path or re.match(r"[\w+]+:", link):
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
    uri = COPIES.get(target, target.removeprefix("docs/"))
    if (target in COPIES or target.startswith("docs/")) and files.get_file_from_path(uri) is not None:
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri)) + hash_ + anchor
    if not (ROOT / target).exists():
        raise PluginError(f"{name}: the link {link} leads to {target}, which does not exist.")
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"{config.repo_url}/{kind}/main/{target}{hash_}{anchor}"
