"""Why a dotted name leads nowhere, and what to do: install a package, or mend a name.

A package that is not there and a name that is not in it fail in the same way, but the one wants pip and the other its help.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Iterable
from types import ModuleType
from typing import Any

# What pip calls them; by far the most are called as their module is.
_DISTRIBUTIONS = {
    "cv2": "opencv-python",
    "open_clip": "open_clip_torch",
    "PIL": "Pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}


def why_missing(target: str) -> str:
    """Why ``target``, such as ``package.module.Class``, cannot be imported, and what to do; empty if it can.

    Raises:
        Exception: What a module on the way raises while it is imported, unless it is an ``ImportError``.
    """
    parts = target.split(".")
    if len(parts) < 2 or not all(map(str.isidentifier, parts)):
        return "want a dotted path, such as package.module.Class."
    found: Any = None
    for number, part in enumerate(parts):
        path, parent = ".".join(parts[: number + 1]), ".".join(parts[:number])
        try:
            if number and hasattr(found, part):  # may import, in packages that do it late
                found = getattr(found, part)
            elif number and not isinstance(found, ModuleType):
                return _lacks(parent, part, dir(found))
            else:
                found = importlib.import_module(path)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if error.name == path:
                return _lacks(parent, part, _names_in(found)) if number else _not_installed(part)
            if missing in ("", parts[0]):
                return f"importing {path} fails: {error}."
            return f"{path} needs another package. {_not_installed(missing)}"
        except ImportError as error:
            return f"importing {path} fails: {error}."
    return ""


def _not_installed(package: str) -> str:
    near = _nearest(package, importlib.metadata.packages_distributions())
    if near:
        return f"There is no package {package!r} here. Did you mean {near[0]!r}?"
    return (
        f"There is no package {package!r} here: pip install {_DISTRIBUTIONS.get(package, package)}. If it is a module of your "
        "own, put its folder on PYTHONPATH."
    )


def _lacks(parent: str, name: str, names: Iterable[str]) -> str:
    near = _nearest(name, names)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "Is the spelling right, and the version?"
    return f"{parent} is there, but has no {name!r}. {hint}"


def _names_in(module: ModuleType) -> list[str]:
    return [*dir(module), *(found.name for found in pkgutil.iter_modules(getattr(module, "__path__", ())))]


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    # Sorted, a class comes before a module of the same letters.
    known = {other.lower(): other for other in sorted(names, reverse=True) if not other.startswith("_")}
    return [known[near] for near in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.75)]
