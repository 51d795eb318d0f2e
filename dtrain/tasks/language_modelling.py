"""Language modelling: next-token cross-entropy over all valid tokens of the global batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from dtrain.data import Batch
from dtrain.tasks.losses import softmax_cross_entropy
from dtrain.training.task import Output

_BYTES = 256  # without bytes_per_token, tokens below 256 are bytes and the others are special tokens
logger = logging.getLogger("dtrain")


class LanguageModelling:
    """Cross-entropy between ``model(row[:-1])``, logits ``[rows, length, vocabulary]``, and ``row[1:]``.

    Args:
        tokens: Name of the field with rows of ``length + 1`` tokens, an integer dtype, as ``dtrain.pack text`` writes.
        ignore: Token, such as padding, that is excluded from loss and count.
        bytes_per_token: Average number of bytes of text per token. None: the tokens are bytes, and tokens from 256 on count
            as no bytes.
        sample: Prompt that the model continues after each evaluation; the text is logged and kept with the run. None: off.
        sample_bytes: Number of bytes to generate.
    """

    counts = "tokens"

    def __init__(
        self,
        tokens: str = "tokens",
        ignore: int | None = None,
        bytes_per_token: float | None = None,
        sample: str | None = None,
        sample_bytes: int = 200,
    ) -> None:
        if sample is not None and bytes_per_token is not None:
            raise ValueError(
                f"task.sample: got {sample!r}, and bytes_per_token {bytes_per_token}. Samples need byte "
                "tokens: set one of the two to null."
            )
        self._tokens = tokens
        self._ignore = ignore
        self._bytes_per_token = bytes_per_token
        self._sample = sample
        self._sample_bytes = sample_bytes

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Returns the loss summed over tokens, their count, and the metrics ``accuracy`` and ``bits_per_byte``."""
        tokens = batch[self._tokens].long()
        targets = tokens[:, 1:]
        logits = model(tokens[:, :-1])
        counted = batch.valid_for(self._tokens).unsqueeze(1).expand_as(targets)
        if self._ignore is not None:
            counted = counted & (targets != self._ignore)
        count = counted.sum()
        losses = softmax_cross_entropy(logits, targets).masked_fill(~counted, 0)
        loss_sum = losses.sum()
        if self._bytes_per_token is None:
            text_bytes = ((targets < _BYTES) & counted).sum()
        else:
            text_bytes = count * self._bytes_per_token
        correct = ((logits.argmax(dim=-1) == targets) & counted).sum()
        metrics = {"accuracy": (correct, count), "bits_per_byte": (loss_sum.detach() / math.log(2), text_bytes)}
        if batch.sources:
            metrics |= batch.by_source(losses.sum(dim=1), counted.sum(dim=1))
        return Output(loss_sum, count, metrics)

    def conclude(self, model: nn.Module, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics computed from the totals of an evaluation: ``perplexity``.

        Args:
            model: The unwrapped model.
            metrics: Metrics of the evaluation.
        """
        # exp() of more than about 709 overflows a float64.
        return {"perplexity": math.exp(min(metrics["loss"], 700.0))}

    def illustrate(self, model: nn.Module, evaluation: Mapping[str, float], samples: Iterable[Batch]) -> dict[str, str]:
        """Text logged after an evaluation: ``sample``, if a prompt is configured.

        Raises:
            ValueError: If the model has no method ``generate``.
        """
        if self._sample is None:
            return {}
        text = self.sample(model)
        logger.info("sample: %s", text)
        return {"sample": text}

    def sample(self, model: nn.Module) -> str:
        """The prompt ``sample`` and its continuation by the model's method ``generate(tokens, count)``.

        Raises:
            ValueError: If the model has no such method.
        """
        generate = getattr(model, "generate", None)
        if generate is None:
            raise ValueError(
                f"task.sample: {type(model).__name__} has no generate(tokens, count). Set task.sample=null, or use a model "
                "that has this method, such as dtrain.models.GPT."
            )
        device = next(model.parameters()).device
        prompt = torch.tensor([list((self._sample or "").encode())], device=device)
        text = generate(prompt, self._sample_bytes)[0].tolist()
        return bytes(token for token in text if token < _BYTES).decode(errors="replace")
