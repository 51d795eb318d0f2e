"""The configs of docs/recipes.md: each composes, and takes a step where the packages that it names are installed."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dtrain import command_line
from dtrain.config.compose import Composed
from dtrain.config.instantiate import by_target
from dtrain.config.schema import Config
from dtrain.data import Batch
from dtrain.models import Logits
from dtrain.training.build import build_model
from dtrain.training.setup.optimizer import build_optimizer

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
RECIPES = re.findall(r"```yaml\n(# @package.*?)```", PAGE, re.DOTALL)
(DECLARATION,) = re.findall(r"```python\n(import torch\n.*?)```", PAGE, re.DOTALL)
CPU = torch.device("cpu")


def composed(recipe: str, folder: Path) -> Config:
    """The config of a block of the page, as a file of a user's own folder."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "recipe.yaml").write_text(recipe)
    found: list[Composed] = []
    command_line.run(found.append, ["--config-dir", str(folder), "experiment=recipe"])
    return found[0].cfg


def require(package: str) -> None:
    """Skips the test without the package; declares the operators of torchvision as the page says, if it has none."""
    if package in ("timm", "torchvision") and find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
            exec(DECLARATION.partition("from timm")[0], {})
    pytest.importorskip(package, reason=f"pip install {package}: the recipe needs it")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.splitlines()[1] for recipe in RECIPES])
def test_every_recipe_of_the_page_composes_and_takes_a_step_where_its_packages_are(recipe: str, tmp_path: Path) -> None:
    cfg = composed(recipe, tmp_path)
    for package in {target.partition(".")[0] for target in re.findall(r"_target_: ([\w.]+)", recipe)}:
        require(package)
    torch.manual_seed(0)
    model = build_model(cfg.model, CPU)
    optimizer = build_optimizer(cfg.optimizer, model)
    task = by_target("task", cfg.task)
    if cfg.data.augment is not None:
        by_target("data.augment", cfg.data.augment)
    if "tokens" in str(cfg.data.fields):
        columns = {"tokens": torch.randint(256, (4, 257), dtype=torch.int32)}
    else:
        columns = {"image": torch.randn(4, 3, 32, 32), "label": torch.arange(4)}
    batch = Batch(columns, ["a", "b", "c", "d"], torch.ones(4, dtype=torch.bool), [])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    output = task(model, batch)
    output.loss_sum.backward()
    optimizer.step()
    assert torch.isfinite(output.loss_sum)
    assert any(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


class SaysALot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=None, logits=self.linear(inputs))


def test_logits_are_taken_out_of_what_a_transformer_returns() -> None:
    model, inputs = SaysALot(), torch.randn(5, 3)
    assert torch.equal(Logits(model)(inputs), model.linear(inputs))
