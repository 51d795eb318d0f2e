"""Publishes artefacts on the Hugging Face hub, and loads them from there.

* A *push* is one commit: all files are uploaded first, and become visible with the commit. So a push that fails leaves the
  repository as it was; if the push had to create it, it stays empty, and the next push uses it.
* Name, token, permission, and whether the repository has a different model, are checked before the export starts.
* Two artefacts are of *the same model* if they have the same architecture, task, class names and tokenizer. A repository with a
  different model, or with anything that is not dtrain's, is only replaced with ``export.push_replace=true``.
* A *pull* reads ``model.json`` first, and then the files that it names, see ``dtrain.runs.hub``. What is pulled is loaded under
  the same rules as any artefact of other users (``artefact``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from dtrain import __version__
from dtrain.config.schema import ExportConfig
from dtrain.data.fields.tokenizers import VOCABULARY
from dtrain.errors import ConfigError
from dtrain.export import artefact
from dtrain.export.artefact import CARD, CONFIG, OWN_FILES, Artefact
from dtrain.export.description import DESCRIPTION
from dtrain.export.formats import FORMATS
from dtrain.files import read_json
from dtrain.runs.hub import LOGIN, HubModel, hub_errors, is_hub_url
from dtrain.runs.run_spec import without_folders

# The hub creates it in every repository.
_OF_THE_HUB = ".gitattributes"


def from_hub(
    name: str, revision: str | None = None, *, device: torch.device | None = None, trust: bool = False
) -> Artefact:
    """Loads an artefact from the Hugging Face hub, or from the local cache of huggingface_hub.

    Args:
        name: ``ORGANISATION/NAME``, or ``hf://ORGANISATION/NAME[@REVISION]``.
        revision: A branch, tag or commit; None: the one in ``name``, or the branch ``main``.
        device: Device to load it on; None: a GPU if there is one and the format runs on it, else the CPU.
        trust: Also load an artefact that may run any code, see ``artefact.load``.

    Returns:
        The loaded model; ``outputs(rows)`` computes its fp32 outputs.

    Raises:
        ConfigError: If it cannot be downloaded, is damaged, or needs ``trust``.

    Example:
        ``from_hub("ORGANISATION/NAME").outputs(rows)``, for an image model with rows of uint8 ``[rows, height, width, 3]``.
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
        The artefact's folder in the cache of huggingface_hub; the name of the folder is the commit.

    Raises:
        ConfigError: If it cannot be downloaded, is not an artefact of dtrain, or is damaged.
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
        replace: Whether a repository with different content is replaced.
        commit: The newest commit of the branch; None if the repository or the branch does not exist.
        exists: Whether the repository exists.
        remote: Paths of the files of the branch.
        front_matter: Metadata of the model card in the repository.
    """

    model: HubModel
    private: bool
    replace: bool
    commit: str | None = None
    exists: bool = False
    remote: set[str] = field(default_factory=set)
    front_matter: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, cfg: ExportConfig, ours: Mapping[str, Any]) -> Push | None:
        """The push that the config asks for; None without ``export.push``.

        Args:
            cfg: The config.
            ours: ``model_identity`` of the model to export.

        Raises:
            ConfigError: If the name is wrong, the package or a token is missing, the token may not write there, the repository
                has a different model, or the model's config names a path of this machine.
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
            ConfigError: If the connection fails, or the repository has a new commit since the export began.
        """
        note = f"Nothing was published. The artefact is complete in {folder}; the same command again pushes it."
        with hub_errors(self._what, note=note):
            self._create()
        if not self.exists:
            note += " The repository was created and is empty; the next push uses it."
        with hub_errors(self._what, note=note):
            done = self._api().upload_folder(
                repo_id=self.model.name,
                folder_path=folder,
                commit_message=message,
                revision=self.model.revision,
                parent_commit=self.commit,
                allow_patterns=sorted(OWN_FILES),
                delete_patterns="*" if self.replace else sorted(OWN_FILES),
            )
        unchanged = " (unchanged, so there is no new commit)" if done.oid == self.commit else ""
        return f"hf://{self.model.name}@{done.oid}{unchanged}"

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
        from huggingface_hub import metadata_load
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        api, name = self._api(), self.model.name
        try:
            info = api.repo_info(name, revision=self.model.revision or "main")
        except RevisionNotFoundError:
            self.exists = True
            return
        except RepositoryNotFoundError:
            return
        self.exists, self.commit = True, info.sha
        self.remote = {file.rfilename for file in info.siblings}
        if CARD in self.remote:
            card = api.hf_hub_download(name, CARD, revision=self.commit)
            with suppress(ValueError, yaml.YAMLError):  # then it has no metadata that could be kept
                self.front_matter = metadata_load(card) or {}

    def _require_same_model(self, ours: Mapping[str, Any]) -> None:
        remedy = "Push to a different name, or set export.push_replace=true to replace all of its files."
        foreign = self.remote - {_OF_THE_HUB, CARD}
        if self.replace or not foreign:
            return
        if DESCRIPTION not in self.remote:
            raise ConfigError(
                f"{self._what} exists and has no artefact of dtrain (it has {min(foreign)}, and no {DESCRIPTION}). {remedy}"
            )
        path = HubModel(self.model.name, self.commit).download(DESCRIPTION)
        try:
            content = read_json(path)
            source, classes, tokenizer = content["source"], content["classes"], content["tokenizer"]
            theirs = model_identity(content["model"], source.get("task"), classes, tokenizer)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self._what} exists, and its {DESCRIPTION} is damaged ({error}). {remedy}") from error
        if theirs != ours:
            raise ConfigError(f"{self._what} has a different model: {_difference(theirs, ours)}. {remedy}")

    def _create(self) -> None:
        """Creates the repository and the branch, if they do not exist."""
        api, name, branch = self._api(), self.model.name, self.model.revision
        if not self.exists:
            api.create_repo(name, private=self.private, exist_ok=True)
        if self.commit is None:
            if branch is not None and branch != "main":
                api.create_branch(name, branch=branch, exist_ok=True)
            self.commit = api.repo_info(name, revision=branch or "main").sha


def model_identity(model: Any, task: Any, classes: Any, tokenizer: Any) -> dict[str, Any]:
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
