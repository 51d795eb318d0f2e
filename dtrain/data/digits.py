"""scikit-learn's handwritten digits as shards or arrays: a real dataset that needs no download.

1,797 images of 8 x 8 pixels (Alpaydin and Kaynak, 1998), grey values 0 to 16 times 15, as lossless PNG. The split is
fixed: one fifth of every class is for testing.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dtrain.data.writer import write_shards
from dtrain.extras import install_command
from dtrain.files import cache_dir, create_folder

TRAIN_SAMPLES, TEST_SAMPLES = 1437, 360
_SHARDS = {"train": 8, "test": 2}


def shard_dir() -> str:
    """The folder in the user's cache where ``prepare`` puts the shards."""
    return str(cache_dir() / "digits")


def prepare(directory: str | None = None) -> None:
    """Writes ``train-{000000..000007}.tar`` and ``test-{000000..000001}.tar`` (png, cls) unless they exist.

    Any number of processes may do this at once: each writes its own folder, and the first one to finish is kept.

    Args:
        directory: The folder; None: ``shard_dir()``.

    Raises:
        ModuleNotFoundError: If the shards and scikit-learn are missing; names the command that installs scikit-learn.
        FileExistsError: If the folder exists with other content.
    """
    folder = Path(directory or shard_dir())
    if _is_whole(folder):
        return
    pixels, labels = _load()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with create_folder(folder) as staged:
        for split, rows in _split(labels).items():
            samples = [
                {"__key__": f"digit_{row:04d}", "png": _png(pixels[row]), "cls": int(labels[row])}
                for row in rows.tolist()
            ]
            write_shards(samples, staged, prefix=split, shards=_SHARDS[split])
    if not _is_whole(folder):
        raise FileExistsError(
            f"{folder} exists and is not the folder of the digits shards. Delete it or choose a different folder."
        )


def arrays(split: str) -> dict[str, np.ndarray]:
    """The same samples in memory, in the same order.

    Args:
        split: ``train`` or ``test``.

    Returns:
        ``image``, uint8 ``[samples, 8, 8, 3]``, and ``label``, int64 ``[samples]``.

    Raises:
        ValueError: If there is no such split.
        ModuleNotFoundError: If scikit-learn is missing; names the command that installs it.
    """
    if split not in _SHARDS:
        raise ValueError(f"split: got {split!r}, want one of {', '.join(_SHARDS)}.")
    pixels, labels = _load()
    rows = _split(labels)[split]
    return {"image": np.repeat(pixels[rows, :, :, np.newaxis], 3, axis=3), "label": labels[rows]}


def _is_whole(folder: Path) -> bool:
    return all((folder / f"{split}-{n:06d}.tar").is_file() for split, shards in _SHARDS.items() for n in range(shards))


def _load() -> tuple[np.ndarray, np.ndarray]:
    """Pixels, uint8 ``[1797, 8, 8]``, and labels, int64 ``[1797]``."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the digits are part of scikit-learn, which is not installed. Run: {install_command('demo')}.",
            name=error.name,
        ) from error
    digits: Any = load_digits()
    # 16 times 15 is 240: every grey value stays a whole number.
    return (digits.images * 15).astype(np.uint8), digits.target.astype(np.int64)


def _split(labels: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of each split, int64, shuffled; every class has the same share in both."""
    # RandomState, because its numbers never change between numpy's versions; default_rng's may.
    shuffled = np.random.RandomState(0).permutation(len(labels))
    by_class = [shuffled[labels[shuffled] == label] for label in np.unique(labels)]
    # A fifth of all, from running totals, so that the rounding of ten classes does not add up.
    bounds = np.concatenate([[0], np.cumsum([len(rows) for rows in by_class])]) * TEST_SAMPLES // len(labels)
    test = np.concatenate([rows[:share] for rows, share in zip(by_class, np.diff(bounds), strict=True)])
    is_test = np.isin(shuffled, test)
    return {"train": shuffled[~is_test], "test": shuffled[is_test]}


def _png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    # Uncompressed: nothing is lost at 64 pixels, and the bytes do not depend on the version of zlib.
    Image.fromarray(pixels).save(stream, "PNG", compress_level=0)
    return stream.getvalue()
