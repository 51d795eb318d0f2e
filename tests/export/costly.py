"""A model of known memory and time for each row, and artefacts of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.export import artefact
from dtrain.export.description import Description
from dtrain.export.program import Program, RowSpec
from dtrain.precision import Precision
from tests.export.helpers import described

ROWS = RowSpec("float32", (3,))
MIB = 16  # of a row of Costly
MILLISECONDS = 2.0


class Costly(nn.Module):
    """Takes a known memory and time for each row, prints, and raises or exits at given numbers of rows."""

    def __init__(self, raises_at: int = 10**9, exits_at: int = 10**9) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self._raises_at, self._exits_at = raises_at, exits_at

    def forward(self, x: Tensor) -> Tensor:
        print("a model may print")
        if len(x) >= self._exits_at:
            raise SystemExit(7)
        if len(x) >= self._raises_at:
            raise RuntimeError(f"{len(x)} rows are too many")
        memory = torch.ones(len(x), MIB * 2**18)
        time.sleep(len(x) * MILLISECONDS / 1e3)
        return x * self.weight + 0 * memory[:, :3]


def costly_description(dtype: str, **model: Any) -> Description:
    return described(dtype=dtype, model={"_target_": f"{__name__}.Costly", **model}, rows=ROWS)


def write_costly(folder: Path, dtype: str = "fp32", **model: Any) -> Path:
    folder.mkdir()
    compute = Precision(dtype).compute_dtype
    program = Program(Costly(**model).to(compute), None, compute)
    artefact.write(folder, program, costly_description(dtype, **model), None)
    return folder
