"""The memory of a step: what is computed without memory, compared with what real steps allocate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from dtrain.config.schema import Config
from dtrain.data import Batch
from dtrain.data.fields.tokenizers import Corpus
from dtrain.precision import Precision
from dtrain.tasks import LanguageModelling
from dtrain.training import step_memory
from dtrain.training.build import build_model
from dtrain.training.step_memory import StepMemory, measure_fake_step, measure_step
from dtrain.training.task import Output
from tests.configs import config_of
from tests.toys import CPU

GPT = {"_target_": "dtrain.models.GPT", "vocabulary": 50, "width": 32, "depth": 2, "heads": 2, "context": 16}
LANGUAGE = {"_target_": "dtrain.tasks.LanguageModelling"}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1}


def config(model: dict[str, Any] = GPT, task: dict[str, Any] = LANGUAGE, **train: Any) -> Config:
    return config_of({"model": model, "task": task, "optimizer": ADAMW, "train": train})


def tokens(rows: int = 4) -> Batch:
    return Batch({"tokens": torch.randint(0, 50, (rows, 17))}, ["key"] * rows, torch.ones(rows, dtype=torch.bool))


def images(rows: int = 4) -> Batch:
    columns = {"image": torch.randn(rows, 3, 8, 8), "label": torch.zeros(rows, dtype=torch.int64)}
    return Batch(columns, ["key"] * rows, torch.ones(rows, dtype=torch.bool))


def measured(cfg: Config, batch: Batch, precision: str = "fp32") -> StepMemory:
    return measure_step(cfg, Precision(precision), CPU, batch)


@pytest.fixture(scope="module")
def gpt() -> StepMemory:
    """The GPT in fp32."""
    return measured(config(), tokens())


@pytest.fixture(scope="module")
def gpt_in_bf16() -> StepMemory:
    """The GPT in bf16, with averaged weights."""
    return measured(config(ema_decay=0.9), tokens(), "bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "batch", "precision"),
    [
        (config(ema_decay=0.9), tokens(), "bf16"),
        (config(checkpoint_activations=["blocks.*"]), tokens(), "fp32"),
        (config({"_target_": "tests.toys.NormNet"}, {"_target_": "dtrain.tasks.Classification"}), images(), "bf16"),
    ],
    ids=["gpt in bf16 with an average", "gpt recomputed", "convolutions"],
)
def test_tensors_without_data_need_what_real_ones_need(cfg: Config, batch: Batch, precision: str) -> None:
    fake = measured(cfg, batch, precision)
    model = build_model(cfg.model, CPU)
    real = step_memory._measure(cfg, Precision(precision), CPU, model, batch, is_fake=False)
    assert (fake.is_fake, real.is_fake) == (True, False)
    for name in ("buffers", "batch", "averaged", "blocks"):
        assert getattr(fake, name) == getattr(real, name), name
    for name in ("activations", "activations_sharded", "with_gradients", "update"):
        # Some kernels of convolutions have small buffers, which only real tensors show.
        assert getattr(fake, name) == pytest.approx(getattr(real, name), rel=0.01), name
    for one, other in zip(fake.parameters, real.parameters, strict=True):
        assert (one.tensor.shape, one.state, one.other_state) == (other.tensor.shape, other.state, other.other_state)


@pytest.mark.slow
def test_activations_are_those_that_autograd_saves_and_temporary_ones(gpt: StepMemory) -> None:
    """Compared with saved-tensor hooks of torch around the same forward."""
    model, batch = build_model(config().model, CPU), tokens()
    saved: dict[int, int] = {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *batch.tensors())}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        LanguageModelling()(model, batch)
    assert sum(saved.values()) < gpt.activations < 1.4 * sum(saved.values())


@pytest.mark.slow
def test_activations_grow_with_the_rows(gpt: StepMemory) -> None:
    one = measured(config(), tokens().chosen([0]))
    assert 3 * one.activations < gpt.activations < 4 * one.activations
    assert one.parameters[0].state == gpt.parameters[0].state


@pytest.mark.slow
def test_the_casts_of_weights_are_known(gpt_in_bf16: StepMemory) -> None:
    numbers = sum(parameter.tensor.numel() for parameter in gpt_in_bf16.parameters)
    assert numbers <= gpt_in_bf16.activations - gpt_in_bf16.activations_sharded <= 2 * numbers


class Reads(nn.Module):
    """Cannot run without data."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, 10]``."""
        return self.head(images.flatten(1)) * (1.0 if images.sum().item() == 0 else 2.0)


@pytest.mark.slow
def test_a_model_that_reads_values_is_measured_for_real() -> None:
    cfg = config({"_target_": f"{__name__}.Reads"}, {"_target_": "dtrain.tasks.Classification"})
    need = measured(cfg, images())
    assert not need.is_fake
    assert need.activations > 0
    with pytest.raises(DataDependentOutputException):
        measure_fake_step(cfg, Precision("fp32"), CPU, images())


class Fails:
    """A task with an error of its own."""

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        raise ZeroDivisionError("made up")


@pytest.mark.slow
def test_an_error_of_the_task_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError, match="made up"):
        measured(config(task={"_target_": f"{__name__}.Fails"}), tokens())


class OfCorpus(LanguageModelling):
    """A task that cannot be built without the description of the tokens."""

    def __init__(self, corpus: Corpus | None = None) -> None:
        assert corpus is not None
        super().__init__(corpus=corpus)


@pytest.mark.slow
def test_a_task_gets_the_description_of_the_tokens(tmp_path: Path) -> None:
    shard = tmp_path / "train-000000.tar"
    shard.touch()
    described = {"tokenizer": "bytes", "vocab_size": 50, "end_of_text": None, "bytes_per_token": 1.0, "splits": {}}
    (tmp_path / "dataset.json").write_text(json.dumps(described))
    cfg = config(task={"_target_": f"{__name__}.OfCorpus"})
    cfg.data.train = str(shard)
    assert measured(cfg, tokens()).rows == 4
