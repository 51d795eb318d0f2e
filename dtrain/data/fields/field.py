"""The fields of a sample, as declared by the public ``fields`` mapping.

* A *field* is one member of each sample, found by its extension; the task reads it from the batch under its name.
* Its *role* (image, feature, label, ...) decides its transfer dtype; common extensions imply a role.
* Its *kind* decides how its bytes are decoded; it follows from the extension, or from a role, ``dtype`` or decoder.
* Rows of tokens for a language model are *raw* numbers: ``{"tok": {"name": "tokens", "dtype": "uint16", "length":
  1025}}`` reads members of exactly 1025 little-endian uint16, without any header. A task with a context of 1024 tokens
  takes ``tokens[:, :-1].long()`` as input and ``tokens[:, 1:].long()`` as target, on the device.
* One member may give several fields: its entry in the mapping is then a list. ``key`` selects a value inside json:
  ``{"json": [{"name": "label", "role": "label", "key": "meta.label"}, {"name": "caption", "role": "text", "key":
  "caption"}]}``.
* *Regions* of an image, masks and boxes, are cropped, resized and mirrored together with it (``regions``).
* A ``SampleError`` means that one sample's bytes are bad: the loader masks that sample. A ``DataError`` means that the data
  do not match the configuration; it ends the run, as every other error does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtrain.data.fields.crop import Crop, whole
from dtrain.data.fields.tokenizers import tokenizer_of
from dtrain.errors import Explained, nearest
from dtrain.precision.policy import ROLES

#: Roles of recordings, which are also the kinds of their files.
MEDIA = ("audio", "video")
#: Roles of what moves with an image.
REGIONS = ("mask", "boxes")
#: Extension to kind. Of ``left.jpg`` the last part counts, as in webdataset.
KINDS = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "avif"), "image"),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "class", "count"), "integer"),
    **dict.fromkeys(("txt", "text", "transcript"), "text"),
    **dict.fromkeys(("json", "jsn"), "json"),
    **dict.fromkeys(("npy", "npz"), "array"),
    **dict.fromkeys(("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"), "audio"),
    **dict.fromkeys(("mp4", "mkv", "webm", "mov", "avi"), "video"),
    "bin": "bytes",
}
#: Extensions of pickles, whose content is a program: loading one would run it.
PICKLES = ("pyd", "pth", "pkl", "pickle", "pt", "joblib")
_IMPLIED_ROLES = {
    **{kind: kind for kind in ("image", "text", "bytes", *MEDIA)},
    **dict.fromkeys(("cls", "cls2", "class"), "label"),
}
_VISUAL = ("image", "video")
#: Options that need one of these roles.
ROLES_OF_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("size", "shorter_side", "mean", "std"), _VISUAL),
    **dict.fromkeys(("exif", "decode"), ("image",)),
    **dict.fromkeys(("sample_rate", "channels"), ("audio",)),
    **dict.fromkeys(("num_frames", "stride", "fps"), ("video",)),
    "clip": MEDIA,
    "of": REGIONS,
    "ignore": ("mask",),
}
CLIPS = ("middle", "random")
DECODE = ("full", "reduced")
INT64 = range(-(2**63), 2**63)
#: Types of raw numbers, stored little-endian.
RAW_DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class SampleError(ValueError):
    """One sample is bad: its bytes do not fit its field. The message is the reason."""


class DataError(Explained, ValueError):
    """The data do not match the declared fields, the transfer dtype, the task or the model; ends the run."""


class NoSuchField(DataError, KeyError):
    """A batch has no field of this name."""

    __str__ = Exception.__str__  # not in quotes, as a KeyError


@dataclass(frozen=True)
class Field:
    """One member of each sample.

    Args:
        ext: Extension in the shard, such as ``jpg``, ``seg.png``, or alternatives of one kind, ``jpg;jpeg;png``.
        name: Key of the batch.
        role: What the values are, one of ``dtrain.precision.policy.ROLES``; None: the role that the extension implies, if
            any and if there is no decoder.
        size: Height and width in pixels that an image, or each frame of a video, is resized to; None: no resizing. An
            augmentation that starts with a crop (``dtrain.data.augment.Cropper``) replaces it.
        shorter_side: Resize the image's shorter side to this many pixels, the other in proportion, and cut ``size``
            from the middle, as is usual in evaluation (256 and 224). None resizes to ``size``, ignoring the aspect ratio.
        mean: Mean of each channel, subtracted on the device from an image or video scaled to [0, 1].
        std: Standard deviation of each channel, by which it is then divided.
        decoder: ``decoder(payload: bytes) -> value`` in place of the built-in one.
        exif: Rotate an image as its EXIF orientation says.
        decode: ``"full"``, or ``"reduced"``: a JPEG is decoded at 1/2, 1/4 or 1/8 of its size if that leaves two pixels
            for each pixel of the result. For results of 224 pixels this saves 20 to 30 % of the time for photographs of 1
            to 12 megapixels, and nothing for 500 x 375; pixels differ by 0.4 to 1.0 grey levels on average, by 2 to 7 on
            images of fine textures, because a crop begins at a whole pixel of the reduced image.
        dtype: The member is a row of numbers without any header, little-endian, of this type (``RAW_DTYPES``), such as
            tokens of a language model. They keep their type on the way to the device.
        length: With ``dtype``: numbers of a row; a member of a different length is a bad sample. None accepts
            any length. With ``tokenizer``: tokens of a row; required. With the role audio: samples of a row, cut from a
            longer recording (``clip``); a shorter one is padded with zeros, and the batch then also has ``<name>_mask``,
            bool ``[rows, length]``, false where a row is padded. None keeps all; they must then be equally long. With the role
            boxes: the maximum number of boxes per sample; required. Fewer are padded with zeros, and the batch then also has
            ``<name>_count``, int64 ``[rows]``. A sample with more boxes is a bad sample.
        key: Where the value is inside a json member, such as ``meta.label``; list indices are numbers, ``boxes.0``. The
            roles label and id take integers (or nested lists of equal length of them), as int64; feature, target, coord
            and weight take numbers, as fp32; text takes a string; boxes takes a list of boxes.
        tokenizer: ``bytes``, ``tiktoken:NAME``, ``tokenizers:FILE`` or ``vocabulary:FOLDER`` (of the shards of a text); turns
            the role text into tokens, int64 ``[length]``: the text, cut to ``length - 1`` tokens, its end-of-text token, and
            padding (0). The batch then also has ``<name>_mask``, bool ``[rows, length]``, false where a row is padded.
        sample_rate: Samples per second that audio is resampled to; None keeps the recording's.
        channels: 1 mixes audio down to mono, 2 gives stereo, both as FFmpeg does (left and right are added with a weight of
            0.71 each); None keeps the recording's.
        num_frames: Frames of a video; required. A video that is too short repeats its last frame.
        stride: Takes every n-th frame; 1 takes consecutive frames.
        fps: Instead of ``stride``: frames per second, by the times of the frames in the file.
        clip: Which part of a recording is taken: ``"middle"``; or ``"random"``, drawn for each (seed, epoch, sample), in
            training only: ``data.eval`` always takes the middle.
        of: Name of the image that a mask or boxes belong to; None: the only image of the sample.
        ignore: Value of the pixels that an augmentation adds around a mask, which the task leaves out; from 0 to 255.

    Attributes:
        kind: How the bytes are read: one of the values of ``KINDS``, ``"raw"`` or ``"custom"``. Derived.

    Raises:
        ValueError: If a value is impossible, or options exclude each other; names the field.

    Example:
        >>> from dtrain.data.fields import parse_fields  # builds them from the argument ``fields`` of ShardLoader
        >>> [image, label] = parse_fields({"jpg": {"name": "image", "size": 224}, "cls": {"name": "label"}})
        >>> image.role, image.size, label.role
        ('image', (224, 224), 'label')
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
    key: str | None = None
    tokenizer: str | None = None
    sample_rate: int | None = None
    channels: int | None = None
    num_frames: int | None = None
    stride: int = 1
    fps: float | None = None
    clip: str = "middle"
    of: str | None = None
    ignore: int = 255
    kind: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError(f"field {self.ext!r} has no name. Give it one, such as name: image.")
        if self.role is not None and self.role not in ROLES:
            raise ValueError(f"field {self.name!r}: role {self.role!r} is unknown. {nearest(self.role, ROLES)}")
        kind = self._find_kind()
        object.__setattr__(self, "kind", kind)
        if self.role is None and kind != "custom":
            object.__setattr__(self, "role", self._implied_role(kind))
        if kind == "image" and self.role != "image":
            raise ValueError(
                f"field {self.name!r}: .{self.ext} decodes to three colour channels, which needs the role image, not "
                f"{self.role!r}. For class numbers use a png with role: mask, for depth a decoder; role: bytes returns the "
                "bytes of the file."
            )
        if self.role == "image" and kind not in ("image", "array", "custom", *MEDIA):
            raise ValueError(f"field {self.name!r}: role image, but .{self.ext} holds {kind}. Use a different role.")
        default = {option.name: option.default for option in dataclasses.fields(self)}
        for option, roles in ROLES_OF_OPTIONS.items():
            if self.role not in roles and getattr(self, option) != default[option]:
                raise ValueError(
                    f"field {self.name!r}: {option} needs the role {' or '.join(roles)}, got role {self.role!r}. Remove "
                    f"{option} or declare role: {roles[0]}."
                )
        self._check_media()
        self._check_regions()
        self._check_text()
        self._check_numbers()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the batch that the field gives: ``name``; for padded rows also ``<name>_mask`` or ``<name>_count``."""
        if self.role == "boxes":
            return self.name, f"{self.name}_count"
        padded = self.tokenizer is not None or (self.role == "audio" and self.length is not None)
        return (self.name, f"{self.name}_mask") if padded else (self.name,)

    @property
    def extensions(self) -> tuple[str, ...]:
        """The alternatives of ``ext``, in order of preference."""
        return tuple(self.ext.split(";"))

    @property
    def crop(self) -> Callable[[int, int], Crop] | None:
        """``crop(height, width)`` that brings an image to ``size``; None without a size."""
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
            kinds.add(self._kind_of(ext))
        if len(kinds) > 1:
            raise ValueError(
                f"field {self.name!r}: {self.ext!r} mixes {' and '.join(sorted(kinds))}. Alternatives must be of one kind: "
                "declare a field for each, or one decoder for all."
            )
        return kinds.pop()

    def _kind_of(self, ext: str) -> str:
        if self.key is not None:
            self._check_key(ext)
            return "json"
        if self.dtype is not None:
            return "raw"
        if self.decoder is not None:
            return "custom"
        if self.role == "bytes":
            return "bytes"
        last = _last(ext)
        if last in PICKLES:
            raise ValueError(
                f"field {self.name!r}: .{ext} is a pickle, which can run any code when it is loaded; dtrain never loads one. "
                "Store arrays as npy and other values as json, set a decoder of your own, or role: bytes for its bytes."
            )
        if self.role == "text":
            return "text"
        if self.role == "mask" and last == "png":
            return "mask"
        if last not in KINDS:
            raise ValueError(
                f"field {self.name!r}: no decoder for .{ext}. {nearest(last, KINDS)} Set a decoder (decoder: "
                "my_package.my_function), dtype: uint16 or similar for raw numbers, or role: bytes for the file's bytes."
            )
        return KINDS[last]

    def _check_key(self, ext: str) -> None:
        assert self.key is not None
        if KINDS.get(_last(ext)) != "json" or self.decoder is not None or self.dtype is not None:
            other = "a decoder" if self.decoder is not None else f"dtype {self.dtype}" if self.dtype else f".{ext}"
            raise ValueError(
                f"field {self.name!r}: key {self.key!r} reads a value from json members of shards, but the field has {other}. "
                "Remove one of them; a map-style dataset returns the value itself."
            )
        roles = [role for role in ROLES if role not in ("image", "mask", "bytes", *MEDIA)]
        if self.role not in roles:
            raise ValueError(
                f"field {self.name!r}: key {self.key!r} with role {self.role!r}. Declare what the value is: "
                f"role: {', '.join(roles)}."
            )
        if not all(self.key.split(".")):
            raise ValueError(
                f"field {self.name!r}: key {self.key!r} is not a path. Write names with dots: key: meta.label."
            )

    def _check_media(self) -> None:
        if self.kind in MEDIA and self.role != self.kind:
            raise ValueError(
                f"field {self.name!r}: .{self.ext} is decoded as {self.kind}, which needs the role {self.kind}, not "
                f"{self.role!r}. role: bytes returns the file's bytes."
            )
        if self.role in MEDIA and self.kind not in (self.role, "array", "custom"):
            raise ValueError(
                f"field {self.name!r}: role {self.role}, but .{self.ext} holds {self.kind}. Use a different role."
            )
        if self.clip not in CLIPS:
            raise ValueError(f"field {self.name!r}: clip {self.clip!r} is unknown, want one of {', '.join(CLIPS)}.")
        if self.role == "video" and (self.num_frames is None or (self.fps is not None and self.stride != 1)):
            raise ValueError(
                f"field {self.name!r}: num_frames {self.num_frames}, stride {self.stride}, fps {self.fps}. Set num_frames, "
                "such as num_frames: 16, and at most one of stride and fps."
            )
        for option, high in (
            ("sample_rate", None),
            ("channels", 2),
            ("num_frames", None),
            ("stride", None),
            ("fps", None),
        ):
            value = getattr(self, option)
            if value is not None and not (value > 0 and (high is None or value <= high)):
                raise ValueError(
                    f"field {self.name!r}: {option} {value}, want {'1 or 2' if high else 'a number above 0'}."
                )

    def _check_regions(self) -> None:
        kinds = {"mask": ("mask", "array", "custom"), "boxes": ("json", "array", "custom")}.get(self.role or "")
        if kinds is None:
            return
        if self.kind not in kinds:
            stored = "png (JPEG changes class numbers) or npy" if self.role == "mask" else "json or npy"
            raise ValueError(
                f"field {self.name!r}: role {self.role}, but .{self.ext} holds {self.kind}. Store {stored}, or set a decoder."
            )
        if self.role == "boxes" and self.length is None:
            raise ValueError(
                f"field {self.name!r}: role boxes without length. Set the maximum number of boxes per sample: length: 50."
            )
        if not 0 <= self.ignore <= 255:
            raise ValueError(f"field {self.name!r}: ignore {self.ignore}, want a number from 0 to 255.")

    def _check_text(self) -> None:
        if self.tokenizer is None:
            return
        if self.role != "text":
            raise ValueError(
                f"field {self.name!r}: tokenizer {self.tokenizer!r} needs the role text, got role {self.role!r}. Declare "
                "role: text, or remove tokenizer."
            )
        if self.length is None or self.length < 2:
            raise ValueError(
                f"field {self.name!r}: tokenizer {self.tokenizer!r} with length {self.length}. Set length, the tokens of a "
                "row with the end-of-text token, at least 2: length: 64."
            )
        try:
            if tokenizer_of(self.tokenizer).end_of_text is None:
                raise ValueError(
                    f"tokenizer {self.tokenizer!r} has no end-of-text token, which ends the text of a row. Pack its text with "
                    "--end-of-text, or choose a different tokenizer."
                )
        except (ValueError, OSError, ModuleNotFoundError) as error:
            raise ValueError(f"field {self.name!r}: {error}") from error

    def _check_raw(self) -> None:
        if self.dtype is None:
            return
        if self.dtype not in RAW_DTYPES:
            raise ValueError(f"field {self.name!r}: dtype {self.dtype!r} is unknown. {nearest(self.dtype, RAW_DTYPES)}")
        if self.decoder is not None or self.role in ("image", "text", "bytes", *MEDIA, *REGIONS):
            other = "its own decoder" if self.decoder is not None else f"role {self.role!r}"
            raise ValueError(
                f"field {self.name!r} has dtype {self.dtype}, raw numbers, and {other}. Remove one of them."
            )

    def _check_numbers(self) -> None:
        if self.length is not None and not (self.dtype or self.tokenizer or self.role in ("audio", "boxes")):
            raise ValueError(
                f"field {self.name!r}: length {self.length} needs raw numbers, tokens, audio or boxes. Add dtype: uint16, a "
                "tokenizer, role: audio, or role: boxes."
            )
        if self.length is not None and self.length < 1:
            raise ValueError(f"field {self.name!r}: length {self.length}, want at least 1.")
        if self.size is not None and min(self.size) < 1:
            raise ValueError(f"field {self.name!r}: size {list(self.size)}, want at least 1 pixel each way.")
        if self.shorter_side is not None and (self.size is None or self.shorter_side < max(self.size)):
            raise ValueError(
                f"field {self.name!r}: shorter_side {self.shorter_side} with size {self.size and list(self.size)}. Set a size "
                "that is not larger: it is cut from the middle of the image with that shorter side."
            )
        if self.decode not in DECODE:
            raise ValueError(
                f"field {self.name!r}: decode {self.decode!r} is unknown, want one of {', '.join(DECODE)}."
            )
        for option, values, low in (("mean", self.mean, 0.0), ("std", self.std, 1e-6)):
            if not all(low <= value <= 1 for value in values):
                raise ValueError(
                    f"field {self.name!r}: {option} {list(values)} is outside [{low:g}, 1]. Pixels are scaled to [0, 1] "
                    "first; divide values of the scale 0 to 255 by 255."
                )


def _last(ext: str) -> str:
    return ext.rpartition(".")[2]
