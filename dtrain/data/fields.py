"""What a sample is made of: the vocabulary of the public ``fields`` mapping.

* A *field* is one member of each sample, found by its extension and handed to the task under a name.
* Its *role* says what it is, which decides its wire dtype; common extensions imply one.
* Its *kind* says how its bytes are read; it follows from the extension, unless the role or a decoder decides.
* Rows of tokens for a language model are *raw* numbers: ``{"tok": {"name": "tokens", "dtype": "uint16", "length": 1025}}``
  reads members of exactly 1025 little-endian uint16, without any header, and a task of 1024-token windows makes
  ``tokens[:, :-1].long()`` and ``tokens[:, 1:].long()`` of them on the device.
* A ``SampleError`` says that one sample's bytes are bad: the loader masks that sample. A ``DataError`` says that samples and
  configuration do not go together. That, or anything else that goes wrong, ends the run.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.config.errors import Explained
from dtrain.data.crop import Crop, whole
from dtrain.precision.policy import ROLES

#: How the bytes under an extension are read. Of ``left.jpg`` the last part counts, as in webdataset.
KINDS = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "avif"), "image"),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "class", "count"), "integer"),
    **dict.fromkeys(("txt", "text", "transcript"), "text"),
    **dict.fromkeys(("json", "jsn"), "json"),
    **dict.fromkeys(("npy", "npz"), "array"),
    "bin": "bytes",
}
#: Their content is a program: reading it would run it.
PICKLES = ("pyd", "pth", "pkl", "pickle", "pt", "joblib")
_IMPLIED_ROLES = {"image": "image", "text": "text", "bytes": "bytes", "cls": "label", "cls2": "label", "class": "label"}
_IMAGE_OPTIONS = ("size", "shorter_side", "mean", "std", "exif", "decode")
DECODE = ("full", "reduced")
#: What raw numbers can be; stored little-endian.
RAW_DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class SampleError(ValueError):
    """The bytes of one sample are not what its field says; the text is the reason."""


class DataError(Explained, ValueError):
    """Samples and what they are for do not go together: the fields, the wire, the task, the model."""


class NoSuchField(DataError, KeyError):
    """A batch was asked for a field that it does not have."""

    __str__ = Exception.__str__  # not in quotes, as a KeyError


@dataclass(frozen=True)
class Field:
    """One member of each sample.

    Args:
        ext: Extension in the shard, such as ``jpg``, ``seg.png``, or alternatives of one kind, ``jpg;jpeg;png``.
        name: Key of the batch.
        role: One of ``dtrain.precision.policy.ROLES``; None takes the one that the extension implies, if it does and no
            decoder makes something else of it.
        size: Height and width in pixels that an image is resized to; None keeps its own. An augmentation that begins with
            a crop (``dtrain.data.augment.Cropper``) replaces it.
        shorter_side: Bring the image's shorter side to this many pixels, the other in proportion, and cut ``size`` from
            the middle, as evaluations do (256 and 224). None resizes to ``size``, aspect ratio disregarded.
        mean: Per channel, subtracted on the device from an image scaled to [0, 1].
        std: Per channel, divides it after that.
        decoder: ``decoder(payload: bytes) -> value`` in place of the built-in one.
        exif: Turn an image as its EXIF orientation says.
        decode: ``"full"``, or ``"reduced"``: a JPEG that is to become much smaller is decoded at 1/2, 1/4 or 1/8 of its
            size, as long as that leaves two pixels for each one wanted. Whole photographs of 1 to 12 megapixels become 224
            pixels wide in 20 to 30 % less time, those of 500 x 375 in the same; pixels differ by 0.4 to 1.0 grey levels
            on average.
        dtype: The member is a row of numbers without any header, little-endian, of this type (``RAW_DTYPES``): tokens of
            a language model, for example. They keep their type on the way to the device.
        length: How many numbers each row has: other members are bad samples. None takes what is there.
        kind: How the bytes are read: one of the values of ``KINDS``, or ``"custom"``. Derived.

    Raises:
        ValueError: If a value is impossible, or the options do not go together; names the field.
    """

    ext: str
    name: str
    role: str | None = None
    size: tuple[int, int] | None = None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    decoder: Callable[[bytes], Any] | None = None
    exif: bool = False
    shorter_side: int | None = None
    decode: str = "full"
    dtype: str | None = None
    length: int | None = None
    kind: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError(f"field {self.ext!r} has no name. Give it one, such as name: image.")
        if self.role is not None and self.role not in ROLES:
            raise ValueError(f"field {self.name!r}: role {self.role!r} is unknown{nearest(self.role, ROLES)}")
        kind = self._find_kind()
        object.__setattr__(self, "kind", kind)
        if self.role is None and kind != "custom":
            object.__setattr__(self, "role", self._implied_role(kind))
        if kind == "image" and self.role != "image":
            raise ValueError(
                f"field {self.name!r}: .{self.ext} decodes to three colour channels, which suits the role image, not "
                f"{self.role!r}. For masks or depth give a decoder; role: bytes hands over the file as it is."
            )
        if self.role == "image" and kind not in ("image", "array", "custom"):
            raise ValueError(f"field {self.name!r}: role image, but .{self.ext} holds {kind}. Use another role.")
        if self.role != "image":
            default = {option.name: option.default for option in dataclasses.fields(self)}
            for option in _IMAGE_OPTIONS:
                if getattr(self, option) != default[option]:
                    raise ValueError(
                        f"field {self.name!r}: {option} is for the role image, it has {self.role!r}. Leave {option} "
                        "out or declare role: image."
                    )
        self._check_numbers()

    @property
    def extensions(self) -> tuple[str, ...]:
        """The alternatives of ``ext``, in order of preference."""
        return tuple(self.ext.split(";"))

    @property
    def crop(self) -> Callable[[int, int], Crop] | None:
        """``crop(height, width)`` of an image for its own ``size``; None where it has none."""
        return None if self.size is None else functools.partial(whole, size=self.size, shorter_side=self.shorter_side)

    def _implied_role(self, kind: str) -> str | None:
        if kind == "raw":
            return "id" if np.dtype(self.dtype).kind in "iu" else None
        return _IMPLIED_ROLES.get(kind) or _IMPLIED_ROLES.get(_last(self.extensions[0]))

    def _find_kind(self) -> str:
        self._check_raw()
        kinds = set()
        for ext in self.extensions:
            if not ext or ext != ext.lower() or ext.startswith(".") or "/" in ext:
                raise ValueError(
                    f"field {self.name!r}: extension {ext!r} matches no member. Write it in lower case, without the "
                    "leading dot, and alternatives with a semicolon between them: jpg;jpeg;png."
                )
            kinds.add(self._kind(ext))
        if len(kinds) > 1:
            raise ValueError(
                f"field {self.name!r}: {self.ext!r} mixes {' and '.join(sorted(kinds))}. Alternatives must be read in "
                "the same way; give each its own field, or one decoder for all."
            )
        return kinds.pop()

    def _kind(self, ext: str) -> str:
        if self.dtype is not None:
            return "raw"
        return _kind(self.name, ext, self.role) if self.decoder is None else "custom"

    def _check_raw(self) -> None:
        if self.dtype is None:
            if self.length is not None:
                raise ValueError(f"field {self.name!r}: length {self.length} is for raw numbers. Add dtype: uint16.")
            return
        if self.dtype not in RAW_DTYPES:
            raise ValueError(f"field {self.name!r}: dtype {self.dtype!r} is unknown{nearest(self.dtype, RAW_DTYPES)}")
        if self.decoder is not None or self.role in ("image", "text", "bytes"):
            other = "a decoder of its own" if self.decoder is not None else f"role {self.role!r}"
            raise ValueError(f"field {self.name!r} has dtype {self.dtype}, raw numbers, and {other}. Leave one out.")
        if self.length is not None and self.length < 1:
            raise ValueError(f"field {self.name!r}: length {self.length}, want at least 1 number.")

    def _check_numbers(self) -> None:
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"field {self.name!r}: size {list(self.size)}, want at least 1 pixel each way.")
        if self.shorter_side is not None and (self.size is None or self.shorter_side < max(self.size)):
            raise ValueError(
                f"field {self.name!r}: shorter_side {self.shorter_side} with size {self.size and list(self.size)}. Give a "
                "size that fits into it: the size is cut from the middle of what has that shorter side."
            )
        if self.decode not in DECODE:
            raise ValueError(
                f"field {self.name!r}: decode {self.decode!r} is unknown, want one of {', '.join(DECODE)}."
            )
        for option, values, low in (("mean", self.mean, 0.0), ("std", self.std, 1e-6)):
            if not all(low <= value <= 1 for value in values):
                raise ValueError(
                    f"field {self.name!r}: {option} {list(values)} is outside [{low:g}, 1]. Pixels count from 0 to 1 "
                    "here; divide by 255 what was measured on 0 to 255."
                )


def nearest(got: str, known: Iterable[str]) -> str:
    """The end of an error message: the name that was probably meant, and all that there are."""
    names = list(known)
    match = difflib.get_close_matches(got, names, n=1)
    hint = f"; did you mean {match[0]!r}?" if match else "."
    return f"{hint} Known: {', '.join(names)}."


def _kind(name: str, ext: str, role: str | None) -> str:
    last = _last(ext)
    if last in PICKLES:
        raise ValueError(
            f"field {name!r}: .{ext} is a pickle, which can run any code when it is read; dtrain never does. Store "
            "arrays as npy and the rest as json, or give the field a decoder of your own."
        )
    if role in ("bytes", "text"):
        return role
    if last not in KINDS:
        raise ValueError(
            f"field {name!r}: no decoder for .{ext}{nearest(last, KINDS)} Give the field a decoder (decoder: "
            "my_package.my_function), dtype: uint16 or the like for raw numbers, or role: bytes for the file as it is."
        )
    return KINDS[last]


def _last(ext: str) -> str:
    return ext.rpartition(".")[2]
