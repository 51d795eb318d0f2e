"""Tokenizers: tokens, size of the vocabulary, end of text, and errors."""

import sys

import numpy as np
import pytest

from dtrain.data.tokenizers import Tokenizer
from tests.refusals import refused


def test_bytes_have_one_more_token_for_the_end_of_text():
    tokenizer = Tokenizer("bytes")
    text = "ä€😀\n"
    assert tokenizer.encode(text).tobytes() == np.frombuffer(text.encode(), np.uint8).astype(np.uint16).tobytes()
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.dtype) == (257, 256, "uint16")


@pytest.fixture
def word_level(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<unk>", "</s>", "a", "b"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_the_identity_of_a_tokenizer_file_is_its_content(word_level, tmp_path):
    tokenizer = Tokenizer(f"tokenizers:{word_level}")
    assert tokenizer.encode("a b c a").tolist() == [2, 3, 0, 2]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (4, 1)
    moved = tmp_path / "moved.json"
    word_level.rename(moved)
    assert Tokenizer(f"tokenizers:{moved}").identity == tokenizer.identity


def test_the_end_of_text_can_be_named_and_must_exist(word_level):
    assert Tokenizer(f"tokenizers:{word_level}", "b").end_of_text == 3
    with refused(ValueError, "<eot>", "no token", "--end-of-text TOKEN"):
        Tokenizer(f"tokenizers:{word_level}", "<eot>")


def test_tiktoken_encodes_names_of_special_tokens_as_text(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding(
        "letters", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    tokenizer = Tokenizer("tiktoken:letters")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.encode("<|endoftext|>").tolist() == list(b"<|endoftext|>")


@pytest.mark.parametrize("spec", ["words", "tiktoken", "tokenizers:", ""])
def test_an_unknown_tokenizer_is_refused_with_the_known_ones(spec):
    with refused(ValueError, key="", remedy="want bytes, tiktoken:NAME"):
        Tokenizer(spec)


def test_a_file_that_is_not_a_tokenizer_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        Tokenizer(f"tokenizers:{tmp_path / 'x.json'}")
    with pytest.raises(OSError, match="none"):
        Tokenizer(f"tokenizers:{tmp_path / 'none.json'}")


@pytest.mark.parametrize("package", ["tiktoken", "tokenizers"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with refused(ModuleNotFoundError, package, "", "pip install 'dtrain[text]'"):
        Tokenizer(f"{package}:missing")
