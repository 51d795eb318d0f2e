"""``python -m dtrain.predict ARTEFACT IMAGE...``: the classes that an exported model sees in image files.

Prints ``file  class  probability``, most probable first. A file that cannot be used is named on standard error, the
others are still predicted; the exit code is 1 then, and 2 for a wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dtrain.config.errors import ConfigError
from dtrain.data.fields import SampleError
from dtrain.deployment import artefact
from dtrain.deployment.artefact import Artefact
from dtrain.deployment.image_input import ImageInput


@dataclass(frozen=True)
class Ranking:
    """The most probable classes of one file, or why there are none.

    Attributes:
        file: As it was named.
        classes: (number, name, probability), most probable first.
        error: Why it could not be used; empty if it could.
    """

    file: str
    classes: tuple[tuple[int, str, float], ...] = ()
    error: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Predicts all files; returns the exit code."""
    options = _parser().parse_args(arguments)
    failed = False
    try:
        device = torch.device(options.device) if options.device else None
        model = artefact.load(options.artefact, device, trust=options.trust)
        for warning in model.warnings:
            _say(f"predict: {warning}")
        for ranking in rank(model, options.images, options.top, options.batch_size):
            failed |= bool(ranking.error)
            _print(ranking, options.json)
    except ConfigError as error:
        _say(f"predict: error: {error}")
        return 1
    return int(failed)


def rank(model: Artefact, files: Sequence[str], top: int, batch_size: int) -> Iterator[Ranking]:
    """Predicts files in their order.

    Args:
        model: The artefact.
        files: Paths of images.
        top: How many classes of each; all if there are fewer.
        batch_size: Files of one forward; images that keep their own size go one by one.

    Raises:
        ConfigError: If the model takes no images, or those of a decoder of its own; or its outputs are not one number for each
            of several classes.
    """
    wanted = model.description.input
    if wanted is None:
        raise ConfigError("the artefact's model does not take an image as it is, so there is nothing to predict here.")
    if wanted.own_decoder:
        raise ConfigError(
            f"the model was trained on {wanted.field!r} as a decoder of its own (data.fields) made it of files, and the "
            "artefact does not have it. Decode them yourself and call dtrain.deployment.artefact.load(...).outputs(pixels)."
        )
    at_once = batch_size if wanted.size is not None else 1
    for start in range(0, len(files), at_once):
        chunk = files[start : start + at_once]
        read = [_read(file, wanted) for file in chunk]
        pixels = [item for item in read if isinstance(item, np.ndarray)]
        found: Iterator[tuple[tuple[int, str, float], ...]] = iter(())
        try:
            if pixels:
                found = iter(_most_probable(model, np.stack(pixels), top))
        except RuntimeError as error:
            fails = f"the model fails on {len(pixels)} x {list(pixels[0].shape)} pixels ({str(error).splitlines()[0]})"
            read = [item if isinstance(item, str) else fails for item in read]
        for file, item in zip(chunk, read, strict=True):
            if isinstance(item, str):
                yield Ranking(file, error=item)
            elif classes := next(found):
                yield Ranking(file, classes)
            else:
                yield Ranking(file, error="the model's outputs are not finite")


def _read(file: str, wanted: ImageInput) -> np.ndarray | str:
    """The pixels of a file, or why it has none."""
    try:
        return wanted.decode(Path(file).read_bytes())
    except SampleError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)


def _most_probable(model: Artefact, pixels: np.ndarray, top: int) -> list[tuple[tuple[int, str, float], ...]]:
    """(number, name, probability) of the ``top`` classes of each image; none where an output is not finite."""
    outputs = model.outputs(torch.from_numpy(pixels))
    if outputs.dim() != 2 or len(outputs) != len(pixels) or outputs.shape[1] < 2:
        raise ConfigError(
            f"the model gives outputs {list(outputs.shape)} for {len(pixels)} images. Probabilities need [rows, classes] "
            "with two classes or more."
        )
    names = model.description.classes
    if names is not None and len(names) != outputs.shape[1]:
        raise ConfigError(
            f"the artefact names {len(names)} classes, its model has {outputs.shape[1]} outputs. Correct 'classes' in "
            f"{artefact.DESCRIPTION}, or make it null."
        )
    probabilities, numbers = outputs.softmax(1).topk(min(top, outputs.shape[1]))
    usable = outputs.isfinite().all(1).tolist()
    return [
        tuple((n, names[n] if names is not None else str(n), p) for n, p in zip(*row, strict=True)) if finite else ()
        for finite, *row in zip(usable, numbers.tolist(), probabilities.tolist(), strict=True)
    ]


def _print(ranking: Ranking, as_json: bool) -> None:
    if ranking.error:
        _say(f"predict: {ranking.file}: {ranking.error}")
    if as_json:
        content: dict[str, object] = {"file": ranking.file}
        if ranking.error:
            content["error"] = ranking.error
        else:
            content["predictions"] = [
                {"label": label, "class": name, "probability": probability}
                for label, name, probability in ranking.classes
            ]
        print(json.dumps(content), flush=True)
        return
    for _, name, probability in ranking.classes:
        print(f"{ranking.file}  {name}  {probability:.4f}", flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtrain.predict", description="Classify image files with a model that dtrain.export wrote."
    )
    parser.add_argument("artefact", metavar="ARTEFACT", type=Path, help="folder that dtrain.export wrote")
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="JPEG, PNG, WebP, BMP, GIF, TIFF, PPM or AVIF file")
    parser.add_argument("--top", type=_positive, default=1, metavar="K", help="show the K most probable (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, files that failed included")
    parser.add_argument(
        "--batch-size", type=_positive, default=32, metavar="N", help="files of one forward (default 32)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to compute (default: cuda where there is one, cpu for onnx)"
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also run an artefact that could do anything: a program with code of its own (pt2, aotinductor), or a model "
        "that is built by something else than a torch.nn.Module class",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
