"""The memory of a step: what is computed without memory, compared with what real steps allocate."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # shard_model imports it, which takes seconds: here once, and not in every rank
from torch import Tensor, nn

from dtrain.config.schema import Config, ParallelConfig
from dtrain.data import Batch
from dtrain.data.fields.tokenizers import Corpus
from dtrain.distributed.sharding import local_part, shard_model
from dtrain.distributed.world import World
from dtrain.doctor import memory, step_memory
from dtrain.doctor.memory import Strategy, Usage, parse_size, usage
from dtrain.doctor.step_memory import StepMemory, measure_step
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.tasks import LanguageModelling
from dtrain.training.build import build_model
from dtrain.training.task import Output
from tests.configs import config_of
from tests.ranks import run_ranks
from tests.refusals import refused
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


# -- one step


@pytest.mark.parametrize(
    ("cfg", "batch", "precision"),
    [
        pytest.param(config(ema_decay=0.9), tokens(), "bf16", marks=pytest.mark.slow),
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


def test_activations_grow_with_the_rows(gpt: StepMemory) -> None:
    one = measured(config(), tokens().chosen([0]))
    assert 3 * one.activations < gpt.activations < 4 * one.activations
    assert one.parameters[0].state == gpt.parameters[0].state


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


def test_a_model_that_reads_values_is_measured_for_real() -> None:
    need = measured(config({"_target_": f"{__name__}.Reads"}, {"_target_": "dtrain.tasks.Classification"}), images())
    assert not need.is_fake
    assert need.activations > 0


class Fails:
    """A task with an error of its own."""

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        raise ZeroDivisionError("made up")


def test_an_error_of_the_task_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError, match="made up"):
        measured(config(task={"_target_": f"{__name__}.Fails"}), tokens())


class OfCorpus(LanguageModelling):
    """A task that cannot be built without the description of the tokens."""

    def __init__(self, corpus: Corpus | None = None) -> None:
        assert corpus is not None
        super().__init__(corpus=corpus)


def test_a_task_gets_the_description_of_the_tokens(tmp_path: Path) -> None:
    shard = tmp_path / "train-000000.tar"
    shard.touch()
    described = {"tokenizer": "bytes", "vocab_size": 50, "end_of_text": None, "bytes_per_token": 1.0, "splits": {}}
    (tmp_path / "dataset.json").write_text(json.dumps(described))
    cfg = config(task={"_target_": f"{__name__}.OfCorpus"})
    cfg.data.train = str(shard)
    assert measured(cfg, tokens()).rows == 4


# -- strategies


def strategy(ranks: int, **options: Any) -> Strategy:
    return Strategy.from_config(ParallelConfig(**options), ranks, ranks_per_node=2)


def test_bytes_of_parts_are_those_that_a_rank_really_has(gpt: StepMemory) -> None:
    def rank(number: int) -> tuple[int, int, int]:
        model = build_model(config().model, CPU)
        shard_model(model, ParallelConfig(shard="full"), World(number, 3, number, 3, CPU, "gloo", launched=True))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(tokens()["tokens"][:, 1:]).sum().backward()
        gradients = sum(local_part(p.grad).nbytes for p in model.parameters() if p.grad is not None)
        optimizer.step()
        state = [value for of_one in optimizer.state.values() for value in of_one.values()]
        parameters = sum(local_part(parameter).nbytes for parameter in model.parameters())
        return parameters, gradients, sum(local_part(value).nbytes for value in state)

    want = usage(gpt, strategy(3, shard="full"), micro_batches=1)
    # The first rank has the largest parts.
    assert run_ranks(3, rank)[0] == (want.parameters - 2 * gpt.buffers, want.gradients, want.optimizer)
    hybrid = usage(gpt, strategy(6, shard="hybrid", shard_size=3), micro_batches=1)
    assert (hybrid.parameters, hybrid.gradients, hybrid.optimizer) == (want.parameters, want.gradients, want.optimizer)


def test_ddp_needs_buckets_and_gradients_besides_where_they_are_no_views(gpt: StepMemory) -> None:
    need = gpt
    whole = sum(parameter.tensor.nbytes for parameter in need.parameters)
    one, two = (usage(need, strategy(2), micro_batches=number) for number in (1, 2))
    assert one.gradients == two.gradients == whole
    for options in ({"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": False}):
        assert usage(need, strategy(2, **options), micro_batches=2).gradients == 2 * whole
    assert usage(need, strategy(2, static_graph=True), micro_batches=1).gradients == whole
    assert one.optimizer == 2 * whole + 4 * len(need.parameters)
    assert usage(need, strategy(2, reduce_dtype="bf16"), 1).working == whole // 2
    alone = usage(need, strategy(1), 1)
    assert one.total - whole < alone.total < one.total  # gradients come while activations go


def test_a_sharded_model_needs_less_with_more_ranks_and_its_options_do_what_they_say(gpt_in_bf16: StepMemory) -> None:
    need = gpt_in_bf16
    two, four = (usage(need, strategy(ranks, shard="full"), 1) for ranks in (2, 4))
    for name in ("parameters", "gradients", "optimizer", "average", "update"):
        assert getattr(four, name) < 0.6 * getattr(two, name) + 2 * need.buffers, name
    assert four.activations == two.activations
    low = usage(need, strategy(4, shard="full", gather_dtype="compute"), 1)
    assert low.activations - 2 * need.batch == need.activations_sharded
    assert low.working < four.working
    assert low.sent < four.sent
    window, each = (
        usage(need, strategy(4, shard="full", reduce_after=after), micro_batches=3)
        for after in ("window", "micro_batch")
    )
    assert window.gradients > 4 * each.gradients
    assert window.sent < each.sent
    offloaded = usage(need, strategy(4, shard="full", offload=True), 1)
    assert (offloaded.gradients, offloaded.optimizer, offloaded.average) == (0, 0, 0)


def test_a_total_is_the_larger_of_backward_and_update() -> None:
    need = Usage(parameters=1, gradients=2, optimizer=4, average=8, activations=16, working=32, update=100, sent=7)
    assert need.total == 115
    assert Usage(1, 2, 4, 8, 16, 32, 10, 7).total == 63


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 2**30), ("80 GiB", 80 * 2**30), ("512MB", 2**29), ("1.5TB", 1.5 * 2**40), ("", None)],
)
def test_sizes_are_those_that_makers_of_gpus_write(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["80", "GB", "0GB", "-1GB", "80 gigabytes"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with refused(ConfigError, "device_memory", text, "80GB"):
        parse_size(text)


# -- the command


SMALL = ("experiment=digits", "tracker=none", "model.width=8", "ranks=4", "ranks_per_node=2")


def command(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and JSON."""

    def one(rank: int) -> tuple[int, str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            return memory.main([*SMALL, *arguments, f"--json={folder / 'memory.json'}"]), text.getvalue()

    [(code, text)] = run_ranks(1, one, init=False)
    return code, text, json.loads((folder / "memory.json").read_text())


@pytest.mark.usefixtures("digits")
def test_the_command_shows_a_line_for_each_strategy_and_what_to_change(tmp_path: Path) -> None:
    code, text, found = command(tmp_path, "device_memory=0.1MB", "train.global_batch_size=64")
    assert code == 1
    assert list(found["strategies"]) == ["ddp", "hsdp 2x2", "fsdp"]
    assert not any(need["fits"] for need in found["strategies"].values())
    for name, need in found["strategies"].items():
        [line] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        assert line.endswith("does not fit")
        assert f" {need['total'] / 2**20:.2f} " in line
    assert "4 ranks x 1 micro-batch x 16 rows" in text
    [advice] = found["advice"]
    assert advice.startswith("Nothing fits: ")
    assert f"-> {advice}" in text


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_smaller_micro_batches_come_first_and_what_fits_is_no_failure(tmp_path: Path) -> None:
    code, _, found = command(tmp_path, "device_memory=100GB", "train.global_batch_size=64")
    assert (code, found["advice"]) == (0, [])
    need = found["strategies"]["ddp"]
    almost = (need["total"] - need["activations"] // 2) / 0.9 / 2**20
    code, _, found = command(tmp_path, f"device_memory={almost:.4f}MB", "train.global_batch_size=64")
    assert code == 1
    assert found["advice"][0].startswith("train.micro_batch_size=")


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5"])
def test_what_is_no_number_of_ranks_is_refused(text: str) -> None:
    with refused(ConfigError, "ranks", text, "at least 1"):
        memory._count("ranks", text)
