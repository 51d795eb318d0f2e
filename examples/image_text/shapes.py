"""Writes a small dataset of images with captions as shards: ``KEY.jpg``, ``KEY.txt`` and ``KEY.json``, as img2dataset does.

    python examples/image_text/shapes.py shapes

An image shows one shape on a background. Its caption, such as "a large red circle at the top left, on blue", is in the txt, and
in the json under ``caption``.
"""

from __future__ import annotations

import argparse
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from dtrain.data.writer import write_shards

COLOURS = ("red", "green", "blue", "yellow", "magenta", "cyan", "white", "black")
SHAPES = ("circle", "square", "triangle")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
SIDE = 32  # pixels


def write(folder: Path, train: int = 2400, test: int = 300) -> None:
    """Writes ``train-*.tar`` and ``test-*.tar``; no caption occurs twice."""
    sizes = {"small": 4, "large": 7}
    every = [each for each in itertools.product(sizes, COLOURS, SHAPES, ROWS, COLUMNS, COLOURS) if each[1] != each[5]]
    chosen = np.random.default_rng(0).permutation(len(every))[: train + test]

    def samples(numbers: np.ndarray) -> Iterator[dict[str, Any]]:
        for number in numbers:
            size, colour, shape, row, column, background = every[number]
            caption = f"a {size} {colour} {shape} at the {row} {column}, on {background}"
            centre = (6 + 10 * COLUMNS.index(column), 6 + 10 * ROWS.index(row))
            image = draw(shape, colour, background, centre, sizes[size])
            yield {
                "__key__": f"{number:05d}",
                "jpg": image,
                "txt": caption,
                "json": {"caption": caption, "shape": shape},
            }

    write_shards(samples(chosen[:train]), folder, prefix="train", shards=8, total=train)
    write_shards(samples(chosen[train:]), folder, prefix="test", shards=2, total=test)


def draw(shape: str, colour: str, background: str, centre: tuple[int, int], radius: int) -> bytes:
    """A JPEG of ``SIDE`` x ``SIDE`` pixels."""
    image = Image.new("RGB", (SIDE, SIDE), background)
    (x, y), pen = centre, ImageDraw.Draw(image)
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=95, subsampling=0)
    return stream.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
