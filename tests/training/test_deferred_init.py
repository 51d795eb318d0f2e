"""A deferred construction gives the tensors of an ordinary one, bit for bit, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dtrain.config.schema import ParallelConfig
from dtrain.distributed.sharding import shard_model
from dtrain.models import GPT, ResNet, ViT
from dtrain.training.deferred_init import DeferredModel, NotDeferrable
from tests.ranks import run_ranks
from tests.toys import CPU, Net, world


def initialised(change: Callable[[nn.Linear], object]) -> Callable[[], nn.Module]:
    """Builds a layer and initialises it by ``change``."""

    def build() -> nn.Module:
        layer = nn.Linear(4, 5)
        change(layer)
        return layer

    return build


def with_generators(layer: nn.Linear) -> None:
    generator = torch.Generator().manual_seed(3)
    nn.init.normal_(layer.bias, generator=generator)
    generator.manual_seed(4)
    nn.init.normal_(layer.weight, generator=generator)


def seeded_twice(layer: nn.Linear) -> None:
    torch.manual_seed(7)  # the seed that the generator has already
    nn.init.uniform_(layer.weight)
    torch.manual_seed(7)
    nn.init.uniform_(layer.bias)


def from_numpy(layer: nn.Linear) -> None:
    layer.extra = nn.Parameter(torch.from_numpy(np.ones((2, 3), dtype=np.float32)).mul_(3))
    layer.weight.data.copy_(torch.from_numpy(np.arange(20, dtype=np.float32).reshape(5, 4)))
    layer.other = nn.Parameter(torch.from_numpy(np.ones((2, 3), dtype=np.float32)))
    nn.init.normal_(layer.other)  # overwrites the array


BUILT: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(width=8, depth=2, heads=2),
    "vit": lambda: ViT(size=[8, 2, 2], image_size=32),
    "resnet": lambda: ResNet(18, width=4),
    "torch": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2),  # which copies its layers
    "own seed": Net,
    "seeded twice": initialised(seeded_twice),
    "own generator": initialised(with_generators),
    "truncated": initialised(lambda layer: nn.init.trunc_normal_(layer.weight, std=0.02)),
    "orthogonal": initialised(lambda layer: nn.init.orthogonal_(layer.weight)),
    "through data": initialised(lambda layer: layer.weight.data[1:3].mul_(2)),
    "tied": initialised(lambda layer: setattr(layer, "again", layer.weight)),
    "frozen": initialised(lambda layer: layer.weight.requires_grad_(False)),
    "buffers": initialised(lambda layer: layer.register_buffer("table", torch.tensor([1.0, 2.0]).cumsum(0))),
    "weight norm": initialised(torch.nn.utils.parametrizations.weight_norm),
    "numpy": initialised(from_numpy),
}


def contents(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", BUILT)
def test_a_deferred_model_has_the_tensors_of_an_ordinary_one(name: str) -> None:
    torch.manual_seed(7)
    want = BUILT[name]()
    state = torch.get_rng_state()
    torch.manual_seed(7)
    deferred = DeferredModel(BUILT[name])
    assert all(tensor.is_meta for tensor in contents(deferred.model).values())
    deferred.fill(deferred.model, CPU, CPU)
    got = contents(deferred.model)
    assert got.keys() == contents(want).keys()
    for name, tensor in contents(want).items():
        assert type(got[name]) is type(tensor)
        assert got[name].requires_grad == tensor.requires_grad
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
    assert len(set(map(id, got.values()))) == len(set(map(id, contents(want).values())))  # tied as before
    assert torch.equal(torch.get_rng_state(), state)


def read_a_value(layer: nn.Linear) -> None:
    layer.bias.data.fill_(float(layer.weight.sum()))


def keep_a_generator_state(layer: nn.Linear) -> None:
    with torch.random.fork_rng(devices=[]):
        nn.init.normal_(layer.weight)


def keep_a_tensor(layer: nn.Linear) -> None:
    layer.table = torch.arange(3)


def assign_data(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn(5, 4)


def assign_a_view(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data[:2]


def change_assigned_data(layer: nn.Linear) -> None:
    layer.bias.data = torch.from_numpy(np.ones(5, dtype=np.float32))
    layer.bias.data.mul_(2)


def draw_into_assigned_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.clone()
    nn.init.trunc_normal_(layer.weight)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(read_a_value, "_local_scalar_dense"), (keep_a_generator_state, "generator"), (keep_a_tensor, "attribute table")]
    + [(change, ".data") for change in (assign_data, assign_a_view, change_assigned_data, draw_into_assigned_data)],
)
def test_what_cannot_be_recorded_is_named(change: Callable[[nn.Linear], object], reason: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(NotDeferrable, match=reason):
        DeferredModel(initialised(change))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore")
def test_weights_from_a_file_are_not_lost(tmp_path: Path) -> None:
    torch.save(nn.Linear(4, 5).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(NotDeferrable, match="file"):
        DeferredModel(initialised(lambda layer: layer.load_state_dict(torch.load(tmp_path / "weights.pt"))))


def test_ranks_fill_their_parts_with_the_numbers_of_the_whole_model() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(GPT(width=8, depth=2, heads=2), nn.Linear(8, 257))
        model[1].weight = model[0].embedding.weight
        return model

    torch.manual_seed(7)
    want = dict(build().named_parameters())

    def on_rank(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(7)
        deferred = DeferredModel(build)
        shard_model(deferred.model, ParallelConfig(shard="full"), world(rank, 3))
        deferred.fill(deferred.model, CPU, CPU)
        assert deferred.model[1].weight is deferred.model[0].embedding.weight  # type: ignore[index]
        return {name: parameter.full_tensor() for name, parameter in deferred.model.named_parameters()}  # type: ignore[attr-defined]

    for got in run_ranks(3, on_rank):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


@pytest.mark.slow
def test_no_rank_holds_the_whole_model() -> None:
    layers, width = 24, 1024
    nbytes = layers * width * width * 4

    class Twice(nn.Sequential):
        """Initialises each layer twice, as many models do."""

        def __init__(self, width: int) -> None:
            super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
            self.apply(lambda module: nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None)

    def build(rank: int, width: int) -> nn.Module:
        deferred = DeferredModel(lambda: Twice(width))
        shard_model(deferred.model, ParallelConfig(shard="full"), world(rank, 2))
        deferred.fill(deferred.model, CPU, CPU)
        return deferred.model

    def memory(line: str) -> int:
        status = dict(text.split(":\t") for text in Path("/proc/self/status").read_text().splitlines())
        return int(status[line].split()[0]) * 1024

    def on_rank(rank: int) -> int:
        build(rank, 8)  # loads code, which is memory too
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        build(rank, width)
        return memory("VmHWM") - before

    for peak in run_ranks(2, on_rank):
        assert peak < nbytes  # a half, some layers, and what the allocator keeps
