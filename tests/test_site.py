"""The site: links for GitHub become its own, docstrings get links, all pages are in the navigation, nothing is from the net."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="makes the site: pip install -e . --group docs")
pytest.importorskip("mkdocstrings_handlers.python", reason="makes the site's API pages: pip install -e . --group docs")

import griffe
import yaml
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
CONFIG = SimpleNamespace(repo_url="https://github.com/us/it", site_url="https://us.example/it/")
PAGES = ("index.md", "design.md", "data.md", "tutorials/laptop.md", "getting_started.md", "report.html", "design.svg")


@pytest.fixture
def hooks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("site_hooks")


@pytest.fixture
def shown(hooks):
    """Shows Markdown as the site would."""
    files = Files([File(uri, None, "site", use_directory_urls=True) for uri in PAGES])

    def show(markdown, uri):
        page = SimpleNamespace(file=files.get_file_from_path(uri))
        return hooks.on_page_markdown(markdown, page=page, config=CONFIG, files=files)

    return show


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("design.md", "data.md#order", "data.md#order"),
        ("design.md", "../README.md#install", "getting_started.md#install"),
        ("getting_started.md", "docs/data.md", "data.md"),
        ("getting_started.md", "docs/design.svg", "design.svg"),
        ("tutorials/laptop.md", "../data.md", "../data.md"),
        ("tutorials/laptop.md", "../../README.md", "../getting_started.md"),
        ("design.md", "../dtrain/train.py#L3", "https://github.com/us/it/blob/main/dtrain/train.py#L3"),
        ("design.md", "../examples", "https://github.com/us/it/tree/main/examples"),
        ("tutorials/laptop.md", "https://us.example/it/report.html", "../report.html"),
        ("index.md", "https://us.example/it/tutorials/laptop/#end", "tutorials/laptop.md#end"),
        ("design.md", "https://elsewhere.example/", "https://elsewhere.example/"),
        ("design.md", "#the-vote", "#the-vote"),
    ],
)
def test_a_link_for_github_leads_to_the_page_or_to_the_repository(shown, page, link, wanted):
    assert shown(f"[`x`]({link}), ![]({link})", page) == f"[`x`]({wanted}), ![]({wanted})"


def test_links_in_code_stay(shown):
    code = "`[x](../README.md)`\n\n```python\n[x](../README.md)\n```\n"
    assert shown(code, "design.md") == code


@pytest.mark.parametrize("link", ["../dtrain/gone.py", "gone.md", "https://us.example/it/gone/"])
def test_a_link_to_what_does_not_exist_is_refused(shown, link):
    with pytest.raises(PluginError, match=re.escape(link)):
        shown(f"[x]({link})", "design.md")


def test_names_in_docstrings_become_links_except_those_of_parameters(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    links = importlib.import_module("site_docstrings").Links()
    (tmp_path / "dtrain").mkdir()
    (tmp_path / "dtrain" / "__init__.py").write_text(
        "class Loader:\n    def go(self, rank, Loader):\n"
        '        """``Loader`` and ``go()``; ``rank``, ``__key__``, ``torch.nn`` and ``1 + 1``."""\n'
        "    @property\n    def rank(self): ...\n"
        'def start():\n    """See ``Loader.go``."""\n'
    )
    extensions = griffe.load_extensions(links)
    package = griffe.load("dtrain", search_paths=[str(tmp_path)], extensions=extensions, try_relative_path=False)
    go, start = package["Loader.go"].docstring.value, package["start"].docstring.value
    linked = "<autoref identifier='dtrain.Loader.go' optional>``{}``</autoref>"
    assert go.startswith(f"``Loader`` and {linked.format('go()')}; ``rank``, ``__key__``, ``torch.nn`` and ``1 + 1``.")
    assert "/blob/main/dtrain/__init__.py#L2-L3)" in go
    assert start.startswith(f"See {linked.format('Loader.go')}.")


def test_all_pages_are_in_the_navigation(hooks):
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    nav = set(re.findall(r"[\w/]+\.md", str(yaml.safe_load(text)["nav"])))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert nav == pages | set(hooks.COPIES.values()) | {"commands.md"}, "add the page to nav in mkdocs.yml"


@pytest.mark.slow
def test_the_site_is_built_without_warnings_and_loads_nothing_from_the_net(hooks, tmp_path):
    """With stand-ins for the pages that ``scripts/site_pages.py`` makes by training."""
    for name in ("mkdocs.yml", "docs", "scripts", "dtrain", *hooks.COPIES):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for folder in ROOT.iterdir():  # which pages link to
        if not (tmp_path / folder.name).exists() and folder.name not in ("build", ".git", ".venv"):
            (tmp_path / folder.name).symlink_to(folder)
    generated = tmp_path / "build" / "site_pages"
    generated.mkdir(parents=True)
    (generated / "commands.md").write_text("# Commands\n")
    (generated / "report.html").write_text("a report")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "build" / "site"
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe|source|link(?! rel=\"canonical\"))\b[^>]*(?:src|href)=\"?([^\s\">]+)",
            page.read_text(),
        )
        assert [url for url in loaded if url.startswith(("http", "//"))] == [], page
    assert "CrossRankGradScaler" in (site / "search" / "search_index.json").read_text()
    assert (site / "report.html").read_text() == "a report"
