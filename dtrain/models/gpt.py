"""Decoder-only transformer for tokens, and generation with it.

* The defaults are rotary positions, LayerNorm and GELU. With other options it is the model of GPT-2 (``model=gpt2``), or
  similar to current language models (``model=gpt_modern``).
* *Documents* are texts that share a row. Given the document number of each token, the model treats each document as if it were
  alone in its row: tokens attend to their own document only, and positions restart in each.
* Generation keeps the keys and values of the tokens seen so far (a *cache*), so that each new token costs one forward of one
  token.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dtrain.models.transformer import Block, KeyValueCache, build_norm, compiled, initialise

#: Values of ``positions``.
POSITIONS = ("rotary", "learned")


class GPT(nn.Module):
    """Decoder-only transformer.

    Takes tokens, int64 ``[rows, length]``, returns logits of the next tokens, ``[rows, length, vocabulary]``. Embeddings and
    an untied output layer are initialised from a normal distribution with standard deviation 0.02, the blocks as described in
    ``Block``.

    Args:
        vocabulary: Number of different tokens; 257 for bytes and an end-of-text token.
        width: Size of a token's representation.
        depth: Number of blocks.
        heads: Number of attention heads.
        context: Maximum number of tokens per row.
        positions: ``rotary`` (Su et al. 2021), or ``learned``, as in GPT-2.
        kv_heads: Number of heads of keys and values (Ainslie et al., grouped-query attention, 2023); None: ``heads``.
        qk_norm: Whether queries and keys are normalised before attention (Henry et al. 2020).
        mlp: ``gelu``; ``gelu_tanh``, its approximation in GPT-2; or ``swiglu`` (Shazeer 2020).
        mlp_width: Size of the MLP's hidden layer. None: 4 x width; with ``swiglu`` 8/3 x width, rounded up to a multiple of 64.
        norm: ``layer``, or ``rms`` (Zhang and Sennrich 2019).
        bias: Whether linear layers and LayerNorm have biases.
        dropout: Probability with which embeddings, attention weights and outputs of the blocks' branches are set to zero in
            training.
        tied: Whether the embedding is also the output layer (Press and Wolf 2017).
        pad_vocabulary_to: The rows of embedding and output layer are rounded up to a multiple of this number, for faster matrix
            products. Results are unchanged: there are no logits for the additional rows.

    Raises:
        ValueError: If an option is unknown or impossible.

    Example:
        >>> import torch
        >>> from dtrain.models import GPT
        >>> model = GPT(width=32, depth=2, context=16).eval()
        >>> model(torch.zeros(2, 8, dtype=torch.int64)).shape
        torch.Size([2, 8, 257])
        >>> model.generate(torch.zeros(1, 4, dtype=torch.int64), count=5).shape
        torch.Size([1, 9])
    """

    def __init__(
        self,
        vocabulary: int = 257,
        width: int = 256,
        depth: int = 6,
        heads: int = 4,
        context: int = 256,
        *,
        positions: str = "rotary",
        kv_heads: int | None = None,
        qk_norm: bool = False,
        mlp: str = "gelu",
        mlp_width: int | None = None,
        norm: str = "layer",
        bias: bool = True,
        dropout: float = 0.0,
        tied: bool = True,
        pad_vocabulary_to: int = 1,
    ) -> None:
        super().__init__()
        if positions not in POSITIONS:
            raise ValueError(f"GPT: got positions {positions!r}, want one of {', '.join(POSITIONS)}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"GPT: got dropout {dropout}, want a number in [0, 1), such as 0.1.")
        if pad_vocabulary_to < 1:
            raise ValueError(f"GPT: got pad_vocabulary_to {pad_vocabulary_to}, want a number from 1 on, such as 64.")
        self.vocabulary = vocabulary
        self.context = context
        self._drops_out = dropout > 0
        padded = math.ceil(vocabulary / pad_vocabulary_to) * pad_vocabulary_to
        self.embedding = nn.Embedding(padded, width)
        initialise(self.embedding)
        self.position_embedding = nn.Embedding(context, width) if positions == "learned" else None
        if self.position_embedding is not None:
            initialise(self.position_embedding)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                width,
                heads,
                depth,
                causal=True,
                rotary=context if positions == "rotary" else None,
                kv_heads=kv_heads,
                qk_norm=qk_norm,
                mlp=mlp,
                mlp_width=mlp_width,
                norm=norm,
                bias=bias,
                dropout=dropout,
            )
            for _ in range(depth)
        )
        self.norm = build_norm(norm, width, bias)
        self.head = None if tied else nn.Linear(width, padded, bias=False)
        if self.head is not None:
            initialise(self.head)

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        *,
        caches: list[KeyValueCache] | None = None,
        seen: int = 0,
    ) -> Tensor:
        """Logits, ``[rows, length, vocabulary]``.

        Args:
            tokens: int64 ``[rows, length]``.
            documents: Document number of each token, an integer dtype, ``[rows, length]``; the tokens of a document are
                contiguous. None: each row is one document.
            caches: For generation: one cache for each block, with the keys and values of the ``seen`` tokens before ``tokens``.
            seen: Number of tokens in the caches.

        Raises:
            ValueError: If the rows are longer than the context.
        """
        length = tokens.shape[1]
        if seen + length > self.context:
            raise ValueError(
                f"GPT: got rows of {seen + length} tokens, its context is {self.context}. Set model.context, or pack "
                "the text with a smaller --length."
            )
        mask = positions = None
        if documents is not None:
            positions = positions_in_documents(documents)
            # FlexAttention computes no dropout of attention weights.
            mask = document_mask(documents, blocks=tokens.is_cuda and not (self._drops_out and self.training))
        elif seen or self.position_embedding is not None:
            positions = torch.arange(seen, seen + length, device=tokens.device)
        hidden = self.embedding(tokens)
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding(positions)
        hidden = self.dropout(hidden)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, mask, positions, None if caches is None else caches[number])
        hidden = self.norm(hidden)
        logits = F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)
        return logits if logits.shape[-1] == self.vocabulary else logits[..., : self.vocabulary]

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = 40,
        seed: int = 0,
        end: int | None = None,
        cache: bool = True,
    ) -> Tensor:
        """Appends tokens to each row, each drawn from the most probable next tokens. Call ``eval()`` first.

        Args:
            tokens: int64 ``[rows, length]``, at least one and at most ``context`` tokens. If the text becomes longer, the model
                sees its last ``context`` tokens.
            count: Number of tokens to append.
            temperature: Divides the logits: below 1, probable tokens become more probable; 0 takes the most probable one.
            top_k: Number of most probable tokens to draw from; None: all.
            seed: Seed of a separate generator; torch's global generators are not used.
            end: Stop as soon as each row has this token, such as the end of a text, among its new ones. None: never.
            cache: Whether to keep keys and values. Without them, each token costs a forward of the whole text; the results are
                equal up to rounding. Beyond the context nothing is kept, because all positions change with each token.

        Returns:
            int64 ``[rows, length + count]``, or shorter because of ``end``.

        Raises:
            ValueError: If there are no tokens or more than ``context``, an option is out of range, or logits are not finite.
        """
        prompt = tokens.shape[1]
        if not 1 <= prompt <= self.context:
            raise ValueError(
                f"GPT.generate: got a prompt of {prompt} tokens, want 1 to {self.context}, the model's context. Shorten the "
                "prompt, or use a model with a larger model.context."
            )
        sampler = Sampler(temperature, top_k, seed, tokens.device)
        caches: list[KeyValueCache] | None = None
        # Each length would be compiled separately.
        is_compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in self.modules())
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            for _ in range(count):
                if not cache or tokens.shape[1] > self.context:
                    logits = self(tokens[:, -self.context :])
                elif caches is None:
                    caches = [KeyValueCache() for _ in self.blocks]
                    logits = self(tokens, caches=caches)
                else:
                    logits = self(tokens[:, -1:], caches=caches, seen=tokens.shape[1] - 1)
                tokens = torch.cat([tokens, sampler(logits[:, -1])], dim=1)
                if end is not None and bool((tokens[:, prompt:] == end).any(dim=1).all()):
                    break
        return tokens


class Sampler:
    """Draws next tokens from logits; for the arguments see ``GPT.generate``.

    Raises:
        ValueError: If ``temperature`` or ``top_k`` is out of range.
    """

    def __init__(self, temperature: float, top_k: int | None, seed: int, device: torch.device) -> None:
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature: got {temperature}, want a number from 0 on, such as 0.8.")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k: got {top_k}, want a number from 1 on, such as 40, or null for all tokens.")
        self._temperature, self._top_k = temperature, top_k
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """Takes ``[rows, vocabulary]``, returns a token for each row, int64 ``[rows, 1]``.

        Raises:
            ValueError: If the largest logit of a row is not finite.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # Also because a failed draw on CUDA ends the process. The largest of a row with NaN is NaN.
        if not bool(logits.amax(dim=1).isfinite().all()):
            raise ValueError(
                "the model's logits for the next token are not finite, so no token can be drawn: its weights have diverged, or "
                "fp16 overflows. Use an earlier checkpoint, or bf16 or fp32."
            )
        if not self._temperature:
            return logits.argmax(dim=1, keepdim=True)
        best, which = logits.topk(min(self._top_k or logits.shape[1], logits.shape[1]))
        # The largest logit is subtracted first: divided by a small temperature, all would be infinite.
        probabilities = ((best - best[:, :1]) / self._temperature).softmax(dim=1)
        return which.gather(1, torch.multinomial(probabilities, 1, generator=self._generator))


def positions_in_documents(documents: Tensor) -> Tensor:
    """Position of each token in its document, int64 ``[rows, length]``; ``documents`` as in ``GPT.forward``."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - index.where(is_first, 0).cummax(dim=1).values


def document_mask(documents: Tensor, *, blocks: bool) -> Tensor | BlockMask:
    """The mask of causal attention within documents.

    Args:
        documents: As in ``GPT.forward``.
        blocks: Whether to return a ``BlockMask``, with which FlexAttention skips blocks of tokens of different documents.

    Returns:
        A ``BlockMask``, or bool ``[rows, 1, length, length]``.
    """
    if not blocks:
        return (documents.unsqueeze(2) == documents.unsqueeze(1)).tril().unsqueeze(1)

    def may_attend(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    rows, length = documents.shape
    return compiled(create_block_mask)(may_attend, rows, None, length, length, device=documents.device)
