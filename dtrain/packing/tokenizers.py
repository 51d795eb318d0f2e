"""Text to tokens: bytes, which need nothing, or the vocabularies of tiktoken and of Hugging Face's tokenizers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary.

    Args:
        spec: ``bytes``, ``tiktoken:NAME`` or ``tokenizers:FILE``.
        end: Name of the token that ends a document, for a file that calls it otherwise than most do.

    Attributes:
        vocab_size: Tokens are below it.
        end_of_text: The token that ends a document.
        identity: Tells this vocabulary from others, wherever its file lies.

    Raises:
        ValueError: If there is no such tokenizer.
        ModuleNotFoundError: If its package is missing; says what to install.
        OSError: If its file cannot be read.
    """

    spec: str
    end: str | None = None
    vocab_size: int = field(init=False)
    end_of_text: int = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        kind, _, name = self.spec.partition(":")
        if self.spec == "bytes":
            facts: tuple[int, int, str] = 257, 256, "bytes"
        elif kind == "tiktoken" and name:
            encoding = _tiktoken(name)
            facts = encoding.n_vocab, encoding.eot_token, self.spec
        elif kind == "tokenizers" and name:
            facts = self._of_file(name)
        else:
            raise ValueError(f"--tokenizer {self.spec!r}: want bytes, tiktoken:NAME (such as gpt2) or tokenizers:FILE.")
        for attribute, value in zip(("vocab_size", "end_of_text", "identity"), facts, strict=True):
            object.__setattr__(self, attribute, value)

    @property
    def dtype(self) -> str:
        """The smallest raw dtype that holds all tokens."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, ``[tokens]`` of ``dtype``; what looks like a special token is text."""
        kind, _, name = self.spec.partition(":")
        tokens: Sequence[int] | np.ndarray
        if kind == "bytes":
            tokens = np.frombuffer(text.encode(), np.uint8)
        elif kind == "tiktoken":
            tokens = _tiktoken(name).encode_ordinary(text)
        else:
            tokens = _from_file(name).encode(text, add_special_tokens=False).ids
        return np.asarray(tokens, self.dtype)

    def _of_file(self, name: str) -> tuple[int, int, str]:
        tokenizer = _from_file(name)
        ends = [self.end] if self.end else _ENDS
        known = [token for token in ends if tokenizer.token_to_id(token) is not None]
        if not known:
            raise ValueError(
                f"--tokenizer {self.spec!r} has no token {' or '.join(ends)}. Name the one that ends a document: "
                "--end-of-text TOKEN."
            )
        size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16]
        return size, tokenizer.token_to_id(known[0]), f"tokenizers:{digest}"


# Kept, because a worker encodes many pieces and building one takes seconds.
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
            f"--tokenizer tiktoken:{name}: its vocabulary is not on this machine and cannot be downloaded ({error}). Set "
            "TIKTOKEN_CACHE_DIR to a folder that has it."
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
    except Exception as error:  # its Rust core raises nothing narrower
        raise ValueError(f"--tokenizer tokenizers:{name}: not a tokenizer.json: {error}.") from error


def _missing(package: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"--tokenizer {package}:... needs the package {package}, which is not installed. Run: pip install "
        "'dtrain[text]' (in a checkout: pip install -e '.[text]').",
        name=error.name,
    )
