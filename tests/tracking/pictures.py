"""PNG files for tests."""

import io

import numpy as np
from PIL import Image


def png(width, height, value=200):
    """A picture of one grey."""
    file = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()
