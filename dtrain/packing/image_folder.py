"""A folder of images, one folder per class, as samples in mixed order.

* A *split* is ``SRC/train/CLASS/...``; without such folders ``SRC/CLASS/...`` is one split.
* A class's *label* is its place among the sorted class names, as in torchvision's ``ImageFolder``.
* A *listing* is where the images of a split are. It lies in a temporary file, since millions of paths as Python objects
  would take gigabytes: memory holds 16 bytes an image, 24 while their order is drawn.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dtrain.data.fields import KINDS, SampleError
from dtrain.data.image import check_image, decode_image
from dtrain.data.writer import Sample
from dtrain.packing.shares import check_shares, deal

#: Folder names that are taken for splits.
SPLITS = ("train", "val", "valid", "validation", "test")
# One extension for each format, so that one field finds them all.
_SAME = {"jpeg": "jpg", "tiff": "tif"}

#: Called with a file that is not an image and the reason; raises, or returns to leave it out.
OnBad = Callable[[Path, str], None]


@dataclass(frozen=True)
class Entry:
    """One image: where it is, its key and label."""

    path: str
    key: str
    label: int


class Listing:
    """Entries by number; appended first, then read in any order.

    Attributes:
        sizes: Bytes of each file.
    """

    def __init__(self) -> None:
        self.sizes = array("q")
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._ends = array("q", [0])
        self._hash = hashlib.sha256()

    def append(self, entry: Entry) -> None:
        """Adds an entry at the end.

        Raises:
            OSError: If its file cannot be found.
        """
        status = os.stat(entry.path)
        self.sizes.append(status.st_size)
        self._hash.update(json.dumps([entry.key, entry.label, status.st_size, status.st_mtime_ns]).encode())
        # JSON, because it gives back file names that are not UTF-8 as they were.
        line = json.dumps([entry.path, entry.key, entry.label]).encode()
        self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Entry:
        self._file.flush()
        start, end = self._ends[number], self._ends[number + 1]
        return Entry(*json.loads(os.pread(self._file.fileno(), end - start, start)))

    def digest(self) -> str:
        """Tells this listing from others: of keys, labels, sizes and modification times."""
        return self._hash.hexdigest()[:16]

    def close(self) -> None:
        """Frees the temporary file."""
        self._file.close()


@dataclass
class ImageFolder:
    """What a scan found.

    Attributes:
        classes: Class names; the place of each is its label.
        splits: The images of each split.
        extensions: Extensions of the images, as shards will have them.
    """

    classes: list[str]
    splits: dict[str, Listing] = field(default_factory=dict)
    extensions: set[str] = field(default_factory=set)

    def close(self) -> None:
        """Frees the listings."""
        for listing in self.splits.values():
            listing.close()


def scan(
    source: Path,
    on_bad: OnBad,
    *,
    prefix: str = "train",
    shares: Mapping[str, float] | None = None,
    seed: int = 0,
    classes: list[str] | None = None,
) -> ImageFolder:
    """Lists the images of a folder.

    Args:
        source: The folder.
        on_bad: Told of every file whose name is not that of an image.
        prefix: Name of the split, where the folder has none.
        shares: Further splits to take from a folder that has none: name to the share of every class, in (0, 1).
        seed: Decides which images those are.
        classes: Class names whose order is given already; None sorts those found.

    Returns:
        The listings, in order of the file names; close it after use.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If the folders are not of either form, a split has classes that others lack, or nothing was found.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not a folder. Expected one with a folder of images per class.")
    roots = _split_folders(source, on_bad)
    shares = dict(shares or {})
    if roots and shares:
        raise ValueError(f"{source} has the splits {', '.join(roots)} already; leave out --split.")
    check_shares(prefix, shares)
    found = {split: _class_folders(root, on_bad) for split, root in (roots or {prefix: source}).items()}
    result = ImageFolder(classes or _common_classes(found))
    labels = {name: label for label, name in enumerate(result.classes)}
    for split, folders in found.items():
        for name in (split, *shares):
            result.splits[name] = Listing()
        for folder in folders:
            if folder.name not in labels:
                raise ValueError(f"{folder}: there is no class {folder.name!r} among {', '.join(labels)}.")
            _list_class(result, split, folder, labels[folder.name], on_bad, shares, seed)
    empty = [split for split, listing in result.splits.items() if not len(listing)]
    if empty:
        raise ValueError(f"{source} gives no image to {empty[0]!r}. Are there any, or is its share too small?")
    return result


@dataclass(frozen=True)
class Images:
    """The samples of one shard, files unchanged.

    Args:
        entries: Its images, in order.
        verify: Decode each, rather than look at its header only.
    """

    entries: Sequence[Entry]
    verify: bool = False

    def __call__(self, on_bad: OnBad) -> Iterator[Sample]:
        """The samples; ``on_bad`` is told of every file that is not an image."""
        for entry in self.entries:
            payload = Path(entry.path).read_bytes()
            try:
                if self.verify:
                    decode_image(payload)
                else:
                    check_image(payload)
            except SampleError as error:
                on_bad(Path(entry.path), str(error))
                continue
            yield {"__key__": entry.key, _extension(entry.path): payload, "cls": entry.label}


def _split_folders(source: Path, on_bad: OnBad) -> dict[str, Path]:
    """Folders that are splits; none if the folders are classes."""
    folders = [path for path in sorted(source.iterdir()) if path.is_dir()]
    splits = [path for path in folders if path.name in SPLITS and any(inner.is_dir() for inner in path.iterdir())]
    if not splits:
        return {}
    others = [path.name for path in folders if path not in splits]
    if others:
        raise ValueError(
            f"{source} has splits ({', '.join(path.name for path in splits)}) and beside them {others[0]!r}, which is "
            f"none of {', '.join(SPLITS)}. Pack them one by one, or move it away."
        )
    for path in sorted(source.iterdir()):
        if not path.is_dir():
            on_bad(path, "lies beside the folders of the splits")
    return {name: source / name for name in SPLITS if source / name in splits}


def _class_folders(root: Path, on_bad: OnBad) -> list[Path]:
    folders = []
    for path in sorted(root.iterdir()):
        if path.is_dir():
            folders.append(path)
        else:
            on_bad(path, "lies beside the folders of the classes")
    if not folders:
        raise ValueError(f"{root} has no folder. Expected one per class, with images in it.")
    return folders


def _common_classes(found: Mapping[str, list[Path]]) -> list[str]:
    """The class names of all splits; the training split must know them all."""
    names = {split: {folder.name for folder in folders} for split, folders in found.items()}
    everything = sorted(set().union(*names.values()))
    unknown = sorted(set(everything) - names["train"]) if "train" in names else []
    if unknown:
        raise ValueError(f"the class {unknown[0]!r} has no folder in train: nothing would be learnt of it. Fold it in.")
    return everything


def _list_class(
    result: ImageFolder, split: str, folder: Path, label: int, on_bad: OnBad, shares: Mapping[str, float], seed: int
) -> None:
    entries = list(_entries(folder, label, on_bad))
    result.extensions.update(_extension(entry.path) for entry in entries)
    # RandomState, because its numbers are frozen over numpy's versions; default_rng's may change.
    shuffled = np.random.RandomState([seed, label]).permutation(len(entries))
    for name, numbers in deal(shuffled, split, shares).items():
        for number in numbers.tolist():
            result.splits[name].append(entries[number])


def _entries(folder: Path, label: int, on_bad: OnBad) -> Iterator[Entry]:
    """The images below a class's folder, sorted; their keys differ."""
    keys: set[str] = set()
    for path in _files(folder):
        if KINDS.get(_extension(path)) != "image":
            on_bad(Path(path), "its name is not that of an image")
            continue
        below, name = os.path.split(os.path.relpath(path, folder.parent))
        # In a shard the key ends at the first dot. What becomes equal so, or was but for its extension, is numbered.
        stem = f"{below}/{os.path.splitext(name)[0].replace('.', '_')}"
        key, copies = stem, 0
        while key in keys:
            copies += 1
            key = f"{stem}-{copies}"
        keys.add(key)
        yield Entry(path, key, label)


def _files(folder: Path) -> Iterator[str]:
    seen = set()
    # Folders of images are often links into a store.
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            raise ValueError(f"{root} is a link to {real}, which was read already: its images would count twice.")
        seen.add(real)
        folders.sort()
        for name in sorted(names):
            yield os.path.join(root, name)


def _raise(error: OSError) -> None:
    raise error


def _extension(path: str) -> str:
    ext = os.path.splitext(path)[1][1:].lower()
    return _SAME.get(ext, ext)
