"""Tokenizers: bytes, which need no package, and the vocabularies of tiktoken and of Hugging Face's tokenizers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Usual names of the end-of-text token, in order of priority.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer:
    """A tokenizer; pickled as its specification, without the vocabulary.

    Args:
        spec: ``bytes``, ``tiktoken:NAME`` or ``tokenizers:FILE``.
        end_token: Name of the end-of-text token, for a ``tokenizers:FILE`` that has none of the usual names.

    Attributes:
        vocab_size: Size of the vocabulary; every token is below it.
        end_of_text: The token that follows each document.
        identity: The specification; for a file, a hash of its content instead of its path.

    Raises:
        ValueError: If the specification is invalid, or the vocabulary has no end-of-text token.
        ModuleNotFoundError: If the package of the tokenizer is missing; names the pip command.
        OSError: If the vocabulary cannot be read.
    """

    def __init__(self, spec: str, end_token: str | None = None) -> None:
        self._spec = spec
        self._kind, _, self._name = spec.partition(":")
        self.vocab_size: int
        self.end_of_text: int
        self.identity: str
        if spec == "bytes":
            self.vocab_size, self.end_of_text, self.identity = 257, 256, spec
        elif self._kind == "tiktoken" and self._name:
            encoding = _tiktoken(self._name)
            self.vocab_size, self.end_of_text, self.identity = encoding.n_vocab, encoding.eot_token, spec
        elif self._kind == "tokenizers" and self._name:
            vocabulary = _from_file(self._name).get_vocab(with_added_tokens=True)
            self.vocab_size = max(vocabulary.values()) + 1
            self.end_of_text = self._find_end(vocabulary, [end_token] if end_token else _END_OF_TEXT)
            self.identity = f"tokenizers:{hashlib.sha256(Path(self._name).read_bytes()).hexdigest()[:16]}"
        else:
            raise ValueError(f"tokenizer {spec!r}: want bytes, tiktoken:NAME (such as gpt2) or tokenizers:FILE.")

    @property
    def dtype(self) -> str:
        """The smallest dtype for all tokens: ``uint16`` or ``uint32``."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, shape ``[tokens]``; names of special tokens in it are encoded as plain text."""
        tokens: Sequence[int] | np.ndarray
        if self._kind == "bytes":
            tokens = np.frombuffer(text.encode(), np.uint8)
        elif self._kind == "tiktoken":
            tokens = _tiktoken(self._name).encode_ordinary(text)
        else:
            tokens = _from_file(self._name).encode(text, add_special_tokens=False).ids
        return np.asarray(tokens, self.dtype)

    def _find_end(self, vocabulary: Mapping[str, int], names: Sequence[str]) -> int:
        known = [name for name in names if name in vocabulary]
        if not known:
            raise ValueError(
                f"tokenizer {self._spec!r} has no token {' or '.join(names)}. Name its token that ends a document: "
                "--end-of-text TOKEN."
            )
        return vocabulary[known[0]]


#: The tokenizer of a specification. Cached, because reading a vocabulary takes seconds.
tokenizer_of = functools.cache(Tokenizer)


# Cached, because a worker encodes many pieces, and loading a vocabulary takes seconds.
@functools.cache
def _tiktoken(name: str) -> Any:
    try:
        import tiktoken
    except ModuleNotFoundError as error:
        raise _missing("tiktoken", error) from error
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        raise OSError(
            f"tokenizer tiktoken:{name}: the vocabulary is not on this machine and cannot be downloaded ({error}). Set "
            "TIKTOKEN_CACHE_DIR to a folder that holds it."
        ) from error


@functools.cache
def _from_file(name: str) -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise _missing("tokenizers", error) from error
    content = Path(name).read_text("utf-8")
    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the Rust library raises plain Exception
        raise ValueError(f"tokenizer tokenizers:{name}: not a tokenizer.json: {error}.") from error


def _missing(package: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"tokenizer {package}:... needs the package {package}, which is not installed. Run: pip install "
        "'dtrain[text]' (in a checkout: pip install -e '.[text]').",
        name=error.name,
    )
