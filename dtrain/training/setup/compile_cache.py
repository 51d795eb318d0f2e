"""Artefacts of ``torch.compile`` in dtrain's cache folder, so that a later start does not compile the same graphs again.

* *Artefacts* are what ``torch.compiler.save_cache_artifacts`` collects while a run compiles: graphs, generated code, and on
  GPUs the compiled kernels. ``load_cache_artifacts`` puts them into torch's own caches, where torch looks for them under hashes
  of the graphs: one that does not fit is not used. On CPUs the libraries that the C++ compiler makes are not among them.
* A *key* has what changes the graphs: torch, the device, the model with its code, precision, sizes and parallelism. There is
  one file for each key. Code for GPUs has the number of the device in it, so the ranks of a machine have a file each.
* torch unpickles artefacts. So they are never in a run directory, which may come from somebody else, but in the folder
  ``compiled`` of the cache. It must be *own* (``dtrain.files``), and the file too: nobody else can have put it there.
* A file is a line of JSON with the names of the artefacts and the SHA-256 of what follows, the *parts*: what torch has returned
  at each save. Of several saves of one process, torch (2.9 to 2.13) loads only what the last one has added, so all are kept.
* Whatever is wrong with a file is one line for the user, and the run compiles.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import nn

from dtrain.config.schema import Config
from dtrain.distributed.world import World
from dtrain.files import cache_dir, is_own, is_own_file, own_folder, replace_file, try_lock

_FORMAT = 1
_SUFFIX = ".artefacts"
_MOST_BYTES = 4 << 30  # of all files; the least recently used are deleted
_MOST_HEADER = 16 << 20  # bytes
_MOST_PARTS = 8  # then the file begins anew
# Timeouts and the like do not change a graph.
_PARALLEL = (
    *(
        "shard",
        "shard_modules",
        "shard_size",
        "gather_dtype",
        "reduce_after",
        "bucket_cap_mb",
        "find_unused_parameters",
    ),
    *("static_graph", "gradient_as_bucket_view", "sync_batchnorm", "reduce_dtype"),
)
_TRAIN = (
    *("global_batch_size", "micro_batch_size", "deterministic", "freeze", "compile", "channels_last"),
    "checkpoint_activations",
)


class CompileCache:
    """The file of one key.

    Args:
        folder: Folder of all files; it need not exist.
        identity: What the key is a hash of, as values that JSON can hold.
        writes: Whether this rank saves.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], *, writes: bool = True) -> None:
        key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self.path = own_folder(folder) / f"{key}{_SUFFIX}"
        self._follow = 0 if self.path.parent == folder else os.O_NOFOLLOW  # a link that others may have made
        self._writes = writes
        self._known: set[str] = set()  # artefacts in the file

    @classmethod
    def from_config(cls, cfg: Config, model: nn.Module, task: Any, world: World) -> CompileCache | None:
        """The cache of a run; None if ``train.compile`` compiles nothing.

        Args:
            cfg: The composed config.
            model: The bare model.
            task: The task, whose code may be part of a graph.
            world: The ranks.
        """
        if not cfg.train.compile:
            return None
        identity = {
            "torch": [
                torch.__version__,
                torch.version.git_version,
                torch.version.cuda,
                sys.version,
                platform.machine(),
            ],
            "device": _describe(world.device),
            "ranks": world.size,
            "model": cfg.model,
            "task": cfg.task,
            "precision": asdict(cfg.precision),
            "fields": cfg.data.fields,
            "train": {name: getattr(cfg.train, name) for name in _TRAIN},
            "parallel": {name: getattr(cfg.parallel, name) for name in _PARALLEL},
            "code": _code_of([*model.modules(), task]),
        }
        # The code for a CPU is the same on all ranks.
        return cls(cache_dir() / "compiled", identity, writes=world.device.type != "cpu" or world.local_rank == 0)

    def load(self) -> list[str]:
        """Gives torch the artefacts of earlier starts; returns lines for the user, none if there is no file."""
        began = time.monotonic()
        try:
            with self._own_folder() as folder:
                parts = _read(folder, self.path.name)
                with suppress(OSError):  # a cache that may only be read is used, too
                    os.utime(self.path.name, dir_fd=folder, follow_symlinks=False)
            loaded = [torch.compiler.load_cache_artifacts(part.content) for part in parts]
        except FileNotFoundError:
            return []
        except Exception as error:  # noqa: BLE001 - torch does not say what its format may raise
            return [f"train.compile: {self.path} is not used, so the model is compiled: {_reason(error)}"]
        if None in loaded:
            return [f"train.compile: {self.path} is not used, so the model is compiled: torch cannot read it"]
        self._known = _all_names(parts)
        return [f"train.compile: {_counted(parts)} loaded from {self.path} in {time.monotonic() - began:.2f} s"]

    def save(self) -> list[str]:
        """Writes what this process has compiled so far, unless the file has it; returns lines for the user.

        The file is replaced atomically. Of several processes with the same key, such as on machines with a common cache, one
        writes it.
        """
        if not self._writes or (saved := torch.compiler.save_cache_artifacts()) is None:
            return []
        content, info = saved
        new = _Part(_names(info) - self._known, content)
        if not new.names:
            return []
        self._known |= new.names
        try:
            self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with self._own_folder() as folder, _only_writer(folder, f".{self.path.name}.lock") as alone:
                parts = _parts_in(folder, self.path.name)
                if not alone or new.names <= _all_names(parts):
                    return []
                parts = [*parts, new] if len(parts) < _MOST_PARTS else [new]
                _make_room(folder, sum(len(part.content) for part in parts), self.path.name)
                with replace_file(self.path, concurrent=True) as file:
                    os.fchmod(file.fileno(), 0o600)
                    _write(file, parts)
        except OSError as error:
            return [f"train.compile: {self.path} cannot be written, so the next start compiles: {_reason(error)}"]
        return [f"train.compile: {_counted(parts)} saved in {self.path} for the next start"]

    @contextmanager
    def _own_folder(self) -> Iterator[int]:
        """The open folder. Nobody else can exchange a file in it between its check and its use."""
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | self._follow)
        try:
            if not is_own(os.fstat(folder)):
                raise PermissionError(errno.EPERM, f"others may write {self.path.parent}, so its files may be theirs")
            yield folder
        finally:
            os.close(folder)


class _Part(NamedTuple):
    """What torch has returned at one save, and the names of the artefacts that were new."""

    names: set[str]
    content: bytes


def _write(file: BinaryIO, parts: Sequence[_Part]) -> None:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.content)
    listed = [{"artefacts": sorted(part.names), "size": len(part.content)} for part in parts]
    file.write(json.dumps({"format": _FORMAT, "sha256": digest.hexdigest(), "parts": listed}).encode() + b"\n")
    for part in parts:
        file.write(part.content)


def _read(folder: int, name: str) -> list[_Part]:
    """What ``_write`` has written.

    Raises:
        FileNotFoundError: If there is no file.
        OSError, ValueError: If it is not this user's, or not one that dtrain has written, or damaged.
    """
    # A link raises an error, and a pipe does not wait for its other end.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=folder), "rb") as file:
        if not is_own_file(os.fstat(file.fileno())):
            raise PermissionError(errno.EPERM, "it is not a regular file that only you may write")
        try:
            header = json.loads(file.readline(_MOST_HEADER))
            if header["format"] != _FORMAT:
                raise ValueError(f"it has format {header['format']!r}, this version reads {_FORMAT}")
            listed = [(set(part["artefacts"]), int(part["size"])) for part in header["parts"]]
            expected = header["sha256"]
        except (KeyError, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError("it has no header of dtrain") from error
        content = file.read()
    if hashlib.sha256(content).hexdigest() != expected or sum(size for _, size in listed) != len(content):
        raise ValueError("it is incomplete or has changed since it was written")
    parts, at = [], 0
    for names, size in listed:
        parts.append(_Part(names, content[at : at + size]))
        at += size
    return parts


def _parts_in(folder: int, name: str) -> list[_Part]:
    """The parts of a file; none if it is missing or not usable."""
    try:
        return _read(folder, name)
    except (OSError, ValueError):
        return []


def _all_names(parts: Iterable[_Part]) -> set[str]:
    return {name for part in parts for name in part.names}


def _names(info: Any) -> set[str]:
    """The artefacts that torch lists, as ``KIND/HASH``."""
    found = vars(info)
    kinds = found.get("artifacts", found)  # torch 2.7 had a field for each kind
    return {f"{kind}/{key}" for kind, keys in kinds.items() for key in keys}


@contextmanager
def _only_writer(folder: int, name: str) -> Iterator[bool]:
    """Whether no other process is in such a block; always true on a file system without locks."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, 0o600, dir_fd=folder), "r+b") as file:
        alone = try_lock(file)
        try:
            yield alone
        finally:
            if alone:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)


def _make_room(folder: int, size: int, replaced: str) -> None:
    """Deletes the least recently used files until one of this size fits into the limit; ``replaced`` is replaced by it."""
    found = []
    for name in os.listdir(folder):
        if name.endswith(_SUFFIX) and not name.startswith(".") and name != replaced:
            with suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                found.append((status.st_mtime_ns, status.st_size, name))
    total = size + sum(each[1] for each in found)
    for _, freed, name in sorted(found):
        if total <= _MOST_BYTES:
            break
        with suppress(OSError):  # of another process
            os.unlink(name, dir_fd=folder)
        total -= freed


def _describe(device: torch.device) -> list[Any]:
    if device.type != "cuda":
        return [str(device), torch.backends.cpu.get_cpu_capability()]
    return [str(device), torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)]


def _code_of(objects: Iterable[Any]) -> dict[str, str]:
    """Module to the SHA-256 of its file, of all classes of these objects but torch's, whose version is in the key."""
    names = {cls.__module__ for each in objects for cls in type(each).__mro__}
    code = {}
    for name in sorted(names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and name.partition(".")[0] != "torch":
            with suppress(OSError):
                code[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return code


def _counted(parts: Sequence[_Part]) -> str:
    number, size = len(_all_names(parts)), sum(len(part.content) for part in parts)
    return f"{number} compiled {'artefact' if number == 1 else 'artefacts'} ({size / 1e6:.1f} MB)"


def _reason(error: Exception) -> str:
    text = str(error.strerror if isinstance(error, OSError) and error.strerror else error) or type(error).__name__
    return " ".join(text.split())
