"""Writes a folder of photos to practise on: crops of the two photographs in scikit-learn, in four classes. No download.

    python examples/photos.py scenes         # scenes/{lake,leaves,petals,temple}/000.jpg ...

Crops differ in size, position and brightness, as photos do. All are cut from the same two photographs, so the classes are easy
to tell apart, and an accuracy on them says nothing about a model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image

#: For each class: the photograph, and the region from which crops are cut: left, top, right, bottom, in pixels.
PARTS = {
    "lake": ("china.jpg", (0, 0, 260, 130)),
    "leaves": ("flower.jpg", (0, 0, 220, 427)),
    "petals": ("flower.jpg", (250, 60, 520, 330)),
    "temple": ("china.jpg", (280, 120, 640, 350)),
}


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=100, help="photos of each class (default: 100)")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    for name, (photograph, box) in PARTS.items():
        part = Image.fromarray(load_sample_image(photograph)).crop(box)
        (options.folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(options.each):
            width, height = (int(rng.integers(64, side + 1)) for side in (min(part.width, 200), min(part.height, 200)))
            left, top = int(rng.integers(part.width - width + 1)), int(rng.integers(part.height - height + 1))
            brightness = rng.uniform(0.7, 1.2)
            photo = part.crop((left, top, left + width, top + height)).point(lambda value, by=brightness: value * by)
            photo.save(options.folder / name / f"{number:03}.jpg", quality=90)


if __name__ == "__main__":
    main()
