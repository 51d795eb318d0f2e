"""Which files this user's dtrain wrote, and what is used of another user's files.

A saved command line can name any function by ``_target_``, and an interpolation can read the environment. So nothing of a
run directory is composed unless this user wrote it, or typed ``--trust``.

* A *mark* is an empty file in a folder of dtrain's cache that only this user can write, named by the SHA-256 of what it marks.
  It stays with the cache: a copy of a run on another machine has none.
* An artefact needs no mark if everything in it that is built is a class of torch.nn, torch.optim or dtrain's models, tasks and
  the like, which only compute, and nothing in it is an interpolation.
* What is typed on the command line is never restricted.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pkgutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigError
from dtrain.files import MAX_BYTES, cache_dir, read_bounded

TRUST = "--trust"
#: The kind of the marks of command lines that this user has started.
STARTED = "started"
#: For processes that dtrain starts: the arguments are the whole command line, and the process that started them decided about
#: ``--trust``. So no command line is read from the run directory, which may have changed since then.
AS_TYPED = "--as-typed"
#: Packages whose classes only compute.
_PACKAGES = (
    *("torch.nn.", "torch.optim."),
    *("dtrain.models.", "dtrain.tasks.", "dtrain.optimizers.", "dtrain.training.schedule."),
    *("dtrain.data.augment.", "dtrain.data.mixing."),
)


def mark_as_own(content: bytes, kind: str) -> None:
    """Marks the content of files as written by this user; without effect if the cache cannot be written.

    Args:
        content: The content.
        kind: What it is, one word; marks of different kinds are separate.
    """
    with suppress(OSError):
        file = _mark(content, kind)
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.touch()


def is_own(content: bytes, kind: str) -> bool:
    """Whether this user called ``mark_as_own`` with this content."""
    file = _mark(content, kind)
    with suppress(OSError):
        folder = file.parent.lstat()  # several people may use one cache
        only_mine = stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.getuid() and not folder.st_mode & 0o022
        return only_mine and file.exists()
    return False


def content_with_folders(content: bytes, folders: Sequence[Path]) -> bytes:
    """The content of a file and of all presets in folders, to mark them together. Hydra composes no files but ``*.yaml``.

    Raises:
        OSError: If a file cannot be read, or is larger than any preset.
    """
    parts = [content]
    for folder in dict.fromkeys(folders):
        for path in sorted(path for path in folder.rglob("*.yaml") if path.is_file()):
            parts += [os.fsencode(path.relative_to(folder)), read_bounded(path)]
            if len(parts[-1]) > MAX_BYTES:
                raise OSError(errno.EFBIG, f"has more than {MAX_BYTES:,} bytes", str(path))
    # Lengths, so that no other division into files has the same bytes.
    return content if len(parts) == 1 else b"".join(b"%d:" % len(part) + part for part in parts)


def command_content(directory: Path, content: bytes, config_dirs: Sequence[str]) -> bytes:
    """What a mark covers: ``overrides.yaml``, and presets that lie in the run directory, as those of a batch script."""
    inside = [folder for folder in map(Path, config_dirs) if Path(directory).resolve() in folder.resolve().parents]
    return content_with_folders(content, inside)


def require_harmless(node: Any, place: Path, key: str) -> None:
    """Refuses another user's config that could run code outside torch and dtrain, or read the environment.

    Args:
        node: Plain data.
        place: The file or folder, for the message.
        key: What the node is in it.

    Raises:
        ConfigError: Names the first key that is refused, and ``--trust``.
    """
    if isinstance(node, Mapping):
        for name, value in node.items():
            require_harmless(str(name), place, key)
            if name == "_target_" or (name == "decoder" and isinstance(value, str)):
                _require_known_class(str(value), place, f"{key}.{name}")
            require_harmless(value, place, f"{key}.{name}")
    elif isinstance(node, str):
        # When the config is composed or built, the result of an interpolation may even hold a _target_.
        if "${" in node:
            raise _refused(place, f"{key} is the interpolation {node!r}")
    elif isinstance(node, Sequence):
        for number, value in enumerate(node):
            require_harmless(value, place, f"{key}[{number}]")


def _require_known_class(target: str, place: Path, key: str) -> None:
    found: Any = None
    if target.startswith(_PACKAGES):  # importing any other module would already run its code
        with suppress(ImportError, AttributeError, ValueError):
            found = pkgutil.resolve_name(target)
    # By its own module too: a package also has the names that it imports, such as dtrain.models.mlp.torch.
    if not (isinstance(found, type) and f"{found.__module__}.".startswith(_PACKAGES)):
        raise _refused(
            place, f"{key} is {target}, which is not a class of torch.nn, torch.optim, or dtrain's models and tasks"
        )


def _refused(place: Path, reason: str) -> ConfigError:
    return ConfigError(f"{place}: {reason}, so it could do anything. If you trust whoever made it, add {TRUST}.")


def _mark(content: bytes, kind: str) -> Path:
    return cache_dir() / f"{kind}-{os.getuid()}" / hashlib.sha256(content).hexdigest()
