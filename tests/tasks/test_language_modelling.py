"""Language modelling: sums over tokens, documents, bytes of text, samples, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.data.fields.tokenizers import Corpus, Tokenizer
from dtrain.models import GPT
from dtrain.tasks import LanguageModelling
from dtrain.training.monitor.run_logger import IllustratingTask
from dtrain.training.task import ConcludingTask, Output
from tests.refusals import refused
from tests.tasks.test_tasks import VALID, Answers, batch

WITH_END = Corpus(Path("shards"), "tiktoken:mine", 10, end_of_text=9, padding=10, bytes_per_token=2.5)


def rows_of(tokens: Tensor) -> Batch:
    """A batch in which all rows are valid."""
    return Batch(
        {"tokens": tokens}, [f"a/{row}" for row in range(len(tokens))], torch.ones(len(tokens), dtype=torch.bool)
    )


def ratio(output: Output, name: str) -> float:
    total, count = output.metrics[name]
    return float(total) / float(count)


def loss(output: Output) -> float:
    return float(output.loss_sum.detach())


def small_gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(10, 16, 2, 2, 16, **options)


def tokens() -> Tensor:
    return torch.tensor([[1, 2, 256, 3], [9, 9, 9, 9], [4, 5, 6, 7], [8, 7, 6, 256]], dtype=torch.uint16)


def test_language_modelling_sums_over_the_valid_tokens() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 3, 257)
    output = LanguageModelling()(Answers(logits), batch(tokens=tokens()))
    rows = [row for row in range(4) if VALID[row]]
    log_p = logits.double().log_softmax(-1)
    expected = -sum(float(log_p[row, n, int(tokens()[row, n + 1])]) for row in rows for n in range(3))
    assert loss(output) == pytest.approx(expected, rel=1e-6)
    assert int(output.count) == 9
    # Two of the nine are ends of text, which are no bytes.
    assert ratio(output, "bits_per_byte") == pytest.approx(expected / math.log(2) / 7)
    other = LanguageModelling(bytes_per_token=4.0)(Answers(logits), batch(tokens=tokens()))
    assert ratio(other, "bits_per_byte") == pytest.approx(expected / math.log(2) / (4 * 9))


def test_an_ignored_token_is_not_predicted_and_the_model_sees_all_but_the_last() -> None:
    seen: list[Tensor] = []

    class Remembers(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inputs)
            return torch.zeros(*inputs.shape, 257)

    output = LanguageModelling(ignore=256)(Remembers(), batch(tokens=tokens()))
    assert int(output.count) == 7
    assert loss(output) == pytest.approx(7 * math.log(257))
    assert seen[0].tolist() == tokens().long()[:, :-1].tolist()


def test_padding_outside_the_vocabulary_is_neither_seen_nor_predicted() -> None:
    model = small_gpt()
    rows = torch.tensor([[9, 1, 2, 9, 10, 10], [9, 3, 4, 5, 6, 9]])
    output = LanguageModelling(corpus=WITH_END)(model, rows_of(rows))
    alone = [LanguageModelling()(model, rows_of(row)) for row in (rows[:1, :4], rows[1:])]
    assert int(output.count) == 3 + 5
    assert loss(output) == pytest.approx(sum(loss(one) for one in alone), rel=1e-6)
    assert ratio(output, "bits_per_byte") == pytest.approx(loss(output) / math.log(2) / (2.5 * 8))


def test_masked_documents_of_a_row_have_the_loss_of_separate_ones() -> None:
    for options in ({}, {"positions": "learned"}):
        model = small_gpt(**options)
        task = LanguageModelling(documents="mask", corpus=WITH_END)
        #                      a part of a document, three whole ones, of which one is empty, and padding
        row = torch.tensor([[4, 5, 9, 1, 2, 3, 9, 9, 6, 9, 10, 10]])
        documents = [[4, 5, 9], [9, 1, 2, 3, 9], [9, 9], [9, 6, 9]]
        output = task(model, rows_of(row))
        alone = [LanguageModelling()(model, rows_of(torch.tensor([document]))) for document in documents]
        assert int(output.count) == sum(int(one.count) for one in alone) == 9
        assert loss(output) == pytest.approx(sum(loss(one) for one in alone), rel=1e-6)
        unmasked = LanguageModelling(corpus=WITH_END)(model, rows_of(row))
        assert loss(unmasked) != pytest.approx(loss(output), rel=1e-4)


def test_an_evaluation_concludes_with_the_perplexity_and_shows_a_sample_of_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="dtrain")
    model = GPT(width=8, depth=1, heads=2, context=8)
    task = LanguageModelling(sample="def ", sample_tokens=5)
    assert isinstance(task, ConcludingTask)
    assert task.conclude(model, {"loss": math.log(20.0)}) == {"perplexity": pytest.approx(20.0)}
    assert isinstance(task, IllustratingTask)
    shown = task.illustrate(model, {}, ())
    assert shown["sample"].startswith("def ")
    assert f"sample: {shown['sample']}" in caplog.text
    assert LanguageModelling().illustrate(model, {}, ()) == {}


def test_a_model_whose_logits_are_not_finite_gets_no_sample_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    model = GPT(width=8, depth=1, heads=2, context=8)
    with torch.no_grad():
        model.embedding.weight.fill_(math.nan)
    assert LanguageModelling(sample="def ", sample_tokens=5).illustrate(model, {}, ()) == {}
    assert "not finite" in caplog.text


def test_a_sample_is_drawn_where_a_model_with_parameters_in_host_memory_computes() -> None:
    class Offloaded(nn.Module):
        """As with ``parallel.offload``: parts on the CPU, a mesh of another device."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.weight.device_mesh = SimpleNamespace(device_type="meta")  # type: ignore[attr-defined]

        def generate(self, tokens: Tensor, count: int, **options: Any) -> Tensor:
            assert tokens.is_meta
            return torch.tensor([list(b"ab")])

    assert LanguageModelling(sample="a").illustrate(Offloaded(), {}, ())["sample"] == "ab"


def written_corpus(folder: Path, tokenizer: Tokenizer) -> Corpus:
    tokenizer.save(folder)
    stored = {"tokenizer": tokenizer.identity, "vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text}
    (folder / "dataset.json").write_text(json.dumps(stored | {"bytes_per_token": 1.5, "splits": {}}))
    return Corpus.read(folder / "dataset.json")


def test_a_sample_is_text_of_the_tokenizer_beside_the_shards(tmp_path: Path) -> None:
    corpus = written_corpus(tmp_path, Tokenizer.of_characters("abcäöü", end_of_text=True))
    task = LanguageModelling(sample="ä", sample_tokens=30, sample_temperature=2.0, sample_top_k=7, corpus=corpus)
    text = task.illustrate(small_gpt(), {}, ())["sample"]
    assert text.startswith("ä")
    assert set(text) <= set("abcäöü")
    empty = LanguageModelling(sample="", sample_tokens=5, corpus=corpus)
    assert set(empty.illustrate(small_gpt(), {}, ())["sample"]) <= set("abcäöü")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"documents": "some"}, ["task.documents", "'some'", "none, mask"]),
        ({"documents": "mask"}, ["task.documents=mask", "end-of-text token", "task.end_of_text="]),
        (
            {"documents": "mask", "corpus": Corpus(Path("here"), "characters:0", 65, None)},
            ["task.documents=mask", "here has none", "task.documents=none"],
        ),
        ({"sample": "x", "bytes_per_token": 4.0}, ["task.sample", "'x'", "bytes_per_token 4.0"]),
        ({"sample": "x", "sample_temperature": -1.0}, ["task.sample_temperature", "-1.0", "0.8"]),
        ({"sample": "x", "sample_top_k": 0}, ["task.sample_top_k", "0", "null"]),
        ({"sample": "x", "corpus": WITH_END}, ["task.sample", "shards"]),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], names: list[str]) -> None:
    with refused(ValueError, *names):
        LanguageModelling(**options)


def test_the_first_step_refuses_a_model_that_cannot_do_what_comes_later(tmp_path: Path) -> None:
    rows = rows_of(torch.tensor([[1, 2, 3, 4]]))
    answers = Answers(torch.zeros(1, 3, 10))
    with refused(ValueError, "task.sample", "Answers", "generate"):
        LanguageModelling(sample="x")(answers, rows)
    with refused(ValueError, "task.documents=mask", "Answers", "documents"):
        LanguageModelling(documents="mask", end_of_text=9)(answers, rows)
    with refused(ValueError, "task.sample", "20 tokens", "16", "Shorten the prompt"):
        LanguageModelling(sample="x" * 20)(small_gpt(), rows)


@pytest.mark.parametrize("position", [1, 3])
def test_a_token_outside_the_vocabulary_is_named_with_its_sample(position: int) -> None:
    rows = torch.ones(2, 4, dtype=torch.int32)
    rows[1, position] = 70
    with refused(ValueError, "sample 'a/1'", "token 70", "model.vocabulary", f"position {position}", "0 to 9"):
        LanguageModelling()(small_gpt(), rows_of(rows))
    # In the padded rows of the embedding.
    rows[1, position] = 11
    with refused(ValueError, "sample 'a/1'", "token 11", "model.vocabulary", f"position {position}", "0 to 9"):
        LanguageModelling()(small_gpt(pad_vocabulary_to=64), rows_of(rows))
