"""The block that the ViT and the GPT are made of: attention and an MLP, each beside a residual, normalised before."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Takes and returns ``[rows, tokens, width]``.

    Linear layers begin normal with a standard deviation of 0.02, biases at zero; those that write into the residual stream
    are smaller by ``sqrt(2 * depth)``, so that its variance does not grow with the depth (Radford et al., GPT-2, 2019).

    Args:
        width: Channels of a token; divisible by ``heads``.
        heads: Attention heads.
        depth: Blocks of the model, for the initialisation.
        context: Causal attention with rotary positions for so many tokens at most; None: all tokens see each other.

    Raises:
        ValueError: If the heads do not divide the width, or their channels cannot be rotated in pairs.
    """

    def __init__(self, width: int, heads: int, depth: int, context: int | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, context)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        for last in (self.attention.out, self.mlp[-1]):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * depth))  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        """``[rows, tokens, width]``."""
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.mlp(self.mlp_norm(tokens))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, context: int | None) -> None:
        super().__init__()
        if width % heads or (context is not None and width // heads % 2):
            raise ValueError(
                f"transformer: got width {width} and {heads} heads, want heads that divide it, and an even number of "
                "channels a head for rotary positions."
            )
        self._heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.rotary = None if context is None else _Rotary(context, width // heads)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length, width = tokens.shape
        # [3, rows, heads, tokens, channels of a head]
        qkv = self.qkv(tokens).view(rows, length, 3, self._heads, width // self._heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.rotary is not None)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class _Rotary(nn.Module):
    """Rotates pairs of channels by an angle that grows with the position (Su et al., RoFormer, 2021)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, channels: int) -> None:
        super().__init__()
        frequencies = 10_000.0 ** -(torch.arange(0, channels, 2) / channels)
        angles = torch.arange(context)[:, None] * frequencies
        # Not in checkpoints: another context must be able to take the weights.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, heads, tokens, channels]``, rotated in fp32, in the dtype it came in."""
        length = x.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
