"""The demo's data: what scikit-learn has, without loss, split once and for all, made once whoever asks."""

import io
import multiprocessing
import os
import sys
import tarfile
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

from dtrain.data import digits
from tests.refusals import refused

# importorskip would import scikit-learn whenever tests are collected, which takes most of a second.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn: pip install scikit-learn")
SHARDS = [*(f"train-{n:06d}.tar" for n in range(8)), *(f"test-{n:06d}.tar" for n in range(2))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "digits"
    digits.prepare(str(path))
    return path


def read(folder, prefix):
    """Row of scikit-learn's table to (pixels, label), by tarfile and Pillow."""
    rows = {}
    for path in sorted(folder.glob(f"{prefix}-*.tar")):
        with tarfile.open(path) as archive:
            content = {member.name: archive.extractfile(member).read() for member in archive}
        for name, payload in content.items():
            key, _, ext = name.partition(".")
            if ext == "png":
                image = Image.open(io.BytesIO(payload))
                assert image.mode == "L"
                rows[int(key.rpartition("_")[2])] = np.asarray(image), int(content[f"{key}.cls"])
    return rows


def test_the_shards_hold_scikit_learns_digits_without_loss(folder):
    from sklearn.datasets import load_digits

    train, test = read(folder, "train"), read(folder, "test")
    assert (len(train), len(test)) == (1437, 360)
    assert not train.keys() & test.keys()
    everything, table = train | test, load_digits()
    assert sorted(everything) == list(range(1797))
    for row, (pixels, label) in everything.items():
        np.testing.assert_array_equal(pixels, table.images[row] * 15)
        assert label == table.target[row]


def test_the_split_is_stratified(folder):
    train, test = read(folder, "train"), read(folder, "test")
    for label in range(10):
        in_test = sum(other == label for _, other in test.values())
        of_all = in_test + sum(other == label for _, other in train.values())
        assert abs(in_test - of_all * 360 / 1797) <= 1


def test_every_shard_mixes_the_classes(folder):
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as archive:
            labels = {archive.extractfile(member).read() for member in archive if member.name.endswith(".cls")}
        assert len(labels) == 10


def test_the_same_bytes_are_made_anywhere(folder, tmp_path):
    digits.prepare(str(tmp_path / "again"))
    for name in SHARDS:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_what_is_there_is_not_made_again(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    digits.prepare(str(folder))
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_the_default_place_is_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path))
    digits.prepare()
    assert digits.shard_dir() == str(tmp_path / "digits")
    assert {path.name for path in (tmp_path / "digits").glob("*.tar")} == set(SHARDS)
    # Nothing else stays behind.
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_processes_that_race_all_end_well(tmp_path):
    target = tmp_path / "digits"
    # fork: torch is imported already, and a second import of it would take most of the time.
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    racers = [context.Process(target=_race, args=(barrier, str(target))) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert {path.name for path in target.glob("*.tar")} == set(SHARDS)
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def _race(barrier, target):
    barrier.wait(60)
    digits.prepare(target)


def test_somebody_elses_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="Delete it"):
        digits.prepare(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_exception_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", _full_disk)
    with pytest.raises(OSError, match="full"):
        digits.prepare(str(tmp_path / "digits"))
    assert list(tmp_path.iterdir()) == []


def _full_disk(source, target):
    raise OSError("the disk is full")


def test_without_scikit_learn_one_message_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with refused(ModuleNotFoundError, key="", remedy="pip install 'dtrain[demo]'"):
        digits.prepare(str(tmp_path / "digits"))
    assert list(tmp_path.iterdir()) == []


def test_shards_that_are_there_need_no_scikit_learn(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits.prepare(str(folder))
