"""Lists of samples that a run leaves out (``data.exclude``): reading them, and their copies in run directories.

* A list has one key per line, as in ``logs/keys-rank-*.jsonl``. Order, repetitions and empty lines do not matter.
* Its *description* has the number of keys and the beginning of the SHA-256 of the sorted keys. It stands for the list in saved
  configs and in the default name of a run, so that the same list has the same effect wherever its file is.
* Each start copies its list to ``exclude-<hash>.txt`` in the run directory. Replay and trace read it there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from dtrain.errors import ConfigError, as_config_error
from dtrain.files import read_bounded, replace_file

_MOST = 2**30  # bytes of a list


def read_excluded(path: str | Path) -> list[str]:
    """The keys of a list, sorted, each once.

    Raises:
        ConfigError: If it cannot be read or has no key.
    """
    if not str(path).strip():
        raise ConfigError("data.exclude is empty. Name a file, or set null to leave nothing out.")
    with as_config_error(f"data.exclude: {path} cannot be read"):
        text = read_bounded(Path(path).expanduser(), _MOST)
    # Not splitlines(), which also splits at characters that a key may have.
    lines = text.decode("utf-8-sig", "surrogateescape").split("\n")
    keys = sorted({key for line in lines if (key := line.removesuffix("\r")).strip()})
    if not keys:
        raise ConfigError(f"data.exclude: {path} has no key. Write one key per line, or remove data.exclude.")
    return keys


def describe(keys: Iterable[str]) -> str:
    """Such as ``3 keys, sha256 0f343b0931126a20``."""
    keys = list(keys)
    digest = hashlib.sha256("\n".join(keys).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return f"{len(keys)} {'key' if len(keys) == 1 else 'keys'}, sha256 {digest}"


def copy_of(run_dir: Path, description: str) -> Path:
    """Where a run directory has the list with a description.

    Raises:
        ConfigError: If the text is no description.
    """
    found = re.fullmatch(r"\d+ keys?, sha256 ([0-9a-f]{16})", description)
    if found is None:
        raise ConfigError(f"data.exclude: {description!r} does not describe a list of {run_dir}.")
    return run_dir / f"exclude-{found[1]}.txt"


def read_copy(run_dir: Path, description: str) -> list[str]:
    """The keys of the list with a description in a run directory.

    Raises:
        ConfigError: If it is missing or was edited.
    """
    path = copy_of(run_dir, description)
    keys = read_excluded(path)
    if describe(keys) != description:
        raise ConfigError(f"data.exclude: {path} has {describe(keys)}, but the run had {description}. Restore it.")
    return keys


def keep_copy(run_dir: Path, keys: Iterable[str]) -> None:
    """Copies a list to a run directory.

    Raises:
        OSError: On a write failure.
    """
    keys = list(keys)
    path = copy_of(run_dir, describe(keys))
    if not path.exists():
        with replace_file(path) as file:
            file.write("".join(f"{key}\n" for key in keys).encode("utf-8", "surrogateescape"))
