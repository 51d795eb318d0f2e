"""The preset and the task of README's section "Your own model and task", as printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, metrics, status, train_on
from tests.shards import jpeg, write_tar

SECTION = re.search(r"## Your own model and task\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)
assert SECTION is not None
(PRESET,) = re.findall(r"```yaml\n(.*?)```", SECTION[1], re.DOTALL)
(TASK,) = (block for block in re.findall(r"```python\n(.*?)```", SECTION[1], re.DOTALL) if "class MyTask" in block)

#: What the section leaves to the reader: a model with the preset's argument, and a loss.
PACKAGE = """
from torch import nn
from torch.nn import functional


def my_loss(logits, labels):
    return functional.cross_entropy(logits.float(), labels, reduction="none")


class MyModel(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.first = nn.Linear(3 * 8 * 8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.head = nn.Linear(16, 100)

    def forward(self, images):
        hidden = self.first(images.flatten(1))
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        return self.head(hidden)


"""


def test_the_preset_and_the_task_of_the_readme_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = tmp_path / "presets" / "experiment"
    experiments.mkdir(parents=True)
    (experiments / "mine.yaml").write_text(PRESET)
    (tmp_path / "my_package.py").write_text(PACKAGE + TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    samples = ((f"{number:03d}", {"jpg": jpeg(number), "cls": str(number % 10).encode()}) for number in range(16))
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "train-000000.tar", samples)
    small = ("data.image_size=8", "train.global_batch_size=8", "train.max_steps=2", "data.num_workers=0")
    shards = f"data.train='{tmp_path}/data/train-{{000000..000000}}.tar'"
    train_on(1, tmp_path / "run", "--config-dir", str(tmp_path / "presets"), shards, *small, experiment="mine")
    assert status(tmp_path / "run")["state"] == "finished"
    assert len(metrics(tmp_path / "run")) == 2
