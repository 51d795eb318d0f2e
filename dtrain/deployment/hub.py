"""Publishes artefacts on the Hugging Face hub, and loads them from there.

* A *push* is one commit: everything is uploaded before, and is invisible until the commit. So a push that fails leaves the
  repository as it was; if the push had to create it, it stays empty, and the next push uses it.
* What can be refused (name, token, permission, a repository of another model) is refused before the export starts.
* Two artefacts are of *the same model* if they have the same architecture, task, class names and tokenizer. A repository with
  another model, or with anything that is not dtrain's, is only replaced with ``export.push_replace=true``.
* A *pull* reads ``model.json`` first, and then the files that it names, see ``dtrain.data.hub``. What is pulled is loaded under
  the same rules as any artefact of other people (``artefact``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from dtrain import __version__
from dtrain.config.bounded_files import read_json
from dtrain.config.errors import ConfigError
from dtrain.config.run import without_folders
from dtrain.config.schema import ExportConfig
from dtrain.data.hub import LOGIN, HubModel, hub_errors, is_hub_url, sha256
from dtrain.data.tokenizers import VOCABULARY
from dtrain.deployment import artefact
from dtrain.deployment.artefact import CARD, CONFIG, OWN_FILES, REPORT, Artefact
from dtrain.deployment.description import DESCRIPTION, Description
from dtrain.deployment.formats import FORMATS

# The hub creates it in every repository.
_OF_THE_HUB = ".gitattributes"
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)


def from_hub(
    name: str, revision: str | None = None, *, device: torch.device | None = None, trust: bool = False
) -> Artefact:
    """Loads an artefact from the hub, or from the cache of huggingface_hub.

    Args:
        name: ``ORGANISATION/NAME``, or ``hf://ORGANISATION/NAME[@REVISION]``.
        revision: A branch, tag or commit; None: the one in ``name``, or the branch ``main``.
        device: As ``artefact.load``.
        trust: As ``artefact.load``.

    Raises:
        ConfigError: If it cannot be downloaded, is damaged, or needs ``trust``.
    """
    url = name if is_hub_url(name) else f"hf://{name}"
    return artefact.load(pull(url if revision is None else f"{url}@{revision}"), device, trust=trust)


def local_folder(place: str) -> Path:
    """The folder of an artefact, which is downloaded if ``place`` is ``hf://ORGANISATION/NAME[@REVISION]``.

    Raises:
        ConfigError: As ``pull``.
    """
    return pull(place) if is_hub_url(place) else Path(place)


def pull(url: str, *, config: bool = False) -> Path:
    """Downloads an artefact, and compares its model with the SHA-256 in its ``model.json``.

    Args:
        url: ``hf://ORGANISATION/NAME[@REVISION]``.
        config: Also download the config of its run.

    Returns:
        Its folder in the cache of huggingface_hub; the name of the folder is the commit.

    Raises:
        ConfigError: If it cannot be downloaded, is no artefact of dtrain, or is damaged.
    """
    model = HubModel.parse("artefact", url).at_commit()
    folder = model.download(DESCRIPTION).parent
    try:
        description, expected = artefact.read_description(folder)
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}") from error
    model.verify(model.download(FORMATS[description.stored_as].file), expected)
    if description.tokenizer is not None:
        model.download(VOCABULARY)
    if config:
        model.download(CONFIG)
    return folder


@dataclass
class Push:
    """A push to the hub, checked before the export.

    Attributes:
        model: The repository, and the branch as its revision.
        private: Whether a repository that has to be created is private.
        replace: Whether a repository with something else is replaced.
        commit: The newest commit of the branch; None if the repository or the branch does not exist.
        exists: Whether the repository exists.
        remote: Path to blob hash, or to SHA-256 for a file in the large file storage.
        front_matter: That of the model card in the repository.
    """

    model: HubModel
    private: bool
    replace: bool
    commit: str | None = None
    exists: bool = False
    remote: dict[str, str] = field(default_factory=dict)
    front_matter: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, cfg: ExportConfig, ours: Mapping[str, Any]) -> Push | None:
        """The push that the config asks for; None without ``export.push``.

        Args:
            cfg: The config.
            ours: ``identity`` of the model to export.

        Raises:
            ConfigError: If the name is wrong, the package or a token is missing, the token may not write there, the repository
                has another model, or the model's config names a path of this machine.
        """
        if cfg.push is None:
            return None
        push = cls(HubModel.parse("export.push", cfg.push), cfg.private, cfg.push_replace)
        if not isinstance(cfg.format, str):
            raise ConfigError(
                f"export.format: got {cfg.format}, but a push is one artefact. Choose one format for export.push."
            )
        if (portable := without_folders(ours["model"])) != ours["model"]:
            raise ConfigError(
                "export.push: the model is built with a path of this machine, which others do not have: "
                f"{_difference(ours['model'], portable)}. Change the model so that it needs no file."
            )
        with hub_errors(push._what):
            push._require_permission()
            push._look()
        push._require_same_model(ours)
        return push

    def upload(self, folder: Path, message: str) -> str:
        """Publishes an artefact.

        Args:
            folder: The artefact with its model card.
            message: Title of the commit.

        Returns:
            The commit as ``hf://ORGANISATION/NAME@COMMIT``, with a remark if the repository was up to date.

        Raises:
            ConfigError: If the connection fails, or somebody else has pushed since the export began.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        note = f"Nothing was published. The artefact is complete in {folder}; the same command again pushes it."
        with hub_errors(self._what, note=note):
            self._create()
        if not self.exists:
            note += " The repository was created and is empty; the next push uses it."
        files = sorted(path for path in folder.iterdir() if path.name in OWN_FILES)
        if self._has(files):
            return f"hf://{self.model.name}@{self.commit} (unchanged, so there is no new commit)"
        operations: list[Any] = [CommitOperationAdd(path.name, str(path)) for path in files]
        stale = {*self.remote} - {path.name for path in files} - {_OF_THE_HUB}
        operations += [
            CommitOperationDelete(path, is_folder=False) for path in sorted(stale) if self.replace or path in OWN_FILES
        ]
        with hub_errors(self._what, note=note):
            done = self._api().create_commit(
                self.model.name,
                operations,
                commit_message=message,
                revision=self.model.revision,
                parent_commit=self.commit,
            )
        return f"hf://{self.model.name}@{done.oid}"

    @property
    def _what(self) -> str:
        return f"export.push: {self.model}"

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(library_name="dtrain", library_version=__version__)

    def _require_permission(self) -> None:
        import huggingface_hub as hub
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise ConfigError(f"{self._what}: HF_HUB_OFFLINE is set. Unset it to push.")
        if hub.get_token() is None:
            raise ConfigError(f"{self._what}: there is no token. {LOGIN} with one that may write.")
        user = self._api().whoami()
        owner = self.model.name.split("/")[0]
        may_write = [str(user.get("name")), *(str(org.get("name")) for org in user.get("orgs", []))]
        role = user.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise ConfigError(f"{self._what}: the token may only read. {LOGIN} with one that may write.")
        if owner not in may_write:
            raise ConfigError(
                f"{self._what}: the token belongs to {may_write[0]}, who is not a member of {owner}. Push to one of "
                f"{', '.join(may_write)}; or {LOGIN[0].lower()}{LOGIN[1:]} with a token of {owner}."
            )

    def _look(self) -> None:
        """Reads the state of the repository and of the branch."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        api, name, branch = self._api(), self.model.name, self.model.revision
        try:
            self.commit = api.repo_info(name, revision=branch or "main").sha
            self.exists = True
        except RevisionNotFoundError:
            self.exists, self.commit = True, None
            return
        except RepositoryNotFoundError:
            return
        entries = api.list_repo_tree(name, revision=self.commit, recursive=True)
        for entry in entries:
            if (lfs := getattr(entry, "lfs", None)) is not None:
                self.remote[entry.path] = lfs.sha256
            elif (blob := getattr(entry, "blob_id", None)) is not None:
                self.remote[entry.path] = blob
        if CARD in self.remote:
            text = Path(api.hf_hub_download(name, CARD, revision=self.commit)).read_text(
                encoding="utf-8", errors="replace"
            )
            if found := _FRONT_MATTER.match(text):
                with suppress(yaml.YAMLError):  # then it has no metadata that could be kept
                    content = yaml.safe_load(found[1])
                    self.front_matter = content if isinstance(content, dict) else {}

    def _require_same_model(self, ours: Mapping[str, Any]) -> None:
        remedy = "Push to another name, or set export.push_replace=true to replace all of its files."
        foreign = {*self.remote} - {_OF_THE_HUB, CARD}
        if self.replace or not foreign:
            return
        if DESCRIPTION not in self.remote:
            raise ConfigError(
                f"{self._what} exists and has no artefact of dtrain (it has {min(foreign)}, and no {DESCRIPTION}). {remedy}"
            )
        path = HubModel(self.model.name, self.commit).download(DESCRIPTION)
        try:
            theirs = _identity_in(read_json(path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self._what} exists, and its {DESCRIPTION} is damaged ({error}). {remedy}") from error
        if theirs != ours:
            raise ConfigError(f"{self._what} has another model: {_difference(theirs, ours)}. {remedy}")

    def _create(self) -> None:
        """Creates the repository and the branch, if they do not exist."""
        api, name, branch = self._api(), self.model.name, self.model.revision
        if not self.exists:
            api.create_repo(name, private=self.private, exist_ok=True)
        if self.commit is None:
            if branch is not None and branch != "main":
                api.create_branch(name, branch=branch, exist_ok=True)
            self.commit = api.repo_info(name, revision=branch or "main").sha

    def _has(self, files: list[Path]) -> bool:
        """Whether the branch has these files, and no other ones that a push would delete.

        The report is left out: the times that an export measures differ each time.
        """
        ours = {path.name: path for path in files if path.name != REPORT}
        theirs = {
            path for path in self.remote if path not in (REPORT, _OF_THE_HUB) and (self.replace or path in OWN_FILES)
        }
        return theirs == {*ours} and all(_has_hash(path, self.remote[name]) for name, path in ours.items())


def identity(model: Any, task: Any, classes: Any, tokenizer: Any) -> dict[str, Any]:
    """What makes two artefacts the same model, as JSON has it.

    Args:
        model: Config node that builds the model.
        task: Target of the task.
        classes: Names of the outputs; None without names.
        tokenizer: Identity of the tokenizer; None without one.
    """
    content = {"model": model, "task": task, "classes": classes, "tokenizer": tokenizer}
    as_in_json: dict[str, Any] = json.loads(json.dumps(content))
    return as_in_json


def identity_of(description: Description) -> dict[str, Any]:
    """``identity`` of an artefact."""
    return identity(description.model, description.source.get("task"), description.classes, description.tokenizer)


def _identity_in(content: Mapping[str, Any]) -> dict[str, Any]:
    return identity(content["model"], content["source"].get("task"), content["classes"], content.get("tokenizer"))


def _difference(theirs: Any, ours: Any) -> str:
    """The first few differences of two nested values: ``model.width: 32 there, 64 here``."""
    found = list(_differences(theirs, ours, ""))
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def _differences(theirs: Any, ours: Any, place: str) -> Iterator[str]:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in {**theirs, **ours}:
            yield from _differences(theirs.get(key), ours.get(key), f"{place}.{key}".lstrip("."))
    elif theirs != ours:
        yield f"{place}: {json.dumps(theirs)} there, {json.dumps(ours)} here"


def _has_hash(path: Path, expected: str) -> bool:
    """Whether this is the SHA-256 of a file, or its hash as a git blob."""
    if len(expected) == len(hashlib.sha256().hexdigest()):
        return sha256(path) == expected
    content = path.read_bytes()  # what the hub keeps as a blob is small
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == expected
