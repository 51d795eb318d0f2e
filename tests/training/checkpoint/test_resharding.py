"""A run saved on N ranks resumes on M ranks, with any strategy: everything is equal, and training goes on alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.config.schema import Config, ParallelConfig, RunConfig
from dtrain.distributed.process_group import process_group
from dtrain.distributed.sharding import is_dtensor, local_part, shard_model
from dtrain.distributed.world import World
from dtrain.errors import ConfigError
from dtrain.precision.loss_scale import LossScale
from dtrain.training.checkpoint.checkpoints import Checkpoints
from dtrain.training.checkpoint.manager import CheckpointManager
from dtrain.training.checkpoint.optimizer_state import load_optimizer, optimizer_state
from dtrain.training.checkpoint.resume import starting_weights
from dtrain.training.checkpoint.state import TrainState, load_weights
from dtrain.training.checkpoint.tensors import StoredTensor
from dtrain.training.setup.ema import Ema
from tests.ranks import run_ranks
from tests.refusals import refused
from tests.toys import CPU, micro_batches, run_steps, train_step

STRATEGIES = {
    "ddp": ParallelConfig(),
    "fsdp": ParallelConfig(shard="full", shard_modules=["*[k0]"]),
    "hsdp": ParallelConfig(shard="hybrid", shard_size=2, shard_modules=["*[k0]"]),
}
GLOBAL_BATCH = 12


class Model(nn.Module):
    """Rows that no number of ranks divides, tied weights, a frozen parameter, and buffers with and without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))
        self.tied, self.again = nn.Linear(5, 5, bias=False), nn.Linear(5, 5)
        self.again.weight = self.tied.weight
        self.head = nn.Linear(5, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("shift", torch.full((2,), 0.25))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.again(self.tied(self.trunk(x * self.frozen)).tanh())
        return self.head(hidden) + self.shift.sum()


class Data:
    """Stands for a loader: the state of a position."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def amsgrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, amsgrad=True)


def build(
    world: World,
    strategy: str,
    folder: Path,
    *,
    ema: bool = True,
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = amsgrad,
) -> TrainState:
    parallel = STRATEGIES[strategy]
    model = model or Model()
    if parallel.shard != "none":
        shard_model(model, parallel, world)
    average = Ema(model, 0.5) if ema else None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step = train_step(
        DistributedDataParallel(model) if strategy == "ddp" and world.size > 1 else model,
        optimizer(trained),
        world=world,
        nominal=GLOBAL_BATCH,
        ema=average,
        loss_scale=LossScale(CPU, init=64.0, growth_interval=2),
    )
    cfg = Config()
    cfg.precision.loss_scale.growth_interval = 2
    data: Any = Data()
    return TrainState(
        cfg=cfg, run_dir=folder, train_loader=data, eval_loader=None, step=step, checkpoints=Checkpoints(folder)
    )


def train(run: TrainState, steps: int) -> list[float]:
    """The losses of some steps after the run's position, as the loop does them."""
    world, first = run.world, run.step.step
    windows = [
        micro_batches(first + number, GLOBAL_BATCH, ranks=world.size, rank=world.rank) for number in range(steps)
    ]
    outcomes = run_steps(run.step, windows)
    run.train_loader.position += steps  # type: ignore[misc, operator]
    return [outcome.stats.loss_sum / outcome.stats.count for outcome in outcomes]


def save(run: TrainState) -> None:
    with torch.no_grad():  # as an evaluation does, which leaves parameters gathered
        run.model(torch.ones(2, 3))
    CheckpointManager(run, None).save({}, final=True)  # type: ignore[arg-type]


def restored(world: World, strategy: str, folder: Path) -> TrainState:
    run = build(world, strategy, folder)
    train(run, 1)  # into another state, which restoring must replace
    run.restore(run.checkpoints.load(run.checkpoints.choose("latest")))
    return run


def everything(run: TrainState) -> dict[str, Any]:
    """Collective. All tensors of a run, gathered, and its counters."""

    def whole(tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach().clone()  # type: ignore[operator]

    content: dict[str, Any] = {f"model {name}": whole(tensor) for name, tensor in run.model.state_dict().items()}
    with run.averaged() as averaged:
        content |= {f"ema {name}": whole(tensor) for name, tensor in averaged.state_dict().items()}
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    for parameter, state in run.optimizer.state.items():
        content |= {f"optimizer {names[parameter]} {key}": whole(value) for key, value in state.items()}
    scale = run.step.loss_scale
    assert scale is not None
    content["counters"] = (run.step.state_dict(), run.train_loader.state_dict(), scale.state_dict())
    return content


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert found[name] == value, name


def saved_by(ranks: int, folder: Path, strategies: tuple[str, ...]) -> dict[str, tuple[Any, list[float]]]:
    """Strategy to everything that its run saved after three steps, and the losses of its next two steps."""

    def rank(number: int) -> dict[str, tuple[Any, list[float]]]:
        found = {}
        with process_group(timeout=60) as world:
            for strategy in strategies:
                run = build(world, strategy, folder / f"{strategy}-{ranks}")
                train(run, 3)
                save(run)
                found[strategy] = everything(run), train(run, 2)
        return found

    return run_ranks(ranks, rank, init=False)[0]


def load_in(
    ranks: int, folder: Path, strategies: tuple[str, ...], saved: dict[str, tuple[Any, list[float]]], saved_ranks: int
) -> None:
    """Restores each checkpoint in each strategy, and trains on."""

    def rank(number: int) -> None:
        with process_group(timeout=60) as world:
            for strategy in strategies:
                for source, (expected, losses) in saved.items():
                    run = restored(world, strategy, folder / f"{source}-{saved_ranks}")
                    assert_same(everything(run), expected)
                    same = (strategy, ranks) == (source, saved_ranks)
                    assert train(run, 2) == (losses if same else pytest.approx(losses, rel=1e-5)), (source, strategy)

    run_ranks(ranks, rank, init=False)


ALL = ("ddp", "fsdp", "hsdp")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[Any, list[float]]]]:
    """Runs of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    return folder, saved_by(2, folder, ("ddp", "fsdp"))


@pytest.mark.slow
def test_one_process_reads_the_weights_of_a_sharded_run_which_equal_those_of_ddp(of_two: Any) -> None:
    folder, saved = of_two
    assert_same(saved["fsdp"][0], saved["ddp"][0], 1e-5)
    checkpoint = Checkpoints(folder / "fsdp-2").load(3)
    for weights, used in (("", "ema"), ("ema", "ema"), ("raw", "raw")):
        model = Model()
        assert load_weights(model, checkpoint, weights) == used
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved["fsdp"][0][f"{'ema' if used == 'ema' else 'model'} {name}"]), name


@pytest.mark.slow
def test_checkpoints_of_two_ranks_are_restored_on_four(of_two: Any) -> None:
    folder, saved = of_two
    load_in(4, folder, ("hsdp",), saved, 2)


@pytest.mark.slow
def test_checkpoints_of_four_ranks_are_restored_on_one_three_and_four_in_every_strategy(tmp_path: Path) -> None:
    saved = saved_by(4, tmp_path, ALL)
    for ranks, strategies in ((1, ("ddp", "fsdp")), (3, ("fsdp",)), (4, ALL)):
        load_in(ranks, tmp_path, strategies, saved, 4)


class WithNothing(Model):
    """Has a frozen parameter without elements, such as the prompt of an adapter that is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.prompt.sum()


def test_a_sharded_run_with_a_parameter_without_elements_is_restored(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        with process_group(timeout=60) as world:
            run = build(world, "fsdp", tmp_path, model=WithNothing())
            train(run, 2)
            save(run)
            again = build(world, "fsdp", tmp_path, model=WithNothing())
            again.restore(again.checkpoints.load(2))
            assert_same(everything(again), everything(run))

    run_ranks(2, rank, init=False)


@pytest.mark.slow
def test_a_new_sharded_run_takes_the_weights_of_another_one(of_two: Any, tmp_path: Path) -> None:
    folder, saved = of_two

    def rank(number: int) -> dict[str, Any]:
        with process_group(timeout=60) as world:
            run = build(world, "fsdp", tmp_path)
            found = starting_weights(RunConfig(weights_from=str(folder / "fsdp-2" / "step-000000003")), run.model)
            assert found is not None
            found.load(run.model)
            return everything(run)

    for found in run_ranks(2, rank, init=False):
        for name, tensor in Model().state_dict().items():
            assert torch.equal(found[f"model {name}"], saved["fsdp"][0][f"ema {name}"]), tensor.shape


def test_a_sharded_run_whose_optimizer_has_no_state_yet_is_restored(tmp_path: Path) -> None:
    plain = partial(torch.optim.SGD, lr=0.1)

    def rank(number: int) -> None:
        with process_group(timeout=60) as world:
            run = build(world, "fsdp", tmp_path, optimizer=plain)
            train(run, 2)
            save(run)
            expected, losses = everything(run), train(run, 2)
            resumed = build(world, "fsdp", tmp_path, optimizer=plain)
            resumed.restore(resumed.checkpoints.load(2))
            assert_same(everything(resumed), expected)
            assert train(resumed, 2) == losses

    run_ranks(2, rank, init=False)


class Larger(Model):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


@pytest.mark.slow
def test_a_checkpoint_that_lacks_tensors_is_refused_by_name_and_changes_nothing(of_two: Any) -> None:
    def rank(number: int) -> None:
        with process_group(timeout=60) as world:
            for source in ("ddp", "fsdp"):
                run = build(world, "fsdp", of_two[0] / f"{source}-2", model=Larger())
                before = everything(run)
                with refused(ConfigError, "extra.weight is missing"):
                    run.restore(run.checkpoints.load(3))
                after = everything(run)
                after["counters"] = before["counters"]
                assert_same(after, before)

    run_ranks(2, rank, init=False)


class OwnTensors(torch.optim.SGD):
    """Keeps plain tensors of the shape of this rank's part."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["size"] = torch.ones(local_part(parameter).shape)


@pytest.mark.slow
def test_optimizer_state_that_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        with process_group(timeout=60) as world:
            run = build(world, "fsdp", tmp_path)
            optimizer = OwnTensors(run.model.parameters(), lr=0.1)
            optimizer.step()
            with refused(ConfigError, "OwnTensors", "frozen/size", "parallel=ddp"):
                optimizer_state(optimizer, run.model)
            rows = {"head.weight/rows": torch.ones(5)}  # as Adafactor's, saved with DDP
            with refused(ConfigError, "head.weight/rows", "[5]", "[1, 5]", "parallel=ddp"):
                load_optimizer(run.optimizer, run.model, rows, {}, [])

    run_ranks(2, rank, init=False)


@pytest.mark.slow
def test_no_rank_copies_or_reads_more_than_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    getitem = StoredTensor.__getitem__

    def counted(self: StoredTensor, index: Any) -> Tensor:
        values = getitem(self, index)
        read.append(values.nbytes)
        return values

    monkeypatch.setattr(StoredTensor, "__getitem__", counted)

    def rank(number: int) -> tuple[int, int]:
        with process_group(timeout=60) as world:
            run = build(
                world, "fsdp", tmp_path, model=nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 64), nn.Linear(64, 1))
            )
            train(run, 1)
            save(run)
            run.restore(run.checkpoints.load(1))
            return run.checkpoint({}).nbytes, sum(read)

    parts = run_ranks(4, rank, init=False)
    whole = sum(copied for copied, _ in parts)
    for copied, loaded in parts:
        assert copied < 1.1 * whole / 4
        assert loaded < 1.1 * whole / 4
