"""``pack arrays``: numpy's rows and the loader's batches are the same numbers."""

import shlex
import tracemalloc

import numpy as np
import pytest
import torch
import webdataset
import yaml

from dtrain.data import ShardLoader
from dtrain.pack import main

ROWS = 23


@pytest.fixture
def arrays(tmp_path):
    """One array of each kind, saved as ``.npy``."""
    random = np.random.default_rng(0)
    made = {
        "x": random.standard_normal((ROWS, 3, 4)).astype(np.float32),
        "label": random.integers(0, 10, ROWS),
        "ids": random.integers(0, 2**31, (ROWS, 5), dtype=np.uint32),
        "price": random.standard_normal(ROWS),
        "colour": random.integers(0, 256, (ROWS, 6, 5, 3), dtype=np.uint8),
        "grey": random.integers(0, 256, (ROWS, 6, 5), dtype=np.uint8),
        "big_endian": np.asfortranarray(random.standard_normal((ROWS, 2))).astype(">f4"),
    }
    for name, array in made.items():
        np.save(tmp_path / f"{name}.npy", array)
    return made


def pack(*arguments):
    return main(["arrays", *map(str, arguments)])


def files(tmp_path):
    return sorted(tmp_path.glob("*.npy"))


def read(destination, precision="fp32"):
    """All batches of ``train`` by the fields that the command wrote down."""
    preset = yaml.safe_load((destination / "conf" / "data" / "packed.yaml").read_text())
    with_loader = ShardLoader(
        preset["train"], preset["fields"], global_batch_size=ROWS, num_workers=0, shuffle="none", precision=precision
    )
    (batch,) = with_loader.epoch(0)
    return batch


def test_the_loader_gives_back_the_arrays(arrays, tmp_path):
    assert pack(*files(tmp_path), tmp_path / "dst", "--png", "grey", "--shards", 3) == 0
    batch = read(tmp_path / "dst")
    assert [key.rpartition("/")[2] for key in batch.sample_keys] == [f"{row:09d}" for row in range(ROWS)]
    for name in ("x", "label", "ids", "price", "colour", "big_endian"):
        np.testing.assert_array_equal(batch[name].numpy(), arrays[name])
    assert batch["ids"].dtype == torch.uint32
    assert batch["price"].dtype == torch.float64
    np.testing.assert_array_equal(batch["grey"].numpy(), np.repeat(arrays["grey"][..., np.newaxis], 3, axis=3))


def test_the_config_finds_the_shards_in_a_folder_with_the_signs_of_a_pattern(arrays, tmp_path):
    assert pack(tmp_path / "label.npy", tmp_path / "set[2]") == 0
    np.testing.assert_array_equal(read(tmp_path / "set[2]")["label"].numpy(), arrays["label"])


def test_the_command_that_is_printed_can_be_pasted_whatever_the_folder_is_called(arrays, tmp_path, capsys):
    assert pack(*files(tmp_path), tmp_path / "my shards; $x") == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[words.index("--config-dir") + 1] == str(tmp_path / "my shards; $x" / "conf")


def test_webdataset_reads_them(arrays, tmp_path):
    assert pack(tmp_path / "x.npy", tmp_path / "label.npy", tmp_path / "dst", "--shards", 2) == 0
    shards = [str(path) for path in sorted((tmp_path / "dst").glob("*.tar"))]
    samples = list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode())
    np.testing.assert_array_equal([sample["x.npy"] for sample in samples], arrays["x"])
    assert [sample["label.cls"] for sample in samples] == arrays["label"].tolist()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_floats_can_be_stored_in_the_dtype_of_the_run(arrays, tmp_path, name, dtype):
    assert pack(tmp_path / "x.npy", tmp_path / "label.npy", tmp_path / "dst", "--dtype", name) == 0
    got = read(tmp_path / "dst", name)["x"]
    assert got.dtype == dtype
    assert torch.equal(got, torch.from_numpy(arrays["x"]).to(dtype))


def test_a_value_that_the_dtype_cannot_hold_is_named(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.array([[1.0], [np.inf], [70_000.0]]))
    assert pack(tmp_path / "x.npy", tmp_path / "dst", "--dtype", "fp16") == 1
    assert "array 'x', row 2: 70000 is outside the range of float16" in capsys.readouterr().err
    assert list((tmp_path / "dst").iterdir()) == []


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_an_npz_are_chosen_and_renamed(arrays, tmp_path, save):
    save(tmp_path / "all.npz", x_train=arrays["x"], y_train=arrays["label"], x_test=arrays["x"][:5])
    assert pack(tmp_path / "all.npz", tmp_path / "dst", "--field", "x=x_train", "--field", "y=y_train") == 0
    batch = read(tmp_path / "dst")
    np.testing.assert_array_equal(batch["x"].numpy(), arrays["x"])
    np.testing.assert_array_equal(batch["y"].numpy(), arrays["label"])
    assert not (tmp_path / "dst" / ".packing").exists()


def test_rows_are_dealt_to_splits_once_and_mixed_on_request(arrays, tmp_path):
    keys = {}
    for name, more in (("in order", ()), ("mixed", ("--shuffle",))):
        assert pack(tmp_path / "label.npy", tmp_path / name, "--val", 0.25, *more) == 0
        shards = {split: str(tmp_path / name / f"{split}-000000.tar") for split in ("train", "val")}
        keys[name] = {
            split: [sample["__key__"] for sample in webdataset.WebDataset(shard, shardshuffle=False, empty_check=False)]
            for split, shard in shards.items()
        }
        assert sorted(keys[name]["train"] + keys[name]["val"]) == [f"{row:09d}" for row in range(ROWS)]
        assert len(keys[name]["val"]) == round(0.25 * ROWS)
    assert keys["in order"]["train"] == sorted(keys["in order"]["train"]) != keys["mixed"]["train"]
    assert sorted(keys["mixed"]["val"]) == keys["in order"]["val"]


@pytest.mark.parametrize(
    ("made", "arguments", "says"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, [], "different numbers of rows: {'x': 3, 'y': 2}"),
        ({"x": np.zeros((0, 2))}, [], "have no rows"),
        ({"x": np.float32(1)}, [], "one row for each sample"),
        ({"x": np.zeros((3, 2), np.longdouble)}, [], "want numbers as tensors have them"),
        ({"x": np.array(["text"])}, [], "want numbers"),
        ({"x": np.array([{}])}, [], "Only arrays of numbers"),
        ({"a.b": np.zeros(2)}, [], "--field x=a.b"),
        ({"x": np.zeros(2), "X": np.zeros(2)}, [], "like that of"),
        ({"x": np.zeros(2)}, ["--field", "y=z"], "there is no array 'z' among x"),
        ({"x": np.zeros(2)}, ["--dtype", "int8"], "want fp32, fp16, bf16"),
        ({"x": np.zeros(2)}, ["--dtype", "y=bf16"], "there is no array 'y'"),
        ({"x": np.zeros(2, int)}, ["--dtype", "x=bf16"], "Only floats are converted"),
        ({"x": np.zeros(2)}, ["--png", "x"], "want uint8"),
        ({"x": np.zeros(2)}, ["--val", "0.01"], "give it none"),
        ({"x": np.zeros(2)}, ["--val", "1"], "sum to less than 1"),
        ({"x": np.zeros(2)}, ["--shards", "3"], "Ask for 2 or fewer"),
        ({"x": np.zeros(2)}, ["--processes", "0"], "at least 1"),
        ({"x": np.zeros(2)}, ["--prefix", "a/b"], "plain name"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_nothing(tmp_path, capsys, made, arguments, says):
    for name, array in made.items():
        np.save(tmp_path / f"{name}.npy", array)
    assert pack(*files(tmp_path), tmp_path / "dst", *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("pack: error: ")
    assert error.count("\n") == 1
    assert says in error
    assert not any((tmp_path / "dst").glob("*"))


def test_arrays_of_one_name_and_files_of_other_kinds_are_refused(arrays, tmp_path, capsys):
    np.savez(tmp_path / "all.npz", x=arrays["x"])
    assert pack(tmp_path / "x.npy", tmp_path / "all.npz", tmp_path / "dst") == 1
    assert "both have an array 'x'" in capsys.readouterr().err
    (tmp_path / "x.csv").write_text("1")
    assert pack(tmp_path / "x.csv", tmp_path / "dst") == 1
    assert "want .npy or .npz" in capsys.readouterr().err
    (tmp_path / "bad.npz").write_text("1")
    assert pack(tmp_path / "bad.npz", tmp_path / "dst") == 1
    assert "not a readable npz" in capsys.readouterr().err


def test_memory_holds_a_row_at_a_time(tmp_path):
    array = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(64, 1 << 16))
    array[:] = 1
    array.flush()
    tracemalloc.start()
    try:
        assert pack(tmp_path / "x.npy", tmp_path / "dst") == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes / 8
