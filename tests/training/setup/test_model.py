from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.schema import ParallelConfig, TrainConfig
from dtrain.errors import ConfigError
from dtrain.models import GPT, ResNet9
from dtrain.precision import Precision
from dtrain.training import build
from dtrain.training.setup.model import CompilerLog, use_channels_last
from tests.ranks import RanksFailed
from tests.refusals import refused
from tests.toys import world
from tests.whole_runs import metrics, torchrun, train_on

# -- compiler log


LOGS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks")


class Whole(nn.Linear):
    """Compiles to one graph."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Broken(Whole):
    """Two places that no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # a branch
            x = x + 1
        print(end="")  # a call
        return x * 2


class GivenUp(Whole):
    """A break in a loop, which makes torch give the whole function up."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            print(end="")  # in a loop
            x = x * 2
        return x


class Changing(Whole):
    """A number that the compiler takes for a constant, and that is another one at every call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Digits(nn.Module):
    """For a real run: a convolution network with a branch on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 10, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.layer(images).mean(dim=(2, 3))
        if hidden.sum() > 0:  # in a run
            hidden = hidden * 2
        return hidden


@contextmanager
def compiled(kind: Callable[[], nn.Module]) -> Iterator[tuple[nn.Module, CompilerLog, list[str]]]:
    """A compiled model, the log, and the list of what it notes."""
    torch._dynamo.reset()
    model, notes = kind(), list[str]()
    model.compile(backend="eager")
    log = CompilerLog(model, notes.append)
    try:
        yield model, log, notes
    finally:
        log.close()
        torch._dynamo.reset()


def line_number(remark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {remark}"))
    return f"{__file__}:{number}: "


def test_each_break_is_told_in_a_line_with_its_place_and_reason_and_only_once() -> None:
    with compiled(Broken) as (model, log, notes):
        model(torch.ones(2, 3))
        log.report()
        log.report()
        (text,) = notes
    head, *lines = text.splitlines()
    assert re.match(r"train.compile: 2 graph breaks, \d+ graphs compiled", head)
    assert lines[0].strip().startswith(line_number("a branch"))
    assert lines[1].strip().startswith(line_number("a call"))
    assert "ata-dependent" in lines[0]
    assert "print" in lines[1]


def test_a_function_that_is_given_up_is_told_with_the_place_of_the_break() -> None:
    with compiled(GivenUp) as (model, log, notes):
        model(torch.ones(2, 3))
        log.report()
        (text,) = notes
    assert "1 graph break," in text
    assert line_number("in a loop") in text


def test_a_model_that_compiles_whole_is_not_talked_about() -> None:
    with compiled(Whole) as (model, log, notes):
        model(torch.ones(2, 3)).sum().backward()
        log.report()
        assert notes == []


def test_breaks_that_come_later_are_told_when_they_come() -> None:
    with compiled(lambda: nn.Sequential(Whole(), Broken())) as (model, log, notes):
        model[0](torch.ones(2, 3))  # type: ignore[index]
        log.report()
        assert notes == []
        model(torch.ones(2, 3))
    assert "2 graph breaks" in notes[0]  # by `close` at the latest


def test_a_function_that_is_compiled_again_and_again_is_told_with_the_reason() -> None:
    with compiled(Changing) as (model, log, notes), redirect_stderr(StringIO()):
        for _ in range(torch._dynamo.config.recompile_limit + 3):
            model(torch.ones(2, 3))
        log.report()
        (text,) = notes
    assert f"'forward' ({__file__}:" in text
    assert "compiled" in text
    assert "8 times (recompile_limit), the last time because of self.calls ==" in text
    assert "uncompiled" in text


def test_torchs_logs_are_as_they_were_afterwards_and_nobody_listens_where_nothing_is_compiled() -> None:
    def state() -> list[tuple[int, bool, int]]:
        loggers = [logging.getLogger(name) for name in (*LOGS, "torch._dynamo.convert_frame")]
        return [(logger.level, logger.propagate, len(logger.handlers)) for logger in loggers]

    before = state()
    with compiled(Whole):
        assert state() != before
    assert state() == before
    log = CompilerLog(Whole(), pytest.fail)
    assert state() == before
    log.close()


def test_who_asked_torch_for_its_log_still_gets_it() -> None:
    source, heard = logging.getLogger(LOGS[0]), list[logging.LogRecord]()
    theirs = logging.Handler()
    theirs.emit = heard.append  # type: ignore[method-assign, assignment]
    parent = logging.getLogger("torch._dynamo.symbolic_convert")
    parent.addHandler(theirs)
    source.setLevel(logging.DEBUG)
    try:
        with compiled(Broken) as (model, _, notes), redirect_stderr(StringIO()):
            model(torch.ones(2, 3))
    finally:
        source.setLevel(logging.NOTSET)
        parent.removeHandler(theirs)
    assert notes
    assert heard


@pytest.mark.slow
def test_a_run_notes_the_breaks_of_its_model_at_the_first_record_of_a_step(digits: Path, tmp_path: Path) -> None:
    run = torchrun(
        1,
        "experiment=digits",
        "tracker=none",
        f"run.dir={tmp_path}",
        "model._target_=tests.training.setup.test_model.Digits",
        "~model.classes",
        "~model.width",
        "train.compile=true",
        "train.max_steps=4",
        "train.log_every=2",
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    (number,) = (number for number, line in enumerate(lines) if line.startswith("train.compile: 1 graph break,"))
    assert line_number("in a run") in lines[number + 1]
    assert lines[number - 1].startswith("step 2/4")


# -- execution


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
    return build.prepare_model(model, TrainConfig(**train), ParallelConfig(), world())


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


@pytest.mark.slow
def test_a_model_that_needs_the_usual_layout_trains_where_channels_last_is_off(
    digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = ("model._target_=tests.training.setup.test_model.Flattening", "train.max_steps=2", "data.num_workers=0")
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
    assert build.prepare_model(model, TrainConfig(), parallel, world()) is model
    with refused(ConfigError, "parallel.sync_batchnorm=true", "", "GPUs only"):
        build.prepare_model(model, TrainConfig(), parallel, world(0, 2))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            {"checkpoint_activations": ["block.*"]},
            ["train.checkpoint_activations: 'block.*' matches no module", "blocks"],
        ),
        ({"compile": ["blocks.7"]}, ["train.compile: 'blocks.7' matches no module"]),
        ({"compile": "yes"}, ["train.compile", "got 'yes'", "true, false, or a list"]),
    ],
)
def test_patterns_that_match_nothing_are_refused(options: dict[str, Any], names: list[str]) -> None:
    with refused(ConfigError, *names):
        equipped(Blocks(), **options)
