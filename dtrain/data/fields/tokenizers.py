"""Tokenizers: bytes and characters, which need no package, and the vocabularies of tiktoken and of Hugging Face's tokenizers.

* The *vocabulary file*, ``vocabulary.json`` next to the shards of a text, describes a tokenizer completely, so that prompts are
  encoded and tokens decoded without the file that the tokenizer was made from.
* *Special tokens*, such as the end of text, are not part of any text: ``encode`` reads their names as plain text, and
  ``decode`` leaves them out.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.extras import install_command
from dtrain.files import read_json, replace_file

#: Name of the vocabulary file.
VOCABULARY = "vocabulary.json"
# Usual names of the end-of-text token, in order of priority.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
#: Name of the file that describes the rows.
DATASET = "dataset.json"


class Tokenizer:
    """A tokenizer; pickled as its specification, without the vocabulary, except for characters.

    Args:
        spec: ``bytes``, ``tiktoken:NAME``, ``tokenizers:FILE`` (a tokenizer.json), or ``vocabulary:PATH`` (a vocabulary file,
            or the folder that contains it). Characters of a text: ``of_characters``.
        end_token: Name of the end-of-text token, for a ``tokenizers:FILE`` that has none of the usual names.

    Attributes:
        vocab_size: Size of the vocabulary; every token is below it.
        end_of_text: The token that follows each document; None: the vocabulary has none.
        identity: The specification; for characters and files, a hash of the vocabulary.

    Raises:
        ValueError: If the specification is invalid, or a ``tokenizers:FILE`` has no end-of-text token.
        ModuleNotFoundError: If the package of the tokenizer is missing; names the pip command.
        OSError: If the vocabulary cannot be read.

    Example:
        >>> from dtrain.data.fields.tokenizers import Tokenizer
        >>> tokenizer = Tokenizer("bytes")
        >>> tokenizer.encode("Hi").tolist(), tokenizer.decode([72, 105]), tokenizer.vocab_size
        ([72, 105], 'Hi', 257)
    """

    def __init__(self, spec: str, end_token: str | None = None) -> None:
        self._spec = spec
        self._kind, _, self._name = spec.partition(":")
        self._characters = ""
        stored: Mapping[str, Any] = {}
        if self._kind == "vocabulary" and self._name:
            file, stored = _read_vocabulary(Path(self._name))
            self._kind, _, self._name = stored["tokenizer"].partition(":")
            if self._kind == "tokenizers":
                self._name = str(file)
        if end_token is not None and (stored or self._kind != "tokenizers"):
            raise ValueError(
                f"--end-of-text {end_token!r}: the tokenizer {spec!r} has its own end-of-text token or none, which cannot be "
                "changed. Leave the option out."
            )
        self.vocab_size: int
        self.end_of_text: int | None
        self.identity: str
        if self._kind == "bytes" and not self._name:
            self.vocab_size, self.end_of_text, self.identity = 257, 256, "bytes"
        elif self._kind == "characters" and stored.get("characters"):
            self._set_characters(stored["characters"], stored.get("end_of_text") is not None)
        elif self._kind == "tiktoken" and self._name:
            encoding = _tiktoken(self._name)
            self.vocab_size, self.end_of_text = encoding.n_vocab, encoding.eot_token
            self.identity = f"tiktoken:{self._name}"
        elif self._kind == "tokenizers" and self._name:
            vocabulary = _from_file(self._name).get_vocab(with_added_tokens=True)
            self.vocab_size = max(vocabulary.values()) + 1
            names = [end_token] if end_token else _END_OF_TEXT
            self.end_of_text = stored.get("end_of_text") if stored else self._find_end(vocabulary, names)
            self.identity = f"tokenizers:{_hash(_content(self._name))}"
        else:
            raise ValueError(
                f"tokenizer {spec!r}: want bytes, tiktoken:NAME (such as gpt2), tokenizers:FILE (a tokenizer.json) or "
                "vocabulary:PATH (the folder of the shards of a text)."
            )

    @classmethod
    def of_characters(cls, characters: Iterable[str], end_of_text: bool = False) -> Tokenizer:
        """One token for each character, in the order of code points, and one for the end of text if wanted.

        Raises:
            ValueError: If there is no character.
        """
        distinct = "".join(sorted(set(characters)))
        if not distinct:
            raise ValueError("tokenizer characters: the text is empty. Pack a text with characters.")
        tokenizer = cls.__new__(cls)
        tokenizer._spec, tokenizer._kind, tokenizer._name = "characters", "characters", ""
        tokenizer._set_characters(distinct, end_of_text)
        return tokenizer

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """The tokenizer of a vocabulary file, or of the folder that contains it.

        Raises:
            ValueError: If the file does not describe a tokenizer.
            ModuleNotFoundError: If the package of the tokenizer is missing.
            OSError: If there is no such file.
        """
        return cls(f"vocabulary:{path}")

    @property
    def description(self) -> dict[str, Any]:
        """The content of the vocabulary file."""
        named = self._kind if self._kind == "tokenizers" else f"{self._kind}:{self._name}".rstrip(":")
        described = {"tokenizer": named, "vocab_size": self.vocab_size, "end_of_text": self.end_of_text}
        if self._kind == "characters":
            described["characters"] = self._characters
        if self._kind == "tokenizers":
            described["content"] = _content(self._name)
        return described

    def save(self, folder: Path | str) -> Path:
        """Writes the vocabulary file into a folder; returns its path."""
        path = Path(folder) / VOCABULARY
        with replace_file(path) as file:
            file.write(json.dumps(self.description, indent=1).encode() + b"\n")
        return path

    @property
    def dtype(self) -> str:
        """The smallest dtype for all tokens: ``uint16`` or ``uint32``."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    def encode(self, text: str, before: str = "", after: str = "") -> np.ndarray:
        """The tokens of a text, shape ``[tokens]``; names of special tokens in it are encoded as plain text.

        Args:
            text: The text, or a piece of a longer one.
            before: If ``text`` is a piece of a longer text: what precedes it, as far as the tokens may depend on it.
            after: Likewise, what follows it. Each piece gives the tokens that begin in it, so the pieces of a text together
                give the tokens of the whole.

        Raises:
            ValueError: If a character is not in a vocabulary of characters; names it.
        """
        if self._kind == "bytes":
            return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)
        if self._kind == "characters":
            return self._encode_characters(text).astype(self.dtype)
        tokens: Sequence[int]
        if self._kind == "tiktoken":
            tokens = _tiktoken(self._name).encode_ordinary(before + text + after)
        else:
            encoding = _from_file(self._name).encode(before + text + after, add_special_tokens=False)
            tokens = encoding.ids
        result = np.asarray(tokens, self.dtype)
        if not before and not after:
            return result
        if self._kind == "tiktoken":
            lengths = _token_lengths(self._name)[result]
            begins = np.cumsum(lengths) - lengths
            first, last = len(before.encode()), len((before + text).encode())
        else:
            begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
            first, last = len(before), len(before + text)
        inside = ((begins >= first) | (not before)) & ((begins < last) | (not after))
        return np.asarray(result[inside])

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without special tokens and numbers outside the vocabulary.

        Bytes that are not UTF-8, such as the first half of a character, become U+FFFD.
        """
        known = [int(token) for token in tokens if 0 <= token < self.vocab_size]
        if self._kind == "bytes":
            return bytes(token for token in known if token < 256).decode(errors="replace")
        if self._kind == "characters":
            return "".join(self._characters[token] for token in known if token < len(self._characters))
        if self._kind == "tokenizers":
            return str(_from_file(self._name).decode(known, skip_special_tokens=True))
        encoding, parts = _tiktoken(self._name), []
        for token in known:
            if not encoding.is_special_token(token):
                with suppress(KeyError):  # some vocabularies have unused numbers
                    parts.append(encoding.decode_single_token_bytes(token))
        return b"".join(parts).decode(errors="replace")

    def _set_characters(self, characters: str, end_of_text: bool) -> None:
        self._characters = characters
        self.end_of_text = len(characters) if end_of_text else None
        self.vocab_size = len(characters) + end_of_text
        self.identity = f"characters:{_hash(characters)}"

    def _encode_characters(self, text: str) -> np.ndarray:
        known, points = _code_points(self._characters), _code_points(text)
        tokens = np.searchsorted(known, points)
        unknown = known[np.minimum(tokens, len(known) - 1)] != points
        if unknown.any():
            character = text[int(unknown.argmax())]
            raise ValueError(
                f"character {character!r} (U+{ord(character):04X}) is not in the vocabulary of {len(known)} characters. "
                "Remove it, or pack this text together with the training text, whose characters are the vocabulary."
            )
        return tokens

    def _find_end(self, vocabulary: Mapping[str, int], names: Sequence[str]) -> int:
        known = [name for name in names if name in vocabulary]
        if not known:
            raise ValueError(
                f"tokenizer {self._spec!r} has no token {' or '.join(names)}. Name its token that ends a document: "
                "--end-of-text TOKEN."
            )
        return vocabulary[known[0]]


class Corpus:
    """What the files next to the shards of a text say about its tokens; read without the package of the tokenizer.

    Args:
        folder: The folder of the shards.
        tokenizer_identity: ``Tokenizer.identity``.
        vocab_size: Size of the vocabulary.
        end_of_text: The token that follows each document; None: the vocabulary has none.
        padding: The token that fills rows; None: rows are full.
        bytes_per_token: Average number of bytes of text per token; None: tokens are bytes.
    """

    # Not a dataclass: Hydra would convert an argument that is one to a mapping.
    def __init__(
        self,
        folder: Path,
        tokenizer_identity: str,
        vocab_size: int,
        end_of_text: int | None,
        padding: int | None = None,
        bytes_per_token: float | None = None,
    ) -> None:
        self.folder = folder
        self.tokenizer_identity = tokenizer_identity
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text
        self.padding = padding
        self.bytes_per_token = bytes_per_token

    @staticmethod
    def is_described_by(path: Path) -> bool:
        """Whether ``dtrain pack text`` wrote this ``dataset.json``; other tools use the name too. True if it is unreadable."""
        try:
            stored = read_json(path)
        except (OSError, ValueError):
            return True  # ``read`` says why
        return isinstance(stored, dict) and "tokenizer" in stored

    @classmethod
    def read(cls, path: Path) -> Corpus:
        """Reads ``dataset.json``.

        Raises:
            ValueError: If the file does not describe the tokens of a text.
        """
        try:
            stored = read_json(path)
            identity, vocab_size, end = str(stored["tokenizer"]), int(stored["vocab_size"]), stored["end_of_text"]
            bytes_per_token = stored["bytes_per_token"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} does not describe the tokens of a text ({type(error).__name__}: {error}). Pack the text again."
            ) from error
        return cls(path.parent, identity, vocab_size, end, stored.get("padding"), bytes_per_token)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises as ``Tokenizer.load``."""
        return Tokenizer.load(self.folder)


#: The tokenizer of a specification. Cached, because reading a vocabulary takes seconds.
tokenizer_of = functools.cache(Tokenizer)


def _read_vocabulary(path: Path) -> tuple[Path, dict[str, Any]]:
    """The vocabulary file of a path, and its content."""
    if path.is_dir():
        path /= VOCABULARY
    try:
        stored = read_json(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} does not exist. Name the folder of shards that `dtrain pack text` wrote, or its {VOCABULARY}."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). Pack the text again, which writes it.") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("tokenizer"), str):
        raise ValueError(f"{path} does not describe a tokenizer. Pack the text again, which writes it.")
    characters, end = stored.get("characters", ""), stored.get("end_of_text")
    if (
        not isinstance(characters, str)
        or list(characters) != sorted(set(characters))
        or not isinstance(end, int | None)
    ):
        raise ValueError(
            f"{path} is damaged: want 'characters' in the order of their code points, each once, and a number or null as "
            "'end_of_text'. Pack the text again, which writes it."
        )
    if stored["tokenizer"].partition(":")[0] == "tokenizers" and not isinstance(stored.get("content"), str):
        raise ValueError(
            f"{path} names a tokenizer without its vocabulary. Pack the text again, which writes {VOCABULARY}."
        )
    return path, stored


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Cached, because a worker encodes many pieces, and loading a vocabulary takes seconds.
@functools.cache
def _tiktoken(name: str) -> Any:
    try:
        import tiktoken
    except ModuleNotFoundError as error:
        raise _missing("tiktoken", error) from error
    try:
        return tiktoken.get_encoding(name)
    except ValueError as error:
        known = ", ".join(tiktoken.list_encoding_names())
        raise ValueError(f"tokenizer tiktoken:{name}: there is no such vocabulary. Known: {known}.") from error
    except OSError as error:
        raise OSError(
            f"tokenizer tiktoken:{name}: the vocabulary is not on this machine and cannot be downloaded ({error}). Set "
            "TIKTOKEN_CACHE_DIR to a folder that holds it."
        ) from error


@functools.cache
def _token_lengths(name: str) -> np.ndarray:
    """Bytes of each token, int64, ``[vocabulary]``; 0 of unused and special numbers."""
    encoding = _tiktoken(name)
    lengths = np.zeros(encoding.n_vocab, np.int64)
    for token in range(encoding.n_vocab):
        with suppress(KeyError):
            lengths[token] = len(encoding.decode_single_token_bytes(token))
    return lengths


@functools.cache
def _from_file(name: str) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise _missing("tokenizers", error) from error
    content = _content(name)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the Rust library raises plain Exception
        raise ValueError(f"tokenizer tokenizers:{name}: not a tokenizer.json: {error}.") from error
    tokenizer.encode_special_tokens = True  # their names are plain text, as with encode_ordinary
    # A file may ask for both; documents would lose their ends, or get padding.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@functools.cache
def _content(name: str) -> str:
    """The tokenizer.json at a path, or inside a vocabulary file."""
    text = Path(name).read_text("utf-8")
    with suppress(ValueError):
        stored = json.loads(text)
        if isinstance(stored, dict) and stored.get("tokenizer") == "tokenizers":
            return str(stored["content"])
    return text


def _missing(package: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"tokenizer {package}:... needs the package {package}, which is not installed. Run: {install_command('text')}.",
        name=error.name,
    )
