"""Reads the public ``fields`` mapping: extension to options, from a config or a call. See ``field`` for what they mean."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.data.fields.field import MEDIA, REGIONS, Field
from dtrain.data.fields.media import torchcodec_decoders
from dtrain.errors import nearest


def parse_fields(mapping: Mapping[str, Any]) -> tuple[Field, ...]:
    """The fields of a public ``fields`` mapping, in its order.

    Types are checked here, because the values may come from YAML; ``Field`` checks whether options fit each other.

    Args:
        mapping: Extension to options: ``name`` (required), and others of ``Field``. ``size`` may be one int for both
            sides, ``decoder`` a callable, the dotted path of one, or a mapping with ``_target_``. A list of options reads
            several fields from one member.

    Raises:
        ValueError: If there is no field, an option or a role is unknown (names the nearest), a value has the wrong
            type, or two fields share a name or an extension.
    """
    if not mapping or not isinstance(mapping, Mapping):
        raise ValueError(
            f"data.fields is {repr(mapping) if mapping else 'empty'}. Declare what to read from each sample, for example "
            "{jpg: {name: image, role: image, size: 224}, cls: {name: label}}."
        )
    fields: list[Field] = []
    for ext, options in mapping.items():
        if isinstance(options, Sequence) and not isinstance(options, str):
            fields += [_parse_field(str(ext), f"{ext}[{number}]", each) for number, each in enumerate(options)]
        else:
            fields.append(_parse_field(str(ext), str(ext), options))
    for kind, values in (
        ("name", [name for field in fields for name in field.columns]),
        ("extension", [ext for alternatives in mapping for ext in str(alternatives).split(";")]),
    ):
        repeated = sorted({value for value in values if values.count(value) > 1})
        if repeated:
            raise ValueError(
                f"data.fields: two fields share the {kind} {repeated[0]!r}. Each needs its own; '~data.fields.cls' removes the "
                "field of .cls."
            )
    fields = [_of_an_image(field, fields) for field in fields]
    if media := [field for field in fields if field.role in MEDIA]:
        try:
            torchcodec_decoders()
        except ImportError as error:
            raise ValueError(f"field {media[0].name!r}: {error}") from error
    return tuple(fields)


def _of_an_image(field: Field, fields: Sequence[Field]) -> Field:
    """The field; that of a mask or boxes with the image that it belongs to, None if there is no image."""
    if field.role not in REGIONS:
        return field
    images = [each.name for each in fields if each.role == "image"]
    if field.of is None and len(images) < 2:
        return dataclasses.replace(field, of=images[0]) if images else field
    if field.of not in images:
        raise ValueError(
            f"field {field.name!r}: of {field.of!r}, want the image that it belongs to. Images: {', '.join(images) or 'none'}."
        )
    return field


def _parse_field(ext: str, where: str, options: Mapping[str, Any]) -> Field:
    """``where`` is the entry below ``data.fields``, for messages."""
    if not isinstance(options, Mapping):
        raise ValueError(f"data.fields.{where}: got {options!r}, want options such as {{name: image, role: image}}.")
    known = [field.name for field in dataclasses.fields(Field) if field.init and field.name != "ext"]
    for option in options:
        if option not in known:
            raise ValueError(f"data.fields.{where}: option {option!r} is unknown. {nearest(str(option), known)}")
    values = {option: value for option, value in options.items() if value is not None}
    if "name" not in values:
        raise ValueError(f"data.fields.{where} has no name. Give it one, such as name: image.")
    if type(values.get("key")) is int:  # an index of a list
        values["key"] = str(values["key"])
    for option in ("name", "role", "decode", "dtype", "key", "tokenizer", "clip", "of"):
        if option in values and not isinstance(values[option], str):
            raise ValueError(f"data.fields.{where}.{option}: got {values[option]!r}, want a word.")
    if "size" in values:
        size = values["size"]
        sides = [size, size] if isinstance(size, int) else size
        if not _is_list(sides, 2) or not all(type(side) is int for side in sides):
            raise ValueError(f"data.fields.{where}.size: got {size!r}, want pixels: an int, or [height, width].")
        values["size"] = tuple(sides)
    for option in ("mean", "std"):
        if option in values:
            values[option] = _rgb(where, option, values[option])
    for option in ("shorter_side", "length", "sample_rate", "channels", "num_frames", "stride", "ignore"):
        if option in values and type(values[option]) is not int:
            raise ValueError(f"data.fields.{where}.{option}: got {values[option]!r}, want an int.")
    if type(values.get("fps", 0)) not in (int, float):
        raise ValueError(f"data.fields.{where}.fps: got {values['fps']!r}, want a number.")
    if not isinstance(values.get("exif", False), bool):
        raise ValueError(f"data.fields.{where}.exif: got {values['exif']!r}, want true or false.")
    if "decoder" in values:
        values["decoder"] = _decoder(where, values["decoder"])
    return Field(ext, **values)


def _rgb(where: str, option: str, value: Any) -> tuple[float, float, float]:
    if not (_is_list(value, 3) and all(type(number) in (int, float) and math.isfinite(number) for number in value)):
        raise ValueError(f"data.fields.{where}.{option}: got {value!r}, want three numbers, red, green and blue.")
    return float(value[0]), float(value[1]), float(value[2])


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == length


def _decoder(field: str, value: Any) -> Callable[[bytes], Any]:
    where = f"data.fields.{field}.decoder"
    if isinstance(value, str):
        module, _, attribute = value.rpartition(".")
        if not module:
            raise ValueError(f"{where}: got {value!r}, want a dotted path such as my_package.my_function.")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{where}: {value!r} cannot be imported: {error}.") from error
    elif isinstance(value, Mapping):
        from dtrain.config.instantiate import by_target

        value = by_target(where, value)
    if isinstance(value, type) or not callable(value):
        raise ValueError(
            f"{where}: got {value!r}, want a function of the member's bytes. An object of a class, or a function with "
            "arguments, is built by _target_ (functions with _partial_: true)."
        )
    decoder: Callable[[bytes], Any] = value
    return decoder
