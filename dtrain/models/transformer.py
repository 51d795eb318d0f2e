"""Transformer blocks, an encoder for images (ViT), and an adapter for Hugging Face models.

* A *block* is pre-norm: attention and an MLP, each with a norm before it and a residual connection around it.
* *Rotary* positions rotate pairs of channels of queries and keys; attention scores then depend on relative positions only.
* *Grouped* attention has fewer heads of keys and values than of queries; each is shared by a group of query heads.
* A *mask* says which keys each query may attend to: a bool tensor, or a ``BlockMask`` of torch's FlexAttention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

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
        image_size: Height and width of the images in pixels.
        patch: Height and width of a patch in pixels; must divide ``image_size``.

    Raises:
        ValueError: If the size is unknown, or ``patch`` does not divide ``image_size``.

    Example:
        >>> import torch
        >>> from dtrain.models import ViT
        >>> ViT([32, 2, 4], classes=10, image_size=32, patch=8)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
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

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from dtrain.models import Logits
        >>> class Classifier(torch.nn.Linear):  # stands for a model of transformers
        ...     def forward(self, inputs):
        ...         return SimpleNamespace(logits=super().forward(inputs))
        >>> Logits(Classifier(4, 2))(torch.rand(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's logits, shape unchanged."""
        return self.model(inputs).logits


#: Values of ``mlp``: the activation between two linear layers, or a gated MLP.
MLPS = ("gelu", "gelu_tanh", "swiglu")
#: Values of ``norm``.
NORMS = ("layer", "rms")

_EPSILON = 1e-5  # of all norms, as in GPT-2 and Llama


class Block(nn.Module):
    """Pre-norm transformer block: attention and an MLP, each with a residual connection.

    Takes and returns ``[rows, tokens, width]``. Weights of linear layers are initialised from a normal distribution with
    standard deviation 0.02, biases with zero, weights of norms with one. The last layer of each residual branch uses
    ``0.02 / sqrt(2 * depth)``, so that the variance of the residual stream does not grow with depth (Radford et al., GPT-2,
    2019).

    Args:
        width: Size of a token's representation; divisible by ``heads``.
        heads: Number of attention heads.
        depth: Number of blocks of the model, for the initialisation.
        causal: Whether a token attends only to itself and earlier ones.
        rotary: Maximum number of tokens for rotary positions; None: no positions.
        kv_heads: Number of heads of keys and values; divides ``heads``. None: ``heads``.
        qk_norm: Whether queries and keys are normalised (RMSNorm over the channels of a head) before rotary positions.
        mlp: One of ``MLPS``.
        mlp_width: Size of the hidden layer. None: 4 x width; with ``swiglu`` 8/3 x width, rounded up to a multiple of 64.
        norm: One of ``NORMS``.
        bias: Whether linear layers and LayerNorm have biases.
        dropout: Probability with which attention weights and outputs of both branches are set to zero in training.

    Raises:
        ValueError: If an option is unknown, ``heads`` does not divide ``width``, ``kv_heads`` does not divide ``heads``, or the
            size of a head is odd and rotary positions are used.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        depth: int,
        *,
        causal: bool = False,
        rotary: int | None = None,
        kv_heads: int | None = None,
        qk_norm: bool = False,
        mlp: str = "gelu",
        mlp_width: int | None = None,
        norm: str = "layer",
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = build_norm(norm, width, bias)
        self.attention = Attention(width, heads, causal, rotary, kv_heads, qk_norm, bias, dropout)
        self.mlp_norm = build_norm(norm, width, bias)
        self.mlp = _build_mlp(mlp, width, mlp_width, bias)
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                initialise(module)
        last = [module for module in self.mlp.modules() if isinstance(module, nn.Linear)][-1]
        for linear in (self.attention.out, last):
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | BlockMask | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """``[rows, tokens, width]``; for the other arguments see ``Attention``."""
        tokens = tokens + self.dropout(self.attention(self.attention_norm(tokens), mask, positions, cache))
        return tokens + self.dropout(self.mlp(self.mlp_norm(tokens)))


class Attention(nn.Module):
    """Multi-head attention. It takes the arguments of ``Block``."""

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        rotary: int | None,
        kv_heads: int | None,
        qk_norm: bool,
        bias: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if width % heads or (rotary is not None and width // heads % 2):
            raise ValueError(
                f"transformer: got width {width} and {heads} heads, want a number of heads that divides the "
                "width and, for rotary positions, an even number of channels per head."
            )
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(
                f"transformer: got kv_heads {kv_heads} and {heads} heads, want a number of heads of keys and values that "
                "divides the number of heads."
            )
        self._causal = causal
        self._heads, self._kv_heads, self._channels = heads, kv_heads, width // heads
        self._dropout = dropout
        # Queries, keys and values in this order, as in GPT-2; each has its heads one after the other.
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self._channels, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.query_norm = RMSNorm(self._channels) if qk_norm else None
        self.key_norm = RMSNorm(self._channels) if qk_norm else None
        self.rotary = Rotary(rotary, self._channels) if rotary is not None else None

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | BlockMask | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """``[rows, tokens, width]``.

        Args:
            tokens: ``[rows, tokens, width]``.
            mask: Which keys each query attends to: bool ``[rows, 1, tokens, tokens]``, or a ``BlockMask``. None: all keys, or,
                if the attention is causal, those at and before the query.
            positions: Position of each token for rotary positions, int64 ``[tokens]`` or ``[rows, tokens]``. None: 0, 1, ...
            cache: Keys and values of earlier tokens; those of ``tokens`` are appended to it. Several tokens only
                follow an empty cache.
        """
        rows, length, _ = tokens.shape
        heads = (self._heads, self._kv_heads, self._kv_heads)
        parts = self.qkv(tokens).split([self._channels * number for number in heads], dim=-1)
        # [rows, heads, tokens, channels] each
        query, key, value = (
            part.view(rows, length, number, self._channels).transpose(1, 2)
            for part, number in zip(parts, heads, strict=True)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        if cache is not None:
            key, value = cache.append(key, value)
        if self._kv_heads != self._heads:
            key, value = (
                part.repeat_interleave(self._heads // self._kv_heads, dim=1, output_size=self._heads)
                for part in (key, value)
            )
        if isinstance(mask, BlockMask):
            mixed = compiled(flex_attention)(query, key, value, block_mask=mask)
        else:
            mixed = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=self._dropout if self.training else 0.0,
                # A single token attends to all in the cache.
                is_causal=self._causal and mask is None and length > 1,
            )
        return self.out(mixed.transpose(1, 2).flatten(2))


class KeyValueCache:
    """Keys and values of the tokens that one attention has seen, for generation."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds ``[rows, heads, tokens, channels]`` each; returns the keys and values of all tokens."""
        if self._keys is not None and self._values is not None:
            keys, values = torch.cat([self._keys, keys], dim=2), torch.cat([self._values, values], dim=2)
        self._keys, self._values = keys, values
        return keys, values


class Rotary(nn.Module):
    """Rotates pairs of channels by an angle that grows with the position (Su et al., RoFormer, 2021)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, channels: int) -> None:
        super().__init__()
        frequencies = 10_000.0 ** -(torch.arange(0, channels, 2) / channels)
        angles = torch.arange(context)[:, None] * frequencies
        # Not persistent: weights must load into a model with a different context length.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Takes and returns ``[rows, heads, tokens, channels]``; computes in fp32 (or fp64), returns the input's dtype.

        ``positions``, int64 ``[tokens]`` or ``[rows, tokens]``, are 0, 1, ... by default.
        """
        if positions is None:
            cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        else:
            # The same for all heads.
            cos, sin = self.cos[positions].unsqueeze(-3), self.sin[positions].unsqueeze(-3)
        first, second = _widened(x).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """Divides by the root mean square of the last dimension (Zhang and Sennrich 2019).

    Computes in fp32 (or fp64) also where weights or inputs have 16 bits, and returns the input's dtype.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns ``[..., width]``."""
        wide = _widened(x)
        return F.rms_norm(wide, self.normalized_shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


def build_norm(kind: str, width: int, bias: bool) -> nn.Module:
    """A norm of ``NORMS`` over the last dimension; ``bias`` is for LayerNorm.

    Raises:
        ValueError: If the kind is unknown.
    """
    if kind not in NORMS:
        raise ValueError(f"transformer: got norm {kind!r}, want one of {', '.join(NORMS)}.")
    return RMSNorm(width) if kind == "rms" else nn.LayerNorm(width, eps=_EPSILON, bias=bias)


def initialise(module: nn.Linear | nn.Embedding) -> None:
    """Weights from a normal distribution with standard deviation 0.02, biases zero (Radford et al., GPT-2, 2019)."""
    nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile(function)``: FlexAttention has fast kernels only if it is compiled."""
    # A compiled model compiles what it calls.
    return function if torch.compiler.is_compiling() else _compiled_once(function)


@functools.cache
def _compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _build_mlp(kind: str, width: int, hidden: int | None, bias: bool) -> nn.Module:
    if kind not in MLPS:
        raise ValueError(f"transformer: got mlp {kind!r}, want one of {', '.join(MLPS)}.")
    if kind == "swiglu":
        return _SwiGLU(width, math.ceil(8 * width / 3 / 64) * 64 if hidden is None else hidden, bias)
    hidden = 4 * width if hidden is None else hidden
    activation = nn.GELU("tanh" if kind == "gelu_tanh" else "none")
    return nn.Sequential(nn.Linear(width, hidden, bias=bias), activation, nn.Linear(hidden, width, bias=bias))


class _SwiGLU(nn.Module):
    """MLP whose hidden layer is multiplied by a gate (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
