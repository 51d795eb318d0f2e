"""What a sharded run refuses before it trains, and which modules become units. Training is in training/test_sharded_step.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtrain.config.schema import ParallelConfig
from dtrain.distributed import process_group
from dtrain.distributed.sharding import (
    already_sharded,
    check_accumulation,
    check_options,
    copies_of,
    is_sharded,
    matching_modules,
    own_range,
    shard_model,
    unit_names,
)
from dtrain.errors import ConfigError
from dtrain.models import GPT, ResNet, ResNet9, SmallCNN, ViT
from tests.ranks import run_ranks
from tests.refusals import refused
from tests.toys import CPU, world

FULL = ParallelConfig(shard="full")


# -- options


OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown strategy": ({"shard": "zero"}, ("parallel.shard", "zero", "hybrid")),
    "unknown dtype": ({"shard": "full", "gather_dtype": "bf16"}, ("parallel.gather_dtype", "bf16", "compute")),
    "unknown moment": ({"shard": "full", "reduce_after": "step"}, ("parallel.reduce_after", "step", "window")),
    "of DDP, buckets": ({"shard": "full", "bucket_cap_mb": 50}, ("parallel.bucket_cap_mb", "50", "shard=none")),
    "of DDP, graph": ({"shard": "full", "static_graph": True}, ("parallel.static_graph", "True", "shard=none")),
    "of DDP, search": (
        {"shard": "hybrid", "find_unused_parameters": True},
        ("parallel.find_unused_parameters", "True", "shard=none"),
    ),
    "of DDP, recovery": ({"shard": "full", "recover": True}, ("parallel.recover", "True", "shard=none")),
    "of sharding, modules": ({"shard_modules": ["blocks.*"]}, ("parallel.shard_modules", "blocks.*", "shard=full")),
    "of sharding, offload": ({"offload": True}, ("parallel.offload", "True", "shard=full")),
    "groups of full": ({"shard": "full", "shard_size": 2}, ("parallel.shard_size", "2", "shard=hybrid")),
    "groups that do not divide": ({"shard": "hybrid", "shard_size": 3}, ("parallel.shard_size", "3", "4 ranks")),
    "no group": ({"shard": "hybrid", "shard_size": 0}, ("parallel.shard_size", "0", "number of ranks")),
    "offload without GPUs": ({"shard": "full", "offload": True}, ("parallel.offload", "true", "CPUs")),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_cannot_work_are_refused(case: str) -> None:
    options, named = OPTIONS[case]
    with refused(ConfigError, *named):
        check_options(ParallelConfig(**options), 4, CPU)


def test_micro_batches_are_not_added_up_in_16_bits() -> None:
    low = replace(FULL, reduce_dtype="bf16")
    check_accumulation(low, 1)
    check_accumulation(replace(low, reduce_after="micro_batch"), 4)
    with refused(ConfigError, "parallel.reduce_dtype", "bf16", "reduce_after=micro_batch"):
        check_accumulation(low, 2)


# -- units


class Pair(nn.Module):
    """Two layers, changed by ``change``."""

    def __init__(self, change: Callable[[Pair], object] = lambda model: None) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        change(self)


MODELS: dict[str, tuple[nn.Module, int]] = {
    "gpt": (GPT(width=8, depth=3, heads=2), 3),
    "vit": (ViT(size=[8, 2, 2], image_size=32), 2),
    "resnet": (ResNet(18, width=4), 8),
    "resnet9": (ResNet9(width=4), 6),
    "small cnn": (SmallCNN(width=4), 0),
    "torch": (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False), 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_repeated_blocks_of_a_model_are_units_by_default(name: str) -> None:
    model, blocks = MODELS[name]
    units = unit_names(model, FULL)
    assert len(units) == blocks + 1
    assert units[-1] == ""
    assert len(set(units)) == len(units)


def test_a_star_in_a_pattern_does_not_match_a_dot() -> None:
    model = GPT(width=8, depth=2, heads=2)
    assert matching_modules(model, "key", ["blocks.*"]) == ["blocks.0", "blocks.1"]
    assert unit_names(model, replace(FULL, shard_modules=["blocks.*.mlp", "norm"])) == [
        *("blocks.0.mlp", "blocks.1.mlp", "norm", "")
    ]
    assert unit_names(model, replace(FULL, shard_modules=[])) == [""]


def tie(model: Pair) -> None:
    model.other.weight = model.one.weight


def share(model: Pair) -> None:
    for part in (model.one, model.other):
        part.inner = model.layers[0]


PAIRS: dict[str, tuple[Callable[[Pair], object], list[str], tuple[str, ...]]] = {
    "no match": (lambda model: None, ["block.*"], ("parallel.shard_modules", "block.*", "one, other")),
    "container": (lambda model: None, ["layers"], ("parallel.shard_modules", "layers", "layers.*")),
    "tied": (tie, ["one", "other"], ("one.weight", "other.weight", "Leave one and other out")),
    "shared module": (
        share,
        ["one", "other"],
        ("one.inner.weight", "other.inner.weight", "Leave one and other out"),
    ),
    "tied to the rest": (tie, ["one"], ("one.weight", "other.weight", "Leave one out")),
    "scalar": (lambda m: setattr(m, "scale", nn.Parameter(torch.ones(()))), [], ("parallel.shard", "scale", "[1]")),
    "complex": (
        lambda m: setattr(m, "phase", nn.Parameter(torch.ones(2, dtype=torch.complex64))),
        [],
        ("parallel.shard", "phase", "parallel=ddp"),
    ),
    "sparse": (lambda m: setattr(m, "table", nn.Embedding(2, 2, sparse=True)), [], ("table", "sparse", "parallel=ddp")),
    "dtypes": (lambda m: m.one.double(), [], ("one.weight", "float64", "other.weight")),
    "script": (
        lambda m: setattr(m, "other", torch.jit.script(nn.Linear(2, 2))),
        ["other"],
        ("parallel.shard_modules", "other", "torch.jit"),
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_modules_and_parameters_that_cannot_be_sharded_are_refused_by_name(case: str) -> None:
    change, patterns, named = PAIRS[case]
    with refused(ConfigError, *named):
        unit_names(Pair(change), replace(FULL, shard_modules=patterns))


def test_tied_weights_in_one_unit_and_a_unit_of_another_dtype_are_accepted() -> None:
    assert unit_names(Pair(tie), replace(FULL, shard_modules=["layers.*"])) == ["layers.0", ""]
    assert unit_names(Pair(lambda model: model.one.double()), replace(FULL, shard_modules=["one"])) == ["one", ""]
    twice = Pair(lambda model: model.layers.append(model.layers[0]))
    assert unit_names(twice, replace(FULL, shard_modules=["layers.*"])) == ["layers.0", ""]


# -- ranks


def test_ranks_hold_parts_and_a_model_is_not_sharded_twice() -> None:
    def on_rank(rank: int) -> tuple[int, tuple[slice, ...], list[int]]:
        model = Pair()
        shard_model(model, FULL, world(rank, 2))
        assert is_sharded(model)
        with refused(ConfigError, "parallel.shard=full", "FSDPPair", "sharded already"):
            unit_names(model, FULL)
        mesh = init_device_mesh("cpu", (2,))
        by_others = Pair()
        fully_shard(by_others.one, mesh=mesh)
        assert "module 'one'" in str(already_sharded(by_others))
        tensor_parallel = Pair()
        tensor_parallel.one.weight = nn.Parameter(DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)]))
        assert "one.weight" in str(already_sharded(tensor_parallel))
        weight = model.one.weight
        replicated = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        return copies_of(weight, 2), own_range(weight), [copies_of(replicated, 2), copies_of(torch.ones(2), 2)]

    first, second = run_ranks(2, on_rank)
    assert first == (1, (slice(0, 1), slice(0, 2)), [2, 2])
    assert second == (1, (slice(1, 2), slice(0, 2)), [2, 2])


@pytest.mark.slow
def test_a_hybrid_mesh_has_copies_and_groups_that_divide_the_ranks() -> None:
    def on_rank(rank: int) -> list[int]:
        model = nn.Linear(5, 5)
        shard_model(model, replace(FULL, shard="hybrid", shard_size=2), world(rank, 4))
        with refused(ConfigError, "parallel.shard_size", "3 ranks", "4 ranks"):
            shard_model(nn.Linear(5, 5), replace(FULL, shard="hybrid"), replace(world(rank, 4), local_size=3))
        uneven = replace(world(rank, 4), local_size=1 if rank == 3 else 2)
        with refused(ConfigError, "parallel.shard_size", "1 or 2 ranks", "4 ranks"):
            shard_model(nn.Linear(5, 5), replace(FULL, shard="hybrid"), uneven)
        return [copies_of(model.weight, 4), own_range(model.weight)[0].start]

    assert run_ranks(4, on_rank) == [[2, 0], [2, 3], [2, 0], [2, 3]]


def test_the_groups_of_a_hybrid_mesh_are_kept_until_the_process_leaves_all_groups() -> None:
    def on_rank(rank: int) -> list[bool]:
        model = nn.Linear(5, 5)
        shard_model(model, replace(FULL, shard="hybrid", shard_size=2), world(rank, 2))
        groups = model.weight.device_mesh.get_all_groups()  # type: ignore[operator, union-attr]
        return [any(group is kept for kept in process_group._groups) for group in groups if group.size() > 1]

    assert run_ranks(2, on_rank) == [[True]] * 2
