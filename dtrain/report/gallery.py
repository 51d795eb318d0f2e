"""A page of samples: pictures, boxes, curves and texts, with tables of facts above them.

* A *card* shows one sample: its pictures next to each other, its curves, its texts, and its other values.
* A *part* is a section of the page: findings, tables and cards.

``dtrain show`` and ``dtrain replay`` build the parts, and ``gallery.html.j2`` lays them out. Pictures are encoded here: small
ones as PNG, and enlarged without smoothing; large ones as JPEG, reduced to what a page can show.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from dtrain.report.shell import render

#: Longest side in pixels of a picture on a page.
MOST_PIXELS = 256
_LOSSLESS_PIXELS = 64 * 64
_SHOWN_WIDTH, _SHOWN_HEIGHT = 136, 200  # CSS pixels
_POINTS = 400  # of a curve: more than its width on any page


@dataclass(frozen=True)
class Box:
    """A rectangle on a picture; all numbers are shares of its width or height."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class Picture:
    """An encoded picture.

    Attributes:
        content: Bytes of the file.
        mime: Its type, such as ``image/png``.
        size: Width and height in pixels before it was reduced.
        caption: What it is.
        boxes: Rectangles that are drawn on it.
    """

    content: bytes
    mime: str
    size: tuple[int, int]
    caption: str = ""
    boxes: Sequence[Box] = ()

    @classmethod
    def from_pixels(cls, pixels: np.ndarray, caption: str = "", boxes: Sequence[Box] = ()) -> Picture:
        """Encodes pixels.

        Args:
            pixels: uint8, RGB ``[height, width, 3]`` or grey ``[height, width]``.
            caption: What they are.
            boxes: Rectangles to be drawn.
        """
        image = Image.fromarray(np.ascontiguousarray(pixels))
        size, file = image.size, io.BytesIO()
        if image.width * image.height <= _LOSSLESS_PIXELS:
            image.save(file, "PNG")
            return cls(file.getvalue(), "image/png", size, caption, boxes)
        image.thumbnail((MOST_PIXELS, MOST_PIXELS))
        image.save(file, "JPEG", quality=90)
        return cls(file.getvalue(), "image/jpeg", size, caption, boxes)

    @property
    def shown(self) -> tuple[int, int]:
        """Width and height on the page, in CSS pixels."""
        width, height = self.size
        scale = min(_SHOWN_WIDTH / width, _SHOWN_HEIGHT / height)
        return max(1, round(width * scale)), max(1, round(height * scale))

    @property
    def is_enlarged(self) -> bool:
        """Whether its pixels are larger than those of the page."""
        return self.shown[0] > self.size[0]


@dataclass(frozen=True)
class Curve:
    """Numbers over their index, such as a waveform.

    Attributes:
        caption: What they are.
        path: The line, as ``d`` of an SVG path within 0 to 100 in both directions.
    """

    caption: str
    path: str

    @classmethod
    def from_values(cls, values: np.ndarray, caption: str, stop: int | None = None) -> Curve:
        """Lays out numbers; of many, the smallest and largest of each stretch are joined, so that no peak is lost.

        Args:
            values: Shape ``[n]``; values that are not finite are left out.
            caption: What they are.
            stop: Draw the first ``stop`` of them, at their place; the rest is padding. None: all.
        """
        values = np.asarray(values, np.float64)
        drawn = values[:stop]
        finite = drawn[np.isfinite(drawn)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        low, high = (low - 1, high + 1) if low == high else (low, high)
        stretch = max(1, -(-len(values) // _POINTS))
        commands, pen = [], "M"
        for first in range(0, len(drawn), stretch):
            piece = drawn[first : first + stretch]
            piece = piece[np.isfinite(piece)]
            if not piece.size:
                pen = "M"
                continue
            for value in dict.fromkeys((float(piece.min()), float(piece.max()))):
                x, y = 100 * first / max(1, len(values) - 1), 100 * (high - value) / (high - low)
                commands.append(f"{pen}{x:.2f} {y:.2f}")
                pen = "L"
        return cls(caption, "".join(commands))


@dataclass(frozen=True)
class Text:
    """A text, cut at the borders of its documents.

    Attributes:
        caption: What it is.
        documents: Its documents, the last one without an end.
        more: What follows and is not shown, such as ``12 tokens of padding``.
    """

    caption: str
    documents: Sequence[str]
    more: str = ""


@dataclass(frozen=True)
class Card:
    """One sample.

    Attributes:
        title: Its key.
        pictures: Its pictures.
        curves: Its curves.
        texts: Its texts.
        facts: Names and texts of other values.
        problem: Why it is bad; "" if it is not.
    """

    title: str
    pictures: Sequence[Picture] = ()
    curves: Sequence[Curve] = ()
    texts: Sequence[Text] = ()
    facts: Sequence[tuple[str, str]] = ()
    problem: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        heading: Its columns.
        rows: Cells of each row; the first one is its name.
        numbers: Indexes of columns with numbers.
        shares: For each row the length of a bar in its last column, from 0 to 1; empty for no bars.
        caption: A sentence above it.
    """

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    shares: Sequence[float] = ()
    caption: str = ""


@dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        heading: Its heading; "" for none.
        note: Sentences below it.
        findings: Level (``ok``, ``warning`` or ``error``) and text of each.
        tables: Its tables.
        cards: Its samples.
    """

    heading: str
    note: str = ""
    findings: Sequence[tuple[str, str]] = field(default_factory=list)
    tables: Sequence[Table] = ()
    cards: Sequence[Card] = ()


def gallery_page(title: str, made: str, now: float, parts: Sequence[Part]) -> str:
    """The page as HTML.

    Args:
        title: Its heading.
        made: What it is, before its date: ``dtrain show of``.
        now: Unix seconds of the page.
        parts: Its sections.
    """
    return render("gallery.html.j2", title, made, now, parts=parts)
