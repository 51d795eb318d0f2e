"""The config of what was packed: a file that Hydra finds, so that nobody has to type fields on a command line."""

from __future__ import annotations

import glob
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.tracking.atomic import replacing

_PLACE = Path("conf/data/packed.yaml")
_HELD_OUT = ("val", "valid", "validation", "test")


def write_preset(destination: Path, fields: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes ``conf/data/packed.yaml``: the shards of the folder, and their fields; prints how to train on it.

    Args:
        destination: Folder of the shards.
        fields: As ``data.fields`` has them.
    """
    splits = sorted({path.name.rpartition("-")[0] for path in destination.glob("*-??????.tar")})
    train = "train" if "train" in splits else splits[0]
    held_out = next((name for name in _HELD_OUT if name in splits and name != train), None)
    folder = destination.resolve()
    shards = glob.escape(str(folder))
    # JSON is YAML, and quotes whatever a path may hold.
    lines = [
        f"# {', '.join(splits)}: packed by `python -m dtrain.pack`. Used with --config-dir {folder / 'conf'} data=packed",
        f"train: {json.dumps(f'{shards}/{train}-*.tar')}",
        f"eval: {json.dumps(f'{shards}/{held_out}-*.tar' if held_out else None)}",
        "fields:",
        *(f"  {json.dumps(extension)}: {_options(options)}" for extension, options in fields.items()),
        "num_workers: 2",
    ]
    place = destination / _PLACE
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place) as file:
        file.write("\n".join([*lines, ""]).encode())
    print(f"data.fields, in {place}:")
    print("\n".join(f"  {extension}: {_options(options)}" for extension, options in fields.items()))


def print_command(destination: Path, model_and_task: str) -> None:
    """Prints the command that trains on it."""
    print("train on it:")
    print(
        f"  torchrun --standalone --nproc-per-node=2 -m dtrain.train --config-dir "
        f"{shlex.quote(str(destination / 'conf'))} data=packed {model_and_task} train.max_epochs=1"
    )


def _options(options: Mapping[str, Any]) -> str:
    return f"{{{', '.join(f'{name}: {value}' for name, value in options.items())}}}"
