"""However a model is run, it computes the same and its state has the same names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.config.schema import ParallelConfig, TrainConfig
from dtrain.models import GPT, ResNet9
from dtrain.precision import Precision
from dtrain.training import build
from dtrain.training.execution import use_channels_last
from tests.ranks import RanksFailed
from tests.runs import metrics, train_on
from tests.training.toys import world


class Blocks(nn.Module):
    """Two blocks with dropout that count how often they run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(_Counting() for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return nn.functional.dropout(self.linear(x).tanh(), 0.5, self.training)


def equipped(model: nn.Module, **train: Any) -> nn.Module:
    return build.equip(model, TrainConfig(**train), ParallelConfig(), world())


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_recomputed_activations_give_the_same_gradients_and_names() -> None:
    plain, model = Blocks(), equipped(Blocks(), checkpoint_activations=["blocks.*"])
    x = torch.randn(3, 4)
    for ours, theirs in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert torch.equal(ours, theirs)
    assert [block.runs for block in model.blocks] == [2, 2]
    assert [block.runs for block in plain.blocks] == [1, 1]
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        model(x)
    assert [block.runs for block in model.blocks] == [3, 3]


def test_a_copy_recomputes_its_own_activations() -> None:
    model = equipped(Blocks(), checkpoint_activations=["blocks.*"])
    average = copy.deepcopy(model)
    average(torch.randn(3, 4))
    assert [block.runs for block in model.blocks] == [0, 0]


def test_modules_kept_in_fp32_stay_so_when_they_recompute() -> None:
    model = equipped(Blocks(), checkpoint_activations=["blocks.*"])
    precision = Precision("bf16", ("blocks.1",))
    precision.wrap_keep_fp32(model)
    with precision.autocast("cpu"):
        assert model.blocks[0](torch.randn(3, 4)).dtype == torch.bfloat16
        result = model(torch.randn(3, 4))
    assert result.dtype == torch.float32
    result.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_compiling_changes_no_name_and_happens_in_place() -> None:
    model = GPT(width=8, depth=2, heads=2, context=8)
    names = list(model.state_dict())
    assert equipped(model, compile=["blocks.*"]) is model
    assert list(model.state_dict()) == names
    assert [block._compiled_call_impl is not None for block in model.blocks] == [True, True]
    assert model._compiled_call_impl is None
    assert equipped(model, compile=True)._compiled_call_impl is not None
    assert equipped(Blocks(), compile=False)._compiled_call_impl is None


def test_convolutions_of_any_number_of_dimensions_get_their_channels_last_layout() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Conv2d(2, 3, 3), nn.Conv3d(2, 3, 3))
    weights = copy.deepcopy(model.state_dict())
    use_channels_last(model)
    assert model[0].weight.is_contiguous()
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[2].weight.is_contiguous(memory_format=torch.channels_last_3d)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    model[2](torch.randn(2, 2, 5, 5, 5)).sum().backward()


class Flattening(nn.Module):
    """Looks at its numbers in the order in which they lie in memory, which takes images and weights as torch lays them."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 2, 3)
        self.head = nn.Linear(72, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.convolution(images).view(len(images), -1))


def test_a_model_that_needs_the_usual_layout_trains_where_channels_last_is_off(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = ("model._target_=tests.training.test_execution.Flattening", "train.max_steps=2", "data.num_workers=0")
    with pytest.raises(RanksFailed):
        train_on(1, tmp_path / "last", *run)
    assert "view size is not compatible" in capfd.readouterr().err
    train_on(1, tmp_path / "first", *run, "train.channels_last=false")
    assert len(metrics(tmp_path / "first")) == 2


@pytest.mark.slow
def test_a_compiled_model_computes_what_it_did() -> None:
    torch.manual_seed(0)
    plain = GPT(width=16, depth=2, heads=2, context=8)
    model = equipped(copy.deepcopy(plain), compile=["blocks.*"])
    tokens = torch.randint(257, (2, 8))
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(gradients(model, tokens), gradients(plain, tokens), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_batchnorm_of_all_ranks_needs_gpus_and_one_rank_needs_none() -> None:
    parallel = ParallelConfig(sync_batchnorm=True)
    model = ResNet9(width=4)
    assert build.equip(model, TrainConfig(), parallel, world()) is model
    with pytest.raises(ConfigError, match=r"parallel.sync_batchnorm=true, but .* GPUs only"):
        build.equip(model, TrainConfig(), parallel, world(0, 2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"checkpoint_activations": ["block.*"]},
            r"train.checkpoint_activations: 'block.\*' matches no module .*blocks",
        ),
        ({"compile": ["blocks.7"]}, r"train.compile: 'blocks.7' matches no module"),
        ({"compile": "yes"}, r"train.compile: got 'yes', want true, false, or a list"),
    ],
)
def test_patterns_that_match_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        equipped(Blocks(), **options)
