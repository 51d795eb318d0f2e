"""A Hugging Face hub on loopback with one dataset: its API, redirects to storage with ranges, and failures on purpose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.data.http_server import FileServer, Handler, running


class HubServer(FileServer):
    """A hub with the dataset ``org/name``, whose files are those of a folder, each stored in LFS.

    Attributes:
        api_failures: Answers that are taken from the front, one for each request to the API or of a file: a status, and
            the headers of the answer.
        token: The token that every request must have; None for a public dataset.
        gated: Whether the token has no access.
        commit: What the branch ``main`` and the tag ``v1`` point to.
        api_requests: Paths of requests to the API.
        page: Entries of a page of a listing.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, HubHandler)
        self.api_failures: list[tuple[int, dict[str, str]]] = []
        self.token: str | None = None
        self.gated = False
        self.commit = "a" * 40
        self.api_requests: list[str] = []
        self.entries_of_page = 4

    @property
    def endpoint(self) -> str:
        """For ``HF_ENDPOINT``."""
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(Handler):
    """Answers the requests of huggingface_hub; storage is the inherited file server."""

    server: HubServer

    def _answer(self, body: bool) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        api, dataset = "/api/datasets/org/name", "/datasets/org/name/resolve/"
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

    def do_POST(self) -> None:
        """The hub is only read."""
        self._send(405, {})


@contextmanager
def serving_hub(folder: Path) -> Iterator[HubServer]:
    """A hub on a free port."""
    server = HubServer(folder)
    with running(server):
        yield server
