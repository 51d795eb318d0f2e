"""Predicts with an artefact: the classes of images, or the continuation of a text.

* ``dtrain predict ARTEFACT IMAGE...`` prints ``file  class  probability``, the most probable class first. If a file
  cannot be used, an error is printed, the other files are still predicted, and the exit code is 1.
* ``dtrain predict ARTEFACT --prompt TEXT`` prints the text and its continuation by a language model.
* ARTEFACT is a folder, or ``hf://ORGANISATION/NAME[@REVISION]`` for one on the Hugging Face hub.

The exit code is 2 for wrong arguments.
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

from dtrain.console import until_reader_leaves
from dtrain.data.fields.field import SampleError
from dtrain.errors import ConfigError, escape_on_stdout, printable
from dtrain.export import artefact
from dtrain.export.artefact import Artefact
from dtrain.export.description import DESCRIPTION
from dtrain.export.hub import local_folder
from dtrain.export.program import ImageInput
from dtrain.export.text import Sampling, continue_text


@dataclass(frozen=True)
class Ranking:
    """The most probable classes of one file, or the reason why there are none.

    Attributes:
        file: Path, as on the command line.
        classes: (number, name, probability), most probable first.
        error: Reason why there are none; else empty.
    """

    file: str
    classes: tuple[tuple[int, str, float], ...] = ()
    error: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Predicts all files; returns the exit code."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)  # also files after an option
    escape_on_stdout()
    if bool(options.images) == (options.prompt is not None):
        parser.error("want image files, or --prompt TEXT for a language model")
    failed = False
    try:
        device = torch.device(options.device) if options.device else None
        folder = local_folder(options.artefact)
        model = artefact.load(folder, device, trust=options.trust)
        for warning in model.warnings:
            _print_error(f"predict: {warning}")
        with until_reader_leaves():
            if options.prompt is not None:
                _print_text(options, folder, model)
            for ranking in (
                rank_classes(model, options.images, options.top, options.batch_size) if options.images else ()
            ):
                failed |= bool(ranking.error)
                _print_ranking(ranking, options.json)
    except ConfigError as error:
        _print_error(f"predict: error: {error}")
        return 1
    return int(failed)


def rank_classes(model: Artefact, files: Sequence[str], top: int, batch_size: int) -> Iterator[Ranking]:
    """Predicts files, in order.

    Args:
        model: The artefact.
        files: Paths of images.
        top: Number of classes for each file; all if the model has fewer.
        batch_size: Files of one forward. If images keep their own size, they are predicted one by one.

    Raises:
        ConfigError: If the model does not take images, or takes images from a custom decoder; or its outputs are not
            ``[rows, classes]`` with at least two classes.
    """
    image = model.description.input
    if image is None:
        remedy = "It is a language model: use --prompt TEXT." if model.description.tokenizer else ""
        raise ConfigError(
            f"the artefact's model does not take images, so dtrain predict cannot use it. {remedy}".rstrip()
        )
    if image.own_decoder:
        raise ConfigError(
            f"the model was trained on {image.field!r} with a custom decoder (data.fields), which the artefact does not "
            "contain. Decode the files yourself and call dtrain.export.artefact.load(...).outputs(pixels)."
        )
    files_at_once = batch_size if image.size is not None else 1
    for start in range(0, len(files), files_at_once):
        chunk = files[start : start + files_at_once]
        decoded = [_decode(file, image) for file in chunk]
        pixels = [item for item in decoded if isinstance(item, np.ndarray)]
        predictions: Iterator[tuple[tuple[int, str, float], ...]] = iter(())
        try:
            if pixels:
                predictions = iter(_most_probable(model, np.stack(pixels), top))
        except RuntimeError as error:
            shape = list(pixels[0].shape)
            failure = f"the model fails on {len(pixels)} x {shape} pixels ({str(error).splitlines()[0]})"
            decoded = [item if isinstance(item, str) else failure for item in decoded]
        for file, item in zip(chunk, decoded, strict=True):
            if isinstance(item, str):
                yield Ranking(file, error=item)
            elif classes := next(predictions):
                yield Ranking(file, classes)
            else:
                yield Ranking(file, error="the model's outputs are not finite")


def _decode(file: str, image: ImageInput) -> np.ndarray | str:
    """The pixels of a file, or the reason why it cannot be read."""
    try:
        return image.decode(Path(file).read_bytes())
    except SampleError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)


def _most_probable(model: Artefact, pixels: np.ndarray, top: int) -> list[tuple[tuple[int, str, float], ...]]:
    """(number, name, probability) of the ``top`` classes of each image; empty where an output is not finite."""
    outputs = model.outputs(torch.from_numpy(pixels))
    if outputs.dim() != 2 or len(outputs) != len(pixels) or outputs.shape[1] < 2:
        raise ConfigError(
            f"the model returns outputs {list(outputs.shape)} for {len(pixels)} images, but probabilities need [rows, classes] "
            "with two classes or more. Call dtrain.export.artefact.load(...).outputs(pixels) instead."
        )
    names = model.description.classes
    if names is not None and len(names) != outputs.shape[1]:
        raise ConfigError(
            f"the artefact has names for {len(names)} classes, but its model has {outputs.shape[1]} outputs. Correct "
            f"'classes' in {DESCRIPTION}, or set it to null."
        )
    probabilities, numbers = outputs.softmax(1).topk(min(top, outputs.shape[1]))
    all_finite = outputs.isfinite().all(1).tolist()
    return [
        tuple((n, names[n] if names is not None else str(n), p) for n, p in zip(*row, strict=True)) if finite else ()
        for finite, *row in zip(all_finite, numbers.tolist(), probabilities.tolist(), strict=True)
    ]


def _print_ranking(ranking: Ranking, as_json: bool) -> None:
    if ranking.error:
        _print_error(f"predict: {printable(ranking.file)}: {ranking.error}")
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
        print(f"{printable(ranking.file)}  {printable(name)}  {probability:.4f}", flush=True)


def _print_text(options: argparse.Namespace, folder: Path, model: Artefact) -> None:
    sampling = Sampling(options.tokens, options.temperature, options.top_k or None, options.seed)
    text = continue_text(folder, model, options.prompt, sampling)
    if sys.stdout.isatty() and not options.json:  # a model may have learned sequences that control a terminal
        text = printable(text, keep="\n\t")
    print(json.dumps({"prompt": options.prompt, "text": text}) if options.json else text, flush=True)


def _print_error(text: str) -> None:
    print(printable(text, keep="\n"), file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtrain predict",
        description="Classifies image files, or continues a text, with a model that dtrain export wrote.",
    )
    parser.add_argument(
        "artefact",
        metavar="ARTEFACT",
        help="folder that dtrain export wrote, or hf://ORGANISATION/NAME[@REVISION] for one on the Hugging Face hub",
    )
    parser.add_argument("images", metavar="IMAGE", nargs="*", help="JPEG, PNG, WebP, BMP, GIF, TIFF, PPM or AVIF file")
    parser.add_argument("--prompt", metavar="TEXT", help="text that a language model continues; instead of images")
    parser.add_argument(
        "--tokens", type=_positive, default=100, metavar="N", help="maximum number of tokens to generate (default: 100)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="divides the logits; 0: always the most probable token; 1: as trained (default)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=40,
        metavar="K",
        help="sample from the K most probable tokens (default: 40; 0: all)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the sampling (default: 0)")
    parser.add_argument(
        "--top",
        type=_positive,
        default=1,
        metavar="K",
        help="print the K most probable classes of an image (default: 1)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line, also for files that cannot be used"
    )
    parser.add_argument(
        "--batch-size", type=_positive, default=32, metavar="N", help="number of files in one forward (default: 32)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="device to compute on (default: cuda if available, cpu for onnx)"
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also run an artefact of a different user that may run any code: a program that contains code (pt2, aotinductor), "
        "or a model that names anything but classes of torch.nn, torch.optim and dtrain",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
