"""Shards on a Hugging Face hub: listings, revisions, ranges, tokens, and what its refusals say."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain import urls
from dtrain.data import ShardLoader
from dtrain.data.shards import shard_file
from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.shards.patterns import expand
from dtrain.data.shards.shard_file import RemoteFile, ShardChanged
from tests.hub_server import HubServer, point_at, serving_hub
from tests.refusals import refused
from tests.shards import make_loader, read_epoch, valid_keys, write_numbered

hub = pytest.importorskip("huggingface_hub", reason="hf needs huggingface_hub: pip install 'dtrain[hf]'")
URL = "hf://datasets/org/name"


@pytest.fixture
def server(shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    with serving_hub(Path(shards[0]).parent) as server:
        point_at(server, tmp_path / "hf", monkeypatch)
        shard_file._commit.cache_clear()
        hub.HfFileSystem.clear_instance_cache()
        yield server
    hub.HfFileSystem.clear_instance_cache()


def keys(loader: ShardLoader) -> list[str]:
    try:
        return [key for step in read_epoch(loader) for key in valid_keys(step)]
    finally:
        loader.close()


@pytest.mark.parametrize("pattern", ["shard-*.tar", "shard-{000..005}.tar", "@main/shard-*.tar", "@v1/shard-00*.tar"])
def test_a_dataset_of_the_hub_gives_the_batches_of_a_folder(server: HubServer, shards: list[str], pattern: str) -> None:
    far = make_loader(f"{URL}{pattern if pattern.startswith('@') else f'/{pattern}'}")
    near = make_loader(shards)
    assert far.index.fingerprint == near.index.fingerprint
    assert keys(far) == keys(near)
    assert server.sent == sum(Path(path).stat().st_size for path in shards)


def test_workers_read_ranges_where_there_is_no_room_for_copies(
    server: HubServer, shards: list[str], tmp_path: Path
) -> None:
    loader = make_loader(f"{URL}/*.tar", num_workers=2, policy=CachePolicy(folder=str(tmp_path / "small"), max_gb=1e-9))
    assert keys(loader) == keys(make_loader(shards))


def test_a_listing_of_folders_and_pages_is_complete(server: HubServer, tmp_path: Path) -> None:
    write_numbered(server.folder / "train" / "more", [1] * 9)
    expected = [f"{URL}/train/more/shard-{number:03d}.tar" for number in range(9)]
    assert expand(f"{URL}/train/**/*.tar") == expand(f"{URL}/train/more/shard-*.tar") == expected
    assert expand(f"{URL}@v1/train/more/*8.tar") == [f"{URL}@v1/train/more/shard-008.tar"]


def test_a_process_stays_at_the_commit_that_it_began_with(server: HubServer, shards: list[str]) -> None:
    first = RemoteFile(f"{URL}/shard-004.tar")
    assert first._at_commit == f"{URL}@{'a' * 40}/shard-004.tar"
    assert first.digest == ("sha256", hashlib.sha256(Path(shards[4]).read_bytes()).digest())
    server.commit = "b" * 40
    assert RemoteFile(f"{URL}@main/shard-004.tar")._at_commit == f"{URL}@{'b' * 40}/shard-004.tar"
    assert RemoteFile(f"{URL}@{'b' * 40}/shard-004.tar").stamp() == first.stamp()
    with refused(
        FileNotFoundError, "shard-004.tar", "HTTP 404", "revision"
    ):  # it would not be mixed with the new commit
        first.read(0, 100)


def test_a_copy_is_compared_with_the_sha256_of_the_hub(server: HubServer, shards: list[str], tmp_path: Path) -> None:
    file = RemoteFile(f"{URL}/shard-004.tar")
    Path(shards[4]).write_bytes(bytes(file.size))
    with refused(ShardChanged, "shard-004.tar", "sha256"):
        CachePolicy(folder=str(tmp_path / "copies")).cache.fetch(f"{URL}/shard-004.tar", file.stamp())


@pytest.mark.parametrize("with_token", [True, False])
def test_a_private_dataset_is_read_with_the_token_of_the_environment(
    server: HubServer,
    shards: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    with_token: bool,
) -> None:
    server.token = "hf_secret"
    caplog.set_level(logging.DEBUG)
    if with_token:
        monkeypatch.setenv("HF_TOKEN", server.token)
        assert keys(make_loader(f"{URL}/*.tar")) == keys(make_loader(shards))
    else:
        with refused(PermissionError, URL, "HTTP 401", "HF_TOKEN"):
            make_loader(f"{URL}/shard-004.tar")
    assert "hf_secret" not in caplog.text


@pytest.mark.parametrize("pattern", ["shard-004.tar", "*.tar"])
def test_a_gated_dataset_is_refused_with_what_to_do(server: HubServer, pattern: str) -> None:
    server.gated = True
    with refused(PermissionError, f"{URL}/{pattern}", "HTTP 403", "HF_TOKEN", "accept its terms"):
        make_loader(f"{URL}/{pattern}")


@pytest.mark.parametrize("path", ["/none.tar", "/none/x.tar", "@none/shard-004.tar"])
def test_what_the_hub_does_not_have_is_named(server: HubServer, path: str) -> None:
    with refused(FileNotFoundError, f"{URL}{path}", "does not exist", "Correct"):
        make_loader(f"{URL}{path}")
    assert len(server.api_requests) < 10  # no attempt was repeated


@pytest.mark.parametrize("url", ["hf://datasets/name.tar", "hf://x.tar", "hf://datasets/org/name"])
def test_a_url_without_organisation_name_and_file_is_refused(url: str) -> None:
    with refused(ValueError, url, "hf://datasets/ORGANISATION/NAME/FILE"):
        expand(url)


def test_a_hub_that_is_busy_for_a_while_is_waited_for_as_it_asks(
    server: HubServer, shards: list[str], pauses: list[float]
) -> None:
    server.api_failures = [(500, {}), (429, {"Retry-After": "7"}), (503, {}), (429, {"Retry-After": "9"})]
    server.failures = [500, 503]
    assert keys(make_loader(f"{URL}/*.tar")) == keys(make_loader(shards))
    assert {7, 9} <= {int(pause) for pause in pauses} | {
        int(pause) - 1 for pause in pauses
    }  # the hub's client adds one


@pytest.mark.parametrize(("status", "remedy"), [(429, "requests"), (500, "Start again"), (503, "Start again")])
def test_a_hub_that_stays_busy_is_told_after_a_bounded_number_of_attempts(
    server: HubServer, pauses: list[float], status: int, remedy: str
) -> None:
    server.api_failures = [(status, {"Retry-After": "20"})] * 100
    with refused(OSError, f"{URL}/shard-004.tar", f"HTTP {status}", remedy, "after 5 attempts"):
        RemoteFile(f"{URL}/shard-004.tar")
    assert len(server.api_requests) <= 5 * 6
    assert sum(pauses) <= 5 * 6 * 21


def test_bytes_of_a_hub_without_ranges_are_read_as_a_whole(server: HubServer, shards: list[str]) -> None:
    server.ranges = False
    file = RemoteFile(f"{URL}/shard-004.tar")
    with pytest.raises(shard_file.NoRanges):
        file.read(50, 10)
    taken = io.BytesIO()
    file.read_whole(taken.writelines)
    assert taken.getvalue() == Path(shards[4]).read_bytes()


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any, **options: Any) -> None:
        raise ImportError("Install huggingface_hub to access HfFileSystem")

    monkeypatch.setattr(urls.fsspec.core, "url_to_fs", missing)
    with refused(ModuleNotFoundError, "hf://", "", "pip install 'dtrain[hf]'"):
        RemoteFile(f"{URL}/x.tar")
