"""Tokenizers: tokens, size of the vocabulary, end of text, and errors."""

import pickle
import sys

import numpy as np
import pytest

from dtrain.data.fields.tokenizers import Tokenizer
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


def test_an_end_of_text_that_would_not_be_used_is_refused(tmp_path):
    Tokenizer.of_characters("abc").save(tmp_path)
    for spec in ("bytes", f"vocabulary:{tmp_path}"):
        with refused(ValueError, "--end-of-text", "'END'", "Leave the option out"):
            Tokenizer(spec, "END")


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


def small_encoding():
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 300}  # 256 to 299 are no tokens
    return tiktoken.Encoding(
        "letters", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 301}
    )


@pytest.mark.parametrize("kind", ["bytes", "characters", "tiktoken", "tokenizers"])
def test_the_vocabulary_file_holds_all_that_encodes_and_decodes(kind, word_level, tmp_path, monkeypatch):
    text, unknown = "a b", 10**6
    if kind == "characters":
        tokenizer = Tokenizer.of_characters("ab ", end_of_text=True)
    elif kind == "tiktoken":
        encoding = small_encoding()
        monkeypatch.setattr("tiktoken.get_encoding", lambda name: encoding)
        tokenizer, unknown = Tokenizer("tiktoken:small"), 260
    else:
        tokenizer = Tokenizer(kind if kind == "bytes" else f"tokenizers:{word_level}", *["b"] * (kind == "tokenizers"))
    assert tokenizer.save(tmp_path) == tmp_path / "vocabulary.json"
    word_level.unlink()
    for path in (tmp_path, tmp_path / "vocabulary.json"):
        loaded = pickle.loads(pickle.dumps(Tokenizer.load(path)))
        assert loaded.identity == tokenizer.identity
        assert (loaded.vocab_size, loaded.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
        tokens = loaded.encode(text).tolist()
        assert tokens == tokenizer.encode(text).tolist()
        ended = tokens if kind == "tokenizers" else [*tokens, loaded.end_of_text]
        assert loaded.decode([*ended, unknown, -1]) == text
        assert loaded.description == tokenizer.description


def test_half_a_character_decodes_to_the_replacement_character():
    assert Tokenizer("bytes").decode("ä".encode()[:1]) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"tokenizer": "characters"}', '{"tokenizer": "x", "vocab_size": 1}'),
        *('{"tokenizer": "characters", "characters": "ba"}', '{"tokenizer": "characters", "characters": 1}'),
        '{"tokenizer": "tokenizers", "content": "", "end_of_text": "x"}',
    ],
)
def test_a_file_that_describes_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "vocabulary.json").write_text(content)
    with refused(ValueError, "vocabulary", remedy=""):
        Tokenizer.load(tmp_path)


def test_a_character_outside_the_vocabulary_is_named():
    tokenizer = Tokenizer.of_characters("abc\n")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (4, None)
    assert tokenizer.encode("cab\n").tolist() == [3, 1, 2, 0]
    assert tokenizer.encode("").tolist() == []
    with refused(ValueError, "'é'", "U+00E9", "training text"):
        tokenizer.encode("abé")
    with refused(ValueError, "characters", "empty", "Pack a text"):
        Tokenizer.of_characters("")


def test_names_of_special_tokens_are_text_in_a_tokenizer_file(word_level):
    # The words of "</s>" are unknown ones, token 0; the token "</s>" is 1.
    assert 1 not in Tokenizer(f"tokenizers:{word_level}").encode("a </s> b").tolist()


def test_truncation_and_padding_of_a_tokenizer_file_are_not_used(word_level):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_file(str(word_level))
    made.enable_truncation(3)
    made.enable_padding(length=5)
    made.save(str(word_level))
    tokenizer = Tokenizer(f"tokenizers:{word_level}")
    assert tokenizer.encode("a b a b a b").tolist() == [2, 3, 2, 3, 2, 3]
    assert tokenizer.encode("a").tolist() == [2]


def test_an_unknown_vocabulary_of_tiktoken_is_refused_with_the_known_ones():
    pytest.importorskip("tiktoken")
    with refused(ValueError, "tiktoken:gpt-2", "no such vocabulary", "gpt2"):
        Tokenizer("tiktoken:gpt-2")


@pytest.mark.parametrize("spec", ["words", "tiktoken", "tokenizers:", "", "characters", "bytes:x"])
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
