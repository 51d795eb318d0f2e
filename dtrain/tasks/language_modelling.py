"""Language modelling: next-token cross-entropy over all valid tokens of the global batch.

* A row has ``length + 1`` tokens: inputs ``row[:-1]`` and targets ``row[1:]``.
* The *end-of-text token* begins a document: it is the first input of the document that follows it, and the last target of the
  one before it.
* With a *document mask* each document of a row is computed as if it were alone. The first token of a document is then predicted
  from the end-of-text token only.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.data.fields.field import DataError
from dtrain.data.fields.tokenizers import Corpus, Tokenizer
from dtrain.distributed.sharding import is_dtensor
from dtrain.tasks.losses import softmax_cross_entropy
from dtrain.training.task import Output

_BYTES = 256  # tokens below it are bytes if the text was not encoded with a different tokenizer
#: Values of ``task.documents``.
DOCUMENTS = ("none", "mask")
logger = logging.getLogger("dtrain")


class LanguageModelling:
    """Cross-entropy between ``model(row[:-1])``, logits ``[rows, length, vocabulary]``, and ``row[1:]``.

    Args:
        tokens: Name of the field with rows of ``length + 1`` tokens, an integer dtype, as ``dtrain pack text`` writes.
        ignore: Token, such as padding, that is excluded from loss and count. It may be outside the vocabulary if only such
            tokens follow it in a row. None: the padding of the shards, if they have one.
        bytes_per_token: Average number of bytes of text per token, for ``bits_per_byte``. None: the value in the shards. If the
            tokens are bytes, they are counted instead; tokens from 256 on, such as the end-of-text token, are not bytes.
        documents: ``none``, or ``mask``: tokens attend only to their own document, and positions restart in each document; the
            model is called as ``model(tokens, documents=numbers)``, see ``dtrain.models.GPT``.
        end_of_text: The token between documents. None: the shards' token.
        sample: Prompt that the model continues after each evaluation; the text is logged and kept with the run. An empty prompt
            begins a document. None: off.
        sample_tokens: Number of tokens to generate.
        sample_temperature: Argument ``temperature`` of the model's method ``generate``; None: its default.
        sample_top_k: Argument ``top_k`` of the model's method ``generate``; None: its default.
        corpus: Description of the shards' tokens; set by dtrain.

    Raises:
        ValueError: If an option is impossible, there is no end-of-text token for ``documents=mask``, or the prompt cannot be
            encoded, for example because the package of the tokenizer is missing.

    Example:
        >>> import torch
        >>> from dtrain.data import Batch
        >>> from dtrain.models import GPT
        >>> from dtrain.tasks import LanguageModelling
        >>> batch = Batch({"tokens": torch.randint(256, (2, 9))}, ["a", "b"], valid=torch.tensor([True, True]))
        >>> output = LanguageModelling(bytes_per_token=1)(GPT(width=32, depth=1, context=8), batch)
        >>> int(output.count), sorted(output.metrics)
        (16, ['accuracy', 'bits_per_byte'])
    """

    counts = "tokens"

    def __init__(
        self,
        tokens: str = "tokens",
        ignore: int | None = None,
        bytes_per_token: float | None = None,
        sample: str | None = None,
        sample_tokens: int = 200,
        *,
        documents: str = "none",
        end_of_text: int | None = None,
        sample_temperature: float | None = None,
        sample_top_k: int | None = None,
        corpus: Corpus | None = None,
    ) -> None:
        if documents not in DOCUMENTS:
            raise ValueError(f"task.documents: got {documents!r}, want one of {', '.join(DOCUMENTS)}.")
        if corpus is not None:
            ignore = corpus.padding if ignore is None else ignore
            end_of_text = corpus.end_of_text if end_of_text is None else end_of_text
            bytes_per_token = corpus.bytes_per_token if bytes_per_token is None else bytes_per_token
        if documents == "mask" and end_of_text is None:
            reason = f"the tokenizer of {corpus.folder} has none" if corpus is not None else "the shards do not name it"
            raise ValueError(
                f"task.documents=mask needs the end-of-text token between documents, and {reason}. Set task.end_of_text=TOKEN, "
                "pack the text with a tokenizer that has one, or use task.documents=none."
            )
        self._tokens = tokens
        self._ignore = ignore
        self._bytes_per_token = bytes_per_token
        self._end_of_text = end_of_text
        self._masks_documents = documents == "mask"
        self._options = {"temperature": sample_temperature, "top_k": sample_top_k}
        self._sample_tokens = sample_tokens
        self._tokenizer: Tokenizer | None = None
        self._prompt: list[int] | None = None
        if sample is not None:
            # Here, because it imports parts of torch that other tasks do not need.
            from dtrain.models.gpt import Sampler

            try:
                Sampler(1.0 if sample_temperature is None else sample_temperature, sample_top_k, 0, torch.device("cpu"))
            except ValueError as error:
                raise ValueError(f"task.sample_{error}") from error
            self._tokenizer = self._sample_tokenizer(sample, corpus)
            self._prompt = self._encoded(sample, self._tokenizer)
        self._checked = False

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        """Returns the loss summed over tokens, their count, and the metrics ``accuracy`` and ``bits_per_byte``.

        Raises:
            DataError: If a token is outside the vocabulary (on a CPU), the model takes no documents, or cannot continue the
                prompt.
        """
        if not self._checked and model.training:
            self._check(getattr(model, "module", model))
            self._checked = True
        tokens = batch[self._tokens].long()
        counted = batch.valid_for(self._tokens).unsqueeze(1).expand(-1, tokens.shape[1] - 1)
        if self._ignore is not None:
            is_ignored = tokens == self._ignore
            counted = counted & ~is_ignored[:, 1:]
            # Padding at the end of a row may be outside the vocabulary. Nothing that counts depends on it.
            is_padding = (~is_ignored).flip(1).cumsum(dim=1).flip(1) == 0
            tokens = tokens.masked_fill(is_padding, 0)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        options = {}
        if self._masks_documents:
            options["documents"] = (inputs == self._end_of_text).cumsum(dim=1)
        try:
            logits = model(inputs, **options)
            losses = softmax_cross_entropy(logits, targets).masked_fill(~counted, 0)
        except (IndexError, RuntimeError) as error:
            _require_vocabulary(tokens, model, batch, error)
            raise
        count = counted.sum()
        loss_sum = losses.sum()
        correct = ((logits.argmax(dim=-1) == targets) & counted).sum()
        is_text = (targets < _BYTES) & counted
        text_bytes = is_text.sum() if self._bytes_per_token is None else count * self._bytes_per_token
        metrics: dict[str, tuple[Tensor | float, Tensor | int]] = {
            "accuracy": (correct, count),
            "bits_per_byte": (loss_sum.detach() / math.log(2), text_bytes),
        }
        if batch.sources:
            metrics |= batch.by_source(losses.sum(dim=1), counted.sum(dim=1))
        return Output(loss_sum, count, metrics)

    def conclude(self, model: nn.Module, evaluation: Mapping[str, float]) -> dict[str, float]:
        """Metrics computed from the totals of an evaluation: ``perplexity``.

        Args:
            model: The unwrapped model.
            evaluation: The result of the evaluation.
        """
        # exp() of more than about 709 overflows a float64.
        return {"perplexity": math.exp(min(evaluation["loss"], 700.0))}

    def illustrate(self, model: nn.Module, evaluation: Mapping[str, float], samples: Iterable[Batch]) -> dict[str, str]:
        """Text logged after an evaluation: ``sample``, the prompt and its continuation, if a prompt is configured."""
        if self._prompt is None or self._tokenizer is None:
            return {}
        parameter: Any = next(model.parameters())
        # With parallel.offload, the parts of parameters are in host memory, and the model computes elsewhere.
        device = parameter.device_mesh.device_type if is_dtensor(parameter) else parameter.device
        options = {name: value for name, value in self._options.items() if value is not None}
        generate: Any = model.generate
        try:
            tokens = generate(torch.tensor([self._prompt], device=device), self._sample_tokens, **options)
        except ValueError as error:
            logger.warning("task.sample: no text: %s", error)  # a sample must not end the run
            return {}
        text = self._tokenizer.decode(tokens[0].tolist())
        logger.info("sample: %s", text)
        return {"sample": text}

    def _sample_tokenizer(self, sample: str, corpus: Corpus | None) -> Tokenizer:
        if corpus is not None:
            try:
                return corpus.tokenizer()
            except (ModuleNotFoundError, OSError, ValueError) as error:
                raise ValueError(f"task.sample: {error}") from error
        if self._bytes_per_token is not None:
            raise ValueError(
                f"task.sample: got {sample!r}, but the shards have no vocabulary.json, and with bytes_per_token "
                f"{self._bytes_per_token} their tokens are not bytes. Pack the text with dtrain pack text, or set "
                "task.sample=null."
            )
        return Tokenizer("bytes")

    def _encoded(self, sample: str, tokenizer: Tokenizer) -> list[int]:
        prompt = [int(token) for token in tokenizer.encode(sample)]
        if not prompt and tokenizer.end_of_text is not None:
            prompt = [tokenizer.end_of_text]
        if not prompt:
            raise ValueError(
                "task.sample: got an empty prompt, and the tokenizer has no end-of-text token. Set a text."
            )
        return prompt

    def _check(self, model: nn.Module) -> None:
        """Refuses in the first step what would otherwise fail after the first evaluation."""
        name = type(model).__name__
        if self._masks_documents:
            parameters = inspect.signature(model.forward).parameters.values()
            if not any(it.name == "documents" or it.kind is it.VAR_KEYWORD for it in parameters):
                raise DataError(
                    f"task.documents=mask: {name}.forward takes no documents. Use a model that does, such as "
                    "dtrain.models.GPT, or task.documents=none."
                )
        if self._prompt is None:
            return
        if not hasattr(model, "generate"):
            raise DataError(
                f"task.sample: {name} has no generate(tokens, count). Set task.sample=null, or use a model that has this "
                "method, such as dtrain.models.GPT."
            )
        context = getattr(model, "context", None)
        if isinstance(context, int) and len(self._prompt) > context:
            raise DataError(
                f"task.sample: the prompt has {len(self._prompt)} tokens, the model's context is {context}. Shorten the prompt."
            )


def _require_vocabulary(tokens: Tensor, model: nn.Module, batch: Batch, failure: Exception) -> None:
    """Raises an error that names a token out of range. Called after a failure: checking in every step would cost time."""
    model = getattr(model, "module", model)
    embeddings = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabulary = getattr(model, "vocabulary", embeddings[0] if embeddings else None)
    if tokens.device.type != "cpu" or not isinstance(vocabulary, int):
        return  # CUDA kernels report it themselves; after the failed assertion the device cannot be read
    wrong = ((tokens < 0) | (tokens >= vocabulary)).nonzero()
    if len(wrong):
        row, position = wrong[0].tolist()
        raise DataError(
            f"task: sample {batch.sample_keys[row]!r} has the token {int(tokens[row, position])} at position {position}, the "
            f"model has a vocabulary of {vocabulary:,}, 0 to {vocabulary - 1}. Set model.vocabulary to the tokenizer's size, "
            "or pack the text with the tokenizer of the model."
        ) from failure
