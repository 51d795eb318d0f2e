"""A description, for tests of what reads one."""

from __future__ import annotations

from dtrain.deployment.description import Description
from dtrain.deployment.image_input import ImageInput
from dtrain.deployment.program import RowSpec

IMAGE = ImageInput("image", (8, 8), (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))


def described(stored_as: str, dtype: str = "fp32", rows: RowSpec | None = None, device: str = "cpu") -> Description:
    """One with nothing in it but what is given."""
    return Description(stored_as, {}, dtype, [], [], None, rows, None, device, {}, {})
