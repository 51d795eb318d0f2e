"""``pack text``: the rows of the shards, laid end to end, are the text."""

import json

import numpy as np
import pytest
import webdataset
import yaml

from dtrain.data import ShardLoader
from dtrain.pack import main
from dtrain.packing import documents, tokens

LENGTH = 64


def pack(*arguments):
    return main(["text", *map(str, arguments)])


@pytest.fixture
def texts(tmp_path):
    """Documents of many lengths, an empty one among them."""
    contents = ["dökument 😀 one\n" * 40, "", "x", "a line without an end" * 30, "last\n" * 100]
    (tmp_path / "src").mkdir()
    for number, content in enumerate(contents):
        (tmp_path / "src" / f"{number}.txt").write_text(content, newline="")
    return contents


def stream_of(contents):
    """The tokens, the dumb way."""
    return [token for content in contents if content for token in (*content.encode(), 256)]


def rows_of(destination, split="train"):
    preset = yaml.safe_load((destination / "conf" / "data" / "packed.yaml").read_text())
    loader = ShardLoader(
        str(destination / f"{split}-*.tar"), preset["fields"], global_batch_size=7, num_workers=0, shuffle="none"
    )
    return np.concatenate([batch["tokens"].numpy()[batch.valid.numpy()] for batch in loader.epoch(0)])


@pytest.mark.parametrize("part", [1, 100, 1 << 23])
def test_the_loader_gives_back_the_text(texts, tmp_path, monkeypatch, part):
    monkeypatch.setattr(tokens, "_PART", part)
    monkeypatch.setattr(documents, "_PIECE", part + 16)
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH, "--shards", 3) == 0
    rows = rows_of(tmp_path / "dst")
    expected = stream_of(texts)
    assert rows.shape == ((len(expected) - 1) // LENGTH, LENGTH + 1)
    assert rows.dtype == np.uint16
    # Inputs are the text, targets the text one token on: every token but the first is predicted once.
    assert rows[:, :-1].flatten().tolist() == expected[: rows.shape[0] * LENGTH]
    assert rows[:, 1:].flatten().tolist() == expected[1 : rows.shape[0] * LENGTH + 1]


def test_webdataset_reads_the_rows(texts, tmp_path):
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH, "--shards", 1) == 0
    shard = str(tmp_path / "dst" / "train-000000.tar")
    samples = list(webdataset.WebDataset(shard, shardshuffle=False, empty_check=False))
    rows = np.stack([np.frombuffer(sample["tok"], "<u2") for sample in samples])
    np.testing.assert_array_equal(rows, rows_of(tmp_path / "dst"))


def test_a_recipe_can_read_what_was_packed(texts, tmp_path):
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH, "--val", 0.5, "--val-by", "tail") == 0
    known = json.loads((tmp_path / "dst" / "dataset.json").read_text())
    assert {name: known[name] for name in ("tokenizer", "vocab_size", "end_of_text", "length", "row", "dtype")} == {
        "tokenizer": "bytes",
        "vocab_size": 257,
        "end_of_text": 256,
        "length": LENGTH,
        "row": LENGTH + 1,
        "dtype": "uint16",
    }
    for split in ("train", "val"):
        assert known["splits"][split]["samples"] == len(rows_of(tmp_path / "dst", split))


def test_splits_packed_one_by_one_must_agree_on_tokens(texts, tmp_path, capsys):
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH) == 0
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", 32, "--prefix", "val") == 1
    assert "length 64, not 32" in capsys.readouterr().err
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH, "--prefix", "val") == 0
    assert set(json.loads((tmp_path / "dst" / "dataset.json").read_text())["splits"]) == {"train", "val"}


def test_bad_bytes_end_the_run_or_are_left_out_by_name(texts, tmp_path, capsys):
    (tmp_path / "src" / "2b.txt").write_bytes(b"caf\xe9")
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH) == 1
    error = capsys.readouterr().err
    assert "2b.txt: not UTF-8: byte 3 is 0xe9" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "dst").exists()
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH, "--bad", "skip") == 0
    out, error = capsys.readouterr()
    assert "left out" in error
    assert "bad files: 1" in out
    assert (
        rows_of(tmp_path / "dst")[:, :-1].flatten().tolist()
        == stream_of(texts)[: (len(stream_of(texts)) - 1) // 64 * 64]
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["SRC", "DST", "--length", "0"], "at least 1 token"),
        (["SRC", "DST", "--length", "100000"], "do not fill a row"),
        (["SRC/none", "DST", "--length", "4"], "there is no text file"),
        (["SRC", "SRC/dst", "--length", "4"], "Choose another DST"),
        (["SRC", "DST", "--length", "4", "--val", "0.01"], "--val-by tail"),
        (["SRC", "DST", "--length", "4", "--val", "2"], "sum to less than 1"),
        (["SRC", "DST", "--length", "4", "--tokenizer", "words"], "want bytes"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_nothing(texts, tmp_path, capsys, arguments, says):
    places = {"SRC": str(tmp_path / "src"), "DST": str(tmp_path / "dst")}
    assert pack(*(argument.replace("SRC", places["SRC"]).replace("DST", places["DST"]) for argument in arguments)) == 1
    error = capsys.readouterr().err
    assert error.startswith("pack: error: ")
    assert error.count("\n") == 1
    assert says in error
    assert not any((tmp_path / "dst").glob("*"))
