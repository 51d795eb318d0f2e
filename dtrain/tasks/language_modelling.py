"""Language modelling: the next token, cross-entropy over all valid tokens of the global batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from dtrain.data import Batch
from dtrain.tasks.losses import softmax_cross_entropy
from dtrain.training.task import Output

_BYTES = 256  # tokens below it are bytes, where nothing else is said
logger = logging.getLogger("dtrain")


class LanguageModelling:
    """Cross-entropy between ``model(row[:-1])``, logits ``[rows, length, vocabulary]``, and ``row[1:]``.

    Args:
        tokens: The field with rows of ``length + 1`` tokens, an integer dtype, as ``python -m dtrain.pack text`` makes them.
        ignore: A token, such as padding, that is not predicted and not counted.
        bytes_per_token: Bytes of text that a token stands for on average; None: tokens are bytes, those from 256 on none.
        sample: After evaluations, this text is continued by the model, logged and kept with the run; None: not.
        sample_bytes: By how many bytes.
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
                f"task.sample: got {sample!r}, and bytes_per_token {bytes_per_token}. Only text of bytes is sampled: set one "
                "of them to null."
            )
        self._tokens = tokens
        self._ignore = ignore
        self._bytes_per_token = bytes_per_token
        self._sample = sample
        self._sample_bytes = sample_bytes

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Loss and count are those of tokens. Metrics: ``accuracy`` and ``bits_per_byte``."""
        tokens = batch[self._tokens].long()
        targets = tokens[:, 1:]
        logits = model(tokens[:, :-1])
        counted = batch.valid.unsqueeze(1).expand_as(targets)
        if self._ignore is not None:
            counted = counted & (targets != self._ignore)
        count = counted.sum()
        loss_sum = softmax_cross_entropy(logits, targets).masked_fill(~counted, 0).sum()
        if self._bytes_per_token is None:
            text_bytes = ((targets < _BYTES) & counted).sum()
        else:
            text_bytes = count * self._bytes_per_token
        correct = ((logits.argmax(dim=-1) == targets) & counted).sum()
        metrics = {"accuracy": (correct, count), "bits_per_byte": (loss_sum.detach() / math.log(2), text_bytes)}
        return Output(loss_sum, count, metrics)

    def conclude(self, model: nn.Module, metrics: Mapping[str, float]) -> dict[str, float]:
        """What an evaluation says beside its sums: ``perplexity``.

        Args:
            model: The bare model.
            metrics: Of the evaluation.
        """
        # Beyond that a float has no exponential, and a perplexity no meaning.
        return {"perplexity": math.exp(min(metrics["loss"], 700.0))}

    def illustrate(self, model: nn.Module, evaluation: Mapping[str, float], samples: Iterable[Batch]) -> dict[str, str]:
        """What a run shows after an evaluation: ``sample``, where one is asked for.

        Raises:
            ValueError: If the model cannot generate.
        """
        if self._sample is None:
            return {}
        text = self.sample(model)
        logger.info("sample: %s", text)
        return {"sample": text}

    def sample(self, model: nn.Module) -> str:
        """The text ``sample``, continued by a model that has ``generate(tokens, count)``.

        Raises:
            ValueError: If it has not.
        """
        generate = getattr(model, "generate", None)
        if generate is None:
            raise ValueError(
                f"task.sample: {type(model).__name__} has no generate(tokens, count). Set task.sample=null, or use a model "
                "that has, such as dtrain.models.GPT."
            )
        device = next(model.parameters()).device
        prompt = torch.tensor([list((self._sample or "").encode())], device=device)
        text = generate(prompt, self._sample_bytes)[0].tolist()
        return bytes(token for token in text if token < _BYTES).decode(errors="replace")
