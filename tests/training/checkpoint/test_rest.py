"""Checkpoints with ``checkpoint.only_trained``: what they have, what they lack, and which model they are loaded into."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dtrain.config.schema import Config, RunConfig, WarmStartConfig
from dtrain.distributed.process_group import process_group
from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.training.checkpoint.checkpoints import Checkpoints
from dtrain.training.checkpoint.rest import Rest, never_trained
from dtrain.training.checkpoint.resume import EarlierStarts, build_rest, load_rest, restore, starting_weights
from dtrain.training.checkpoint.state import TrainState, load_weights
from dtrain.training.setup.ema import Ema
from dtrain.training.setup.freeze import freeze
from tests.ranks import run_ranks
from tests.refusals import refused
from tests.training.checkpoint.test_resharding import Model, assert_same, build, everything, save, train

REST = ["frozen", "trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias"]
TRAINED = ["again.bias", "again.weight", "head.bias", "head.weight", "tied.weight"]
BUFFERS = ["nothing", "shift"]


def adapted() -> Model:
    model = Model()
    model.trunk.requires_grad_(False)
    return model


def adapted_run(
    world: World, strategy: str, folder: Path, model: nn.Module | None = None, *, only_trained: bool = True
) -> TrainState:
    run = build(world, strategy, folder, model=model or adapted())
    run.cfg.checkpoint.only_trained = only_trained
    return run


def begun(run: TrainState) -> TrainState:
    restore(run, EarlierStarts())
    return run


def resumed(run: TrainState) -> TrainState:
    restore(run, EarlierStarts(checkpoint=run.checkpoints.choose("latest")))
    return run


def in_one_process(function: Callable[[World], Any]) -> Any:
    def rank(number: int) -> Any:
        with process_group(timeout=60) as world:
            return function(world)

    return run_ranks(1, rank, init=False)[0]


Saved = tuple[Path, dict[str, tuple[dict[str, Any], list[float]]]]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Runs of two ranks, saved after three steps; what they had then, and the losses of the next two steps."""
    folder = tmp_path_factory.mktemp("adapted")

    def rank(number: int) -> dict[str, Any]:
        found = {}
        with process_group(timeout=60) as world:
            for strategy in ("ddp", "fsdp"):
                run = begun(adapted_run(world, strategy, folder / strategy))
                train(run, 3)
                save(run)
                found[strategy] = everything(run), train(run, 2)
        return found

    return folder, run_ranks(2, rank, init=False)[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_has_what_is_trained_all_buffers_and_hashes_of_the_rest(strategy: str, of_two: Saved) -> None:
    checkpoint = Checkpoints(of_two[0] / strategy).load(3)
    assert sorted(checkpoint.tensors["model"]) == sorted(TRAINED + BUFFERS)
    assert sorted(checkpoint.tensors["ema"]) == sorted(TRAINED + BUFFERS)
    assert {name.partition("/")[0] for name in checkpoint.tensors["optimizer"]} <= {*TRAINED}
    rest = checkpoint.state["rest"]
    model = adapted().state_dict()
    expected = {}
    for name in sorted(REST):
        tensor = model[name]
        head = f"fp32 {list(tensor.shape)} ".encode()
        expected[name] = hashlib.sha256(head + tensor.numpy().tobytes()).hexdigest()
    assert rest["tensors"] == expected
    assert rest["sha256"] == hashlib.sha256(json.dumps(expected).encode()).hexdigest()
    assert "run.seed=0" in rest["from"]


def resume_in(ranks: int, of_two: Saved, *strategies: str) -> None:
    folder, saved = of_two

    def rank(number: int) -> None:
        with process_group(timeout=60) as world:
            for strategy in strategies:
                for source, (expected, losses) in saved.items():
                    run = resumed(adapted_run(world, strategy, folder / source))
                    assert_same(everything(run), expected)
                    same = (strategy, ranks) == (source, 2)
                    assert train(run, 2) == (losses if same else pytest.approx(losses, rel=1e-5)), (source, strategy)

    run_ranks(ranks, rank, init=False)


@pytest.mark.slow
def test_a_resumed_run_continues_bit_for_bit_and_with_a_different_strategy(of_two: Saved) -> None:
    resume_in(2, of_two, "ddp", "fsdp")


@pytest.mark.slow
def test_it_resumes_on_one_and_three_ranks(of_two: Saved) -> None:
    resume_in(1, of_two, "ddp", "fsdp")
    resume_in(3, of_two, "ddp", "fsdp")


def other_trunk() -> Model:
    model = adapted()
    with torch.no_grad():
        model.trunk[2].weight[0, 0] += 1
    return model


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_different_rest_is_refused_by_name_and_nothing_is_loaded(strategy: str, of_two: Saved) -> None:
    def rank(number: int) -> None:
        with process_group(timeout=60) as world:
            run = adapted_run(world, strategy, of_two[0] / strategy, other_trunk())
            before = everything(run)
            with refused(ConfigError, "checkpoint.only_trained", "trunk.2.weight", "run.seed"):
                resumed(run)
            after = everything(run) | {"counters": before["counters"]}
            assert_same(after, before)

    run_ranks(2, rank, init=False)


def test_a_model_without_the_rest_is_refused_by_name(of_two: Saved) -> None:
    class Smaller(Model):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = self.trunk[:1]

    def function(world: World) -> None:
        with refused(ConfigError, "trunk.2", "is missing", "checkpoint.only_trained"):
            resumed(adapted_run(world, "ddp", of_two[0] / "ddp", Smaller()))

    in_one_process(function)


def test_only_trained_may_change_between_two_starts(of_two: Saved, tmp_path: Path) -> None:
    folder, saved = of_two

    def function(world: World) -> None:
        run = resumed(adapted_run(world, "ddp", folder / "fsdp", only_trained=False))
        assert_same(everything(run), saved["fsdp"][0])
        run.checkpoints = Checkpoints(tmp_path)
        save(run)
        checkpoint = run.checkpoints.load(3)
        assert checkpoint.rest is None
        assert sorted(checkpoint.tensors["model"]) == sorted(REST + TRAINED + BUFFERS)
        again = resumed(adapted_run(world, "ddp", tmp_path))
        assert_same(everything(again), saved["fsdp"][0])
        train(again, 1)
        save(again)
        assert sorted(again.checkpoints.load(4).tensors["model"]) == sorted(TRAINED + BUFFERS)

    in_one_process(function)


def test_a_parameter_that_was_trained_before_cannot_be_left_out(tmp_path: Path) -> None:
    def function(world: World) -> None:
        run = begun(adapted_run(world, "ddp", tmp_path, Model()))
        train(run, 2)
        save(run)
        with refused(ConfigError, "checkpoint.only_trained", "trunk.0.weight", "only_trained=false", "train.freeze"):
            resumed(adapted_run(world, "ddp", tmp_path))
        resumed(adapted_run(world, "ddp", tmp_path, Model()))

    in_one_process(function)


def test_what_is_left_out_now_and_trained_later_is_restored(of_two: Saved) -> None:
    """train.freeze without the trunk: its values are built again, and from then on they are stored."""

    def function(world: World) -> None:
        run = adapted_run(world, "ddp", of_two[0] / "ddp", Model())
        assert_same(everything(resumed(run)), of_two[1]["ddp"][0])
        assert {*run.checkpoint({}).tensors["model"]} == {*REST, *TRAINED, *BUFFERS} - {"frozen"}

    in_one_process(function)


def test_a_rest_that_changes_during_the_run_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        with process_group(timeout=60) as world:
            for strategy in ("ddp", "fsdp"):
                run = begun(adapted_run(world, strategy, tmp_path / strategy))
                train(run, 1)
                with torch.no_grad():
                    for parameter in run.model.trunk[0].parameters():  # type: ignore[index, union-attr]
                        parameter.mul_(2)
                with refused(
                    ConfigError, "checkpoint.only_trained", "trunk.0.weight has changed", "only_trained=false"
                ):
                    save(run)

    run_ranks(2, rank, init=False)


def test_one_process_loads_the_weights_into_a_model_with_the_same_rest_only(of_two: Saved) -> None:
    folder, saved = of_two
    cfg = Config(model={"_target_": "my.model"})
    for strategy in ("ddp", "fsdp"):
        checkpoint = Checkpoints(folder / strategy).load(3)
        assert checkpoint.rest is not None
        for asked, used in (("", "ema"), ("raw", "model")):
            model = adapted()
            load_weights(model, checkpoint, asked, load_rest(cfg, model, checkpoint.rest))
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, saved[strategy][0][f"{used} {name}"]), name
        model = other_trunk()
        with refused(ConfigError, "trunk.2.weight", "model._target_=my.model"):
            load_weights(model, checkpoint, "", load_rest(cfg, model, checkpoint.rest))


def test_a_new_run_takes_the_weights_of_one_that_has_the_same_rest(of_two: Saved, tmp_path: Path) -> None:
    folder, saved = of_two
    path = str(folder / "fsdp" / "step-000000003")

    def function(world: World) -> None:
        run = adapted_run(world, "ddp", tmp_path)
        run.cfg.run.weights_from = path
        begun(run)
        for name, tensor in run.model.state_dict().items():
            assert torch.equal(tensor, saved["fsdp"][0][f"ema {name}"]), name
        train(run, 1)
        save(run)
        again = adapted_run(world, "ddp", tmp_path)
        again.cfg.run.weights_from = str(tmp_path / "gone")  # not needed: the model builds the rest itself
        resumed(again)
        assert_same(everything(again), everything(run))
        different = adapted_run(world, "ddp", tmp_path / "other", other_trunk())
        different.cfg.run.weights_from = path
        with refused(ConfigError, "trunk.2.weight", "run.seed=0"):
            begun(different)

    in_one_process(function)


def test_a_rest_from_a_file_is_read_again_at_each_start(tmp_path: Path) -> None:
    base = other_trunk().state_dict()
    save_file({name: base[name].clone() for name in REST}, tmp_path / "base.safetensors")
    warm = WarmStartConfig(str(tmp_path / "base.safetensors"), skip=["head.*", "tied.*", "again.*", "shift", "nothing"])

    def warm_run(world: World, folder: Path) -> TrainState:
        run = adapted_run(world, "ddp", folder)
        run.cfg.run.warm_start = warm
        return run

    def function(world: World) -> None:
        run = begun(warm_run(world, tmp_path / "run"))
        train(run, 2)
        save(run)
        assert "base.safetensors" in run.checkpoint({}).state["rest"]["from"]
        expected = everything(run)
        assert_same(everything(resumed(warm_run(world, tmp_path / "run"))), expected)

        # weights_from such a run needs the same base
        follower = warm_run(world, tmp_path / "follower")
        follower.cfg.run.weights_from = str(tmp_path / "run" / "step-000000002")
        begun(follower)
        for name, tensor in follower.model.state_dict().items():
            assert torch.equal(tensor, expected[f"ema {name}"]), name
        lost = adapted_run(world, "ddp", tmp_path / "lost")
        lost.cfg.run.weights_from = follower.cfg.run.weights_from
        with refused(ConfigError, "trunk.2.weight", "base.safetensors"):
            begun(lost)

        (tmp_path / "base.safetensors").unlink()
        with refused(ConfigError, "run.warm_start.path", "base.safetensors"):
            resumed(warm_run(world, tmp_path / "run"))

    in_one_process(function)


def test_two_sources_of_whole_weights_stay_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1, 1)}, tmp_path / "a.safetensors")
    path = str(tmp_path / "a.safetensors")
    with refused(ConfigError, "run.weights_from", "run.warm_start.path", "Keep one"):
        starting_weights(RunConfig(weights_from=path, warm_start=WarmStartConfig(path)), nn.Linear(1, 1, bias=False))


def test_a_warm_start_from_such_a_checkpoint_names_the_remedy(of_two: Saved) -> None:
    run = RunConfig(warm_start=WarmStartConfig(str(of_two[0] / "ddp" / "step-000000003")))
    with refused(ConfigError, "run.warm_start.path", "run.weights_from", "dtrain export"):
        starting_weights(run, adapted())


@pytest.mark.parametrize("state", [{}, {"tensors": 3, "from": "x"}, {"tensors": {}}, "text"])
def test_a_damaged_record_of_the_rest_is_refused(state: Any) -> None:
    with refused(ConfigError, "state.json"):
        Rest.from_state(state)


def test_what_is_frozen_until_a_step_is_trained() -> None:
    model = Model()
    freeze(model, ["trunk.0", {"patterns": ["trunk.2"], "until": 5}])
    assert sorted(never_trained(model)) == ["frozen", "trunk.0.bias", "trunk.0.weight"]


class HalfPrecision(nn.Module):
    """Frozen parameters of all kinds of dtypes and layouts."""

    def __init__(self) -> None:
        super().__init__()
        layout = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        for name, tensor in {
            "bf16": torch.ones(3, dtype=torch.bfloat16),
            "complex": torch.ones(2, dtype=torch.complex64),
            "scalar": torch.tensor(2.0),
            "empty": torch.empty(0, 4),
            "layout": layout,
            "bytes": torch.arange(4, dtype=torch.uint8),
        }.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def test_hashes_depend_on_dtype_shape_and_bits_and_not_on_the_layout() -> None:
    model = HalfPrecision()
    names = never_trained(model)
    before = Rest.measure(model, names, "").digests
    assert len({*before.values()}) == len(names) == 6
    model.layout.data = model.layout.data.contiguous()
    assert Rest.measure(model, names, "").digests == before
    model.bf16.data = model.bf16.data.half()
    model.layout.data = model.layout.data.reshape(2, 1, 3, 4)
    model.scalar.data = -model.scalar.data
    after = Rest.measure(model, names, "").digests
    assert {name for name in names if after[name] != before[name]} == {"bf16", "layout", "scalar"}


def test_the_average_of_only_trained_parameters_needs_no_memory_for_the_rest() -> None:
    model = adapted()
    ema = Ema(model, 0.5, only_trained=True)
    assert sum(average.numel() for average in ema._averages) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    with torch.no_grad():
        model.head.weight.add_(2)
        expected = model.head.weight - 1
    ema.update(torch.tensor(False))
    trunk = model.trunk[0].weight
    with ema.swapped_in() as averaged:
        assert torch.allclose(averaged.head.weight, expected)  # type: ignore[union-attr, arg-type]
        assert averaged.trunk[0].weight is trunk  # type: ignore[index, union-attr]


def test_a_new_run_measures_its_rest_and_one_that_stores_everything_does_not(tmp_path: Path) -> None:
    def function(world: World) -> None:
        run = adapted_run(world, "ddp", tmp_path, only_trained=False)
        build_rest(run)
        assert run.rest is None
        assert run.checkpoint({}).state["rest"] is None

    in_one_process(function)
