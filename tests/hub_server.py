"""A Hugging Face hub on loopback with one dataset and with models: its API, its storage, and failures on purpose."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.http_server import FileServer, Handler, running

_NAME = r"([\w.-]+/[\w.-]+)"
_MODEL = re.compile(rf"/api/models/{_NAME}(?:/(\w+)/(.+))?")
_FILE = re.compile(rf"/{_NAME}/resolve/([^/]+)/(.+)")
_BATCH = re.compile(rf"/{_NAME}\.git/info/lfs/objects/batch")
_WRONG_TOKEN = "Invalid credentials in Authorization header"
_GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


class HubServer(FileServer):
    """A hub with the dataset ``org/name``, whose files are those of a folder, each stored in LFS, and with models in memory.

    Attributes:
        api_failures: Answers that are taken from the front, one for each request to the API or of a file: a status, and
            the headers of the answer.
        token: The token that every request for the dataset must have; None for a public dataset.
        gated: Whether the token has no access.
        commit: What the branch ``main`` and the tag ``v1`` of the dataset point to.
        api_requests: Paths of requests to the API.
        page: Entries of a page of a listing.
        users: Tokens to the answer of ``whoami-v2``. A user may write to what belongs to the user or to one of the ``orgs``.
        models: Repositories of models by name.
        stored: Content of the storage by SHA-256; what no commit names is invisible.
        xet: What Xet's storage gets, by SHA-256. It takes any upload and does not decode it, so a test says what will come.
        xet_uploads: Paths of the uploads to Xet's storage.
        cut: A regular expression of a method and path, such as ``PUT /lfs``; the connection of such a request is closed without
            an answer. Empty for none.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, HubHandler)
        self.api_failures: list[tuple[int, dict[str, str]]] = []
        self.token: str | None = None
        self.gated = False
        self.commit = "a" * 40
        self.api_requests: list[str] = []
        self.entries_of_page = 4
        self.users: dict[str, dict[str, Any]] = {}
        self.models: dict[str, Model] = {}
        self.stored: dict[str, bytes] = {}
        self.xet: dict[str, bytes] = {}
        self.xet_uploads: list[str] = []
        self.cut = ""

    @property
    def endpoint(self) -> str:
        """For ``HF_ENDPOINT``."""
        return f"http://127.0.0.1:{self.server_port}"

    def add_user(self, token: str, name: str = "ann", orgs: Sequence[str] = ("org",), role: str = "write") -> str:
        """Adds a user; returns the token."""
        of_token = {"accessToken": {"displayName": "test", "role": role}}
        self.users[token] = {"type": "user", "name": name, "orgs": [{"name": it} for it in orgs], "auth": of_token}
        return token

    def add_model(self, name: str, files: Mapping[str, bytes], *, private: bool = False) -> Model:
        """Adds a repository with one commit that has these files."""
        model = self.models[name] = Model(private)
        model.add_commit("main", dict(files), "first")
        return model


@dataclass
class Model:
    """A repository of a model.

    Attributes:
        private: Whether only those who may write see it.
        branches: Branch to commits, the newest last.
        trees: Commit to its files.
        messages: Commit to its message.
    """

    private: bool = False
    branches: dict[str, list[str]] = field(default_factory=dict)
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def add_commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        """Adds a commit with exactly these files to a branch; returns its hash."""
        commit = hashlib.sha1(f"{branch} {len(self.trees)} {sorted(files)} {message}".encode()).hexdigest()
        self.branches.setdefault(branch, []).append(commit)
        self.trees[commit], self.messages[commit] = files, message
        return commit

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch or commit; None if there is none."""
        return (
            self.branches[revision][-1] if revision in self.branches else revision if revision in self.trees else None
        )

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """The files of a branch or commit."""
        commit = self.resolve(revision)
        assert commit is not None
        return self.trees[commit]


class HubHandler(Handler):
    """Answers the requests of huggingface_hub; storage is the inherited file server."""

    server: HubServer

    def _answer(self, body: bool) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if self._is_cut():
            return
        api, dataset = "/api/datasets/org/name", "/datasets/org/name/resolve/"
        if "/xet-write-token/" in path:
            token = {"accessToken": "of-xet", "exp": 2**33, "casUrl": f"{self.server.endpoint}/xet"}
            self._send(200, token)
            return
        if path.startswith("/xet/"):
            self._send(404, {})  # nothing is known yet
            return
        if path.startswith("/lfs/"):
            self._send_stored(path.removeprefix("/lfs/"))
            return
        if found := _MODEL.fullmatch(path) or _FILE.fullmatch(path):
            with self.server.lock:
                self.server.api_requests.append(path)
            self._model(*found.groups(default=""), of_file=found.re is _FILE)
            return
        if path == "/api/whoami-v2":
            user = self._user()
            self._send(*((200, user) if user else (401, {"error": _WRONG_TOKEN})))
            return
        if not path.startswith(("/api/", "/datasets/")):
            assert "authorization" not in {name.lower() for name in self.headers}, "a token was sent to the storage"
            super()._answer(body)
            return
        with self.server.lock:
            self.server.api_requests.append(path)
            failure = self.server.api_failures.pop(0) if self.server.api_failures else None
        if failure is not None:
            self._send(failure[0], {"error": "failed on purpose"}, failure[1])
        elif not path.startswith((api, dataset)) or not self._is_authorised():
            self._send(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif self.server.gated:
            self._send(403, {"error": "Access is restricted"}, {"X-Error-Code": "GatedRepo"})
        elif path.startswith(dataset):
            self._resolve(*path[len(dataset) :].split("/", 1))
        elif path.startswith(f"{api}/tree/"):
            self._list(path[len(f"{api}/tree/") :], parse_qs(parts.query))
        else:
            revision = path[len(f"{api}/revision/") :] or "main"
            if self._is_known(revision):
                self._send(
                    200, {"id": "org/name", "sha": self.server.commit, "private": False, "tags": [], "downloads": 0}
                )

    # -- models

    def do_POST(self) -> None:
        """Answers everything that changes models; datasets are only read."""
        path, body = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._is_cut():
            return
        if path.startswith("/xet/"):
            self._take_xet(path)
            return
        with self.server.lock:
            self.server.api_requests.append(path)
        if path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif found := _BATCH.fullmatch(path):
            if self._may_write(found[1]):
                self._plan_uploads(json.loads(body)["objects"])
        elif found := _MODEL.fullmatch(path):
            name, what, rest = found.groups(default="")
            if not self._may_write(name):
                return
            model = self.server.models[name]
            if what == "branch":
                model.branches[rest] = [model.branches["main"][-1]]
                self._send(200, {})
            elif what == "preupload":
                self._choose_modes(model, rest, json.loads(body)["files"])
            elif what == "commit":
                self._commit(name, model, rest, [json.loads(line) for line in body.splitlines()])
            else:
                self._send(405, {})
        else:
            self._send(405, {})

    def do_PUT(self) -> None:
        """Stores an upload. It stays invisible until a commit names it."""
        assert "authorization" not in {name.lower() for name in self.headers}, "a token was sent to the storage"
        if re.search(self.server.cut or "(?!)", f"PUT {self.path}"):
            self.rfile.read(int(self.headers["Content-Length"]) // 2)  # cut in the middle
            self._is_cut()
            return
        content = self.rfile.read(int(self.headers["Content-Length"]))
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.path.removeprefix("/lfs/"):
            self._send(400, {"error": "another SHA-256"})
            return
        self.server.stored[digest] = content
        self._send(200, {})

    def _take_xet(self, path: str) -> None:
        """Takes an upload in version 1 of Xet's protocol. A shard is the last of them, and says which files there are."""
        if not path.startswith("/xet/v1/"):
            self._send(404, {})
            return
        self.server.xet_uploads.append(path)
        if "/shards" in path:
            self.server.stored |= self.server.xet
        self._send(200, {"was_inserted": True, "result": 1})

    def _is_cut(self) -> bool:
        if not re.search(self.server.cut or "(?!)", f"{self.command} {self.path}"):
            return False
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
        return True

    def _user(self) -> dict[str, Any] | None:
        return self.server.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _owns(self, name: str) -> bool:
        user = self._user()
        return user is not None and name.split("/")[0] in (user["name"], *(org["name"] for org in user["orgs"]))

    def _may_write(self, name: str) -> bool:
        user = self._user()
        if "Authorization" in self.headers and user is None:
            self._send(401, {"error": _WRONG_TOKEN})
        elif name in self.server.models and self.server.models[name].private and not self._owns(name):
            self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif user is None or not self._owns(name) or user["auth"]["accessToken"]["role"] == "read":
            self._send(403, {"error": "Forbidden: pass a token with the permission to write"})
        else:
            return True
        return False

    def _model(self, name: str, what: str, rest: str, *, of_file: bool) -> None:
        """Describes a model at a revision, lists its files, or sends one: then ``what`` is the revision, ``rest`` the path."""
        model = self.server.models.get(name)
        revision = what if of_file else rest.partition("/")[0] or "main"
        if "Authorization" in self.headers and self._user() is None:
            self._send(401, {"error": _WRONG_TOKEN})
        elif model is None or (model.private and not self._owns(name)):
            status = 404 if self._user() is not None else 401
            self._send(status, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif (commit := model.resolve(revision)) is None:
            self._send(404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"})
        elif of_file:
            self._send_file(model.trees[commit], commit, rest)
        elif what == "tree":
            self._send(200, [_entry(path, content) for path, content in sorted(model.trees[commit].items())])
        else:
            siblings = [{"rfilename": path} for path in model.trees[commit]]
            self._send(200, {"id": name, "sha": commit, "private": model.private, "tags": [], "siblings": siblings})

    def _send_file(self, files: dict[str, bytes], commit: str, path: str) -> None:
        if path not in files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            self._send(404, {"error": "Entry not found"}, headers)
            return
        content, entry = files[path], _entry(path, files[path])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry["oid"]}"', "Accept-Ranges": "bytes"}
        if "lfs" in entry:
            digest = entry["lfs"]["oid"]
            self.server.stored.setdefault(digest, content)
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            self._send(302, {}, headers | {"Location": f"http://localhost:{self.server.server_port}/lfs/{digest}"})
        else:
            self._send_bytes(content, headers)

    def _send_stored(self, digest: str) -> None:
        assert "authorization" not in {name.lower() for name in self.headers}, "a token was sent to the storage"
        with self.server.lock:
            self.server.requests[f"lfs/{digest}"] += self.command == "GET"
        self._send_bytes(self.server.stored[digest], {})

    def _validate(self, content: str) -> None:
        """Roughly what the hub checks: the front matter is YAML, and every result of the model index is complete."""
        from huggingface_hub import ModelCard  # the package may be missing where this file is imported

        try:
            card = ModelCard(content)
            errors = [] if card.data.to_dict() else ["there is no front matter"]
        except Exception as error:  # noqa: BLE001 - any error makes it invalid
            errors = [str(error)]
        messages = [{"message": text} for text in errors]
        self._send(400 if errors else 200, {"errors": messages, "warnings": []})

    def _create(self, body: dict[str, Any]) -> None:
        user = self._user()
        if user is None:
            self._send(401, {"error": _WRONG_TOKEN})
            return
        name = f"{body['organization'] or user['name']}/{body['name']}"
        if not self._may_write(name):
            return
        if name in self.server.models:
            self._send(409, {"error": "You already created this model repo", "url": f"{self.server.endpoint}/{name}"})
            return
        model = self.server.models[name] = Model(body.get("visibility") == "private" or bool(body.get("private")))
        model.add_commit("main", {".gitattributes": _GITATTRIBUTES}, "initial commit")
        self._send(200, {"url": f"{self.server.endpoint}/{name}", "name": name})

    def _choose_modes(self, model: Model, branch: str, files: list[dict[str, Any]]) -> None:
        known = model.files(branch)
        answers = []
        for file in files:
            answer = {"path": file["path"], "uploadMode": _mode(file["path"]), "shouldIgnore": False}
            if file["path"] in known:
                entry = _entry(file["path"], known[file["path"]])
                answer["oid"] = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
            answers.append(answer)
        self._send(200, {"files": answers})

    def _plan_uploads(self, objects: list[dict[str, Any]]) -> None:
        planned = []
        for each in objects:
            plan = dict(each)
            if each["oid"] not in self.server.stored:
                href = f"http://localhost:{self.server.server_port}/lfs/{each['oid']}"
                plan["actions"] = {"upload": {"href": href, "header": {}}}
            planned.append(plan)
        self._send(200, {"transfer": "basic", "objects": planned})

    def _commit(self, name: str, model: Model, branch: str, lines: list[dict[str, Any]]) -> None:
        header, *changes = lines
        parent = header["value"].get("parentCommit")
        if branch not in model.branches:
            self._send(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return
        if parent is not None and model.resolve(branch) != parent:
            self._send(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(model.files(branch))
        for line in changes:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.stored:
                    self._send(400, {"error": f"{value['path']} was not uploaded"})
                    return
                files[value["path"]] = self.server.stored[value["oid"]]
            else:
                del files[value["path"]]
        commit = model.add_commit(branch, files, header["value"]["summary"])
        url = f"{self.server.endpoint}/{name}/commit/{commit}"
        self._send(200, {"success": True, "commitOid": commit, "commitUrl": url})

    def _send_bytes(self, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(200)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # -- the dataset

    def _is_authorised(self) -> bool:
        return self.server.token is None or self.headers.get("Authorization") == f"Bearer {self.server.token}"

    def _is_known(self, revision: str) -> bool:
        known = revision in ("main", "v1", self.server.commit)
        if not known:
            self._send(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        return known

    def _resolve(self, revision: str, path: str) -> None:
        if not self._is_known(revision):
            return
        if not (self.server.folder / path).is_file():
            self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        self._send(302, {}, {"Location": f"http://localhost:{self.server.server_port}/{path}?signature=secret"})

    def _list(self, place: str, query: dict[str, list[str]]) -> None:
        revision, _, folder = place.partition("/")
        if not self._is_known(revision):
            return
        root = self.server.folder / folder
        if not root.is_dir():
            self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        found = sorted(root.rglob("*") if query.get("recursive") == ["true"] else root.iterdir())
        entries = []
        for file in found:
            name = str(file.relative_to(self.server.folder))
            if file.is_dir():
                entries.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": name})
                continue
            content = file.read_bytes()
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            blob = hashlib.sha1(content).hexdigest()
            entries.append({"type": "file", "oid": blob, "size": len(content), "path": name, "lfs": lfs})
        first = int(query.get("cursor", ["0"])[0])
        last = first + self.server.entries_of_page
        headers = {}
        if last < len(entries):
            more = f"{self.server.endpoint}/api/datasets/org/name/tree/{place}?cursor={last}"
            more += "&recursive=true" if query.get("recursive") == ["true"] else ""
            headers["Link"] = f'<{more}>; rel="next"'
        self._send(200, entries[first:last], headers)

    def _send(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".png", ".onnx", ".pt2", ".bin")) else "regular"


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """A file of a listing."""
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "oid": blob, "size": len(content), "path": path}
    if _mode(path) == "lfs":
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def point_at(server: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes huggingface_hub use this server, with ``home`` as its empty home.

    It reads the environment when it is imported, which may have been long ago; processes that are started read it again.
    """
    values = {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    for name, value in values.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    for name, value in {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def serving_hub(folder: Path) -> Iterator[HubServer]:
    """A hub on a free port."""
    server = HubServer(folder)
    with running(server):
        yield server
