"""Descriptions and small models for the tests of ``dtrain.export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.export import artefact
from dtrain.export.description import Description
from dtrain.export.program import ImageInput, Program, RowSpec

CPU = torch.device("cpu")
IMAGE = ImageInput("image", (8, 8), (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))


def described(stored_as: str = "safetensors", dtype: str = "fp32", **attributes: Any) -> Description:
    """A description with the given attributes; the others are empty."""
    empty: dict[str, Any] = {
        "model": {},
        "keep_fp32": [],
        "folded": [],
        "input": None,
        "rows": None,
        "classes": None,
        "device": "cpu",
        "source": {},
        "versions": {},
    }
    return Description(stored_as=stored_as, dtype=dtype, **(empty | attributes))


def write_linear(out: Path, stored_as: str = "safetensors", width: int = 3) -> Path:
    """Writes an fp32 artefact of an ``nn.Linear`` to ``out``."""
    program = Program(nn.Linear(width, width).eval().requires_grad_(False), None, torch.float32).eval()
    node = {"_target_": "torch.nn.Linear", "in_features": width, "out_features": width}
    with artefact.replacing(out) as folder:
        description = described(stored_as, model=node, rows=RowSpec("float32", (width,)))
        artefact.write(folder, program, description, torch.zeros(2, width))
    return out


class Branching(nn.Module):
    """Cannot be traced: branches on values."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows if rows.sum() > 0 else -rows
