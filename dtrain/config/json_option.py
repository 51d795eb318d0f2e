"""``--json FILE``: where a command also writes everything that it found."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``, a path or None; a place where no file can be is a wrong usage."""
    parser.add_argument("--json", type=_file, metavar="FILE", help="also write everything to FILE")


def write_json(path: Path | None, content: Any) -> None:
    """Writes what the option asks for; nothing where it was not given."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: is a folder, want a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent}: is not a folder, so {path.name} cannot be written there")
    return path
