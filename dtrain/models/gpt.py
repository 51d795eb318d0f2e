"""A decoder-only transformer over tokens, by default bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.models.transformer import Block


class GPT(nn.Module):
    """Causal transformer with rotary positions; the output layer is the embedding's (Press and Wolf 2017).

    Takes tokens, int64 ``[rows, length]``, returns logits of the next ones, ``[rows, length, vocabulary]``. The embedding
    begins normal with a standard deviation of 0.02, the blocks as ``Block`` says.

    Args:
        vocabulary: Tokens are below it; 257 are the bytes and an end of text.
        width: Channels of a token.
        depth: Blocks.
        heads: Attention heads.
        context: Tokens of a row at most.
    """

    def __init__(
        self, vocabulary: int = 257, width: int = 256, depth: int = 6, heads: int = 4, context: int = 256
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, depth, context) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, ``[rows, length, vocabulary]``.

        Raises:
            ValueError: If the rows are longer than the context.
        """
        if tokens.shape[1] > self.context:
            raise ValueError(
                f"GPT: got rows of {tokens.shape[1]} tokens, its context is {self.context}. Set model.context, or pack "
                "the text with a smaller --length."
            )
        hidden = self.norm(self.blocks(self.embedding(tokens)))
        return nn.functional.linear(hidden, self.embedding.weight)

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, *, top_k: int = 40, seed: int = 0) -> Tensor:
        """Continues rows of tokens, each next one drawn from the ``top_k`` most probable.

        Args:
            tokens: int64 ``[rows, length]``; the last ``context`` of them are looked at.
            count: Tokens to add.
            top_k: Of how many one is drawn.
            seed: Of a generator of its own: nothing else is disturbed.

        Returns:
            int64 ``[rows, length + count]``.
        """
        generator = torch.Generator(tokens.device).manual_seed(seed)
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[:, -1].float()
            best, which = logits.topk(min(top_k, logits.shape[1]))
            drawn = torch.multinomial(best.softmax(dim=1), 1, generator=generator)
            tokens = torch.cat([tokens, which.gather(1, drawn)], dim=1)
        return tokens
