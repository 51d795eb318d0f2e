"""``python -m dtrain.pack imagefolder``: list, plan, write, publish, tell."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from dtrain.packing import image_folder
from dtrain.packing.command import Command, as_json
from dtrain.packing.preset import print_command, write_preset
from dtrain.packing.sizes import ShardSize, tar_bytes
from dtrain.packing.unfinished import unfinished

_CLASSES = "classes.json"


def pack_images(options: Namespace, console: Console) -> None:
    """``imagefolder SRC DST``.

    Raises:
        ValueError: If an option or a file is wrong.
        OSError: If a file cannot be read, or ``DST`` holds other shards or is full.
    """
    command = Command(options, ShardSize(samples=1000), console)
    source, destination = options.source, command.destination
    if destination.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{destination} lies inside {source}, where it would be read as a class. Choose another DST.")
    folder = image_folder.scan(
        source,
        command.on_bad,
        prefix=command.prefix,
        shares=command.shares,
        seed=options.seed,
        classes=_known_classes(destination),
    )
    with closing(folder):
        images = {split: f"{len(listing)} ({listing.digest()})" for split, listing in folder.splits.items()}
        plan = command.plan(command="imagefolder", images=images, verify=options.verify)
        written = {}
        with unfinished(destination, folder.splits, plan) as work:
            for split, listing in folder.splits.items():
                # RandomState, because its numbers are frozen over numpy's versions; default_rng's may change.
                order = np.random.RandomState(options.seed).permutation(len(listing))
                sample_bytes = tar_bytes(np.asarray(listing.sizes)[order]) + tar_bytes(1)
                cut = command.size.cut(len(listing), sample_bytes)
                make = partial(_images, listing, order, options.verify)
                written[split] = command.write(work, split, cut, make, int(np.sum(sample_bytes)))
            work.publish({_CLASSES: as_json(folder.classes)})
            bad_files = command.bad_files + sum(its.left_out for its in written.values())
            command.summarise(written, f"classes: {len(folder.classes):,}", f"bad files: {bad_files:,}")
            image = {"name": "image", "role": "image"}
            label = {"name": "label", "role": "label"}
            write_preset(destination, {";".join(sorted(folder.extensions)): image, "cls": label})
    print(
        "  images of unequal sizes need a size there, {name: image, role: image, size: 224}, or an augmentation that crops"
    )
    print_command(destination, f"model=small_cnn model.classes={len(folder.classes)}")


def _images(
    listing: image_folder.Listing, order: np.ndarray, verify: bool, start: int, stop: int
) -> image_folder.Images:
    return image_folder.Images([listing[number] for number in order[start:stop].tolist()], verify)


def _known_classes(destination: Path) -> list[str] | None:
    """The classes of what was packed there before, so that labels agree between splits that are packed one by one."""
    path = destination / _CLASSES
    if not path.exists():
        return None
    classes = json.loads(path.read_text("utf-8"))
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"{path} is not a list of class names. Delete it, or choose another DST.")
    return classes
