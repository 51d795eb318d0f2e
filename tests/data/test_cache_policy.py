"""What goes through the cache: URLs always, files where they lie far away."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from dtrain.data import cache_policy
from dtrain.data.cache_policy import CachePolicy


@pytest.mark.parametrize(
    ("storage", "network", "far"),
    [
        ("auto", {"data"}, True),
        ("auto", set(), False),
        ("auto", {"data", "cache"}, False),  # nothing would be gained
        ("fast", {"data"}, False),
        ("slow", set(), True),
        ("slow", {"data", "cache"}, True),
    ],
)
def test_files_are_copied_where_that_helps(
    storage: str, network: set[str], far: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("data", "cache"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(cache_policy, "is_network", lambda folder: Path(folder).name in network)
    policy = CachePolicy(storage, str(tmp_path / "cache"))
    assert policy.applies_to(str(tmp_path / "data" / "x.tar")) is far
    assert policy.applies_to("s3://bucket/x.tar")


def test_a_cache_that_is_not_there_yet_lies_where_it_will_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(cache_policy, "is_network", lambda folder: asked.append(Path(folder)) or len(asked) == 1)
    assert CachePolicy(folder=str(tmp_path / "not" / "there")).applies_to("/data/x.tar")
    assert asked == [Path("/data"), tmp_path]


def test_the_cache_is_in_the_users_own_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/me")
    assert CachePolicy().cache.folder == tmp_path / "shards"
    assert CachePolicy(folder="~/scratch").cache.folder == Path("/home/me/scratch")
    assert not list(tmp_path.iterdir())


def test_a_policy_travels_to_workers(tmp_path: Path) -> None:
    policy = CachePolicy("slow", str(tmp_path), 1.5, 2)
    assert policy.cache.max_bytes == 1_500_000_000
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "nfs"}, r"data\.storage: got 'nfs', want one of auto, fast, slow"),
        ({"max_gb": 0.0}, r"data\.cache\.max_gb: got 0\.0, want a number above 0"),
    ],
)
def test_an_impossible_policy_is_refused_with_what_is_possible(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CachePolicy(**options)  # type: ignore[arg-type]
