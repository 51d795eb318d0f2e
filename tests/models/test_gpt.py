"""The GPT: each option against a plain float64 computation, documents in a row against separate ones, and generation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from dtrain.models import GPT, gpt
from dtrain.models.gpt import Sampler, document_mask
from dtrain.training.setup.model import checkpoint_activations
from tests.refusals import refused

GPT2 = {"positions": "learned", "mlp": "gelu_tanh"}
NANOGPT = {"positions": "learned", "bias": False}
MODERN = {"kv_heads": 2, "qk_norm": True, "mlp": "swiglu", "norm": "rms", "bias": False, "tied": False}
OPTIONS = pytest.mark.parametrize("options", [{}, GPT2, NANOGPT, MODERN], ids=["default", "gpt2", "nanogpt", "modern"])


def small(dtype: torch.dtype = torch.float64, **options: Any) -> GPT:
    """A small GPT whose parameters are all random, in evaluation mode."""
    torch.manual_seed(0)
    model = GPT(31, 32, 2, 4, 16, **options).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(31, shape, generator=torch.Generator().manual_seed(1))


def plain_logits(model: GPT, row: Tensor, kv_heads: int) -> Tensor:
    """Logits of one row, ``[length, vocabulary]``, token by token and head by head from the weights by their names."""
    weights = dict(model.named_parameters())
    length, heads, channels = len(row), 4, 8
    shared = heads // kv_heads  # query heads of a key head

    def norm(name: str, x: Tensor) -> Tensor:
        if isinstance(model.get_submodule(name), nn.LayerNorm):
            x = x - x.mean()
        scaled = x / (x.square().mean() + 1e-5).sqrt() * weights[f"{name}.weight"]
        return scaled + weights.get(f"{name}.bias", 0)

    def linear(name: str, x: Tensor) -> Tensor:
        return weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", 0)

    def rotated(x: Tensor, position: int) -> Tensor:
        pairs = torch.complex(x[: channels // 2], x[channels // 2 :])
        # The model keeps the angles in fp32.
        angles = torch.tensor(float(position)) * 10_000.0 ** -(torch.arange(0, channels, 2) / channels)
        turned = pairs * torch.complex(angles.cos().double(), angles.sin().double())
        return torch.cat([turned.real, turned.imag])

    learned = weights.get("position_embedding.weight")
    hidden = [weights["embedding.weight"][token] for token in row.tolist()]
    if learned is not None:
        hidden = [x + learned[position] for position, x in enumerate(hidden)]
    for number in range(2):
        block = f"blocks.{number}"
        normed = [norm(f"{block}.attention_norm", x) for x in hidden]
        projected = [linear(f"{block}.attention.qkv", x) for x in normed]
        mixed = [torch.empty(heads, channels, dtype=torch.float64) for _ in row]
        for head in range(heads):
            queries, keys, values = [], [], []
            for position, x in enumerate(projected):
                query, key, value = x.split([heads * channels, kv_heads * channels, kv_heads * channels])
                query, key = query.view(heads, -1)[head], key.view(kv_heads, -1)[head // shared]
                if f"{block}.attention.query_norm.weight" in weights:
                    query = norm(f"{block}.attention.query_norm", query)
                    key = norm(f"{block}.attention.key_norm", key)
                if learned is None:
                    query, key = rotated(query, position), rotated(key, position)
                queries.append(query)
                keys.append(key)
                values.append(value.view(kv_heads, -1)[head // shared])
            for position in range(length):
                scores = torch.stack([queries[position] @ key for key in keys[: position + 1]]) / math.sqrt(channels)
                mixed[position][head] = scores.softmax(0) @ torch.stack(values[: position + 1])
        hidden = [x + linear(f"{block}.attention.out", y.flatten()) for x, y in zip(hidden, mixed, strict=True)]
        for position, x in enumerate(hidden):
            y = norm(f"{block}.mlp_norm", x)
            if f"{block}.mlp.gate.weight" in weights:
                gate = linear(f"{block}.mlp.gate", y)
                hidden[position] = x + linear(f"{block}.mlp.down", gate * gate.sigmoid() * linear(f"{block}.mlp.up", y))
            else:
                y = linear(f"{block}.mlp.0", y)
                tanh = y * (1 + (math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)).tanh()) / 2
                erf = y * (1 + (y / math.sqrt(2)).erf()) / 2
                approximated = model.blocks[0].mlp[1].approximate == "tanh"
                hidden[position] = x + linear(f"{block}.mlp.2", tanh if approximated else erf)
    output = weights.get("head.weight", weights["embedding.weight"])
    return torch.stack([output @ norm("norm", x) for x in hidden])


@OPTIONS
@torch.no_grad()
def test_logits_are_those_of_a_plain_computation(options: dict[str, Any]) -> None:
    model, rows = small(**options), some_tokens(2, 9)
    expected = torch.stack([plain_logits(model, row, options.get("kv_heads", 4)) for row in rows])
    torch.testing.assert_close(model(rows), expected, rtol=1e-6, atol=1e-6)


def test_the_defaults_have_these_parameters_and_initial_weights() -> None:
    linear = {
        f"{name}.{kind}" for name in ("attention.qkv", "attention.out", "mlp.0", "mlp.2") for kind in ("weight", "bias")
    }
    norms = {f"{name}.{kind}" for name in ("attention_norm", "mlp_norm") for kind in ("weight", "bias")}
    blocks = {f"blocks.{number}.{name}" for number in range(2) for name in linear | norms}
    torch.manual_seed(0)
    model = GPT(31, 32, 2, 4, 16)
    assert set(model.state_dict()) == blocks | {"embedding.weight", "norm.weight", "norm.bias"}
    # Drawn in the same order as well.
    assert model.embedding.weight[0, 0].item() == pytest.approx(-0.025890997, rel=1e-4)
    assert model.blocks[1].mlp[2].weight[-1, -1].item() == pytest.approx(0.0074331411, rel=1e-4)


def test_initial_weights_are_those_of_gpt2() -> None:
    torch.manual_seed(0)
    model = GPT(1000, 128, 8, 4, 64, **GPT2, tied=False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
            expected = 0.02 / math.sqrt(16) if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("norm.weight")))), name


def test_dropout_changes_the_training_only() -> None:
    model, rows = small(**NANOGPT), some_tokens(2, 9)
    dropping = small(**NANOGPT, dropout=0.5)
    assert torch.equal(model(rows), dropping(rows))
    dropping.train()
    assert not torch.equal(dropping(rows), dropping(rows))


def test_a_padded_vocabulary_changes_nothing() -> None:
    for options in (GPT2, MODERN):
        model, padded = small(**options), small(**options, pad_vocabulary_to=64)
        assert padded.embedding.weight.shape == (64, 32)
        weights = {
            name: F.pad(tensor, (0, 0, 0, 33)) if name in ("embedding.weight", "head.weight") else tensor
            for name, tensor in model.state_dict().items()
        }
        padded.load_state_dict(weights)
        torch.testing.assert_close(padded(some_tokens(2, 9)), model(some_tokens(2, 9)))


@OPTIONS
def test_a_gpt_does_not_see_what_comes_later(options: dict[str, Any]) -> None:
    model, tokens = small(**options), some_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 8:] = 0
    torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8])
    assert not torch.equal(model(tokens)[:, 8:], model(changed)[:, 8:])


def test_rotary_attention_depends_on_distances_only() -> None:
    model = GPT(width=16, depth=1, heads=2, context=64)
    rotary = model.blocks[0].attention.rotary
    torch.manual_seed(0)
    query, key = torch.randn(8).expand(64, 8), torch.randn(8).expand(64, 8)
    scores = rotary(query) @ rotary(key).T
    for distance in (0, 3, 40):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


# -- documents

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 10, [7] * 12 + [8] * 3 + [9]])


@OPTIONS
def test_documents_of_a_row_have_the_logits_and_gradients_of_separate_rows(options: dict[str, Any]) -> None:
    model, rows = small(**options), some_tokens(2, 16)
    weight = torch.randn(2, 16, 31, dtype=torch.float64)
    together = model(rows, DOCUMENTS)
    (together * weight).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    for row, documents in enumerate(DOCUMENTS):
        for document in documents.unique():
            mine = documents == document
            alone = model(rows[row, mine].unsqueeze(0))[0]
            torch.testing.assert_close(together[row, mine], alone, rtol=1e-12, atol=1e-13)
            (alone * weight[row, mine]).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-11, atol=1e-12)


def test_documents_work_with_activation_checkpointing() -> None:
    gradients = []
    for patterns in ([], ["blocks.*"]):
        model = small(**MODERN).train()
        checkpoint_activations(model, patterns)
        model(some_tokens(2, 16), DOCUMENTS).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.slow  # imports the compiler
@pytest.mark.parametrize("blocks", [False, True], ids=["dense", "flex"])
@torch.no_grad()  # FlexAttention has no backward on a CPU
def test_a_model_with_documents_is_one_graph(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = small(torch.float32, **MODERN), some_tokens(2, 16)
    expected = model(rows, DOCUMENTS)
    monkeypatch.setattr(gpt, "document_mask", lambda documents, **_: document_mask(documents, blocks=blocks))
    graph = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(rows, DOCUMENTS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # imports the compiler
def test_the_mask_of_flex_attention_allows_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = document_mask(DOCUMENTS, blocks=False)
    monkeypatch.setattr(gpt, "compiled", lambda function: function)
    blocks = document_mask(DOCUMENTS, blocks=True)
    assert isinstance(blocks, BlockMask)
    row, query, key = (index.flatten() for index in torch.meshgrid(*map(torch.arange, (2, 16, 16)), indexing="ij"))
    allowed = blocks.mask_mod(row, torch.zeros_like(row), query, key)
    assert torch.equal(allowed.view(2, 1, 16, 16), dense)


# -- generation


@OPTIONS
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 5), (0.7, None), (0.0, None)])
def test_generation_with_a_cache_equals_that_without(
    options: dict[str, Any], temperature: float, top_k: int | None
) -> None:
    model, prompts = small(**options), some_tokens(3, 4)
    arguments: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": 3}
    # Beyond the context of 16, too.
    texts = [model.generate(prompts, 24, cache=cache, **arguments) for cache in (True, False)]
    assert texts[0].shape == (3, 28)
    assert torch.equal(*texts)
    # Each token costs a forward of one token, as long as the text is within the context.
    lengths: list[int] = []
    model.embedding.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    model.generate(prompts, 15, **arguments)
    assert lengths == [4] + [1] * 12 + [16] * 2


def test_generated_tokens_follow_the_prompt_and_depend_on_the_seed_alone() -> None:
    model = small()
    prompt = torch.tensor([[1, 2, 3]])
    state = torch.get_rng_state()
    text = model.generate(prompt, 20)
    assert text.shape == (1, 23)
    assert torch.equal(text[:, :3], prompt)
    assert torch.equal(text, model.generate(prompt, 20))
    assert not torch.equal(text, model.generate(prompt, 20, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    for greedy in ({"top_k": 1}, {"temperature": 0.0}):
        assert model.generate(prompt, 1, **greedy)[0, -1] == model(prompt)[0, -1].argmax()


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = torch.tensor([1.0, 3.0, -2.0, 2.0, 2.5])
    drawn = Sampler(temperature=2.0, top_k=3, seed=0, device=torch.device("cpu"))(logits.expand(20_000, 5))
    expected = (logits[[1, 3, 4]] / 2).softmax(0).tolist()
    for token, probability in zip((1, 3, 4), expected, strict=True):
        assert (drawn == token).double().mean().item() == pytest.approx(probability, abs=0.02)
    assert drawn.shape == (20_000, 1)
    assert drawn.unique().tolist() == [1, 3, 4]


def test_a_very_low_temperature_takes_the_most_probable_token() -> None:
    logits = torch.tensor([[1.0, 9.0, 8.0]])
    assert Sampler(1e-38, None, 0, torch.device("cpu"))(logits).tolist() == [[1]]
    assert Sampler(1.0, 1, 0, torch.device("cpu"))(logits).tolist() == [[1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value: float, temperature: float) -> None:
    with refused(ValueError, "logits", "not finite", "bf16 or fp32"):
        Sampler(temperature, 40, 0, torch.device("cpu"))(torch.tensor([[1.0, value]]))


def test_generation_ends_where_every_row_has_ended() -> None:
    model, prompt = small(), some_tokens(1, 3)
    text = model.generate(prompt, 12)[0].tolist()
    end = text[6]
    assert model.generate(prompt, 12, end=end)[0].tolist() == text[: text.index(end, 3) + 1]
    assert len(model.generate(some_tokens(2, 3), 12, end=31)[0]) == 15
    # An end in the prompt ends nothing.
    both = torch.cat([torch.tensor([[end]]), prompt], dim=1)
    text = model.generate(both, 3)[0].tolist()
    length = text.index(end, 4) + 1 if end in text[4:] else 7
    assert length > 5
    assert model.generate(both, 3, end=end)[0].tolist() == text[:length]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"width": 15, "heads": 2}, ["width 15 and 2 heads"]),
        ({"kv_heads": 3}, ["kv_heads 3 and 4 heads", "divides"]),
        ({"positions": "sinus"}, ["positions 'sinus'", "rotary, learned"]),
        ({"mlp": "relu"}, ["mlp 'relu'", "gelu, gelu_tanh, swiglu"]),
        ({"norm": "batch"}, ["norm 'batch'", "layer, rms"]),
        ({"dropout": 1.0}, ["dropout 1.0", "[0, 1)"]),
        ({"pad_vocabulary_to": 0}, ["pad_vocabulary_to 0", "from 1 on"]),
    ],
)
def test_impossible_options_are_refused_with_their_values(options: dict[str, Any], names: list[str]) -> None:
    with refused(ValueError, *names):
        GPT(**options)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (
            lambda model: model(torch.zeros(1, 17, dtype=torch.long)),
            ["rows of 17 tokens", "context is 16", "model.context"],
        ),
        (lambda model: model.generate(some_tokens(1, 17), 1), ["prompt of 17 tokens", "16", "Shorten the prompt"]),
        (lambda model: model.generate(some_tokens(1, 0), 1), ["prompt of 0 tokens", "1 to 16"]),
        (lambda model: model.generate(some_tokens(1, 3), 1, temperature=-1.0), ["temperature", "-1.0", "0.8"]),
        (lambda model: model.generate(some_tokens(1, 3), 1, top_k=0), ["top_k", "0", "40"]),
    ],
)
def test_impossible_inputs_are_refused_with_their_values(call: Any, names: list[str]) -> None:
    with refused(ValueError, *names):
        call(small())
