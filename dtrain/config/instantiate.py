"""Builds the object that a node of the config names by ``_target_``, with Hydra's ``instantiate``.

Nodes are plain data, because the config was resolved when it was composed. The arguments of every target,
nested targets included, are compared with its signature first. Any failure, even inside the target's own code, becomes a
``ConfigError`` that names the key, the target and the values.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import MISSING

from dtrain.config.partials import plain_partial
from dtrain.errors import ConfigError, Explained, PeerFailed, hide_secret, nearest, shortened
from dtrain.extras import extra_of, install_command

#: Keys of a section with a ``_target_`` that dtrain reads itself, and does not pass to the target.
OWN_KEYS = {"optimizer": ("no_decay", "groups")}
# Module to the name of its distribution on PyPI, where they differ.
_DISTRIBUTIONS = {
    "cv2": "opencv-python",
    "open_clip": "open_clip_torch",
    "PIL": "Pillow",
    "skimage": "scikit-image",
    "yaml": "PyYAML",
}

_OF_HYDRA = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")


def by_target(key: str, node: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the ``_target_`` of a node of the config with the node's other keys as keyword arguments.

    Args:
        key: The node's place in the config, such as ``data.augment``; starts every error message.
        node: The node, plain data.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call; they override the node's keys.

    Returns:
        What the call returns.

    Raises:
        ConfigError: If there is no ``_target_``, it cannot be imported, it does not accept these keys or lacks required ones, a
            text in the node contains ``${``, or the call raises an exception.

    Example:
        >>> from dtrain.config.instantiate import by_target
        >>> by_target("model", {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 2})
        Linear(in_features=4, out_features=2, bias=True)
    """
    _require_target(key, node)
    refuse_interpolations(key, node)
    node = copy.deepcopy(node)
    nodes = dict(nodes_with_target(key, node))
    for place, inner in nodes.items():
        _check_call(place, inner, *((len(args), kwargs) if inner is node else (0, {})))
    try:
        return plain_partial(instantiate(node, *args, _convert_="all", **kwargs))
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, (ConfigError, Explained, PeerFailed)):
            raise cause from None
        if cause is None:
            raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
        found = re.search(r"full_key: (\S+)", str(error))
        named = str(found[1]) if found else ""
        for place, inner in nodes.items():
            # Hydra leaves out the brackets of lists, and has no key of a node without parent.
            if re.sub(r"[\[\]]", "", place) in (named, f"{key}.{named}"):
                raise ConfigError(_failure(place, inner, cause)) from cause
        raise ConfigError(_failure(key, node, cause)) from cause


def check_call(key: str, node: Any, **given: Any) -> None:
    """Checks a node as ``by_target`` does, without calling its target.

    Args:
        key: The node's place in the config.
        node: The node.
        given: Arguments that the caller of ``by_target`` adds; their values are not looked at.

    Raises:
        ConfigError: If there is no ``_target_``, it cannot be imported, or it does not accept these keys.
    """
    _require_target(key, node)
    refuse_interpolations(key, node)
    for place, inner in nodes_with_target(key, node):
        _check_call(place, inner, 0, given if inner is node else {})


def refuse_interpolations(key: str, node: Any) -> None:
    """Refuses plain data in which a text is still an interpolation, after the config was resolved.

    Hydra resolves what it builds once more, so such a text would be looked up like one that the user typed.

    Args:
        key: The node's place in the config.
        node: The node.

    Raises:
        ConfigError: If a text or key has ``${``; names the place.
    """
    for place, text in _texts(key, node):
        if "${" in text:
            raise ConfigError(
                f"{place}: got {text!r} after interpolation. A value cannot be interpolated twice: write it without "
                "${vars...} inside."
            )


def _texts(place: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield place, str(name)
            yield from _texts(f"{place}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _texts(f"{place}[{number}]", item)


def argument_names(target: Any) -> list[str]:
    """Names that a ``_target_`` takes as keyword arguments, in its order; [] if it cannot be imported or has no signature."""
    with suppress(Exception):  # ``by_target`` reports it
        parameters = inspect.signature(get_object(target)).parameters.values()
        return [it.name for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)]
    return []


def argument_defaults(target: Any) -> dict[str, Any]:
    """The default of each keyword argument that has one, of a ``_target_``; {} if it has no signature."""
    with suppress(Exception):  # ``by_target`` reports it
        parameters = inspect.signature(get_object(target)).parameters.values()
        return {it.name: it.default for it in parameters if it.default is not it.empty}
    return {}


def _require_target(key: str, node: Any) -> None:
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(
            f"{key}: got {shortened(repr(node), 60)}, which has no _target_. Name a class or function, such as "
            f"{key}._target_=package.Class."
        )


def nodes_with_target(key: str, node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mappings with a ``_target_``, from the outside to the inside, each with its place in the config."""
    if isinstance(node, (list, tuple)):
        for number, item in enumerate(node):
            yield from nodes_with_target(f"{key}[{number}]", item)
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        yield key, node
        if node.get("_recursive_") is False:
            return
    for name, item in node.items():
        yield from nodes_with_target(f"{key}.{name}", item)


def _check_call(place: str, node: dict[str, Any], positional: int, keywords: Mapping[str, Any]) -> None:
    """Refuses a node whose target cannot be imported or called with the node's keys.

    Args:
        place: The node's place in the config.
        node: The node.
        positional: Number of positional arguments that are added.
        keywords: Keyword arguments that are added.
    """
    if node["_target_"] == MISSING:
        raise ConfigError(
            f"{place}._target_ is not set. Name a class or function, such as {place}._target_=package.Class."
        )
    path = node["_target_"]
    if not isinstance(path, str):
        raise ConfigError(f"{place}._target_: got {path!r}, want a dotted path, such as package.module.Class.")
    try:
        reason = why_missing(path)
    except Exception as error:  # of the module itself
        raise ConfigError(f"{place}._target_: {path!r} cannot be imported: {_describe(error)}") from error
    if reason:
        raise ConfigError(f"{place}._target_: {path!r} cannot be imported: {reason}")
    try:
        target = get_object(path)
        if not callable(target):
            raise ConfigError(
                f"{place}._target_: {path!r} is a {type(target).__name__}, which is not callable. Name a class or function."
            )
        parameters = list(inspect.signature(target).parameters.values())
    except (ValueError, TypeError, InstantiationException) as error:
        if isinstance(error, ConfigError):
            raise
        return  # a builtin without signature, or a target that Hydra refuses
    by_name = [it for it in parameters if it.kind in (it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY)][positional:]
    given = [str(name) for name in node if name not in _OF_HYDRA]
    # A decorated target may take more than what it wraps, as the configs of transformers do.
    called = inspect.signature(target, follow_wrapped=False).parameters.values()
    if not any(it.kind is it.VAR_KEYWORD for it in (*parameters, *called)):
        names = [it.name for it in by_name]
        for name in given:
            if name not in names:
                valid = set(names) - set(keywords)
                raise ConfigError(f"{place}.{name}: {path} has no argument {name!r}. {nearest(name, valid)}")
    for it in by_name:
        value = node.get(it.name)
        wanted = getattr(it.annotation, "__name__", it.annotation)
        if wanted in ("int", "float", "bool") and isinstance(value, str) and value != MISSING:
            raise ConfigError(f"{place}.{it.name}: got {_value(it.name, value)}, but {path} wants {wanted}.")
    if node.get("_partial_") or keywords.get("_partial_") or "_args_" in node:
        return
    needed = [it.name for it in by_name if it.default is it.empty and it.name not in (*given, *keywords)]
    needed += [str(name) for name, value in node.items() if value == MISSING]
    if needed:
        raise ConfigError(
            f"{place}.{needed[0]} is not set: {path} needs {' and '.join(needed)}. Set {place}.{needed[0]}=VALUE."
        )


def _failure(place: str, node: Any, error: BaseException) -> str:
    """The message for a target that raised an exception."""
    path = str(node["_target_"])
    if isinstance(error, ValueError) and path.startswith("dtrain."):
        text = str(error)  # names the value and the remedy
        return text if text.startswith(place) else f"{place}: {text}"
    values = ", ".join(f"{name}={_value(str(name), value)}" for name, value in node.items() if name not in _OF_HYDRA)
    return f"{place}: {path}({values}) failed: {_describe(error)}"


def _value(name: str, node: Any) -> str:
    if isinstance(node, Mapping) and "_target_" in node:
        return f"{node['_target_']}(...)"
    return hide_secret(name, shortened(repr(node), 60))


def _describe(error: BaseException) -> str:
    """An exception of other code: type, message and place."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and "importlib" not in frame.filename]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    message = shortened(" ".join(str(error).split()), 300)
    return f"{type(error).__name__}: {message.rstrip('.')}{place}. DTRAIN_TRACEBACK=1 shows the traceback."


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
    extra = extra_of(package)
    command = f"pip install {_DISTRIBUTIONS.get(package, package)}" if extra is None else install_command(extra)
    return f"There is no package {package!r} here: {command}. If it is your own module, add its folder to PYTHONPATH."


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
