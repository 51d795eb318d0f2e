"""``pack text``: documents, pieces and rows; the concatenated rows of the shards are the text."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data import ShardLoader
from dtrain.data.fields.tokenizers import Tokenizer
from dtrain.pack import documents as documents_module
from dtrain.pack import text as text_module
from dtrain.pack.__main__ import main
from dtrain.pack.documents import VAL_BY, find_files, split_into_pieces
from tests.property_tests import examples
from tests.refusals import refused
from tests.shards import webdataset_reads

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


def write_stream(contents):
    """The expected tokens, by plain Python."""
    return [token for content in contents if content for token in (*content.encode(), 256)]


def read_rows(destination, split="train"):
    preset = yaml.safe_load((destination / "conf" / "data" / "packed.yaml").read_text())
    loader = ShardLoader(
        str(destination / f"{split}-*.tar"), preset["fields"], global_batch_size=7, num_workers=0, shuffle="none"
    )
    return np.concatenate([batch["tokens"].numpy()[batch.valid.numpy()] for batch in loader.epoch(0)])


@pytest.mark.parametrize("part", [1, 100, 1 << 23])
def test_the_loader_gives_back_the_text(texts, tmp_path, monkeypatch, part):
    monkeypatch.setattr(text_module, "_PART_BYTES", part)
    monkeypatch.setattr(documents_module, "_PIECE_BYTES", part + 16)
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH, "--shards", 3) == 0
    rows = read_rows(tmp_path / "dst")
    expected = write_stream(texts)
    assert rows.shape == ((len(expected) - 1) // LENGTH, LENGTH + 1)
    assert rows.dtype == np.uint16
    # Inputs are the text, targets are the text shifted by one token.
    assert rows[:, :-1].flatten().tolist() == expected[: rows.shape[0] * LENGTH]
    assert rows[:, 1:].flatten().tolist() == expected[1 : rows.shape[0] * LENGTH + 1]


def test_webdataset_reads_the_rows(texts, tmp_path):
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH, "--shards", 1) == 0
    samples = list(webdataset_reads(tmp_path / "dst" / "train-000000.tar"))
    rows = np.stack([np.frombuffer(sample["tok"], "<u2") for sample in samples])
    np.testing.assert_array_equal(rows, read_rows(tmp_path / "dst"))


def test_dataset_json_describes_the_rows(texts, tmp_path):
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH, "--val", 0.5, "--val-by", "tail") == 0
    stored = json.loads((tmp_path / "dst" / "dataset.json").read_text())
    assert {name: stored[name] for name in ("tokenizer", "vocab_size", "end_of_text", "length", "row", "dtype")} == {
        "tokenizer": "bytes",
        "vocab_size": 257,
        "end_of_text": 256,
        "length": LENGTH,
        "row": LENGTH + 1,
        "dtype": "uint16",
    }
    for split in ("train", "val"):
        assert stored["splits"][split]["samples"] == len(read_rows(tmp_path / "dst", split))


def test_splits_packed_by_several_commands_must_have_the_same_tokens(texts, tmp_path, capsys):
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH) == 0
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", 32, "--prefix", "val") == 1
    assert "length 64, not 32" in capsys.readouterr().err
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH, "--prefix", "val") == 0
    assert set(json.loads((tmp_path / "dst" / "dataset.json").read_text())["splits"]) == {"train", "val"}


def test_a_file_that_is_not_utf8_is_an_error_or_skipped(texts, tmp_path, capsys):
    (tmp_path / "src" / "2b.txt").write_bytes(b"caf\xe9")
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH) == 1
    error = capsys.readouterr().err
    assert "2b.txt: not UTF-8: byte 3 is 0xe9" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "dst").exists()
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", LENGTH, "--bad", "skip") == 0
    out, error = capsys.readouterr()
    assert f"skipped {tmp_path / 'src' / '2b.txt'}: not UTF-8" in error
    assert "bad files: 1" in out
    assert (
        read_rows(tmp_path / "dst")[:, :-1].flatten().tolist()
        == write_stream(texts)[: (len(write_stream(texts)) - 1) // 64 * 64]
    )


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["SRC", "DST", "--length", "0"], ("--length 0", "at least 1")),
        (["SRC", "DST", "--length", "100000"], ("100,001", "shorter --length")),
        (["SRC/none", "DST", "--length", "4"], ("SRC/none", "Give files, folders")),
        (["SRC", "SRC/dst", "--length", "4"], ("SRC/dst", "Choose a different")),
        (["SRC", "DST", "--length", "4", "--val", "0.01", "--val-by", "document"], ("'val'", "--val-by tail")),
        (["SRC", "DST", "--length", "4", "--val", "2"], ("'val': 2.0", "sum to less than 1")),
        (["SRC", "DST", "--length", "4", "--tokenizer", "words"], ("tokenizer 'words'", "want bytes")),
        (["SRC", "DST", "--length", "4", "--tokenizer", "characters"], ("characters", "(4)", "--end-of-text")),
        (["SRC/2.txt", "DST", "--length", "4", "--tokenizer", "characters", "--fit", "best"], ("(1)", "--end-of-text")),
        (["SRC", "DST", "--length", "4", "--tokenizer", "vocabulary:SRC"], ("SRC/vocabulary.json", "Name the folder")),
        (
            ["SRC", "DST", "--length", "9", "--fit", "best", "--long-documents", "error"],
            ("/0.txt", "761", "--long-documents cut"),
        ),
        (["SRC", "DST", "--length", "4", "--split", "val=SRC/none"], ("SRC/none", "Give files, folders")),
        (["SRC", "DST", "--length", "4", "--split", "train=SRC/0.txt"], ("train", "either a share or files")),
        (
            ["SRC", "DST", "--length", "4", "--split", "val=SRC/[04].txt", "--split", "test=SRC/4.txt"],
            ("SRC/4.txt", "val and in test", "one split"),
        ),
        (["SRC/0.txt", "DST", "--length", "4", "--split", "val=SRC/0.txt"], ("SRC/0.txt", "Name files with text")),
    ],
)
def test_errors_are_one_line_and_leave_no_file(texts, tmp_path, capsys, arguments, names):
    def resolved(text):
        return text.replace("SRC", str(tmp_path / "src")).replace("DST", str(tmp_path / "dst"))

    assert pack(*map(resolved, arguments)) == 1
    error = capsys.readouterr().err
    assert error.startswith("pack: error: ")
    assert error.count("\n") == 1
    for name in names:
        assert resolved(name) in error
    assert not any((tmp_path / "dst").glob("*"))


def test_a_split_can_have_its_own_files(texts, tmp_path):
    pattern = f"val={tmp_path / 'src'}/[24].txt"
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", 8, "--split", pattern, "--split", "test=0.5") == 0
    expected = write_stream([texts[2], texts[4]])
    rows = read_rows(tmp_path / "dst", "val")
    assert rows[:, :-1].flatten().tolist() == expected[: rows.shape[0] * 8]
    rest = np.concatenate([read_rows(tmp_path / "dst", split) for split in ("train", "test")])
    assert (rest == ord("x")).sum() == 0


@pytest.mark.skipif("DTRAIN_TEST_TEXT" not in os.environ, reason="needs DTRAIN_TEST_TEXT")
def test_characters_of_shakespeare_are_those_of_nanogpt(tmp_path):
    source = Path(os.environ["DTRAIN_TEST_TEXT"]) / "tinyshakespeare.txt"
    split = ["--split", "val=0.1", "--val-by", "character", "--tokenizer", "characters"]
    assert pack(source, tmp_path / "dst", "--length", 64, *split) == 0
    # nanoGPT's data/shakespeare_char/prepare.py
    text = source.read_text()
    characters = np.array([ord(character) for character in sorted(set(text))], np.uint8)
    train, val = text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :]
    for name, expected in (("train", train), ("val", val)):
        rows = read_rows(tmp_path / "dst", name)
        assert rows.shape == ((len(expected) - 1) // 64, 65)
        assert characters[rows[:, :-1]].tobytes().decode() == expected[: rows.shape[0] * 64]
    assert Tokenizer.load(tmp_path / "dst").vocab_size == 65


def test_characters_are_the_same_tokens_in_a_split_that_is_packed_later(texts, tmp_path, capsys):
    ends = ["--tokenizer", "characters", "--end-of-text", "<end>"]
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", 8, *ends) == 0
    tokenizer = Tokenizer.load(tmp_path / "dst")
    stream = "".join(f"{text}\0" for text in texts if text)
    rows = read_rows(tmp_path / "dst")
    assert tokenizer.end_of_text == tokenizer.vocab_size - 1 == len(set(stream)) - 1
    assert tokenizer.decode(rows[:, :-1].flatten()) == stream[: rows.shape[0] * 8].replace("\0", "")
    (tmp_path / "other.txt").write_text("last line one\n" * 9)
    later = [tmp_path / "other.txt", tmp_path / "dst", "--length", 8, "--prefix", "val", "--tokenizer"]
    assert pack(*later, "characters", "--end-of-text", "<end>") == 1
    assert f"--tokenizer vocabulary:{tmp_path / 'dst'}" in capsys.readouterr().err
    assert pack(*later, f"vocabulary:{tmp_path / 'dst'}") == 0
    assert tokenizer.decode(read_rows(tmp_path / "dst", "val")[0]) == "last line"
    (tmp_path / "other.txt").write_text("last line ONE\n" * 9)
    assert pack(*later[:-2], "more", "--tokenizer", f"vocabulary:{tmp_path / 'dst'}") == 1
    error = capsys.readouterr().err
    assert f"{tmp_path / 'other.txt'}: character 'O' (U+004F)" in error
    assert "pack this text together with the training text" in error


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('{"text": null}', ("the line at byte 16", "null at the key 'text'")),
        ('{"text": 3}', ("the line at byte 16", "a number at the key 'text'")),
        ('{"text": {"body": "a"}}', ("an object at the key 'text'",)),
        ('{"body": "a", "id": 4}', ("no key 'text'", "'body', 'id'", "--json-key")),
        ("[1]", ("is an array", "an object with the key 'text'")),
        ("{", ("not JSON", "the line at byte 16")),
        ('{"text": "\\ud800"}', ("surrogate", "the line at byte 16")),
    ],
)
def test_a_line_without_text_is_an_error_or_its_file_is_skipped(tmp_path, capsys, line, names):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.jsonl").write_text('{"text": "one"}\n' + line + "\n")
    (tmp_path / "src" / "b.jsonl").write_text('{"text": "two"}\n{"text": ""}\n\n{"text": "three"}')
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", 9) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for name in ("a.jsonl", *names):
        assert name in error
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", 9, "--bad", "skip") == 0
    assert read_rows(tmp_path / "dst").flatten().tolist() == [*b"two", 256, *b"three", 256]
    output = capsys.readouterr().out
    assert "empty documents: 1" in output
    assert f"{tmp_path / 'src' / 'a.jsonl'}: all of its 2 lines" in output


# -- documents and pieces


def refuse(path, reason):
    raise ValueError(f"{path}: {reason}")


@examples(50)
@given(
    st.lists(st.text(st.sampled_from("aé€😀\n "), min_size=1, max_size=300), min_size=1, max_size=4), st.integers(1, 60)
)
def test_joined_pieces_are_the_text_for_any_piece_size(tmp_path_factory, texts, size):
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "_PIECE_BYTES", size)
        found, _ = find_files([str(folder)], "text", refuse)
        (pieces,) = split_into_pieces(found, "train", {}, "document", 0).values()
    read_back = [""]
    for piece in pieces:
        for text, ends in piece.texts():
            read_back[-1] += text
            read_back += [""] * ends
    assert read_back == [*texts, ""]


def a_tokenizer(kind, folder, text):
    """A tokenizer whose tokens depend on what precedes and follows them."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    if kind == "metaspace":
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    elif kind == "llama":
        made.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
        )
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>", "<eot>"], show_progress=False)
    made.train_from_iterator(text.splitlines(keepends=True), trainer)
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(f"tokenizers:{folder / 'tokenizer.json'}", "<eot>")


@pytest.mark.parametrize("kind", ["metaspace", "llama", "byte level"])
@pytest.mark.parametrize(("size", "context"), [(50, 40), (7, 200)])
def test_the_tokens_of_the_pieces_are_those_of_the_document(tmp_path, monkeypatch, kind, size, context):
    random = np.random.default_rng(0)
    words = ["one", "é", " ", "\n", "\n\n", "  ", "| GPT", "two.", "\U0001f600"]
    text = "\N{ZERO WIDTH NO-BREAK SPACE}" + "".join(random.choice(words, 500))
    tokenizer = a_tokenizer(kind, tmp_path, text)
    (tmp_path / "a.txt").write_text(text, newline="")
    monkeypatch.setattr(documents_module, "_PIECE_BYTES", size)
    monkeypatch.setattr(documents_module, "_CONTEXT_BYTES", context)
    found, _ = find_files([str(tmp_path / "a.txt")], "text", refuse)
    (pieces,) = split_into_pieces(found, "train", {}, "document", 0).values()
    assert len(pieces) > 10
    tokens = [
        token for piece in pieces for one, _ in piece.texts() for token in tokenizer.encode(one, *piece.context())
    ]
    assert tokens == tokenizer.encode(text[1:]).tolist()


def test_a_byte_order_mark_inside_a_text_is_kept_wherever_pieces_end(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "_PIECE_BYTES", 4)
    text = "abc\n\N{ZERO WIDTH NO-BREAK SPACE}def\n"
    (tmp_path / "a.txt").write_text(text, newline="")
    found, _ = find_files([str(tmp_path / "a.txt")], "text", refuse)
    (pieces,) = split_into_pieces(found, "train", {}, "document", 0).values()
    assert [piece.start for piece in pieces][:2] == [0, 4]
    assert "".join(one for piece in pieces for one, _ in piece.texts()) == text


@pytest.mark.parametrize("by", VAL_BY[:2])
def test_splits_share_no_text_and_lose_none(tmp_path, by):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} line {line}\n" for line in range(50)))
    found, _ = find_files([str(tmp_path)], "text", refuse)
    by_split = split_into_pieces(found, "train", {"val": 0.3}, by, 0)
    lines = {
        split: [line for piece in pieces for text, _ in piece.texts() for line in text.splitlines()]
        for split, pieces in by_split.items()
    }
    assert sorted(lines["train"] + lines["val"]) == sorted(f"{n} line {line}" for n in range(10) for line in range(50))
    assert 140 <= len(lines["val"]) <= 160
    of_documents = {line.split()[0] for line in lines["val"]}
    assert len(of_documents) == (3 if by == "document" else 10)


@pytest.mark.parametrize(("files", "by"), [(1, "tail"), (3, "tail"), (20, "document")])
def test_too_few_files_for_whole_ones_are_split_inside(tmp_path, capsys, files, by):
    for n in range(files):
        (tmp_path / "src").mkdir(exist_ok=True)
        (tmp_path / "src" / f"{n}.txt").write_text("".join(f"{n} line {line}\n" for line in range(200)))
    assert pack(tmp_path / "src", tmp_path / "dst", "--length", 16, "--val", 0.05) == 0
    assert ("--val-by tail" in capsys.readouterr().out) == (by == "tail")
    splits = json.loads((tmp_path / "dst" / "dataset.json").read_text())["splits"]
    assert 0.03 < splits["val"]["tokens"] / (splits["train"]["tokens"] + splits["val"]["tokens"]) < 0.08


def test_lines_of_json_stay_whole_for_any_piece_size_and_split(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "_PIECE_BYTES", 30)
    wanted = [f"{number} é " * (number % 11 + 1) for number in range(40)]
    lines = [json.dumps({"text": text}, ensure_ascii=number % 2 == 0) for number, text in enumerate(wanted)]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines), newline="")
    found, _ = find_files([str(tmp_path)], "text", refuse)
    assert (found[0].documents, found[0].text_bytes) == (40, sum(len(text.encode()) for text in wanted))
    for by in VAL_BY[1:]:
        by_split = split_into_pieces(found, "train", {"val": 0.25}, by, 0)
        read_back = [text for pieces in by_split.values() for piece in pieces for text, _ in piece.texts()]
        assert read_back == wanted
        assert all(ends for piece in by_split["val"] for _, ends in piece.texts())


@pytest.mark.parametrize("text", ["ab" * 50, "é€😀\n" * 10])
def test_a_split_can_begin_at_exactly_its_share_of_the_bytes(tmp_path, text):
    (tmp_path / "a.txt").write_text(text, newline="")
    found, _ = find_files([str(tmp_path)], "text", refuse)
    by_split = split_into_pieces(found, "train", {"val": 0.1}, "character", 0)
    train, val = (next(piece.texts())[0] for (piece,) in by_split.values())
    assert train + val == text
    assert 0 <= len(train.encode()) - int(0.9 * len(text.encode())) < 4


def test_a_staged_pack_is_not_resumed_with_another_json_key(tmp_path, capsys, monkeypatch):
    lines = [json.dumps({"a": f"first {number}\n", "b": f"second {number}\n"}) for number in range(20)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    arguments = (tmp_path / "x.jsonl", tmp_path / "dst", "--length", 8, "--json-key")
    with monkeypatch.context() as patch:
        patch.setattr(text_module.PackCommand, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert pack(*arguments, "a") == 130
    assert pack(*arguments, "b") == 1
    assert "json_key" in capsys.readouterr().err
    assert pack(*arguments, "a") == 0


def test_a_long_document_is_refused_also_if_its_end_is_in_another_part(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(documents_module, "_PIECE_BYTES", 30)
    monkeypatch.setattr(text_module, "_PART_BYTES", 30)
    (tmp_path / "a.txt").write_text("a line of text\n" * 3)
    arguments = (tmp_path / "a.txt", tmp_path / "dst", "--length", 20, "--long-documents")
    assert pack(*arguments, "error") == 1
    assert "--long-documents cut" in capsys.readouterr().err
    assert pack(*arguments, "cut") == 0


def test_too_few_documents_for_a_split_are_refused(tmp_path):
    (tmp_path / "one.txt").write_text("text\n" * 9)
    found, _ = find_files([str(tmp_path / "one.txt")], "text", refuse)
    with pytest.raises(ValueError, match="--val-by tail"):
        split_into_pieces(found, "train", {"val": 0.1}, "document", 0)


def test_hidden_files_and_folders_are_ignored(tmp_path):
    for name in ("b/2.txt", "a.txt", ".git/config", "b/.DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [document.name for document in find_files([str(tmp_path)], "text", refuse)[0]] == ["a.txt", "b/2.txt"]
    assert len(find_files([str(tmp_path / "**" / "*.txt")], "text", refuse)[0]) == 2


def test_linked_folders_are_read_once(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "b.txt").write_text("b")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "texts" / "link").symlink_to(tmp_path / "store")
    assert [document.name for document in find_files([str(tmp_path / "texts")], "text", refuse)[0]] == [
        "a.txt",
        "link/b.txt",
    ]
    (tmp_path / "store" / "loop").symlink_to(tmp_path / "texts")
    with pytest.raises(ValueError, match="is listed twice"):
        find_files([str(tmp_path / "texts")], "text", refuse)


def test_the_offset_of_the_first_byte_that_is_not_utf8_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "_PIECE_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"line\n" * 1000 + b"caf\xe9\n")
    with refused(ValueError, "a.txt", "byte 5,003 is 0xe9", "UTF-8"):
        find_files([str(tmp_path)], "text", refuse)


def test_a_byte_order_mark_is_removed(tmp_path):
    (tmp_path / "a.txt").write_bytes("\N{ZERO WIDTH NO-BREAK SPACE}text".encode())
    found, _ = find_files([str(tmp_path)], "text", refuse)
    (piece,) = split_into_pieces(found, "train", {}, "document", 0)["train"]
    assert list(piece.texts()) == [("text", True)]


def test_sources_without_text_or_listed_twice_are_refused(tmp_path):
    with refused(FileNotFoundError, "no text file found", "", "Give files, folders"):
        find_files([str(tmp_path)], "text", refuse)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="all documents are empty"):
        find_files([str(tmp_path)], "text", refuse)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="is listed twice"):
        find_files([str(tmp_path), str(tmp_path / "a.txt")], "text", refuse)
