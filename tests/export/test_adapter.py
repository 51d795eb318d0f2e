"""Adapters of peft in an export: found, merged, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.config.instantiate import by_target
from dtrain.errors import ConfigError
from dtrain.export import __main__ as export
from dtrain.export.adapter import find_adapter, merge, without_adapter, write_adapter
from tests.refusals import refused
from tests.whole_runs import train_on

peft = pytest.importorskip("peft", reason="pip install peft")
CONFIG = {"_target_": "peft.LoraConfig", "r": 2, "target_modules": "all-linear", "init_lora_weights": False}


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


ADAPTED: dict[str, Any] = {
    "_target_": "peft.get_peft_model",
    "model": {"_target_": "tests.export.test_adapter.sequential"},
    "peft_config": CONFIG | {"target_modules": ["0", "2"]},
}
WRAPPED = {"_target_": "tests.export.test_adapter.Wrapped", "model": ADAPTED}


DORA = ADAPTED | {"peft_config": ADAPTED["peft_config"] | {"use_dora": True}}
IA3_CONFIG = {"_target_": "peft.IA3Config", "target_modules": ["0", "2"], "feedforward_modules": ["2"]}
IA3 = ADAPTED | {"peft_config": IA3_CONFIG | {"init_ia3_weights": False}}


@pytest.mark.parametrize("node", [ADAPTED, WRAPPED, DORA, IA3], ids=["whole", "part", "DoRA", "IA3"])
def test_a_merged_model_is_the_one_without_an_adapter_with_the_same_outputs(node: Any) -> None:
    model = by_target("model", node).eval()
    rows = torch.randn(5, 3)
    with torch.no_grad():
        expected = model(rows)
        merged = merge(model, node)
        plain = by_target("model", without_adapter(node))
        assert type(merged) is type(plain)
        assert find_adapter(merged) is None
        plain.load_state_dict(merged.state_dict())
        torch.testing.assert_close(plain(rows), expected)


def test_a_node_and_a_model_without_an_adapter_stay_as_they_are() -> None:
    node = {"_target_": "torch.nn.Linear", "list": [{"_target_": "torch.nn.ReLU"}]}
    assert without_adapter(node) == node
    model = nn.Linear(2, 2)
    assert merge(model, node) is model


def test_an_adapter_that_cannot_be_merged_names_the_remedy() -> None:
    model = by_target("model", ADAPTED)
    with refused(ConfigError, "export.adapter", "my_package.lora", "peft.get_peft_model", "export.adapter=kept"):
        merge(model, {"_target_": "my_package.lora"})


def test_a_model_without_an_adapter_has_none_to_write(tmp_path: Path) -> None:
    with refused(ConfigError, "export.adapter", "separate", "peft.get_peft_model"):
        write_adapter(sequential(), torch.float32, tmp_path)


@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["export.adapter=fused"], ["export.adapter", "'fused'", "merged, separate, kept"]),
        (["export.adapter=separate", "export.format=pt2"], ["export.adapter", "separate", "export.format"]),
        (["export.adapter=separate", "samples=0"], ["export.adapter", "separate", "peft.PeftModel"]),
    ],
)
def test_an_impossible_adapter_is_refused_and_nothing_is_written(
    options: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_on(1, tmp_path / "run", "train.max_steps=1", "train.eval_every=0", "model.width=8")
    monkeypatch.setattr(
        "sys.argv", ["export", f"run.dir={tmp_path / 'run'}", f"export.out={tmp_path / 'out'}", *options]
    )
    with pytest.raises(SystemExit):
        export.main()
    message = capsys.readouterr().err
    for part in parts:
        assert part in message
    assert not (tmp_path / "out").exists()
