"""Transformers: a decoder for tokens (GPT), an encoder for images (ViT), and an adapter for Hugging Face models."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GPT(nn.Module):
    """Decoder-only transformer with rotary positions; output and input embeddings are tied (Press and Wolf 2017).

    Takes tokens, int64 ``[rows, length]``, returns logits of the next tokens, ``[rows, length, vocabulary]``. The
    embedding is initialised from a normal distribution with standard deviation 0.02, the blocks as described in ``Block``.

    Args:
        vocabulary: Number of different tokens; 257 for bytes and an end-of-text token.
        width: Size of a token's representation.
        depth: Number of blocks.
        heads: Number of attention heads.
        context: Maximum number of tokens per row.
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
        """Appends tokens to each row, each drawn from the ``top_k`` most probable next tokens.

        Args:
            tokens: int64 ``[rows, length]``; the model sees the last ``context`` of them.
            count: Number of tokens to append.
            top_k: Number of most probable tokens to draw from.
            seed: Seed of a separate generator; torch's global generators are not used.

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


#: Width, depth and heads of the sizes (Steiner et al. 2021).
SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)}


class ViT(nn.Module):
    """Vision transformer (Dosovitskiy et al. 2021), simplified as in "Better plain ViT baselines" (Beyer et al. 2022).

    Patches are tokens, positions are fixed sines and cosines, and a linear head takes the mean over all tokens.

    Takes images ``[rows, 3, image_size, image_size]``, returns logits ``[rows, classes]``. Blocks are initialised as
    described in ``Block``, the patch embedding as ``nn.Conv2d``, the head with zeros.

    Args:
        size: ``tiny``, ``small`` or ``base``; or ``[width, depth, heads]``.
        classes: Number of classes.
        image_size: Pixels of a side.
        patch: Pixels of a patch's side; must divide ``image_size``.

    Raises:
        ValueError: If the size is unknown, or ``patch`` does not divide ``image_size``.
    """

    positions: Tensor

    def __init__(
        self, size: str | list[int] = "small", classes: int = 1000, image_size: int = 224, patch: int = 16
    ) -> None:
        super().__init__()
        if isinstance(size, str) and size not in SIZES:
            raise ValueError(f"ViT: got size {size!r}, want one of {', '.join(SIZES)}, or [width, depth, heads].")
        width, depth, heads = SIZES[size] if isinstance(size, str) else size
        if image_size % patch or width % 4:
            raise ValueError(
                f"ViT: got images of {image_size} pixels in patches of {patch} and width {width}, want a patch size that "
                "divides the image size, and a width divisible by 4."
            )
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(Block(width, heads, depth) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("positions", _sines(image_size // patch, width), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = self.blocks(tokens + self.positions)
        return self.head(self.norm(tokens).mean(dim=1))


def _sines(side: int, width: int) -> Tensor:
    """Positions of the patches of a square, ``[side * side, width]``: a quarter each of sin and cos of x and of y."""
    frequencies = 10_000.0 ** -(torch.arange(width // 4) / max(1, width // 4 - 1))
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = [axis.flatten()[:, None] * frequencies for axis in (x, y)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)


class Logits(nn.Module):
    """Adapter for models that return an object with ``logits``: returns the logits themselves.

    Args:
        model: For example ``ViTForImageClassification`` or ``GPT2LMHeadModel`` of Hugging Face transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's logits, shape unchanged."""
        return self.model(inputs).logits


class Block(nn.Module):
    """Pre-norm transformer block: attention and an MLP, each with a residual connection.

    Takes and returns ``[rows, tokens, width]``. Weights of linear layers are initialised from a normal distribution with
    standard deviation 0.02, biases with zero. The last layer of each residual branch uses ``0.02 / sqrt(2 * depth)``, so
    that the variance of the residual stream does not grow with depth (Radford et al., GPT-2, 2019).

    Args:
        width: Size of a token's representation; divisible by ``heads``.
        heads: Number of attention heads.
        depth: Number of blocks of the model, for the initialisation.
        context: Maximum number of tokens for causal attention with rotary positions. None: full attention without positions.

    Raises:
        ValueError: If ``heads`` does not divide ``width``, or the size of a head is odd and rotary positions are used.
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
                f"transformer: got width {width} and {heads} heads, want a number of heads that divides the "
                "width and, for rotary positions, an even number of channels per head."
            )
        self._heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.rotary = None if context is None else _Rotary(context, width // heads)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length, width = tokens.shape
        # [3, rows, heads, tokens, channels per head]
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
        # Not persistent: weights must load into a model with another context length.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns ``[rows, heads, tokens, channels]``; computes in fp32, returns the input's dtype."""
        length = x.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
