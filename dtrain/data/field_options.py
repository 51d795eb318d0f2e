"""The public ``fields`` mapping, as a config or a caller gives it: extension to options.

Whatever may come out of YAML is checked here for its type; whether options go together is the ``Field``'s own matter.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.data.fields import Field, nearest


def parse_fields(mapping: Mapping[str, Mapping[str, Any]]) -> tuple[Field, ...]:
    """The fields of a public ``fields`` mapping, in its order.

    Args:
        mapping: Extension to options: ``name`` (required), and others of ``Field``. ``size`` may be one int for both sides,
            ``decoder`` a callable, the dotted path of one, or a mapping with ``_target_``.

    Raises:
        ValueError: If there is no field, an option or a role is unknown (names the nearest), a value is of the wrong
            type, or two fields share a name or an extension.
    """
    if not mapping or not isinstance(mapping, Mapping):
        raise ValueError(
            f"data.fields is {repr(mapping) if mapping else 'empty'}. Name what to read from each sample, for example "
            "{jpg: {name: image, role: image, size: 224}, cls: {name: label}}."
        )
    fields = tuple(_parse_field(str(ext), options) for ext, options in mapping.items())
    for what, values in (
        ("name", [field.name for field in fields]),
        ("extension", [ext for field in fields for ext in field.extensions]),
    ):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"data.fields: two fields share the {what} {twice[0]!r}. Each needs its own.")
    return fields


def _parse_field(ext: str, options: Mapping[str, Any]) -> Field:
    if not isinstance(options, Mapping):
        raise ValueError(f"data.fields.{ext}: got {options!r}, want options such as {{name: image, role: image}}.")
    known = [field.name for field in dataclasses.fields(Field) if field.init and field.name != "ext"]
    for option in options:
        if option not in known:
            raise ValueError(f"data.fields.{ext}: option {option!r} is unknown{nearest(str(option), known)}")
    given = {option: value for option, value in options.items() if value is not None}
    if "name" not in given:
        raise ValueError(f"data.fields.{ext} has no name. Give it one, such as name: image.")
    for option in ("name", "role", "decode", "dtype"):
        if option in given and not isinstance(given[option], str):
            raise ValueError(f"data.fields.{ext}.{option}: got {given[option]!r}, want a word.")
    if "size" in given:
        given["size"] = _size(ext, given["size"])
    for option in ("mean", "std"):
        if option in given:
            given[option] = _channels(ext, option, given[option])
    for option in ("shorter_side", "length"):
        if option in given and type(given[option]) is not int:
            raise ValueError(f"data.fields.{ext}.{option}: got {given[option]!r}, want an int.")
    if not isinstance(given.get("exif", False), bool):
        raise ValueError(f"data.fields.{ext}.exif: got {given['exif']!r}, want true or false.")
    if "decoder" in given:
        given["decoder"] = _decoder(ext, given["decoder"])
    return Field(ext, **given)


def _size(ext: str, value: Any) -> tuple[int, int]:
    sides = [value, value] if isinstance(value, int) else value
    if not _is_list(sides, 2) or not all(type(side) is int for side in sides):
        raise ValueError(f"data.fields.{ext}.size: got {value!r}, want pixels: an int, or [height, width].")
    return sides[0], sides[1]


def _channels(ext: str, option: str, value: Any) -> tuple[float, float, float]:
    numbers = _is_list(value, 3) and all(type(number) in (int, float) and math.isfinite(number) for number in value)
    if not numbers:
        raise ValueError(f"data.fields.{ext}.{option}: got {value!r}, want three numbers, red, green and blue.")
    return float(value[0]), float(value[1]), float(value[2])


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == length


def _decoder(ext: str, value: Any) -> Callable[[bytes], Any]:
    where = f"data.fields.{ext}.decoder"
    if isinstance(value, str):
        module, _, attribute = value.rpartition(".")
        if not module:
            raise ValueError(f"{where}: got {value!r}, want a dotted path such as my_package.my_function.")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{where}: {value!r} cannot be imported: {error}.") from error
    elif isinstance(value, Mapping):
        from hydra.utils import instantiate

        value = instantiate(value)
    if isinstance(value, type) or not callable(value):
        raise ValueError(
            f"{where}: got {value!r}, want a function of the member's bytes. An object of a class, or a function with "
            "arguments, is built by _target_ (functions with _partial_: true)."
        )
    return value
