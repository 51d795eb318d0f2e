"""A sharded model has the tensors of an ordinary construction, bit for bit, and only rank 0 holds all of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.sharding import shard_model
from dtrain.errors import ConfigError
from dtrain.models import GPT, ResNet, ViT
from dtrain.training.setup.sharded_init import build_on_meta, fill
from tests.ranks import run_ranks
from tests.refusals import refused
from tests.toys import CPU, world


class Table:
    def __init__(self) -> None:
        self.angles = [torch.rand(3)]


class Everything(nn.Module):
    """Tied weights, an odd first dimension, a frozen weight, statistics, and buffers of several kinds, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 4)
        self.head = nn.Linear(4, 257)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(1)
        self.frozen = nn.Parameter(torch.from_numpy(np.ones((3, 2), np.float32)).mul_(3), requires_grad=False)
        self.register_buffer("drawn", torch.rand(5), persistent=False)
        self.register_buffer("again", self.drawn, persistent=False)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril().expand(2, 3, 3))
        self.register_buffer("phase", torch.polar(torch.ones(2), torch.rand(2)), persistent=False)


class ReadsValues(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 5)
        self.rates = [float(rate) for rate in torch.rand(4)]
        nn.init.constant_(self.bias, float(self.weight.detach().sum()))


class KeepsTensors(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 5)
        self.scales = {"first": torch.rand(2)}
        self.table = Table()


def seeded_itself() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 1)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(width=8, depth=2, heads=2),
    "vit": lambda: ViT(size=[8, 2, 2], image_size=32),
    "resnet": lambda: ResNet(18, width=4),
    "lstm": lambda: nn.LSTM(3, 4, 2),  # which keeps a list of its weights
    "everything": Everything,
    "reads values": ReadsValues,
    "keeps tensors": KeepsTensors,
    "own seed": seeded_itself,
}
ON_CPU = {"reads values", "keeps tensors"}


def contents(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()


def initialised(build: Callable[[], nn.Module], rank: int, size: int, **parallel: object) -> nn.Module:
    torch.manual_seed(7)
    model, values = build_on_meta(build)
    assert all(tensor.is_meta for tensor in contents(model).values())
    assert bool(values) == (rank == 0)
    shard_model(model, ParallelConfig(**{"shard": "full", **parallel}), world(rank, size))  # type: ignore[arg-type]
    fill(model, values, CPU, CPU)
    assert not values
    return model


def require_equal(got: nn.Module, want: nn.Module) -> None:
    got_tensors, want_tensors = contents(got), contents(want)
    assert got_tensors.keys() == want_tensors.keys()
    for name, tensor in want_tensors.items():
        own = got_tensors[name]
        assert isinstance(own, nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert own.requires_grad == tensor.requires_grad
        whole = own.full_tensor() if isinstance(own, nn.Parameter) else own  # type: ignore[attr-defined]
        assert whole.dtype == tensor.dtype
        assert torch.equal(whole, tensor), name
    assert len({*map(id, got_tensors.values())}) == len({*map(id, want_tensors.values())})  # tied as before
    assert got.state_dict().keys() == want.state_dict().keys()


def test_two_ranks_have_the_tensors_of_an_ordinary_construction() -> None:
    def on_rank(rank: int) -> dict[str, list[str]]:
        built: dict[str, list[str]] = {}
        for name, build in MODELS.items():

            def noted(name: str = name, build: Callable[[], nn.Module] = build) -> nn.Module:
                built.setdefault(name, []).append(torch.empty(0).device.type)
                return build()

            want, state = seeded(build), torch.get_rng_state()
            got = initialised(noted, rank, 2)
            assert torch.equal(torch.get_rng_state(), state)
            require_equal(got, want)
            if isinstance(want, ReadsValues):
                assert got.rates == want.rates
            if isinstance(want, KeepsTensors):
                assert torch.equal(got.scales["first"], want.scales["first"])
                assert torch.equal(got.table.angles[0], want.table.angles[0])  # type: ignore[union-attr, index]
            if isinstance(want, nn.LSTM):
                assert torch.equal(got(torch.ones(1, 3))[0], want(torch.ones(1, 3))[0])
        return built

    first, second = run_ranks(2, on_rank)
    assert first == {name: ["cpu"] for name in MODELS}
    assert second == {name: ["meta", "cpu"] if name in ON_CPU else ["meta"] for name in MODELS}


@pytest.mark.slow
def test_four_ranks_in_two_groups_have_them_too() -> None:
    def on_rank(rank: int) -> None:
        for name in ("everything", "gpt"):
            require_equal(initialised(MODELS[name], rank, 4, shard="hybrid", shard_size=2), seeded(MODELS[name]))

    run_ranks(4, on_rank)


def test_numbers_from_an_unseeded_generator_are_those_of_rank_0() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 3)
        model.weight.data.copy_(torch.full((3, 2), float(dist.get_rank())))
        return model

    def on_rank(rank: int) -> Tensor:
        return initialised(build, rank, 2).weight.full_tensor().detach()  # type: ignore[operator, union-attr]

    for weight in run_ranks(2, on_rank):
        assert not weight.any()


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_models_that_cannot_be_initialised_are_refused_on_all_ranks() -> None:
    def wider() -> nn.Module:
        return nn.Linear(4, 3 + dist.get_rank())

    def fails_on_rank_0() -> nn.Module:
        if dist.get_rank() == 0:
            raise ConfigError("model: the file is missing")
        return nn.Linear(4, 3)

    def fails() -> nn.Module:
        raise ConfigError("model: no meta device" if torch.empty(0).is_meta else "model: width is wrong")

    def on_rank(rank: int) -> None:
        with refused(ConfigError, "model", "rank 1", "weight", "[4, 4]", "[3, 4]", "same"):
            build_on_meta(wider)
        with refused(ConfigError, "rank 0", "missing"):
            build_on_meta(fails_on_rank_0)
        with refused(ConfigError, "width is wrong"):
            build_on_meta(fails)
        with refused(ConfigError, "ScriptModule", "parallel=ddp"):
            initialised(lambda: torch.jit.script(nn.Linear(3, 4)), rank, 2)

    run_ranks(2, on_rank)
