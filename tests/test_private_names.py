"""The table of private names of other libraries in CONTRIBUTING.md lists those that the code uses."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dtrain"
#: Documented, or config keys, although their names begin with an underscore.
PUBLIC = {"_exit", "_target_"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def defined(trees: list[ast.Module]) -> set[str]:
    """Names that dtrain defines itself; an attribute of that name is taken for its own."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def used() -> set[tuple[str, str]]:
    """Private names and the files that use them, relative to the package."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = defined([*trees.values()])
    found: set[tuple[str, str]] = set()
    for path, tree in trees.items():
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("dtrain"):
                of_private = any(map(is_private, (node.module or "").split(".")))
                names |= {alias.name for alias in node.names if of_private or is_private(alias.name)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names if any(map(is_private, alias.name.split(".")))}
            elif isinstance(node, ast.Attribute) and not is_own(node.value):
                names |= {node.attr} if is_private(node.attr) and node.attr not in own else set()
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                texts = {value.value for value in node.args if isinstance(value, ast.Constant)}
                names |= {text for text in texts if isinstance(text, str) and is_private(text) and text not in own}
        found |= {(name, path.relative_to(PACKAGE).as_posix()) for name in names}
    return found


def table() -> list[tuple[list[str], list[str], str]]:
    """Names, files and test of each row."""
    section = (
        (ROOT / "CONTRIBUTING.md").read_text().partition("## Private names of other libraries")[2].partition("\n## ")[0]
    )
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", row[0]), row[1].strip().split(", "), row[3].strip()) for row in rows]


@pytest.mark.slow
def test_every_private_name_in_the_code_is_in_the_table() -> None:
    listed = {(name.rpartition(".")[2], file) for names, files, _ in table() for name in names for file in files}
    missing = {(name, file) for name, file in used() if (name.rpartition(".")[2], file) not in listed}
    assert not missing, "add these to the table of private names in CONTRIBUTING.md, or use public ones"


def test_every_row_of_the_table_is_in_the_code_and_names_a_test() -> None:
    rows = table()
    assert len(rows) > 20
    for names, files, test in rows:
        assert (ROOT / "tests" / test).is_file(), test
        for file in files:
            text = (PACKAGE / file).read_text()
            # A row may name several files; each uses one of its names at least.
            assert any(re.search(rf"\b{name.rpartition('.')[2]}\b", text) for name in names), (names, file)
        for name in names:
            leaf = name.rpartition(".")[2]
            assert any(re.search(rf"\b{leaf}\b", (PACKAGE / file).read_text()) for file in files), name
