"""The shards that most tests of the loader read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shards import UNEVEN, write_numbered


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Shards of ``UNEVEN`` sizes, shared by all tests: for reading only."""
    return write_numbered(tmp_path_factory.mktemp("uneven"), UNEVEN)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """The same shards in a folder of the test's own, ``tmp_path / "data"``, which it may change."""
    return write_numbered(tmp_path / "data", UNEVEN)
