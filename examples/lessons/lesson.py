"""Shared by all lessons: their command line, and their last lines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError:
    sys.exit("The lessons draw their pictures with matplotlib, which is not installed: pip install matplotlib")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a lesson: the option ``--out``, and the lesson's docstring as help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=_folder, default=Path("."), help="folder of the picture")
    return parser


def finish(figure: Figure, file: Path, *sentences: str) -> None:
    """Writes the picture, and prints its name and the conclusion of the lesson."""
    figure.savefig(file, dpi=110)
    print("", file, *sentences, sep="\n")


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder. Make it first, or leave --out away for this one")
    return Path(text)
