"""A model's own autocast regions keep torch's meaning under the policy, and an fp32 run names the modules that open them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dtrain.precision import Precision
from dtrain.precision.autocast_check import AutocastCheck
from tests.whole_runs import train_on

START = "precision: this run computes in fp32, but"
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


class Recorder(nn.Linear):
    """A layer that remembers the dtype it computed in."""

    seen: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen = y.dtype
        return y


class Regions(nn.Module):
    """Layers inside regions of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.nested, self.inner, self.off, self.decorated, self.after = (Recorder(3, 3) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.nested(x)
            with torch.autocast("cpu", dtype=torch.float16):
                x = self.inner(x)
            with torch.autocast("cpu", enabled=False):
                x = self.off(x.float())
        return self.after(self.in_decorated(x).float())

    @torch.autocast("cpu", dtype=torch.float16)
    def in_decorated(self, x: Tensor) -> Tensor:
        return self.decorated(x)

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: layer.seen for name, layer in self.named_children() if isinstance(layer, Recorder)}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nested_decorated_and_disabled_regions_keep_their_meaning(precision: str) -> None:
    model, policy = Regions(), Precision(precision)
    expected = dict.fromkeys(("plain", "after"), policy.compute_dtype)
    expected |= {"nested": torch.bfloat16, "off": torch.float32}
    expected |= dict.fromkeys(("inner", "decorated"), torch.float16)
    x = torch.ones(2, 3)

    with policy.autocast("cpu"):
        inside = model(x)
    assert model.dtypes() == expected

    as_decorator = policy.autocast("cpu")(model)
    assert as_decorator(x).equal(inside)
    assert model.dtypes() == expected

    lowered = policy.compute_dtype != torch.float32
    with torch.autocast("cpu", policy.compute_dtype) if lowered else nullcontext():
        assert model(x).equal(inside)


def test_the_policy_means_itself_inside_a_region_and_gives_the_region_back() -> None:
    # A layer each: torch keeps a weight that it has cast until the outermost region ends, whatever dtype comes next.
    layers = [Recorder(3, 3) for _ in range(len(PRECISIONS) + 1)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer, precision in zip(layers, PRECISIONS, strict=False):
            with Precision(precision).autocast("cpu"):
                layer(torch.ones(1, 3))
        layers[-1](torch.ones(1, 3))
    assert [layer.seen for layer in layers] == [*(Precision(p).compute_dtype for p in PRECISIONS), torch.bfloat16]


class Block(nn.Module):
    def __init__(self, forward: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.weight = nn.Parameter(torch.eye(3))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self._forward)(x)

    def plain(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layers(x)

    def around_children(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).float()

    def around_functions(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return (x @ self.weight).float()

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def decorated(self, x: Tensor) -> Tensor:
        return self.layers(x)


def seen(model: nn.Module) -> str:
    with AutocastCheck(model, "cpu") as lowered:
        model(torch.ones(2, 3)).sum()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return "\n".join(lowered.warnings())


@pytest.mark.parametrize(
    ("forward", "dtype"), [("around_children", "bf16"), ("around_functions", "fp16"), ("decorated", "bf16")]
)
def test_the_module_that_opens_a_region_is_named_not_those_inside(forward: str, dtype: str) -> None:
    model = nn.Sequential(Block("plain"), Block(forward))
    assert f"fp32, but 1 (Block) in {dtype}, by autocast" in seen(model)


def test_a_region_is_found_behind_compile() -> None:
    model = torch.compile(nn.Sequential(Block("plain"), Block("decorated")), backend="eager")
    assert isinstance(model, nn.Module)
    assert "but 1 (Block) in bf16, by autocast" in seen(model)


def test_16_bit_weights_and_casts_are_named() -> None:
    halved = nn.Sequential(nn.Embedding(4, 3).bfloat16(), nn.Linear(3, 3).bfloat16())
    with AutocastCheck(halved, "cpu") as lowered:
        halved(torch.tensor([1]))
    assert lowered.warnings() == [f"{START} 0 (Embedding) in bf16, by autocast, casts or weights of their own"]
    assert seen(Casting()) == f"{START} the model (Casting) in fp16, by autocast, casts or weights of their own"


def test_a_model_without_regions_leaves_nothing_to_say() -> None:
    assert seen(nn.Sequential(Block("plain"), Block("plain"))) == ""


class Casting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half() * 2


class RegionCNN(nn.Module):
    """For a whole run."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, classes)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.mean(dim=(2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "lines"), [("fp32", 1), ("bf16", 0)])
def test_an_fp32_run_names_once_the_module_that_lowers_its_precision(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], precision: str, lines: int
) -> None:
    model = ("model._target_=tests.precision.test_autocast_check.RegionCNN", "model.classes=10")
    train_on(1, tmp_path, f"precision={precision}", "train.max_steps=3", *model)
    warning = "this run computes in fp32, but the model (RegionCNN) in bf16, by autocast"
    assert capfd.readouterr().out.count(warning) == lines
    assert (tmp_path / "logs" / "rank-00000.log").read_text().count(warning) == lines
