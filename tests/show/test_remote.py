"""``dtrain show`` of shards behind a server reads the indexes and the samples that it shows, and copies nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain import urls
from dtrain.data.shards.shard_index import load_or_build
from tests.http_server import serving
from tests.shards import jpeg, write_tar
from tests.show.data_for_tests import FIELDS, show

pytest.importorskip("aiohttp", reason="http needs aiohttp: pip install 'dtrain[http]'")


def test_only_what_is_shown_is_read_from_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(urls, "_FIRST_PAUSE", 0.01)
    folder = tmp_path / "data"
    for shard in range(4):
        samples = [(f"{shard}-{n:03d}", {"jpg": jpeg(n, 96, 96), "cls": b"1"}) for n in range(60)]
        load_or_build(write_tar(folder / f"train-{shard}.tar", samples))  # stores the index next to it
    total = sum(path.stat().st_size for path in folder.glob("*.tar"))
    near, _ = show(tmp_path, "data=shards", f"data.train={folder}/train-*.tar", FIELDS, "--n", "4")
    with serving(folder) as server:
        addresses = f'data.train="{server.url("train-{0..3}.tar")}"'
        far, _ = show(tmp_path, "data=shards", addresses, FIELDS, "--n", "4")
        sent = server.sent
    assert far["shown"] == near["shown"]
    assert far["fields"] == near["fields"]
    assert far["bad"]["examined"] == 4
    assert far["labels"]["label"]["counts"] == {"1": 4}
    assert any("URL" in note for note in far["notes"])
    assert sent < total / 4
    assert not list((tmp_path / "cache").glob("shards/**/*.tar"))
