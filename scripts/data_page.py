"""Writes the tables of fields in docs/data.md, between its two markers: kinds of members, roles, and options, from the code.

    python scripts/data_page.py

The meaning of an option is its entry in the docstring of ``dtrain.data.fields.Field``; kinds and roles are described here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from dtrain.data.fields import KINDS, PICKLES, RAW_DTYPES, Field
from dtrain.precision.policy import ROLES, Precision

PAGE = Path(__file__).resolve().parents[1] / "docs" / "data.md"
BEGIN = "<!-- fields: written by `python scripts/data_page.py` from dtrain/data/fields.py -->"
END = "<!-- fields: end -->"
#: What the batch has of each kind of member.
_VALUES = {
    "image": "images, see the role `image`; the format is recognised by the content",
    "integer": "int64 `[rows]`",
    "text": "list of strings; with `tokenizer`, tokens",
    "json": "the value at `key`, by role; without a role, a list of the parsed values",
    "array": "a tensor `[rows, ...]`; all samples of a batch need one shape",
    "bytes": "list of bytes",
}
_ROLES = {
    "image": "a picture: uint8 `[height, width, 3]` in workers and augmentations; on the device `[rows, 3, height, width]`, "
    "normalised by `mean` and `std`",
    "feature": "numbers that are an input of the model",
    "label": "class numbers",
    "target": "numbers to be predicted",
    "coord": "coordinates, such as boxes and key points",
    "weight": "weights of samples",
    "id": "identifiers and tokens",
    "text": "text; with `tokenizer`, rows of tokens and their mask",
    "bytes": "the member's bytes, for the task",
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
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: no description. Write one in scripts/data_page.py, or in the docstring of Field."
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
    roles = [(f"`{role}`", meaning, _transfer(role)) for role, meaning in _ROLES.items()]
    rows = [(f"`{field.name}`", _default(field), meanings[field.name]) for field in options]
    return "\n".join(
        [
            BEGIN,
            "",
            "**Members.** The last part of a member's extension says how it is read (`left.jpg` is an image):\n",
            _table(("extension", "implied role", "in the batch"), kinds),
            "**Roles.** The role says what the values are, and so their dtype on the way to the device:\n",
            _table(("role", "meaning", "transfer dtype"), roles),
            "**Options** of a field, `data.fields.EXTENSION={name: NAME, OPTION: VALUE, ...}`:\n",
            _table(("option", "default", "meaning"), rows),
            END,
        ]
    )


def _meanings() -> dict[str, str]:
    """The entries of ``Args`` in the docstring of ``Field``."""
    arguments = (inspect.getdoc(Field) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in entries}


def _implied(extensions: list[str]) -> str:
    roles = {ext: Field(ext, "x").role for ext in extensions}
    names = sorted({role for role in roles.values() if role is not None})
    if len(set(roles.values())) == 1:
        return f"`{names[0]}`" if names else "none"
    return "; ".join(
        f"`{name}` for {' '.join(f'`{ext}`' for ext, role in roles.items() if role == name)}" for name in names
    )


def _transfer(role: str) -> str:
    dtypes = {Precision(name).transfer_dtype(role) for name in ("fp32", "bf16")}
    if dtypes == {None}:
        return "as stored"
    return str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else "the compute dtype of the run's precision"


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
