"""Builds the object that a config node names by ``_target_``, with Hydra's ``instantiate``.

An error of the user (an unknown name, a missing package, a wrong argument or value) becomes a ``ConfigError`` that names the
key. An error inside the target's own code keeps its traceback.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.metadata
import pkgutil
import re
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig

from dtrain.config.errors import ConfigError

# Module to the name of its distribution on PyPI, where they differ.
_DISTRIBUTIONS = {
    "cv2": "opencv-python",
    "open_clip": "open_clip_torch",
    "PIL": "Pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}

#: Classes that moved, old path to new path. Looked up when an object is built, after the config was hashed and compared, so
#: that neither the name nor the identity of a run changes.
MOVED_TARGETS = {
    "dtrain.data.augment.ColorJitter": "dtrain.data.augment.ColorJitter",
    "dtrain.data.augment.TorchvisionTransform": "dtrain.data.augment.TorchvisionTransform",
}


def by_target(key: str, node: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the ``_target_`` of a config node with the node's other keys as keyword arguments.

    Args:
        key: The node's place in the config, such as ``data.augment``; starts every error message.
        node: The node.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call; they override the node's keys.

    Returns:
        What the call returns.

    Raises:
        ConfigError: If there is no ``_target_``, nothing of that name can be imported, or the target does not take these
            keys or raises ``ValueError``.
        Exception: Any other exception of the target, or of its module during the import.
    """
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise ConfigError(f"{key}: has no _target_. Name a class or function, such as {key}._target_=package.Class.")
    node = _replace_moved_targets(node)
    try:
        return instantiate(node, *args, _convert_="all", **kwargs)
    except InstantiationException as error:
        cause = error.__cause__
        if cause is not None and "Error locating target" not in str(error):
            # A traceback of one frame: the call itself failed, before any line of the target ran.
            if isinstance(cause, TypeError) and cause.__traceback__ is not None and cause.__traceback__.tb_next is None:
                raise ConfigError(f"{key}: {node._target_} does not take these keys: {cause}.") from error
            if isinstance(cause, ValueError) and not isinstance(cause, ConfigError):
                raise ConfigError(f"{key}: {cause}") from cause
            raise cause from None
        root = cause
        while root is not None and root.__cause__ is not None:
            root = root.__cause__
        if root is not None and not isinstance(root, (ImportError, AttributeError, ValueError)):
            raise root from None  # the target's module raised it during the import
        # Only Hydra's message has the name of a target that is nested inside this node.
        match = re.search(r"Error locating target '([^']*)'", str(error))
        target = match[1] if match else str(node._target_)
        where = f"{key}._target_" if target == node._target_ else f"{key}, a _target_ inside"
        reason = why_missing(target)
        if not reason:  # it can be imported, but it is not callable
            raise ConfigError(f"{where}: {target!r}: {str(error).splitlines()[0]}.") from error
        raise ConfigError(f"{where}: {target!r} cannot be imported: {reason}") from error


def _replace_moved_targets(node: DictConfig) -> DictConfig:
    """A copy of the node in which no ``_target_`` has an old path."""
    node = copy.deepcopy(node)
    for old in list(_nodes_with_old_target(node)):
        old["_target_"] = MOVED_TARGETS[old["_target_"]]
    return node


def _nodes_with_old_target(node: Any) -> Iterator[DictConfig]:
    if (
        not isinstance(node, (DictConfig, ListConfig))
        or node._is_none()
        or node._is_missing()
        or node._is_interpolation()
    ):
        return
    if isinstance(node, DictConfig) and node.get("_target_") in MOVED_TARGETS:
        yield node
    for key in node if isinstance(node, DictConfig) else range(len(node)):
        yield from _nodes_with_old_target(node._get_node(key))


def why_missing(target: str) -> str:
    """Why ``target`` cannot be imported, with a remedy; ``""`` if it can.

    Args:
        target: A dotted path, such as ``package.module.Class``.

    Raises:
        Exception: What a module raises while it is imported, unless it is an ``ImportError``.
    """
    parts = target.split(".")
    if len(parts) < 2 or not all(map(str.isidentifier, parts)):
        return "want a dotted path, such as package.module.Class."
    found: Any = None
    for number, part in enumerate(parts):
        path, parent = ".".join(parts[: number + 1]), ".".join(parts[:number])
        try:
            if number and hasattr(found, part):  # may import a module, in packages with lazy imports
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
        f"There is no package {package!r} here: pip install {_DISTRIBUTIONS.get(package, package)}. If it is your own module, "
        "add its folder to PYTHONPATH."
    )


def _lacks(parent: str, name: str, names: Iterable[str]) -> str:
    near = _nearest(name, names)
    hint = (
        f"Did you mean {' or '.join(map(repr, near))}?"
        if near
        else "Check the spelling, and the version of the package."
    )
    return f"{parent} has no {name!r}. {hint}"


def _names_in(module: ModuleType) -> list[str]:
    return [*dir(module), *(found.name for found in pkgutil.iter_modules(getattr(module, "__path__", ())))]


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    # In this order a class takes precedence over a module whose name differs only in case.
    known = {other.lower(): other for other in sorted(names, reverse=True) if not other.startswith("_")}
    return [known[near] for near in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.75)]
