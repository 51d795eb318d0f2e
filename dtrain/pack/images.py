"""``dtrain pack imagefolder``: a folder of images, one folder for each class, as shards in random order.

* A *split* is ``SRC/train/CLASS/...``. Without such folders, ``SRC/CLASS/...`` is one split.
* The *label* of a class is its position in the sorted list of class names, as in torchvision's ``ImageFolder``.
* A *listing* holds paths, keys and labels of the images of a split. It is stored in a temporary file, because millions of
  paths as Python objects would take gigabytes. In memory an image takes 16 bytes, and 24 bytes while the order is drawn.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from argparse import Namespace
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from dtrain.data.fields.decode import check_image, decode_image
from dtrain.data.fields.field import KINDS, SampleError
from dtrain.data.writer import Sample
from dtrain.files import replace_file
from dtrain.pack.command import (
    PRESET,
    PackCommand,
    ShardSize,
    as_json,
    assign_to_splits,
    check_shares,
    permutation,
    print_train_command,
    splits_of,
    tar_bytes,
    write_preset,
)
from dtrain.pack.resizing import QUALITY, Resizing
from dtrain.pack.staging import OnBadFile, SampleProducer, staged

#: Folder names that are read as splits.
SPLITS = ("train", "val", "valid", "validation", "test")
_CLASSES = "classes.json"
# One extension for each format, so that one field of the config matches all images.
_SAME_FORMAT = {"jpeg": "jpg", "tiff": "tif"}
# Besides hidden files: what Windows and macOS put into folders and archives of photos.
_OF_THE_SYSTEM = ("thumbs.db", "desktop.ini", "icon\r", "__macosx")
# The sizes of at most this many images, evenly spread, decide whether the preset resizes them.
_MEASURED = 5_000
# Largest size to which images of different sizes are resized: the input size of most published models.
_LARGEST_DEFAULT = 224
# First part of the names of files in the staging folder with the number of resized images in a shard.
_COUNTS = ".resized-"
# Resizing one byte of a JPEG takes about as long as writing this many bytes.
_RESIZING_WORK = 32


def pack_images(options: Namespace, console: Console) -> None:
    """Runs ``pack imagefolder SRC DST``.

    Raises:
        ValueError: If an option or a file is wrong.
        OSError: If a file cannot be read, ``DST`` holds other shards, or the disk is full.
    """
    command = PackCommand(options, ShardSize(samples=1000), console)
    resizing = _resizing(options)
    source, destination = options.source, command.destination
    if destination.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{destination} is inside {source} and would be read as a class. Choose a different DST.")
    with closing(_scan(source, command, options.seed, _stored_classes(destination))) as folder:
        images = {split: f"{len(listing)} ({listing.digest()})" for split, listing in folder.splits.items()}
        plan = command.plan(command="imagefolder", images=images, verify=options.verify)
        if resizing is not None:
            plan["resizing"] = vars(resizing)
        if command.is_finished(plan):
            return
        written = {}
        with staged(destination, folder.splits, plan) as dataset:
            for split, listing in folder.splits.items():
                order = permutation(len(listing), options.seed)
                sample_bytes = tar_bytes(np.asarray(listing.sizes)[order]) + tar_bytes(1)
                bounds = command.size.bounds(len(listing), sample_bytes)
                counts = dataset.folder / f"{_COUNTS}{split}"
                make_producer = partial(_image_reader, listing, order, options.verify, resizing, counts)
                work = int(np.sum(sample_bytes)) * (1 if resizing is None else _RESIZING_WORK)
                written[split] = command.write(dataset, split, bounds, make_producer, work)
            resized = _resized_images(dataset.folder, folder) if resizing is not None else ""
            dataset.publish({_CLASSES: as_json(folder.classes)})
            command.print_summary(
                written,
                f"classes: {len(folder.classes):,}",
                f"unreadable images: {sum(its.skipped for its in written.values()):,}",
                f"other files: {command.skipped:,}",
                f"ignored (hidden or of the system): {folder.ignored:,}",
            )
            if resized:
                print(resized)
            _write_preset(destination, folder, resizing)
    print_train_command(destination, ["model=small_cnn", f"model.classes={len(folder.classes)}"])


def _resizing(options: Namespace) -> Resizing | None:
    """The options ``--max-side`` and ``--quality``; None without them."""
    if options.max_side is None:
        if options.quality is not None:
            raise ValueError(
                f"--quality {options.quality}: is for images that are resized. Add --max-side, or leave it out."
            )
        return None
    if options.shard_mb is not None:
        raise ValueError(
            f"--shard-mb {options.shard_mb}: the sizes of resized images are not known before they are packed. Use "
            "--samples-per-shard or --shards with --max-side."
        )
    return Resizing(options.max_side, QUALITY if options.quality is None else options.quality)


def _resized_images(staging: Path, folder: _ImageFolder) -> str:
    """A line about the resized images of all shards; ``folder`` gets the extensions of the images in them."""
    counts = sum((Counter(json.loads(path.read_bytes())) for path in staging.glob(f"{_COUNTS}*")), Counter[str]())
    images = {name.removeprefix("."): number for name, number in counts.items() if name.startswith(".")}
    folder.extensions = set(images)
    before, after = (f"{counts[name] / 1e6:,.1f} MB" for name in ("bytes before", "bytes after"))
    return f"resized images: {counts['resized']:,} of {sum(images.values()):,}, {before} -> {after}"


def _write_preset(destination: Path, folder: _ImageFolder, resizing: Resizing | None) -> None:
    image: dict[str, Any] = {"name": "image", "role": "image", "exif": True}
    keys = {}
    smallest, largest, size = _measure(folder, resizing)
    stored = _stored_preset(destination, folder)
    if "image_size" in stored or smallest != largest:
        size = stored.get("image_size", size)
        image["size"], keys["image_size"] = "${data.image_size}", size
        note = (
            f"images have {smallest[0]} x {smallest[1]} to {largest[0]} x {largest[1]} pixels and are resized to {size} x "
            f"{size}: change data.image_size there or in a command, or add an augmentation that crops"
        )
    else:
        note = f"images have {smallest[0]} x {smallest[1]} pixels"
        if stored or len(folder) > _MEASURED:  # images that were not measured may have a different size
            image["size"] = list(smallest)
    extensions = folder.extensions.union(*(ext.split(";") for ext in stored.get("fields", {}) if ext != "cls"))
    label = {"name": "label", "role": "label"}
    write_preset(destination, {";".join(sorted(extensions)): image, "cls": label}, **keys)
    print(f"  {note}")


def _stored_preset(destination: Path, folder: _ImageFolder) -> dict[str, Any]:
    """The preset of an earlier command that packed other splits into the same folder."""
    path = destination / PRESET
    if not path.exists() or set(splits_of(destination)) <= set(folder.splits):
        return {}
    return dict(yaml.safe_load(path.read_text("utf-8")))


def _measure(folder: _ImageFolder, resizing: Resizing | None) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Height and width of the smallest and the largest packed image, and the size that the preset resizes them to."""
    sizes = []
    for listing in folder.splits.values():
        for number in np.unique(np.linspace(0, len(listing) - 1, min(len(listing), _MEASURED)).astype(int)).tolist():
            with suppress(SampleError, OSError):  # skipped when it was packed
                size = check_image(Path(listing[number].path).read_bytes(), exif=True)
                sizes.append(size if resizing is None else resizing.size(*size))
    by_area = sorted(sizes, key=lambda size: (size[0] * size[1], size))
    if not by_area:
        return (0, 0), (0, 0), _LARGEST_DEFAULT
    side = min(int(np.median([min(size) for size in sizes])), _LARGEST_DEFAULT)
    return by_area[0], by_area[-1], side // 8 * 8 if side > 16 else side


# -- listings


@dataclass(frozen=True)
class _Entry:
    """Path, key and label of one image."""

    path: str
    key: str
    label: int


class _Listing:
    """A list of entries in a temporary file: first filled with ``append``, then read by number."""

    def __init__(self) -> None:
        self.sizes = array("q")  # of the image files, in bytes
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._ends = array("q", [0])
        self._hash = hashlib.sha256()

    def append(self, entry: _Entry) -> None:
        status = os.stat(entry.path)
        self.sizes.append(status.st_size)
        self._hash.update(json.dumps([entry.key, entry.label, status.st_size, status.st_mtime_ns]).encode())
        # JSON, because it also restores file names that are not UTF-8.
        line = json.dumps([entry.path, entry.key, entry.label]).encode()
        self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> _Entry:
        self._file.flush()
        start, end = self._ends[number], self._ends[number + 1]
        return _Entry(*json.loads(os.pread(self._file.fileno(), end - start, start)))

    def digest(self) -> str:
        """Hash of keys, labels, file sizes and modification times."""
        return self._hash.hexdigest()[:16]

    def close(self) -> None:
        self._file.close()


@dataclass
class _ImageFolder:
    """The images of a folder."""

    classes: list[str]  # the position of a name is its label
    splits: dict[str, _Listing] = field(default_factory=dict)
    extensions: set[str] = field(default_factory=set)  # of the images in the shards
    ignored: int = 0  # files and folders that are hidden or of the system

    def __len__(self) -> int:
        return sum(map(len, self.splits.values()))

    def close(self) -> None:
        for listing in self.splits.values():
            listing.close()


def _scan(source: Path, command: PackCommand, seed: int, classes: list[str] | None) -> _ImageFolder:
    """Lists the images in the order of their names; ``classes`` come from an earlier command with the same DST."""
    on_bad_file, prefix, shares = command.on_bad_file, command.prefix, command.shares
    if not source.is_dir():
        raise FileNotFoundError(
            f"{source} is not a folder. Expected a folder with one folder of images for each class."
        )
    roots = _split_folders(source, on_bad_file)
    if roots and shares:
        raise ValueError(f"{source} already has the splits {', '.join(roots)}. Leave out --split and --val.")
    check_shares(prefix, shares)
    found = {split: _class_folders(root, on_bad_file) for split, root in (roots or {prefix: source}).items()}
    result = _ImageFolder(classes or _common_classes(found))
    for folder in {source, *(roots or {}).values()}:
        result.ignored += sum(_is_ignored(path.name) for path in folder.iterdir())
    labels = {name: label for label, name in enumerate(result.classes)}
    for split, folders in found.items():
        for name in (split, *shares):
            result.splits[name] = _Listing()
        for folder in folders:
            if folder.name not in labels:
                raise ValueError(
                    f"{folder}: there is no class {folder.name!r} among {', '.join(labels)}, which were packed into the same "
                    "DST before. Rename the folder, or choose a different DST."
                )
            _list_class(result, split, folder, labels[folder.name], on_bad_file, shares, seed)
    empty = [split for split, listing in result.splits.items() if not len(listing)]
    if empty:
        raise ValueError(
            f"{source} has no image for the split {empty[0]!r}. Add images, or increase the share of the split."
        )
    return result


def _split_folders(source: Path, on_bad_file: OnBadFile) -> dict[str, Path]:
    """The folders that are splits; empty if the folders are classes."""
    folders = [path for path in _visible(source) if path.is_dir()]
    splits = [path for path in folders if path.name in SPLITS and any(inner.is_dir() for inner in path.iterdir())]
    if not splits:
        return {}
    others = [path.name for path in folders if path not in splits]
    if others:
        raise ValueError(
            f"{source} has the splits {', '.join(path.name for path in splits)} and a folder {others[0]!r}, which is none "
            f"of {', '.join(SPLITS)}. Pack each split by itself, or move {others[0]!r} away."
        )
    for path in _visible(source):
        if not path.is_dir():
            on_bad_file(path, "is next to the folders of the splits")
    return {name: source / name for name in SPLITS if source / name in splits}


def _visible(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if not _is_ignored(path.name)]


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name.lower() in _OF_THE_SYSTEM


def _class_folders(root: Path, on_bad_file: OnBadFile) -> list[Path]:
    folders = []
    for path in _visible(root):
        if path.is_dir():
            folders.append(path)
        else:
            on_bad_file(path, "is next to the folders of the classes")
    if not folders:
        raise ValueError(f"{root} has no folder. Expected one folder of images for each class.")
    return folders


def _common_classes(found: Mapping[str, list[Path]]) -> list[str]:
    names = {split: {folder.name for folder in folders} for split, folders in found.items()}
    everything = sorted(set().union(*names.values()))
    unknown = sorted(set(everything) - names["train"]) if "train" in names else []
    if unknown:
        raise ValueError(
            f"the class {unknown[0]!r} has no folder in train, so the model cannot learn it. Add the folder to train, or "
            "remove it from the other splits."
        )
    return everything


def _list_class(
    result: _ImageFolder,
    split: str,
    folder: Path,
    label: int,
    on_bad_file: OnBadFile,
    shares: Mapping[str, float],
    seed: int,
) -> None:
    entries = list(_entries(result, folder, label, on_bad_file))
    result.extensions.update(_extension(entry.path) for entry in entries)
    for name, numbers in assign_to_splits(permutation(len(entries), [seed, label]), split, shares).items():
        for number in numbers.tolist():
            result.splits[name].append(entries[number])


def _entries(result: _ImageFolder, folder: Path, label: int, on_bad_file: OnBadFile) -> Iterator[_Entry]:
    """The images below the folder of a class, sorted, with unique keys."""
    keys: set[str] = set()
    for path in _files(result, folder):
        if KINDS.get(_extension(path)) != "image":
            on_bad_file(Path(path), "its name is not an image's")
            continue
        below, name = os.path.split(os.path.relpath(path, folder.parent))
        # In a shard the key ends at the first dot, so dots are replaced. Keys that would be equal then get a number.
        stem = f"{below}/{os.path.splitext(name)[0].replace('.', '_')}"
        key, copies = stem, 0
        while key in keys:
            copies += 1
            key = f"{stem}-{copies}"
        keys.add(key)
        yield _Entry(path, key, label)


def _files(result: _ImageFolder, folder: Path) -> Iterator[str]:
    seen = set()
    # Links are followed, because folders of images are often links.
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            raise ValueError(
                f"{root} is a link to {real}, which was read before: its images would count twice. Remove the link."
            )
        seen.add(real)
        visible = sorted(name for name in names if not _is_ignored(name))
        result.ignored += len(names) + len(folders) - len(visible)
        folders[:] = sorted(name for name in folders if not _is_ignored(name))
        result.ignored -= len(folders)
        for name in visible:
            yield os.path.join(root, name)


def _raise(error: OSError) -> None:
    raise error


def _extension(path: str) -> str:
    ext = os.path.splitext(path)[1][1:].lower()
    return _SAME_FORMAT.get(ext, ext)


def _image_reader(
    listing: _Listing,
    order: np.ndarray,
    verify: bool,
    resizing: Resizing | None,
    counts: Path,
    start: int,
    stop: int,
) -> SampleProducer:
    entries = [listing[number] for number in order[start:stop].tolist()]
    return partial(_read_images, entries, verify, resizing, counts.with_name(f"{counts.name}-{start}"))


def _read_images(
    entries: Sequence[_Entry], verify: bool, resizing: Resizing | None, counts_path: Path, on_bad_file: OnBadFile
) -> Iterator[Sample]:
    """The samples of one shard; files that are not images are reported, all others copied unchanged or resized.

    With ``resizing``, stores at ``counts_path`` how many images were resized, and their bytes.
    """
    counts = Counter[str]()
    for entry in entries:
        original = Path(entry.path).read_bytes()
        payload, extension = original, _extension(entry.path)
        try:
            if verify:
                decode_image(original)
            if resizing is None:
                check_image(original)
            elif (resized := resizing.apply(original)) is not None:
                payload, extension = resized
                counts["resized"] += 1
        except SampleError as error:
            on_bad_file(Path(entry.path), str(error))
            continue
        counts.update({"bytes before": len(original), "bytes after": len(payload), f".{extension}": 1})
        yield {"__key__": entry.key, extension: payload, "cls": entry.label}
    if resizing is not None:
        # Before the shard is complete, so that a command that resumes has the counts of each shard that it finds.
        with replace_file(counts_path) as file:
            file.write(json.dumps(counts).encode())


def _stored_classes(destination: Path) -> list[str] | None:
    """The classes of an earlier command with the same destination, so that labels agree between its splits."""
    path = destination / _CLASSES
    if not path.exists():
        return None
    classes = json.loads(path.read_text("utf-8"))
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"{path} is not a list of class names. Delete it, or choose a different DST.")
    return classes
