"""Shards in a bucket of a real S3 server (moto's), by listing and by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain import urls
from dtrain.data.shards.shard_file import RemoteFile, ShardChanged
from tests.refusals import refused
from tests.s3_server import s3_server
from tests.shards import make_loader, read_epoch, valid_keys

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with s3_server():
        import boto3

        yield boto3.client("s3")


@pytest.fixture
def bucket(client: Any, shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client; the shards are in its bucket."""
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(urls, "_FIRST_PAUSE", 0.01)
    client.create_bucket(Bucket="shards")
    for path in shards:
        client.upload_file(path, "shards", f"train/{Path(path).name}")
    return client


def keys(shards: str | list[str], workers: int = 0) -> list[str]:
    loader = make_loader(shards, num_workers=workers)
    found = [key for step in read_epoch(loader) for key in valid_keys(step)]
    loader.close()
    return found


def test_a_bucket_gives_the_batches_of_a_folder(bucket: Any, shards: list[str]) -> None:
    expected = keys(shards)
    assert keys("s3://shards/train/*.tar") == expected
    assert keys("s3://shards/train/shard-{000..005}.tar", workers=2) == expected


def test_an_object_that_is_replaced_by_one_of_its_size_is_noticed(
    bucket: Any, shards: list[str], tmp_path: Path
) -> None:
    loader = make_loader("s3://shards/train/shard-004.tar")
    shutil.rmtree(tmp_path / "cache" / "shards")
    size = Path(shards[4]).stat().st_size
    bucket.put_object(Bucket="shards", Key="train/shard-004.tar", Body=bytes(size))
    with refused(ShardChanged, "s3://shards/train/shard-004.tar", "was replaced"):
        read_epoch(loader)
    loader.close()


def test_an_object_that_is_replaced_while_it_is_open_is_noticed(bucket: Any, shards: list[str]) -> None:
    file = RemoteFile("s3://shards/train/shard-004.tar")
    assert file.read(0, 100) == Path(shards[4]).read_bytes()[:100]
    bucket.put_object(Bucket="shards", Key="train/shard-004.tar", Body=bytes(file.size))
    with refused(ShardChanged, "shard-004.tar", "was replaced"):
        file.read(100, 100)
    file.close()


def test_an_object_that_is_not_there_is_a_file_not_found(bucket: Any) -> None:
    with refused(FileNotFoundError, "s3://shards/train/none.tar", "does not exist"):
        make_loader("s3://shards/train/none.tar")


@pytest.mark.parametrize("opened", [False, True], ids=["before its first read", "while it reconnects"])
def test_an_object_that_is_replaced_before_it_is_opened_is_noticed(
    bucket: Any, shards: list[str], opened: bool
) -> None:
    file = RemoteFile("s3://shards/train/shard-004.tar")
    if opened:
        file.read(0, 100)
        file.close()  # as after a broken connection
    bucket.put_object(Bucket="shards", Key="train/shard-004.tar", Body=bytes(file.size))
    with refused(ShardChanged, "s3://shards/train/shard-004.tar", "was replaced", "Restore the old one"):
        file.read(100, 100)
