"""The files of a search: Optuna's journal, the lock of the search, and what the search is.

* ``journal.log`` is Optuna's storage: one operation per line. It holds the *definition* of the search, too, so that values of
  other keys or ranges are never taken for values of this search.
* ``.search.lock`` is locked while a process runs the search.
* ``journal.log.lock`` is Optuna's own lock, a link that exists during each write. A process that is killed then leaves it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigError, as_config_error
from dtrain.files import open_to_append, try_lock
from dtrain.report.search import FILE

_JOURNAL, _LOCK, _STUDY, _DEFINITION = "journal.log", ".search.lock", "dtrain", "definition"
_STALE = 5.0  # seconds; a write takes milliseconds


@contextmanager
def search_lock(folder: Path) -> Iterator[None]:
    """Makes the directory of a search and locks it against other processes."""
    with as_config_error(f"run.dir: {folder} cannot be written, choose a different one"):
        folder.mkdir(parents=True, exist_ok=True)
        file = open_to_append(folder / _LOCK)
    with file:
        with as_config_error(f"run.dir: {folder} cannot be locked, choose a different one"):
            is_locked = try_lock(file)
        if not is_locked:
            raise ConfigError(f"run.dir: another process runs the search in {folder}. Wait for it, or stop it.")
        yield


def open_study(folder: Path, definition: Mapping[str, Any], direction: str, pruner: Any) -> Any:
    """Opens the study of a search, or makes it. The search is locked.

    Raises:
        ConfigError: If the journal is damaged.
    """
    import optuna

    with _readable(folder / _JOURNAL):
        _without_torn_line(folder / _JOURNAL)
        _break_stale_lock(folder / _JOURNAL)
        study = optuna.create_study(
            study_name=_STUDY,
            storage=_storage(folder / _JOURNAL),
            direction="maximize" if direction == "maximize" else "minimize",
            pruner=pruner,
            load_if_exists=True,
        )
        if _DEFINITION not in study.user_attrs:
            study.set_user_attr(_DEFINITION, dict(definition))
    return study


def refuse_other_search(folder: Path, definition: Mapping[str, Any]) -> None:
    """Refuses a directory whose search has a different definition. Writes nothing.

    Raises:
        ConfigError: Names what differs; also if the files are damaged.
    """
    saved = _saved_definition(folder)
    if saved is None:
        return
    if differing := [key for key in definition if saved.get(key) != definition[key]]:
        lines = "".join(
            f"    {key}: {json.dumps(saved.get(key))} -> {json.dumps(definition[key])}\n" for key in differing
        )
        raise ConfigError(
            f"run.dir: {folder} holds a different search. It differs in\n{lines}  Set a different run.dir (or run.name), or go "
            "back to the values on the left."
        )


def _saved_definition(folder: Path) -> Mapping[str, Any] | None:
    """The definition in the journal, else in search.json; None in a directory without a search."""
    import optuna

    with _readable(folder / _JOURNAL):
        if (folder / _JOURNAL).exists():
            with contextlib.suppress(KeyError):  # the study was not made yet
                study = optuna.load_study(study_name=_STUDY, storage=_storage(folder / _JOURNAL))
                if _DEFINITION in study.user_attrs:
                    return dict(study.user_attrs[_DEFINITION])
    path = folder / FILE
    with _readable(path):
        return dict(json.loads(path.read_text(encoding="utf-8"))[_DEFINITION]) if path.exists() else None


def _storage(journal: Path) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(journal)))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Converts the errors of a damaged file."""
    try:
        yield
    except Exception as error:  # Optuna checks nothing in its journal, so any error may come
        raise ConfigError(
            f"run.dir: {path} cannot be read ({type(error).__name__}: {error}). Restore it, or use a different run.dir."
        ) from error


def _without_torn_line(journal: Path) -> None:
    """Removes an incomplete last line, which a full disk or a power cut leaves: Optuna would append to it."""
    with contextlib.suppress(FileNotFoundError), journal.open("r+b") as file:
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def _break_stale_lock(journal: Path) -> None:
    """Deletes Optuna's lock if it is older than any write: Optuna would wait 30 s for it, older versions forever."""
    lock = journal.with_name(f"{journal.name}.lock")
    end = time.monotonic() + _STALE
    with contextlib.suppress(FileNotFoundError):
        while time.time() - lock.lstat().st_mtime < _STALE and time.monotonic() < end:
            time.sleep(0.1)
        os.unlink(lock)
        sys.stderr.write(f"dtrain: {lock}: deleted; a process that was killed while it wrote the journal has left it\n")
