"""How a sample looks on the page: pictures, masks, boxes, curves, texts and labels, by the role and shape of each value.

* An *image* is shown as it is stored, and as the model gets it before it is normalised.
* A *mask* is a plane of integers, in one colour for each number, on the image if it has its size.
* *Boxes* are rows of four numbers with the role ``coord``: pixels of the picture, or shares of it if none is above 1.
* *Tokens* are decoded by the tokenizer next to the shards, and cut where its end-of-text token is.
* Other planes of numbers are grey pictures, other rows of numbers curves, and the rest is text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dtrain.data.fields.field import Field
from dtrain.data.fields.tokenizers import Corpus, Tokenizer, tokenizer_of
from dtrain.data.sources.mixture import SOURCE
from dtrain.report.gallery import Box, Card, Curve, Picture, Text
from dtrain.report.style import format_number
from dtrain.show.split import Row

#: Formats of boxes: two corners; corner and size; centre and size.
BOX_FORMATS = ("xyxy", "xywh", "cxcywh")
_LEAST_SIDE = 4  # of a plane that is shown as a picture
_LEAST_CURVE = 8  # numbers
_MOST_CURVES, _MOST_FRAMES, _MOST_BOXES, _MOST_CLASSES = 2, 4, 100, 3
_MOST_CHARACTERS, _MOST_TOKENS = 1500, 600
_MOST_LISTED = 16  # numbers
_MANY_GREYS = 64  # different values of a plane of uint8 that is no mask
_MASK_STRENGTH = 0.55


@dataclass(frozen=True)
class Looks:
    """What is known of the values.

    Attributes:
        classes: Name of each class; None if they have none.
        corpus: Description of the tokens of the shards; None if there is none.
        tokenizer: Its tokenizer; None shows the numbers of tokens.
        boxes: One of ``BOX_FORMATS``.
    """

    classes: Sequence[str] | None = None
    corpus: Corpus | None = None
    tokenizer: Tokenizer | None = None
    boxes: str = "xyxy"

    def card(self, row: Row, stored: Mapping[str, Any], fields: Sequence[Field]) -> Card:
        """A sample as it is stored and as the model gets it.

        Args:
            row: The sample as the model gets it.
            stored: Its stored values; {} if there are none, as in a stream.
            fields: The fields of its source.
        """
        pictures: list[Picture] = []
        curves: list[Curve] = []
        texts: list[Text] = []
        facts: list[tuple[str, str]] = []
        by_name = {field.name: field for field in fields}
        skipped = {column for field in fields for column in field.columns[1:]} | {SOURCE}
        image = next((field.name for field in fields if field.role == "image"), "")
        boxes = [field.name for field in fields if field.role == "coord"]
        for name in dict.fromkeys((*by_name, *row.values)):
            if name in skipped:
                continue
            field, seen, before = by_name.get(name), row.values.get(name), stored.get(name)
            title = "" if name == image else f"{name} "
            role = field.role if field is not None else None
            if role == "image":
                pictures += self._image(f"{title}stored", before, stored, boxes)
                pictures += self._image(f"{title}seen", seen, row.values, boxes)
            elif role == "video":
                pictures += _frames(name, seen)
            elif role == "audio":
                curves += _waves(f"{name} stored", before)
                curves += _waves(f"{name} seen", seen, row.values.get(f"{name}_mask"))
            elif field is not None and _are_tokens(field, seen if seen is not None else before):
                texts.append(self._tokens(field, seen if seen is not None else before, row.values))
            elif (plane := _plane(seen if seen is not None else before)) is not None:
                pictures += _planes(name, plane, row.values.get(image))
            else:
                self._other(name, field, seen if seen is not None else before, curves, texts, facts)
        return Card(row.key, pictures, curves, texts, facts, row.problem)

    def class_name(self, number: int) -> str:
        """``cat`` or, without names, ``3``."""
        if self.classes is not None and 0 <= number < len(self.classes):
            return self.classes[number]
        return str(number)

    def _image(self, caption: str, pixels: Any, values: Mapping[str, Any], boxes: Sequence[str]) -> Iterator[Picture]:
        if isinstance(pixels, np.ndarray) and pixels.ndim == 3 and pixels.size:
            height, width = pixels.shape[:2]
            drawn = [box for name in boxes for box in boxes_of(values.get(name), (width, height), self.boxes)]
            yield Picture.from_pixels(pixels, f"{caption} {width} x {height}", drawn)

    def _tokens(self, field: Field, tokens: Any, values: Mapping[str, Any]) -> Text:
        numbers = np.asarray(tokens).astype(np.int64)
        tokenizer = self.tokenizer
        end = self.corpus.end_of_text if self.corpus is not None else None
        padding = self.corpus.padding if self.corpus is not None else None
        if field.tokenizer is not None:
            tokenizer = tokenizer_of(field.tokenizer)
            end, padding = tokenizer.end_of_text, None
        mask = values.get(f"{field.name}_mask")
        filled = int(np.count_nonzero(mask)) if mask is not None else len(numbers)
        if padding is not None and mask is None:
            used = np.flatnonzero(numbers != padding)
            filled = int(used[-1]) + 1 if used.size else 0
            filled += filled < len(numbers) and padding == end  # the first one ends the last document
        shown = numbers[: min(filled, _MOST_TOKENS)]
        cuts = np.flatnonzero(shown == end) if end is not None else np.zeros(0, np.int64)
        documents = [_decoded(tokenizer, piece[piece != end]) for piece in np.split(shown, cuts)]
        more = [
            f"{filled - len(shown):,} more tokens" if filled > len(shown) else "",
            f"{len(numbers) - filled:,} tokens of padding" if filled < len(numbers) else "",
        ]
        return Text(f"{field.name}: {len(numbers):,} tokens", documents, ", ".join(filter(None, more)))

    def _other(
        self,
        name: str,
        field: Field | None,
        value: Any,
        curves: list[Curve],
        texts: list[Text],
        facts: list[tuple[str, str]],
    ) -> None:
        numbers = _numbers(value)
        if value is None:
            return
        if isinstance(value, str):
            more = f"{len(value) - _MOST_CHARACTERS:,} more characters" * (len(value) > _MOST_CHARACTERS)
            texts.append(Text(name, [value[:_MOST_CHARACTERS]], more))
        elif isinstance(value, (bytes, memoryview)):
            facts.append((name, f"{len(value):,} bytes"))
        elif numbers is None:
            facts.append((name, str(value)))
        elif field is not None and field.role == "label":
            facts.append((name, self._label(numbers)))
        elif numbers.ndim == 1 and len(numbers) >= _LEAST_CURVE and numbers.dtype.kind == "f":
            curves.append(Curve.from_values(numbers, f"{name}: {_range(numbers)}"))
        else:
            facts.append((name, _listed(numbers)))

    def _label(self, numbers: np.ndarray) -> str:
        """The class, or the most probable classes after mixup or cutmix."""
        if numbers.ndim == 0:
            return self.class_name(int(numbers)) if numbers.dtype.kind in "iub" else format_number(float(numbers))
        if numbers.ndim == 1 and numbers.dtype.kind == "f":
            best = [int(number) for number in np.argsort(-numbers)[:_MOST_CLASSES] if numbers[number] > 0]
            return ", ".join(f"{self.class_name(number)} {numbers[number]:.2f}" for number in best)
        return _listed(numbers)


def boxes_of(value: Any, size: tuple[int, int], form: str) -> list[Box]:
    """The boxes of a value with the role ``coord``; [] if it is something else, such as key points.

    Args:
        value: Numbers, shape ``[4]`` or ``[boxes, 4]``; rows without area are left out.
        size: Width and height of the picture in pixels.
        form: One of ``BOX_FORMATS``.
    """
    numbers = _numbers(value)
    if numbers is None or numbers.ndim not in (1, 2) or numbers.shape[-1] != 4:
        return []
    rows = numbers.reshape(-1, 4).astype(np.float64)[:_MOST_BOXES]
    rows = rows[np.isfinite(rows).all(axis=1)]
    if not rows.size:
        return []
    shares = rows / ((1, 1, 1, 1) if rows.max() <= 1 else (*size, *size))
    first, second = shares[:, :2], shares[:, 2:]
    if form == "xyxy":
        start, extent = first, second - first
    else:
        start, extent = (first if form == "xywh" else first - second / 2), second
    each = np.concatenate([start, extent], axis=1).round(5).tolist()
    return [Box(*box) for box in each if box[2] > 0 and box[3] > 0]


def coloured(mask: np.ndarray) -> np.ndarray:
    """One colour for each number, uint8 ``[height, width, 3]``: 0 is black, neighbours differ."""
    numbers = mask.astype(np.int64) % 256
    hue = np.arange(256) * 0.61803398875 % 1  # the golden ratio spreads them evenly
    angle = 2 * math.pi * (hue[:, np.newaxis] + np.array([0, 1 / 3, 2 / 3]))
    colours = (140 + 110 * np.cos(angle)).round().astype(np.uint8)
    colours[0] = 0
    return np.asarray(colours[numbers])


def _planes(name: str, plane: np.ndarray, image: Any) -> Iterator[Picture]:
    height, width = plane.shape
    is_mask = plane.dtype.kind in "iub" and len(np.unique(plane)) <= _MANY_GREYS
    if not is_mask:
        yield Picture.from_pixels(_grey(plane), f"{name} {_range(plane)}")
        return
    colours = coloured(plane)
    caption = f"{name} {width} x {height}, values {', '.join(map(str, np.unique(plane)[:8].tolist()))}"
    if isinstance(image, np.ndarray) and image.shape[:2] == plane.shape:
        share = np.where(plane != 0, _MASK_STRENGTH, 0.0)[:, :, np.newaxis]
        colours = (image * (1 - share) + colours * share).round().astype(np.uint8)
        caption += ", on the image"
    yield Picture.from_pixels(colours, caption)


def _frames(name: str, video: Any) -> Iterator[Picture]:
    if isinstance(video, np.ndarray) and video.ndim == 4:
        for number in np.unique(np.linspace(0, len(video) - 1, _MOST_FRAMES).astype(np.int64)).tolist():
            frame = video[number]
            yield Picture.from_pixels(frame.transpose(1, 2, 0), f"{name} frame {number} of {len(video)}")


def _waves(caption: str, sound: Any, mask: Any = None) -> Iterator[Curve]:
    numbers = _numbers(sound)
    if numbers is not None and numbers.ndim in (1, 2) and numbers.size:
        stop = None if mask is None else int(np.count_nonzero(mask))
        for channel in np.atleast_2d(numbers)[:_MOST_CURVES]:
            yield Curve.from_values(channel, f"{caption}: {len(channel):,} values, {_range(channel[:stop])}", stop)


def _are_tokens(field: Field, value: Any) -> bool:
    if field.tokenizer is not None:
        return value is not None and _numbers(value) is not None
    numbers = _numbers(value)
    return field.kind == "raw" and numbers is not None and numbers.ndim == 1 and numbers.dtype.kind in "iu"


def _decoded(tokenizer: Tokenizer | None, tokens: np.ndarray) -> str:
    if tokenizer is not None:
        return tokenizer.decode(tokens.tolist())
    if tokens.dtype == np.uint8 or (tokens.size and tokens.min() >= 0 and tokens.max() < 256):
        with suppress(UnicodeDecodeError):
            return bytes(tokens.tolist()).decode()
    return " ".join(map(str, tokens.tolist()))


def _plane(value: Any) -> np.ndarray | None:
    """Numbers of two axes that are large enough for a picture, without axes of length 1."""
    numbers = _numbers(value)
    if numbers is None:
        return None
    numbers = numbers.squeeze() if numbers.ndim > 2 else numbers
    return numbers if numbers.ndim == 2 and min(numbers.shape) >= _LEAST_SIDE else None


def _numbers(value: Any) -> np.ndarray | None:
    """An array of numbers; None if the value is something else."""
    if isinstance(value, Tensor):
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    if isinstance(value, (bool, int, float, np.generic)):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        return None
    return value


def _grey(plane: np.ndarray) -> np.ndarray:
    """The plane scaled to grey levels by its smallest and largest finite value."""
    values = plane.astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    scaled = (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) / ((high - low) or 1)
    return (255 * scaled).round().clip(0, 255).astype(np.uint8)


def _range(numbers: np.ndarray) -> str:
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return "no finite value"
    return f"{format_number(float(finite.min()))} to {format_number(float(finite.max()))}"


def _listed(numbers: np.ndarray) -> str:
    text: str = np.array2string(
        numbers.squeeze(), threshold=_MOST_LISTED, separator=", ", formatter={"all": "{:.4g}".format}
    )
    return " ".join(text.split())
