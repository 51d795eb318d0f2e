"""What an evaluation leaves in a folder: everything as JSON, and a picture of the confusion.

The name says what was evaluated, ``step-000000276-ema-bf16-1c4f09ab``: checkpoint, weights, precision, and the first digits
of the data's fingerprint. The same evaluation again replaces it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dtrain import __version__
from dtrain.tracking.atomic import replacing
from dtrain.tracking.evaluated import Evaluated
from dtrain.tracking.per_class import per_class


def write(folder: Path, one: Evaluated, names: Sequence[str] | None) -> list[Path]:
    """Writes the files of one evaluation.

    Args:
        folder: Where to; made if it is not there.
        one: The evaluation.
        names: Of the classes, where they are known.

    Returns:
        The files.

    Raises:
        OSError: If the disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{one.checkpoint.name}-{one.weights}-{one.precision}-{str(one.data['fingerprint'])[:8]}"
    files = {f"{stem}.json": json.dumps(_content(one, names), allow_nan=False).encode()}
    if "confusion" in one.tables:
        # Imported here because it costs half a second that an evaluation without a picture should not pay.
        from dtrain.tracking.confusion import confusion_picture

        files[f"{stem}-confusion.png"] = confusion_picture(one.tables["confusion"], names)
    for name, content in files.items():
        with replacing(folder / name) as file:
            file.write(content)
    return [folder / name for name in files]


def _content(one: Evaluated, names: Sequence[str] | None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "checkpoint": one.checkpoint.name,
        "weights": one.weights,
        "precision": one.precision,
        "data": dict(one.data),
        "config": dict(one.config),
        "ranks": one.ranks,
        "metrics": _finite({f"eval/{name}": value for name, value in one.metrics.items()}),
        "not_finite": [f"eval/{name}" for name in one.not_finite],
        "cost": _finite(one.cost),
        "time": time.time(),
        "versions": {"dtrain": __version__, "torch": torch.__version__},
    }
    if "confusion" in one.tables:
        content["classes"] = [_finite(dataclasses.asdict(each)) for each in per_class(one.tables["confusion"], names)]
    return content | {"tables": {name: table.tolist() for name, table in one.tables.items()}}


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """As in metrics.jsonl: JSON knows neither NaN nor infinity."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
