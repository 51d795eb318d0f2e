"""Artefacts on the Hugging Face hub: one commit or nothing, never over another model, and loaded as safely as any other."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain import predict
from dtrain.config.schema import ExportConfig
from dtrain.errors import ConfigError
from dtrain.export import artefact, from_hub, hub
from dtrain.export.hub import Push, model_identity
from tests.export.helpers import CPU, write_linear
from tests.hub_server import HubServer, point_at, serving_hub
from tests.ranks import run_ranks
from tests.refusals import assert_refused, refused

pytest.importorskip("huggingface_hub", reason="hf needs huggingface_hub: pip install 'dtrain[hf]'")
TOKEN = "hf_token_that_may_write"
URL = "hf://org/name"
CARD = "---\nlibrary_name: dtrain\n---\n# name\n"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving_hub(tmp_path) as server:
        point_at(server, tmp_path / "home", monkeypatch)
        monkeypatch.setenv("HF_TOKEN", server.add_user(TOKEN))
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artefact with a card."""
    out = write_linear(tmp_path / "artefact")
    (out / "README.md").write_text(CARD)
    (out / "config.yaml").write_text("task: {_target_: dtrain.tasks.Regression}\n")
    (out / "report.json").write_text(json.dumps({"cost": 1}))
    return out


def push(folder: Path, url: str = URL, message: str = "first", **options: Any) -> str:
    """Pushes as ``dtrain.export`` does."""
    checked = Push.from_config(ExportConfig(push=url, **options), identity_in(folder))
    assert checked is not None
    return checked.upload(folder, message)


def identity_in(folder: Path) -> dict[str, Any]:
    model = json.loads((folder / "model.json").read_text())
    return model_identity(model["model"], model["source"].get("task"), model["classes"], model["tokenizer"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def without_hubs(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name != ".gitattributes"}


# -- push


@pytest.mark.parametrize("private", [True, False])
def test_a_push_is_one_commit_with_all_files(server: HubServer, folder: Path, private: bool) -> None:
    text = push(folder, private=private)
    model = server.models["org/name"]
    created, commit = model.branches["main"]
    assert text == f"hf://org/name@{commit}"
    assert without_hubs(model.trees[created]) == {}
    assert without_hubs(model.files()) == contents(folder)
    assert model.messages[commit] == "first"
    assert model.private is private


def test_a_push_without_changes_makes_no_commit_and_a_push_with_changes_makes_one(
    server: HubServer, folder: Path
) -> None:
    push(folder)
    assert "unchanged" in push(folder)
    (folder / "README.md").write_text(f"{CARD}more\n")
    push(folder, message="second")
    model = server.models["org/name"]
    assert [model.messages[commit] for commit in model.branches["main"]] == ["initial commit", "first", "second"]
    assert without_hubs(model.files()) == contents(folder)


def test_a_branch_is_created_and_the_main_branch_stays(server: HubServer, folder: Path) -> None:
    push(folder)
    before = server.models["org/name"].files()
    (folder / "README.md").write_text(f"{CARD}on a branch\n")
    push(folder, f"{URL}@next")
    assert server.models["org/name"].files() == before
    assert without_hubs(server.models["org/name"].files("next")) == contents(folder)


def test_files_of_another_format_are_removed_and_those_of_others_stay(server: HubServer, folder: Path) -> None:
    old = contents(folder) | {"model.pt2": b"program", "notes.txt": b"mine"}
    del old["model.safetensors"]
    server.add_model("org/name", old)
    push(folder)
    assert without_hubs(server.models["org/name"].files()) == contents(folder) | {"notes.txt": b"mine"}


def test_metadata_that_somebody_added_to_the_card_is_known_to_the_next_push(server: HubServer, folder: Path) -> None:
    server.add_model("org/name", {"README.md": b"---\nlicense: mit\nlanguage: [de]\n---\ntext"})
    checked = Push.from_config(ExportConfig(push=URL), identity_in(folder))
    assert checked is not None
    assert checked.front_matter == {"license": "mit", "language": ["de"]}


def test_a_card_and_a_description_of_others_may_have_any_content(server: HubServer, folder: Path) -> None:
    ours = identity_in(folder)
    server.add_model("org/name", {"README.md": b"---\ntags: [\n---\ntext"})
    checked = Push.from_config(ExportConfig(push=URL), ours)
    assert checked is not None
    assert checked.front_matter == {}
    server.add_model("org/name", {"model.json": b'{"model": 1, "source": null, "classes": []}'})
    with refused(ConfigError, "export.push", "model.json is damaged", "export.push_replace=true"):
        Push.from_config(ExportConfig(push=URL), ours)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (
            {"model": {"_target_": "torch.nn.Linear", "in_features": 99, "out_features": 2}},
            ["model.in_features: 99 there"],
        ),
        ({"classes": ["cat"]}, ["classes", "cat"]),
        ({"tokenizer": "bytes"}, ["tokenizer", "bytes"]),
    ],
    ids=["model", "classes", "tokenizer"],
)
def test_a_repository_of_another_model_is_replaced_only_if_asked_to(
    server: HubServer, folder: Path, change: dict[str, Any], names: list[str]
) -> None:
    theirs = json.loads((folder / "model.json").read_text()) | change
    model = server.add_model("org/name", {"model.json": json.dumps(theirs).encode(), "old.txt": b""})
    before = dict(model.branches)
    with refused(ConfigError, "export.push", "a different model", "export.push_replace=true", *names):
        push(folder)
    assert model.branches == before
    push(folder, push_replace=True)
    assert without_hubs(model.files()) == contents(folder)


def test_a_repository_that_is_not_dtrains_is_refused(server: HubServer, folder: Path) -> None:
    model = server.add_model("org/name", {"config.json": b"{}", "pytorch_model.bin": b"", "README.md": b""})
    with refused(ConfigError, "export.push", "config.json", "export.push_replace=true", "no artefact of dtrain"):
        push(folder)
    assert len(model.trees) == 1


@pytest.mark.parametrize(
    "url",
    [
        "org/name",
        "hf://name",
        "hf://a/b/c",
        "hf://datasets/org/name",
        "hf://o/n@",
        "hf://o/..",
        "s3://b/k",
        f"{URL}@main/../x",
    ],
)
def test_a_malformed_name_is_refused(url: str) -> None:
    with refused(ConfigError, "export.push", url, "hf://ORGANISATION/NAME"):
        Push.from_config(ExportConfig(push=url), {})


@pytest.mark.parametrize(
    ("token", "role", "url", "names"),
    [
        ("", "write", URL, ["no token", "HF_TOKEN"]),
        ("hf_wrong_and_secret", "write", URL, ["HTTP 401", "HF_TOKEN"]),
        (TOKEN, "read", URL, ["may only read", "HF_TOKEN"]),
        (TOKEN, "write", "hf://other/name", ["other", "ann, org", "HF_TOKEN"]),
    ],
    ids=["none", "wrong", "read only", "not a member"],
)
def test_who_may_not_push_is_told_before_the_export(
    server: HubServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    token: str,
    role: str,
    url: str,
    names: list[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    server.add_user(TOKEN, role=role)
    monkeypatch.setenv("HF_TOKEN", token)
    with refused(ConfigError, "export.push", url, *names) as error:
        Push.from_config(ExportConfig(push=url), identity_in(folder))
    assert server.models == {}
    assert not token or token not in str(error.value) + caplog.text


def test_a_permission_that_only_the_hub_knows_of_is_explained(
    server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add_user(TOKEN, role="fineGrained")
    monkeypatch.setattr("tests.hub_server.HubHandler._may_write", lambda self, name: self._send(403, {"error": "no"}))
    with refused(ConfigError, "export.push", "HTTP 403", "HF_TOKEN", str(folder)):
        push(folder)


def test_what_cannot_be_pushed_is_refused(server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = identity_in(folder)
    with refused(ConfigError, "export.format", "pt2", "one format"):
        Push.from_config(ExportConfig(push=URL, format=["safetensors", "pt2"]), ours)
    with refused(ConfigError, "export.push", "/home/ann/x.pt", "path of this machine"):
        Push.from_config(ExportConfig(push=URL), ours | {"model": {"_target_": "m", "weights": "/home/ann/x.pt"}})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused(ConfigError, "export.push", "HF_HUB_OFFLINE", "Unset"):
        Push.from_config(ExportConfig(push=URL), ours)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refused(ConfigError, "export.push", "huggingface_hub", "pip install 'dtrain[hf]'"):
        Push.from_config(ExportConfig(push=URL), ours)


@pytest.mark.parametrize(
    "request_", ["PUT /lfs", "POST .*/preupload", "POST .*/batch", "POST .*/commit", "POST .*validate-yaml"]
)
def test_a_connection_that_ends_in_the_middle_publishes_nothing_and_the_next_push_continues(
    server: HubServer, folder: Path, pauses: list[float], request_: str
) -> None:
    server.cut = request_
    with refused(ConfigError, URL, "created and is empty", "same command again", str(folder)):
        push(folder)
    model = server.models["org/name"]
    assert without_hubs(model.files()) == {}
    assert sum(pauses) < 60
    server.cut = ""
    uploaded = dict(server.stored)
    push(folder)
    assert without_hubs(model.files()) == contents(folder)
    assert len(model.trees) == 2
    assert not uploaded or server.stored == uploaded  # it was not sent again


@pytest.mark.slow
def test_a_push_through_xet_is_what_the_default_does(
    server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hf_xet")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "0")
    content = (folder / "model.safetensors").read_bytes()
    server.xet = {hashlib.sha256(content).hexdigest(): content}
    # In a process of its own, because hf_xet leaves threads behind.
    run_ranks(1, lambda rank: push(folder), init=False)
    assert without_hubs(server.models["org/name"].files()) == contents(folder)
    assert not [path for path in server.requests if path.startswith("lfs")]
    assert server.xet_uploads[-1].startswith("/xet/v1/shards")


def test_a_commit_of_somebody_else_in_the_meantime_is_not_overwritten(server: HubServer, folder: Path) -> None:
    model = server.add_model("org/name", contents(folder))
    checked = Push.from_config(ExportConfig(push=URL), identity_in(folder))
    assert checked is not None
    theirs = model.add_commit("main", contents(folder) | {"README.md": b"theirs"}, "theirs")
    (folder / "README.md").write_text(f"{CARD}ours\n")
    with refused(ConfigError, URL, "HTTP 412", "start again"):
        checked.upload(folder, "ours")
    assert model.resolve("main") == theirs


# -- pull


@pytest.fixture
def published(server: HubServer, folder: Path) -> str:
    """The commit of an artefact on the hub."""
    return server.add_model("org/name", contents(folder)).branches["main"][0]


ROWS = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize("revision", [None, "main", "commit"])
def test_an_artefact_of_the_hub_is_that_of_the_folder(
    server: HubServer, folder: Path, published: str, revision: str | None
) -> None:
    revision = published if revision == "commit" else revision
    there = from_hub("org/name", revision, device=CPU)
    rows = torch.ones(3, there.description.model["in_features"])
    assert torch.equal(there.outputs(rows), artefact.load(folder, CPU).outputs(rows))
    assert f"{URL}@{published}" == str(hub.HubModel.parse("", URL).at_commit())


def test_what_is_in_the_cache_is_used_without_a_network(
    server: HubServer, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = hub.pull(URL)
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        nobody = getattr(sys.modules["huggingface_hub"].constants, name).replace(str(server.server_port), "9")
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", nobody)
    assert hub.pull(URL) == pulled
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.pull(URL) == pulled
    with refused(ConfigError, "hf://org/other", "cannot be reached", "HF_HOME"):
        hub.pull("hf://org/other")


def test_only_the_files_of_the_artefact_are_downloaded(server: HubServer, folder: Path) -> None:
    server.add_model("org/name", contents(folder) | {"pytorch_model.bin": b"pickle", "train.py": b"import os"})
    assert {path.name for path in hub.pull(URL).iterdir()} == {"model.json", "model.safetensors"}


def change(**changes: bytes | None) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    def changed(files: dict[str, bytes]) -> dict[str, bytes]:
        named = {name.replace("_", "."): content for name, content in changes.items()}
        return {name: content for name, content in (files | named).items() if content is not None}

    return changed


@pytest.mark.parametrize(
    ("url", "files", "names"),
    [
        ("hf://org/none", change(), ["does not exist", "HTTP", "HF_TOKEN"]),
        (f"{URL}@v9", change(), ["no such revision", "HTTP 404", "branch main"]),
        (
            URL,
            change(model_json=None, model_safetensors=None, pytorch_bin=b"pickle"),
            ["not an artefact", "never loaded"],
        ),
        (URL, change(model_json=None), ["model.json"]),
        (URL, change(model_json=b"{"), ["model.json", "damaged"]),
        (URL, change(model_safetensors=b"other"), ["SHA-256", "model.json", "Delete"]),
    ],
    ids=["repository", "revision", "not dtrain's", "weights only", "description", "hash"],
)
def test_what_cannot_be_pulled_is_one_message(
    server: HubServer,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    url: str,
    files: Callable[[dict[str, bytes]], dict[str, bytes]],
    names: list[str],
) -> None:
    server.add_model("org/name", files(contents(folder)))
    assert predict.main([url, "photo.jpg"]) == 1
    text = capsys.readouterr().err
    assert_refused(text, url, *names)
    assert "Traceback" not in text


def test_a_private_model_needs_a_token_which_is_never_shown(
    server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.add_model("org/name", contents(folder), private=True)
    monkeypatch.delenv("HF_TOKEN")
    with refused(ConfigError, URL, "HTTP 401", "HF_TOKEN", "private"):
        hub.pull(URL)
    (Path(sys.modules["huggingface_hub"].constants.HF_TOKEN_PATH)).parent.mkdir(parents=True, exist_ok=True)
    Path(sys.modules["huggingface_hub"].constants.HF_TOKEN_PATH).write_text(TOKEN)  # of `hf auth login`
    assert hub.pull(URL).is_dir()
    assert TOKEN not in caplog.text


def test_an_artefact_of_somebody_else_runs_only_known_code(
    server: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "other"))  # of somebody who did not export it
    files = contents(folder)
    content = json.loads(files["model.json"]) | {"model": {"_target_": "os.system", "command": "false"}}
    server.add_model("org/name", files | {"model.json": json.dumps(content).encode()})
    with refused(ConfigError, "os.system", "", "--trust"):
        from_hub("org/name")


def test_the_vocabulary_of_a_language_model_is_pulled_too(server: HubServer, folder: Path) -> None:
    content = json.loads((folder / "model.json").read_text()) | {"tokenizer": "bytes"}
    server.add_model(
        "org/name", contents(folder) | {"model.json": json.dumps(content).encode(), "vocabulary.json": b"{}"}
    )
    assert (hub.pull(URL) / "vocabulary.json").read_bytes() == b"{}"
    shutil.rmtree(Path(sys.modules["huggingface_hub"].constants.HF_HUB_CACHE))
    server.add_model("org/name", contents(folder) | {"model.json": json.dumps(content).encode()})
    with refused(ConfigError, URL, "vocabulary.json"):
        hub.pull(URL)
