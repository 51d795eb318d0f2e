"""Models on the Hugging Face hub: their names, revisions, downloads and errors.

* ``hf://ORGANISATION/NAME`` is the branch ``main`` of a model, ``hf://ORGANISATION/NAME@REVISION`` a branch, tag or commit.
* A revision is resolved to a *commit* once. Everything is then read at this commit, so a branch that moves changes nothing.
* Only files that are asked for by name are downloaded, into the cache of huggingface_hub (``HF_HOME``). Without a network, or
  with ``HF_HUB_OFFLINE=1``, they are read from there. Pickled weights are never downloaded.
* The token comes from huggingface_hub: ``HF_TOKEN``, or what ``hf auth login`` stored. It is never part of a config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dtrain import __version__
from dtrain.errors import ConfigError, in_brief, without_secrets_in
from dtrain.extras import install_command
from dtrain.files import read_json, size_and_hash

#: Names of an artefact's files: its description, and its weights.
DESCRIPTION, WEIGHTS = "model.json", "model.safetensors"
LOGIN = "Set HF_TOKEN, or run `hf auth login`"
_NAME = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_URL = re.compile(rf"hf://(?!(?:datasets|spaces|buckets|kernels)/)(?P<name>{_NAME}/{_NAME})(?:@(?P<revision>[^@\s]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Packages whose errors are about the hub or the connection to it; they have no common base class.
_PACKAGES = ("huggingface_hub", "hf_xet", "httpx", "httpx2", "httpcore", "httpcore2")


def is_hub_url(text: str) -> bool:
    """Whether a text begins like the URL of a model on the hub."""
    return text.startswith("hf://")


@dataclass(frozen=True)
class HubModel:
    """A model on the hub.

    Attributes:
        name: ``ORGANISATION/NAME``.
        revision: A branch, tag or commit; None: the branch ``main``.
        key: Where it was written, for errors; empty for none.
    """

    name: str
    revision: str | None = None
    key: str = field(default="", compare=False)

    @classmethod
    def parse(cls, key: str, url: str) -> HubModel:
        """Reads ``hf://ORGANISATION/NAME[@REVISION]``; ``key`` is where it was written.

        Raises:
            ConfigError: If it has a different form.
        """
        found = _URL.fullmatch(url)
        # huggingface_hub makes a path in its cache of the name and the revision.
        if found is None or "--" in found["name"] or ".." in url:
            raise ConfigError(
                f"{key}: got {url!r}, want the name of a model, hf://ORGANISATION/NAME or .../NAME@REVISION."
            )
        return cls(found["name"], found["revision"], key)

    def __str__(self) -> str:
        return f"hf://{self.name}" + (f"@{self.revision}" if self.revision is not None else "")

    def at_commit(self) -> HubModel:
        """The same model at the current commit of its revision; without a network, at the commit of the last download.

        Raises:
            ConfigError: If there is no such model or revision, it has no weights that dtrain can read, or the hub cannot be
                reached and the cache does not have it.
        """
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self
        path = self._first_of(DESCRIPTION, WEIGHTS)
        return replace(self, revision=path.parent.name)

    def download(self, file: str) -> Path:
        """The path of one of the model's files in the cache, next to the other downloads of this commit.

        Raises:
            ConfigError: As ``at_commit``, or if the model has no such file.
        """
        return self._first_of(file)

    def weights(self) -> Path:
        """The path of ``model.safetensors``; compared with the SHA-256 in ``model.json``, if the model has this file.

        Raises:
            ConfigError: As ``download``, or if the SHA-256 differs.
        """
        path = self.download(WEIGHTS)
        if (description := self._described()) is not None:
            self.verify(path, str(description["sha256"]))
        return path

    def verify(self, path: Path, expected: str) -> None:
        """Refuses a downloaded file that does not have the SHA-256 that ``model.json`` says.

        Raises:
            ConfigError: Names the file and both values.
        """
        if (found := sha256(path)) != expected:
            raise ConfigError(
                f"{self.key}: {self}: {path.name} has SHA-256 {found}, but {expected} in its {DESCRIPTION}: one is damaged. "
                f"Delete {path.parents[2]} and try again. If that does not help, the published files do not match each other."
            )

    def _described(self) -> dict[str, Any] | None:
        """The content of ``model.json``; None for a model that is not dtrain's."""
        try:
            content = read_json(self._first_of(DESCRIPTION, WEIGHTS).with_name(DESCRIPTION))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{self.key}: {self}: its {DESCRIPTION} is damaged ({error}).") from error
        return content if isinstance(content, dict) and "sha256" in content else None

    def _first_of(self, *files: str) -> Path:
        """The path of the first of these files that the model has."""
        with hub_errors(f"{self.key}: {self}" if self.key else str(self), files):
            import huggingface_hub as hub
            from huggingface_hub.errors import EntryNotFoundError

            for file in files:
                try:
                    path = hub.hf_hub_download(
                        self.name, file, revision=self.revision, library_name="dtrain", library_version=__version__
                    )
                    return Path(path)
                except EntryNotFoundError:
                    if file == files[-1]:
                        raise
        raise AssertionError("the last file is returned or raises")


def sha256(path: Path) -> str:
    """The SHA-256 of a file.

    Raises:
        OSError: If it cannot be read, or is not a regular file: a pipe would block, and a device might never end.
    """
    return str(size_and_hash(path)["sha256"])


@contextmanager
def hub_errors(what: str, files: tuple[str, ...] = (), *, note: str = "") -> Iterator[None]:
    """Converts the errors of huggingface_hub, and of what it uses, to ``ConfigError``.

    Args:
        what: The model, or the key and the model.
        files: Files that were asked for.
        note: Added to every message, such as what was already done.

    Raises:
        ConfigError: Says what happened and what to do. It contains no token.
    """
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the package huggingface_hub ({error}). Run: {install_command('hf')}"
        ) from error
    except Exception as error:
        packages = {cause.__class__.__module__.partition(".")[0] for cause in _causes(error)}
        if not isinstance(error, (OSError, ValueError, RuntimeError)) and not packages & {*_PACKAGES}:
            raise
        # Without its cause, whose traceback contains signed URLs.
        message = f"{what}{_explained(error, files)} {note}".rstrip()
        raise ConfigError(without_secrets_in(message)) from None


def _explained(error: Exception, files: tuple[str, ...]) -> str:
    """The rest of the sentence that begins with the name of the model."""
    from huggingface_hub import errors

    cause = next((it for it in _causes(error) if isinstance(it, errors.HfHubHTTPError)), error)
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, errors.GatedRepoError):
        return f": access denied (HTTP {status}): it is gated. Accept its terms on its page, and log in. {LOGIN}."
    if isinstance(cause, errors.RevisionNotFoundError):
        return (
            f" has no such revision (HTTP {status}). Correct what follows the @, or leave it out for the branch main."
        )
    if isinstance(cause, errors.LocalEntryNotFoundError):
        return (
            ": the hub cannot be reached, or HF_HUB_OFFLINE is set, and the cache of huggingface_hub (HF_HOME) does not have "
            f"it ({_reason(cause)}). Try again with a network, or download it where there is one and set HF_HOME to that cache."
        )
    if isinstance(cause, errors.EntryNotFoundError):
        return (
            f" has no {' and no '.join(files)}, so it is not an artefact of dtrain export, and has no weights in safetensors; "
            "pickled weights are never loaded. Name a different model or revision."
        )
    if isinstance(cause, errors.RepositoryNotFoundError):
        return (
            f" does not exist, or is private and this token may not see it (HTTP {status}). Correct the name. {LOGIN}."
        )
    if status == 401:
        return (
            f": the token is not valid (HTTP 401). {LOGIN} with a new one from https://huggingface.co/settings/tokens."
        )
    if status == 403:
        return f": this token does not have the permission (HTTP 403). {LOGIN} with one that has it."
    if status == 412:
        return " has a new commit since this export began (HTTP 412). Look at it, and start again."
    if status is not None:
        return f": the hub refuses (HTTP {status}): {_reason(cause)}."
    if isinstance(error, ValueError):
        return f": {_reason(error)}"
    return f": the connection to the hub failed ({_reason(cause)}). Start again when it answers."


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _reason(error: BaseException) -> str:
    innermost = list(_causes(error))[-1]
    return f"{type(innermost).__name__}: {in_brief(str(innermost))}"
