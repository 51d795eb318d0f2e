"""Models of Hugging Face transformers, which return an object, as models that return logits."""

from __future__ import annotations

from torch import Tensor, nn


class Logits(nn.Module):
    """What ``model(inputs)`` has under ``logits``.

    Args:
        model: Any model that returns an object with ``logits``, such as transformers' ``ViTForImageClassification`` for images
            or ``GPT2LMHeadModel`` for tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits, of whatever shape the model gives them."""
        return self.model(inputs).logits
