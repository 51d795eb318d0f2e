"""Writes the tables of fields in docs/data.md, between its two markers: kinds of members, roles, and options, from the code.

    python scripts/data_page.py

The meaning of an option is its entry in the docstring of ``dtrain.data.fields.Field``; kinds and roles are described here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

from dtrain.data.fields.field import KINDS, PICKLES, RAW_DTYPES, ROLES_OF_OPTIONS, Field
from dtrain.data.fields.parse import _parse_field
from dtrain.precision.policy import ROLES, Precision

PAGE = Path(__file__).resolve().parents[1] / "docs" / "data.md"
BEGIN = "<!-- fields: written by `python scripts/data_page.py` from dtrain/data/fields/field.py -->"
END = "<!-- fields: end -->"
_PRECISIONS = ("fp32", "bf16", "fp16")  # tf32 is as fp32
#: An example of each role and option: an extension and its options.
_EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "image": ("jpg;jpeg;png", {"name": "image", "role": "image", "size": 224}),
    "video": ("mp4", {"name": "clip", "role": "video", "num_frames": 16, "stride": 4, "size": 112}),
    "audio": ("flac", {"name": "sound", "role": "audio", "sample_rate": 16000, "channels": 1, "length": 32000}),
    "feature": ("npy", {"name": "x", "role": "feature"}),
    "label": ("cls", {"name": "label", "role": "label"}),
    "target": ("npy", {"name": "y", "role": "target"}),
    "coord": ("json", {"name": "box", "role": "coord", "key": "annotation.box"}),
    "weight": ("json", {"name": "weight", "role": "weight", "key": "weight"}),
    "id": ("tok", {"name": "tokens", "dtype": "uint16", "length": 1025}),
    "text": ("txt", {"name": "caption", "role": "text", "tokenizer": "bytes", "length": 64}),
    "bytes": ("pth", {"name": "file", "role": "bytes"}),
    "mask": ("png", {"name": "mask", "role": "mask"}),
    "boxes": ("json", {"name": "boxes", "role": "boxes", "key": "boxes", "length": 50}),
    "name": ("cls", {"name": "label"}),
    "role": ("npy", {"name": "x", "role": "feature"}),
    "size": ("jpg", {"name": "image", "size": [224, 320]}),
    "mean": ("jpg", {"name": "image", "mean": [0.485, 0.456, 0.406]}),
    "std": ("jpg", {"name": "image", "std": [0.229, 0.224, 0.225]}),
    "decoder": ("gz", {"name": "file", "decoder": "gzip.decompress"}),
    "exif": ("jpg", {"name": "image", "exif": True}),
    "shorter_side": ("jpg", {"name": "image", "size": 224, "shorter_side": 256}),
    "decode": ("jpg", {"name": "image", "size": 224, "decode": "reduced"}),
    "dtype": ("tok", {"name": "tokens", "dtype": "uint16"}),
    "length": ("tok", {"name": "tokens", "dtype": "uint16", "length": 1025}),
    "key": ("json", {"name": "label", "role": "label", "key": "meta.label"}),
    "tokenizer": (
        "json",
        {"name": "caption", "role": "text", "key": "caption", "tokenizer": "tiktoken:gpt2", "length": 64},
    ),
    "sample_rate": ("wav", {"name": "sound", "sample_rate": 16000}),
    "channels": ("wav", {"name": "sound", "channels": 1}),
    "num_frames": ("mp4", {"name": "clip", "num_frames": 16}),
    "stride": ("mp4", {"name": "clip", "num_frames": 16, "stride": 4}),
    "fps": ("mp4", {"name": "clip", "num_frames": 16, "fps": 7.5}),
    "clip": ("mp4", {"name": "clip", "num_frames": 16, "clip": "random"}),
    "of": ("right.png", {"name": "mask", "role": "mask", "of": "right"}),
    "ignore": ("png", {"name": "mask", "role": "mask", "ignore": 0}),
}
_TYPES = {
    "str": "text",
    "int": "int",
    "float": "number",
    "bool": "bool",
    "tuple[int, int]": "int, or [height, width]",
    "tuple[float, float, float]": "[red, green, blue]",
    "Callable[[bytes], Any]": "dotted path, `_target_`, or function",
}
#: Roles of options that depend on other options too.
_OTHER_ROLES = {
    "dtype": "all but image, video, audio, text, bytes, mask, boxes",
    "length": "text with `tokenizer`, audio, boxes, numbers with `dtype`",
    "key": "all but image, video, audio, bytes, mask",
    "tokenizer": "text",
}
#: What the batch has of each kind of member.
_VALUES = {
    "image": "images, see the role `image`; the format is recognised by the content; `png` also with the role `mask`",
    "integer": "int64 `[rows]`",
    "text": "list of strings; with `tokenizer`, tokens",
    "json": "the value at `key`, by role; without a role, a list of the parsed values",
    "array": "a tensor `[rows, ...]`; all samples of a batch need the same shape",
    "audio": "sound, see the role `audio`",
    "video": "frames, see the role `video`",
    "bytes": "list of bytes",
}
_ROLES = {
    "image": "a picture: uint8 `[height, width, 3]` in workers and augmentations; on the device `[rows, 3, height, width]`, "
    "normalised by `mean` and `std`",
    "video": "frames of a video: uint8 `[num_frames, 3, height, width]` in workers; on the device `[rows, num_frames, 3, "
    "height, width]`, normalised by `mean` and `std`",
    "audio": "sound: floats `[rows, channels, length]` in [-1, 1]; with `length`, cut or padded, with a mask",
    "feature": "numbers that are an input of the model",
    "label": "class numbers",
    "target": "numbers to be predicted",
    "coord": "coordinates, such as boxes and key points",
    "weight": "weights of samples",
    "id": "identifiers and tokens",
    "text": "text; with `tokenizer`, rows of tokens and their mask",
    "bytes": "the member's bytes, for the task",
    "mask": "a number for each pixel of an image, such as its class: integers `[rows, height, width]`, from a grey or palette "
    "PNG or an array; cropped, resized and mirrored together with the image",
    "boxes": "boxes of an image, fp32 `[rows, length, 5]`: left, top, right and bottom edge in pixels and class, padded; "
    "and their number, `NAME_count`; cropped, resized and mirrored together with the image",
}


def tables() -> str:
    """The part of the page between the markers, including them.

    Raises:
        ValueError: If a kind, a role or an option has no description.
    """
    meanings = _meanings()
    options = [field for field in dataclasses.fields(Field) if field.init and field.name != "ext"]
    missing = [*(set(KINDS.values()) ^ set(_VALUES)), *(set(ROLES) ^ set(_ROLES))]
    missing += [field.name for field in options if field.name not in meanings]
    missing += {*ROLES, *(field.name for field in options)} ^ set(_EXAMPLES)
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: no description or example. Write one in scripts/data_page.py, or in the docstring of Field."
        )
    extensions = {kind: [ext for ext, its in KINDS.items() if its == kind] for kind in _VALUES}
    kinds = [
        (" ".join(f"`{ext}`" for ext in extensions[kind]), _implied(extensions[kind]), value)
        for kind, value in _VALUES.items()
    ]
    kinds += [
        ("any, with `dtype`", "`id` for integers", f"a row of numbers without a header: {', '.join(RAW_DTYPES)}"),
        ("any, with `decoder`", "none", "what your function returns for the member's bytes"),
        (
            " ".join(f"`{ext}`" for ext in PICKLES),
            "refused",
            "pickles can run any code; store `npy` or `json`, set a `decoder`, or `role: bytes`, which loads nothing",
        ),
    ]
    roles = [(f"`{role}`", meaning, *_transfer(role), _example(role)) for role, meaning in _ROLES.items()]
    rows = [
        (
            f"`{field.name}`",
            _TYPES[str(field.type).removesuffix(" | None")],
            _default(field),
            _OTHER_ROLES.get(field.name) or ", ".join(ROLES_OF_OPTIONS.get(field.name, ("all",))),
            meanings[field.name],
            _example(field.name),
        )
        for field in options
    ]
    return "\n".join(
        [
            BEGIN,
            "",
            "**Members.** The last part of a member's extension says how it is read (`left.jpg` is an image):\n",
            _table(("extension", "implied role", "in the batch"), kinds),
            "**Roles.** The role says what the values are, and so their *transfer dtype*, in which workers send them:\n",
            _table(("role", "meaning", *(f"`{name}`" for name in _PRECISIONS), "example"), roles),
            "**Options** of a field, `data.fields.EXTENSION={name: NAME, OPTION: VALUE, ...}`:\n",
            _table(("option", "type", "default", "roles", "meaning", "example"), rows),
            END,
        ]
    )


def _meanings() -> dict[str, str]:
    """The entries of ``Args`` in the docstring of ``Field``."""
    arguments = (inspect.getdoc(Field) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in entries}


def _implied(extensions: list[str]) -> str:
    roles = {ext: Field(ext, "x", num_frames=16 if KINDS[ext] == "video" else None).role for ext in extensions}
    names = sorted({role for role in roles.values() if role is not None})
    if len(set(roles.values())) == 1:
        return f"`{names[0]}`" if names else "none"
    return "; ".join(
        f"`{name}` for {' '.join(f'`{ext}`' for ext, role in roles.items() if role == name)}" for name in names
    )


def _transfer(role: str) -> list[str]:
    """The transfer dtype in each precision."""
    dtypes = [Precision(name).transfer_dtype(role) for name in _PRECISIONS]
    return ["as stored" if dtype is None else str(dtype).removeprefix("torch.") for dtype in dtypes]


def _example(name: str) -> str:
    """The example of a role or option, which is parsed to check it."""
    ext, options = _EXAMPLES[name]
    # Not parse_fields, which needs torchcodec for audio and video, and not every tokenizer, which may be downloaded.
    field = _parse_field(ext, ext, options | ({"tokenizer": "bytes"} if "tokenizer" in options else {}))
    if name not in (field.role, *options):
        raise ValueError(f"the example of {name} does not show it: {ext}: {options}.")
    written = ", ".join(
        f"{option}: {str(value).lower() if value is True else value}" for option, value in options.items()
    )
    return f"`{ext}: {{{written}}}`"


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is dataclasses.MISSING:
        return "to be set"
    if field.default is None:
        return "none"
    value = field.default
    text = str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)
    return f"`{text}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def page(old: str) -> str:
    """The page with its tables written anew.

    Raises:
        ValueError: If a marker is missing.
    """
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: no {BEGIN!r} followed by {END!r}.")
    return f"{before}{tables()}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(PAGE)
