"""Continues a text with the artefact of a language model.

* The tokenizer of the training is part of the artefact (``vocabulary.json``).
* A model with a method ``generate``, such as ``dtrain.models.GPT``, is called through it: it keeps keys and values, so that
  each new token costs a forward of one token.
* A traced program takes rows of one length only. The text is padded at its end, which a causal model does not see, and each
  token costs a forward of the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.data.fields.tokenizers import VOCABULARY, Tokenizer
from dtrain.errors import ConfigError, as_config_error
from dtrain.export.artefact import Artefact
from dtrain.export.program import Program
from dtrain.models.gpt import Sampler


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, see ``dtrain.models.GPT.generate``.

    Attributes:
        tokens: Maximum number of new tokens; an end-of-text token ends the text earlier.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Number of most probable tokens to draw from; None: all.
        seed: Seed of the draws.
    """

    tokens: int = 100
    temperature: float = 1.0
    top_k: int | None = 40
    seed: int = 0


def continue_text(folder: Path, model: Artefact, prompt: str, sampling: Sampling) -> str:
    """The prompt and its continuation.

    Args:
        folder: The artefact.
        model: The loaded artefact.
        prompt: The text to continue; empty: begin a new text.
        sampling: How tokens are drawn.

    Raises:
        ConfigError: If the artefact is not a language model, its tokenizer cannot be used, or the prompt is longer than
            the model's context.
    """
    tokenizer = _tokenizer(folder, model)
    with as_config_error("--prompt"):
        tokens = [int(token) for token in tokenizer.encode(prompt)]
    end = tokenizer.end_of_text
    if not tokens and end is None:
        raise ConfigError(
            "--prompt: it is empty, and the tokenizer has no end-of-text token to begin with. Give a text."
        )
    tokens = tokens or [end or 0]
    network: Any = model.program.model if isinstance(model.program, Program) else None
    if hasattr(network, "generate"):
        _require_context(len(tokens), getattr(network, "context", None))
        with as_config_error("predict"):
            options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "seed": sampling.seed, "end": end}
            row = torch.tensor([tokens], device=model.device)
            text = network.generate(row, sampling.tokens, **options)[0].tolist()
    else:
        text = _generate(model, tokens, sampling, end)
    new = text[len(tokens) :]
    return tokenizer.decode(tokens + (new[: new.index(end)] if end in new else new))


def _tokenizer(folder: Path, model: Artefact) -> Tokenizer:
    expected = model.description.tokenizer
    if expected is None:
        raise ConfigError(
            f"{folder} has no tokenizer, so it cannot continue a text: the model is not a language model, or the {VOCABULARY} "
            "next to its training shards was not there when it was exported. Export the run again with data.train=SHARDS."
        )
    with as_config_error(str(folder)):
        tokenizer = Tokenizer.load(folder)
    if tokenizer.identity != expected:
        raise ConfigError(
            f"{folder / VOCABULARY} is the tokenizer {tokenizer.identity}, the model was trained with {expected}. Export the "
            "run again."
        )
    return tokenizer


def _require_context(tokens: int, context: int | None) -> None:
    if context is not None and tokens > context:
        raise ConfigError(
            f"--prompt: it has {tokens:,} tokens, the model's context is {context:,}. Shorten it, for example to its end."
        )


def _generate(model: Artefact, tokens: list[int], sampling: Sampling, end: int | None) -> list[int]:
    """``tokens`` and the new ones, by a forward of a whole row for each."""
    rows = model.description.rows
    if rows is None or len(rows.shape) != 1:
        raise ConfigError(
            f"the artefact does not say how many tokens a row has ({rows}), so it cannot continue a text. Export the run again "
            "with data.eval=SHARDS."
        )
    (length,) = rows.shape
    _require_context(len(tokens), length)
    with as_config_error("predict"):
        sampler = Sampler(sampling.temperature, sampling.top_k, sampling.seed, model.device)
        return _drawn(model, tokens, sampling.tokens, length, sampler, end)


def _drawn(model: Artefact, tokens: list[int], count: int, length: int, sampler: Sampler, end: int | None) -> list[int]:
    tokens = list(tokens)
    for _ in range(count):
        seen = tokens[-length:]
        row = torch.tensor([seen + [0] * (length - len(seen))])
        logits: Tensor = model.outputs(row)
        if logits.dim() != 3:
            raise ConfigError(
                f"the model returns {list(logits.shape)} for a row of tokens, want [rows, tokens, vocabulary]."
            )
        tokens.append(int(sampler(logits[:, len(seen) - 1])))
        if tokens[-1] == end:
            break
    return tokens
