"""``pack arrays``: the loader reads the same numbers from the shards as numpy from the arrays."""

import shlex
import tracemalloc

import numpy as np
import pytest
import torch
import webdataset
import yaml

from dtrain.data import ShardLoader
from dtrain.pack.__main__ import main
from tests.shards import webdataset_reads

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
    """The only batch of ``train``, with the fields of the preset."""
    preset = yaml.safe_load((destination / "conf" / "data" / "packed.yaml").read_text())
    with_loader = ShardLoader(
        preset["train"], preset["fields"], global_batch_size=ROWS, num_workers=0, shuffle="none", precision=precision
    )
    (batch,) = with_loader.epoch(0)
    return batch


def test_the_loader_returns_the_arrays(arrays, tmp_path):
    assert pack(*files(tmp_path), tmp_path / "dst", "--png", "grey", "--shards", 3) == 0
    batch = read(tmp_path / "dst")
    assert [key.rpartition("/")[2] for key in batch.sample_keys] == [f"{row:09d}" for row in range(ROWS)]
    for name in ("x", "label", "ids", "price", "colour", "big_endian"):
        np.testing.assert_array_equal(batch[name].numpy(), arrays[name])
    assert batch["ids"].dtype == torch.uint32
    assert batch["price"].dtype == torch.float64
    np.testing.assert_array_equal(batch["grey"].numpy(), np.repeat(arrays["grey"][..., np.newaxis], 3, axis=3))


def test_the_preset_finds_shards_in_a_folder_with_pattern_characters(arrays, tmp_path):
    assert pack(tmp_path / "label.npy", tmp_path / "set[2]") == 0
    np.testing.assert_array_equal(read(tmp_path / "set[2]")["label"].numpy(), arrays["label"])


def test_the_printed_command_quotes_the_folder(arrays, tmp_path, capsys):
    assert pack(*files(tmp_path), tmp_path / "my shards; $x") == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[words.index("--config-dir") + 1] == str(tmp_path / "my shards; $x" / "conf")


def test_webdataset_reads_them(arrays, tmp_path):
    assert pack(tmp_path / "x.npy", tmp_path / "label.npy", tmp_path / "dst", "--shards", 2) == 0
    pipeline = webdataset_reads(*sorted((tmp_path / "dst").glob("*.tar")))
    samples = list(pipeline.compose(webdataset.decode()))
    np.testing.assert_array_equal([sample["x.npy"] for sample in samples], arrays["x"])
    assert [sample["label.cls"] for sample in samples] == arrays["label"].tolist()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_floats_can_be_stored_in_the_dtype_of_the_run(arrays, tmp_path, name, dtype):
    assert pack(tmp_path / "x.npy", tmp_path / "label.npy", tmp_path / "dst", "--dtype", name) == 0
    got = read(tmp_path / "dst", name)["x"]
    assert got.dtype == dtype
    assert torch.equal(got, torch.from_numpy(arrays["x"]).to(dtype))


def test_a_value_outside_the_range_of_the_dtype_is_named(tmp_path, capsys):
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


def test_each_row_is_in_one_split_and_shuffled_on_request(arrays, tmp_path):
    keys = {}
    for name, more in (("in order", ()), ("shuffled", ("--shuffle",))):
        assert pack(tmp_path / "label.npy", tmp_path / name, "--val", 0.25, *more) == 0
        shards = {split: tmp_path / name / f"{split}-000000.tar" for split in ("train", "val")}
        keys[name] = {
            split: [sample["__key__"] for sample in webdataset_reads(shard)] for split, shard in shards.items()
        }
        assert sorted(keys[name]["train"] + keys[name]["val"]) == [f"{row:09d}" for row in range(ROWS)]
        assert len(keys[name]["val"]) == round(0.25 * ROWS)
    assert keys["in order"]["train"] == sorted(keys["in order"]["train"]) != keys["shuffled"]["train"]
    assert sorted(keys["shuffled"]["val"]) == keys["in order"]["val"]


@pytest.mark.parametrize(
    ("made", "arguments", "names"),
    [
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, [], ("{'x': 3, 'y': 2}", "--field NAME=ARRAY")),
        ({"x": np.zeros((0, 2))}, [], ("arrays x", "no rows")),
        ({"x": np.float32(1)}, [], ("'x'", "float32 []", "one row for each sample")),
        ({"x": np.zeros((3, 2), np.longdouble)}, [], ("'x'", "[3, 2]", "astype")),
        ({"x": np.array(["text"])}, [], ("'x'", "<U4", "astype")),
        ({"x": np.array([{}])}, [], ("'x'", "Only arrays of numbers")),
        ({"a.b": np.zeros(2)}, [], ("'a.b'", "--field x=a.b")),
        ({"x": np.zeros(2), "X": np.zeros(2)}, [], ("'x'", "'X'", "--field")),
        ({"x": np.zeros(2)}, ["--field", "y=z"], ("--field", "'z'", "among x")),
        ({"x": np.zeros(2)}, ["--dtype", "int8"], ("--dtype", "int8", "fp32, fp16, bf16")),
        ({"x": np.zeros(2)}, ["--dtype", "y=bf16"], ("--dtype", "'y'", "among x")),
        ({"x": np.zeros(2, int)}, ["--dtype", "x=bf16"], ("--dtype x=bf16", "int64", "Only floats")),
        ({"x": np.zeros(2)}, ["--png", "x"], ("--png x", "float64 [2]", "want uint8")),
        ({"x": np.zeros(2)}, ["--val", "0.01"], ("--split val", "Increase the share")),
        ({"x": np.zeros(2)}, ["--val", "1"], ("'val': 1.0", "sum to less than 1")),
        ({"x": np.zeros(2)}, ["--shards", "3"], ("3 shards", "2 or fewer")),
        ({"x": np.zeros(2)}, ["--processes", "0"], ("--processes 0", "at least 1")),
        ({"x": np.zeros(2)}, ["--prefix", "a/b"], ("'a/b'", "plain name")),
    ],
)
def test_errors_are_one_line_and_leave_no_file(tmp_path, capsys, made, arguments, names):
    for name, array in made.items():
        np.save(tmp_path / f"{name}.npy", array)
    assert pack(*files(tmp_path), tmp_path / "dst", *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("pack: error: ")
    assert error.count("\n") == 1
    for name in names:
        assert name in error
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


def test_memory_holds_one_row(tmp_path):
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
