"""Pieces of text: together the files, each readable on its own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.packing import documents
from dtrain.packing.documents import deal_pieces, find, read


def refuse(path, reason):
    raise ValueError(f"{path}: {reason}")


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.text(st.sampled_from("aé€😀\n "), min_size=1, max_size=300), min_size=1, max_size=4), st.integers(1, 60)
)
def test_pieces_are_the_text_in_order_wherever_it_is_cut(tmp_path_factory, texts, size):
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_PIECE", size)
        found, _ = find([str(folder)], refuse)
        (pieces,) = deal_pieces(found, "train", {}, "document", 0).values()
    read_back = [""]
    for piece in pieces:
        read_back[-1] += read(piece)
        read_back += [""] * piece.ends
    assert read_back == [*texts, ""]


@pytest.mark.parametrize("by", documents.VAL_BY)
def test_splits_share_no_text_and_lose_none(tmp_path, by):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} line {line}\n" for line in range(50)))
    found, _ = find([str(tmp_path)], refuse)
    dealt = deal_pieces(found, "train", {"val": 0.3}, by, 0)
    lines = {split: [line for piece in pieces for line in read(piece).splitlines()] for split, pieces in dealt.items()}
    assert sorted(lines["train"] + lines["val"]) == sorted(f"{n} line {line}" for n in range(10) for line in range(50))
    assert 140 <= len(lines["val"]) <= 160
    of_documents = {line.split()[0] for line in lines["val"]}
    assert len(of_documents) == (3 if by == "document" else 10)


def test_a_few_documents_that_cannot_be_shared_are_told(tmp_path):
    (tmp_path / "one.txt").write_text("text\n" * 9)
    found, _ = find([str(tmp_path / "one.txt")], refuse)
    with pytest.raises(ValueError, match="--val-by tail"):
        deal_pieces(found, "train", {"val": 0.1}, "document", 0)


def test_hidden_files_and_folders_are_no_text(tmp_path):
    for name in ("b/2.txt", "a.txt", ".git/config", "b/.DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [document.name for document in find([str(tmp_path)], refuse)[0]] == ["a.txt", "b/2.txt"]
    assert len(find([str(tmp_path / "**" / "*.txt")], refuse)[0]) == 2


def test_folders_that_are_linked_are_read(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "b.txt").write_text("b")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "texts" / "link").symlink_to(tmp_path / "store")
    assert [document.name for document in find([str(tmp_path / "texts")], refuse)[0]] == ["a.txt", "link/b.txt"]
    (tmp_path / "store" / "loop").symlink_to(tmp_path / "texts")
    with pytest.raises(ValueError, match="is named twice"):
        find([str(tmp_path / "texts")], refuse)


def test_the_byte_that_is_no_text_is_named_by_its_place_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_PIECE", 100)
    (tmp_path / "a.txt").write_bytes(b"line\n" * 1000 + b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"a.txt: not UTF-8: byte 5,003 is 0xe9"):
        find([str(tmp_path)], refuse)


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\N{ZERO WIDTH NO-BREAK SPACE}text".encode())
    found, _ = find([str(tmp_path)], refuse)
    assert [read(piece) for piece in deal_pieces(found, "train", {}, "document", 0)["train"]] == ["text"]


def test_sources_without_text_or_named_twice_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no text file"):
        find([str(tmp_path)], refuse)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="all files are empty"):
        find([str(tmp_path)], refuse)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="is named twice"):
        find([str(tmp_path), str(tmp_path / "a.txt")], refuse)
