"""The installed package, and its release. scripts/check_package.py checks the files of the wheel and the sdist."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
from datetime import date
from pathlib import Path

import pytest
import yaml

from dtrain import __version__

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has dtrain from the wheel, and everything else from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, ROOT], check=True, timeout=240)
    venv.create(folder / "venv", symlinks=True)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    subprocess.run([*pip, "install", "--no-deps", "--target", site, *folder.glob("*.whl")], check=True, timeout=120)
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "venv" / "bin" / "python"


@pytest.mark.slow
def test_a_program_with_annotations_passes_strict_type_checks_against_the_wheel(
    installed: Path, tmp_path: Path
) -> None:
    program = shutil.copy(ROOT / "tests" / "typed_program.py", tmp_path)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed]
    # Options and cache of the checkout: analysing torch takes most of the time, and is then done once.
    mypy += ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
    # Only what is installed: not the checkout.
    environment = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    checked = subprocess.run(
        [*mypy, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_shards_are_written_with_the_webdataset_that_open_clip_needs(tmp_path: Path) -> None:
    oldest = re.search(r'"webdataset>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert oldest[1] == "0.2.86"  # open_clip_torch[training] needs it or an older one
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-q",
        "install",
        "--no-deps",
        "--target",
        tmp_path,
    ]
    subprocess.run([*pip, f"webdataset=={oldest[1]}"], check=True, timeout=120)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    version = [sys.executable, "-c", "import webdataset; print(webdataset.__version__)"]
    assert subprocess.check_output(version, env=environment, text=True).strip() == oldest[1]
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/data/test_writer.py"]
    done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


# -- releases

PACKAGE = '"""dtrain."""\n\n__version__ = "0.2.0"\n'
notes = runpy.run_path(str(ROOT / "scripts" / "release_notes.py"))["notes"]
CITATION = "cff-version: 1.2.0\nversion: 0.2.0\ndate-released: 2026-12-31 # of the release\n"
CHANGELOG = """# Changelog

## 0.3.0 (unreleased)

- next

## 0.2.0 (2026-12-31)

### Breaking changes

- [a](docs/a.md) change

## 0.1.0 (2026-11-30)

- the first
"""


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    link = "https://github.com/dtrain-developers/dtrain/blob/v0.2.0/docs/a.md"
    assert notes("v0.2.0", PACKAGE, CHANGELOG, CITATION) == f"### Breaking changes\n\n- [a]({link}) change\n"


@pytest.mark.parametrize(
    ("tag", "package", "remedy"),
    [
        ("v0.1.0", PACKAGE, "tag v0.2.0"),
        ("0.2.0", PACKAGE, "tag v0.2.0"),
        ("v0.2.0", "", "Set __version__ in dtrain/__init__.py"),
        ("v0.3.0", PACKAGE.replace("0.2.0", "0.3.0"), "Set the date: 0.3.0 ("),
        ("v0.4.0", PACKAGE.replace("0.2.0", "0.4.0"), "Add it: ## 0.4.0 ("),
    ],
    ids=["an-older-tag", "no-v", "no-version", "undated", "no-section"],
)
def test_a_tag_without_its_version_and_its_section_is_refused(tag: str, package: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(remedy)):
        notes(tag, package, CHANGELOG, CITATION)


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (("version: 0.2.0", "version: 0.1.0"), "version is '0.1.0'. Set it to that of CHANGELOG.md: 0.2.0"),
        (("2026-12-31", "2026-12-30"), "date-released is '2026-12-30'. Set it to that of CHANGELOG.md: 2026-12-31"),
        (("date-released: 2026-12-31", ""), "date-released is None. Set it to that of CHANGELOG.md: 2026-12-31"),
    ],
    ids=["another-version", "another-day", "no-day"],
)
def test_a_release_whose_citation_names_another_is_refused(wrong: tuple[str, str], remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(remedy)):
        notes("v0.2.0", PACKAGE, CHANGELOG, CITATION.replace(*wrong))


def test_the_citation_has_the_version_of_the_package_and_a_day() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert isinstance(citation["date-released"], date)
    assert (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].split()[0] == __version__


def test_the_notes_of_the_next_release_can_be_made_once_it_is_dated() -> None:
    changelog, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    day = yaml.safe_load(citation)["date-released"]
    package = (ROOT / "dtrain" / "__init__.py").read_text()
    text = notes(f"v{__version__}", package, changelog.replace("(unreleased)", f"({day})"), citation)
    assert "### Training" in text
    assert "](docs/" not in text


def test_commits_are_checked_with_the_ruff_of_the_tests() -> None:
    pinned = re.search(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    before_commits = re.search(r"ruff-pre-commit\n    rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert pinned is not None
    assert before_commits is not None
    assert before_commits[1] == pinned[1]


# -- workflows of GitHub


def test_ci_runs_the_oldest_and_the_newest_python_that_the_package_names() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    tested = re.findall(r'"(3\.\d+)"', workflow)
    assert {named[0], named[-1]} <= set(tested) <= set(named)
    assert f'requires-python = ">={named[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_lowest_versions_are_tested_with_the_oldest_python_and_hydra() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "versions.yml").read_text())["jobs"]
    rows = {row["name"]: row for job in jobs.values() for row in job["strategy"]["matrix"]["include"]}
    assert f'requires-python = ">={rows["lowest versions"]["python"]}"' in project
    lowest = rows["lowest versions"]["install"]
    assert "--resolution lowest-direct" in lowest
    groups = project.partition("\n[dependency-groups]")[2].partition("\n[project.urls]")[0]
    of_tests = {extra for names in re.findall(r"dtrain\[([\w,]+)\]", groups) for extra in names.split(",")}
    assert {*lowest.partition("-e .[")[2].partition("]")[0].split(",")} == of_tests
    oldest = rows["oldest Hydra"]["then"].replace("==", ">=")
    assert f'"{oldest},' in project
    for row in rows.values():
        assert all((ROOT / path).exists() for path in row.get("tests", "").split())


def test_the_scripts_that_workflows_run_exist() -> None:
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for script in re.findall(r"scripts/[\w.]+", workflow.read_text()):
            assert (ROOT / script).is_file(), f"{workflow.name}: {script}"


# -- what docs/stability.md and the forms promise


def test_the_packages_whose_names_are_public_list_them() -> None:
    [row] = [
        line for line in (ROOT / "docs" / "stability.md").read_text().splitlines() if line.startswith("| Python |")
    ]
    named = re.findall(r"`(dtrain[\w.]+)`", row.partition("; what the")[0])
    assert len(named) == 9
    for name in named:
        module = importlib.import_module(name)
        assert all(hasattr(module, public) for public in module.__all__), name


def test_links_of_the_forms_lead_to_files_or_to_what_the_owner_switches_on() -> None:
    repository = "https://github.com/dtrain-developers/dtrain/"
    checklist = (ROOT / "CONTRIBUTING.md").read_text().partition("### Before the first release")[2]
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        for link in re.findall(r"https://[^\s)]+", form.read_text()):
            assert link.startswith(repository), "the site may not exist yet"
            place = link.removeprefix(repository)
            if place.startswith("blob/main/"):
                assert (ROOT / place.removeprefix("blob/main/")).is_file(), link
            else:
                setting = {
                    "discussions": "**Discussions**",
                    "security/advisories/new": "**Private vulnerability reporting**",
                }
                assert setting[place] in checklist


def test_the_checklist_has_the_names_that_the_workflows_use() -> None:
    checklist = (ROOT / "CONTRIBUTING.md").read_text().partition("### Before the first release")[2]
    for name in ("release", "docs"):
        workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        for job, content in workflow["jobs"].items():
            if environment := content.get("environment"):
                assert f"`{environment['name']}`" in checklist
                assert f"`{job}`" in checklist
