"""``python -m dtrain.deployment.replay ARTEFACT ROWS OUTPUTS DEVICE``: the fresh process of an export's comparison.

Loads the artefact as any user would, runs it on ``rows`` of one safetensors file and writes ``outputs``, fp32, to another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

from dtrain.config.errors import ConfigError
from dtrain.deployment import artefact
from dtrain.deployment.comparison import ROWS


def main(arguments: Sequence[str]) -> int:
    """Runs one artefact; returns the exit code."""
    folder, rows, outputs, device = arguments
    try:
        # Made by the process that waits for this one, from a config that it trusts.
        loaded = artefact.load(Path(folder), torch.device(device), trust=True)
        parts = [loaded.outputs(part).cpu() for part in safetensors.torch.load_file(rows)["rows"].split(ROWS)]
    except (ConfigError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    safetensors.torch.save_file({"outputs": torch.cat(parts)}, outputs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
