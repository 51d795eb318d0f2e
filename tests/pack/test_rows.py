"""Rows of ``pack text``: best fit against a plain search, and rows read back against the documents that went in."""

import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.pack import documents as documents_module
from dtrain.pack import rows as rows_module
from dtrain.pack import text as text_module
from dtrain.pack.__main__ import main
from dtrain.pack.rows import BestFitRows, CutRows, TokenStream, best_fit, layout_jobs
from tests.pack.test_text import read_rows
from tests.property_tests import examples

END = 256


def stored(folder: Path, *parts: list[list[int]]) -> TokenStream:
    """The stream of these documents, in one part for each list of them."""
    paths = []
    for number, documents in enumerate(parts):
        tokens = [token for document in documents for token in (*document, END)]
        paths.append(folder / f"part-{number}")
        np.array(tokens, "<u2").tofile(paths[-1])
    return TokenStream.from_parts(paths, "uint16")


def fitted(folder: Path, stream: TokenStream, length: int, padding: int = 999) -> BestFitRows:
    layouts = []
    for name, job in layout_jobs(stream, "rows", length, END, seed=0).items():
        layouts.append(folder / name)
        with open(layouts[-1], "wb") as file:
            job(file, lambda count: None)
    return BestFitRows.from_stream(stream, length, padding, END, layouts)


def as_lists(rows: BestFitRows | CutRows) -> list[list[int]]:
    return rows_between(rows, 0, rows.count)


def rows_between(rows: BestFitRows | CutRows, start: int, stop: int) -> list[list[int]]:
    blocks = list(rows.read(start, stop))
    assert all(block.dtype == "<u2" and block.shape[1] == rows.length + 1 for block in blocks)
    return [row for block in blocks for row in block.tolist()]


@examples(100)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 30))
def test_best_fit_puts_each_piece_into_the_fullest_row_with_room(sizes, capacity):
    rows, count = best_fit(np.array(sizes, np.int64), capacity)
    expected: list[int] = []  # tokens in each row, by trying all of them
    for size in sorted(sizes, reverse=True):
        fitting = [row for row, used in enumerate(expected) if used + size <= capacity]
        if fitting:
            expected[max(fitting, key=expected.__getitem__)] += size
        else:
            expected.append(size)
    used = np.bincount(rows, np.array(sizes), minlength=count)
    assert sorted(used.tolist()) == sorted(expected)


@pytest.mark.parametrize("window", [1, 60, 1 << 20])
def test_best_fit_rows_hold_every_document_once_and_whole(tmp_path, monkeypatch, window):
    monkeypatch.setattr(rows_module, "_WINDOW_TOKENS", window)
    rng = np.random.default_rng(0)
    parts = [[rng.integers(0, 200, rng.integers(1, 12)).tolist() for _ in range(15)] for _ in range(4)]
    rows = as_lists(fitted(tmp_path, stored(tmp_path, *parts), 12))
    found = []
    for row in rows:
        assert len(row) == 13
        assert row[0] == END
        content = [token for token in row[1:] if token != 999]
        assert row[1 + len(content) :] == [999] * (12 - len(content))
        assert content[-1] == END
        document: list[int] = []
        for token in content:
            document.append(token)
            if token == END:
                found.append(document[:-1])
                document = []
    assert sorted(found) == sorted(document for part in parts for document in part)
    if window == 1 << 20:
        assert len(rows) <= -(-sum(len(document) + 1 for document in found) // 12) + 1


def test_a_document_longer_than_a_row_is_cut_and_its_pieces_begin_with_the_token_before(tmp_path):
    long = list(range(100, 125))
    rows = as_lists(fitted(tmp_path, stored(tmp_path, [[1, 2], long, [3]]), 10))
    assert sorted(rows) == sorted(
        [
            [END, *long[:10]],
            [long[9], *long[10:20]],
            # The rest and two short documents, in the order of the stream.
            [END, 1, 2, END, *long[20:], END, 999],
            [END, 3, END, *[999] * 8],
        ]
    )


def test_any_range_of_rows_reads_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "_WINDOW_TOKENS", 40)
    parts = [[[n] * (1 + n % 7) for n in range(part, part + 20)] for part in range(0, 60, 20)]
    stream = stored(tmp_path, *parts)
    for rows in (fitted(tmp_path, stream, 9), CutRows(stream, 9)):
        everything = as_lists(rows)
        assert len(everything) == rows.count
        with monkeypatch.context() as patch:
            patch.setattr(rows_module, "_BLOCK_ROWS", 4)
            for start, stop in ((0, 1), (3, 9), (rows.count - 2, rows.count), (0, rows.count)):
                assert rows_between(rows, start, stop) == everything[start:stop]


def test_the_waste_is_counted(tmp_path):
    documents = [[1] * 9, [2] * 4, [3] * 30, [4] * 4]
    stream = stored(tmp_path, documents[:2], documents[2:])
    best = fitted(tmp_path, stream, 10)
    assert best.count * 10 - stream.tokens == sum(row.count(999) for row in as_lists(best))
    assert "documents cut: 1 of 4" in best.waste(END)
    # The targets of the cut rows are the tokens 1 to 10, 11 to 20, ...: the second document is 10 to 14, the third 15 to 45.
    assert "documents cut: 2 of 4" in CutRows(stream, 10).waste(END)
    assert "unused tokens: 0" in CutRows(stream, 10).waste(END)


def test_packed_documents_train_with_their_padding_ignored(tmp_path, capsys):
    lines = [json.dumps({"body": "x" * (n % 40 + 1)}) for n in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "", json.dumps({"body": ""})]))
    arguments = [str(tmp_path / "a.jsonl"), str(tmp_path / "dst"), "--json-key", "body", "--length", "64"]
    assert main(["text", *arguments, "--fit", "best", "--split", "val=0.2"]) == 0
    out = capsys.readouterr().out
    assert "padding is the token 257" in out
    assert "padding: " in out
    assert "empty documents: 1" in out
    described = json.loads((tmp_path / "dst" / "dataset.json").read_text())
    assert (described["fit"], described["padding"], described["vocab_size"]) == ("best", 257, 257)
    rows = np.concatenate([read_rows(tmp_path / "dst", split) for split in ("train", "val")])
    assert (rows[:, 1:] == END).sum() == 100
    assert (rows == ord("x")).sum() == sum(n % 40 + 1 for n in range(100))


def test_rows_do_not_depend_on_parts_that_end_with_a_document(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    for number in range(30):
        (tmp_path / "src" / f"{number:02d}.txt").write_text(f"{number} " * (number + 1))
    pack = partial(main, ["text", str(tmp_path / "src"), str(tmp_path / "one"), "--length", "50", "--fit", "best"])
    assert pack() == 0
    monkeypatch.setattr(text_module, "_PART_BYTES", 100)
    assert main(["text", str(tmp_path / "src"), str(tmp_path / "many"), "--length", "50", "--fit", "best"]) == 0
    np.testing.assert_array_equal(read_rows(tmp_path / "one"), read_rows(tmp_path / "many"))


def test_a_file_of_many_documents_is_laid_out_in_windows(tmp_path, monkeypatch):
    lines = [json.dumps({"text": f"{n} " * (n % 7 + 1)}) for n in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for module, name in (
        (documents_module, "_PIECE_BYTES"),
        (text_module, "_PART_BYTES"),
        (rows_module, "_WINDOW_TOKENS"),
    ):
        monkeypatch.setattr(module, name, 300)
    windows = []
    write = rows_module._write_layout
    monkeypatch.setattr(rows_module, "_write_layout", lambda *args: (windows.append(args[1]), write(*args)))
    monkeypatch.setattr(rows_module, "_READ_TOKENS", 70)
    arguments = ["--length", "40", "--fit", "best", "--processes", "1"]
    assert main(["text", str(tmp_path / "a.jsonl"), str(tmp_path / "dst"), *arguments]) == 0
    assert len(windows) > 3
    assert max(bounds[-1] - bounds[0] for bounds in windows) < 700
    rows = read_rows(tmp_path / "dst")
    tokens = rows[:, 1:][rows[:, 1:] != 257]
    texts = bytes(10 if token == END else token for token in tokens).decode().split("\n")[:-1]
    assert sorted(texts) == sorted(json.loads(line)["text"] for line in lines)


def test_a_layout_is_the_same_whenever_it_is_written(tmp_path):
    stream = stored(tmp_path, [[n] * (n % 9 + 1) for n in range(50)])
    (job,) = layout_jobs(stream, "rows", 12, END, seed=3).values()
    files = [io.BytesIO(), io.BytesIO()]
    for file in files:
        job(file, lambda count: None)
    first, second = (np.load(io.BytesIO(file.getvalue())) for file in files)
    assert all(np.array_equal(first[name], second[name]) for name in first.files)
