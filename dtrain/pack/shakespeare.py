"""Tiny Shakespeare (Karpathy 2015) as nanoGPT prepares it: characters as tokens, the last tenth for validation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dtrain.pack.staging import is_published

FILE = "tinyshakespeare.txt"


def prepare(source: str, directory: str, length: int) -> None:
    """Packs the text with ``dtrain pack text``, unless the shards exist.

    The splits are ``train``, 1,003,854 characters in one shard, and ``val``, 111,540.

    Args:
        source: Folder of ``tinyshakespeare.txt``.
        directory: Folder of the shards.
        length: Number of targets of a row.

    Raises:
        FileNotFoundError: If there is no such file; names the address where it is.
        OSError: If packing fails; the message holds the reason.
    """
    if is_published(Path(directory), "dataset.json"):
        return
    text = Path(source, FILE)
    if not text.is_file():
        raise FileNotFoundError(
            f"there is no {text}. Download it: curl -o {text} "
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
        )
    options = ["--tokenizer", "characters", "--length", str(length), "--val", "0.1", "--val-by", "character"]
    command = [sys.executable, "-m", "dtrain.pack", "text", str(text), directory, *options, "--shards", "1"]
    done = subprocess.run([*command, "--processes", "1"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"packing {text} into {directory} failed: {done.stderr.strip()}")
