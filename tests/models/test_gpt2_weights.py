"""The weights of Hugging Face's GPT-2, loaded as docs/models.md says, give the logits of transformers' own model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from dtrain.config.schema import RunConfig, WarmStartConfig
from dtrain.errors import ConfigError
from dtrain.models import GPT
from dtrain.training.checkpoint.resume import starting_weights
from tests.refusals import refused

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
(RECIPE,) = re.findall(r"```yaml\n(# @package _global_\n# gpt2:.*?)```", PAGE, re.DOTALL)
WARM_START = yaml.safe_load(RECIPE)["run"]["warm_start"]

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_logits_are_those_of_transformers(prefix: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    weights = {
        name.removeprefix("transformer."): tensor.clone()
        for name, tensor in theirs.state_dict().items()
        if name != "lm_head.weight"
    }
    # The file of the hub has the causal masks as well.
    weights |= {f"h.{number}.attn.bias": torch.ones(1, 1, 16, 16) for number in range(2)}
    save_file({f"{prefix}{name}": tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    warm = WarmStartConfig(
        str(tmp_path / "model.safetensors"),
        {f"{prefix}{old}": new for old, new in WARM_START["rename"].items()},
        [f"{prefix}{pattern}" for pattern in WARM_START["skip"]],
        WARM_START["transpose"],
    )
    ours = GPT(31, 32, 2, 4, 16, positions="learned", mlp="gelu_tanh", dropout=0.1).double().eval()
    start = starting_weights(RunConfig(warm_start=warm), ours)
    assert start is not None
    start.load(ours)
    tokens = torch.randint(31, (3, 16))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)


def test_renaming_and_transposing_what_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"h.0.weight": torch.zeros(2, 3), "h.0.bias": torch.zeros(3)}, path)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    load = {"h.*.": "*."}
    start = starting_weights(RunConfig(warm_start=WarmStartConfig(str(path), load, [], ["*.weight"])), model)
    assert start is not None
    assert start.tensors["0.weight"].shape == (3, 2)
    for warm, names in (
        (WarmStartConfig(str(path), {"h.": "*."}), ["run.warm_start.rename", "h.", "as many *"]),
        (WarmStartConfig(str(path), load, [], ["*.kernel"]), ["run.warm_start.transpose", "'*.kernel'", "no name"]),
        (WarmStartConfig(str(path), load, [], ["*.bias"]), ["run.warm_start.transpose", "'*.bias'", "0.bias"]),
        (WarmStartConfig(transpose=["*"]), ["run.warm_start", "run.warm_start.path"]),
    ):
        with refused(ConfigError, *names):
            starting_weights(RunConfig(warm_start=warm), model)
