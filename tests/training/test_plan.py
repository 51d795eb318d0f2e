from __future__ import annotations

import pytest

from dtrain.config.errors import ConfigError
from dtrain.config.schema import TrainConfig
from dtrain.data import ShardLoader
from dtrain.training.plan import last_step, schedule_horizon
from tests.training.shards import FIELDS, numbered_shards

SAMPLES = 50


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered_shards(tmp_path_factory.mktemp("shards"), SAMPLES)


def loader(shards: str, batch: int = 8, tail: str = "pad") -> ShardLoader:
    return ShardLoader(shards, FIELDS, global_batch_size=batch, num_workers=0, tail=tail)


def run_out(loader: ShardLoader, train: TrainConfig, step: int) -> int:
    """The reference: takes step after step until an epoch or the number of steps says stop."""
    while not (
        (train.max_steps is not None and step >= train.max_steps)
        or (train.max_epochs is not None and loader.position[0] >= train.max_epochs)
    ):
        for _ in zip(range(loader.micro_batches_per_step), iter(loader), strict=False):
            pass
        loader.commit()
        step += 1
    return step


@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize(
    ("max_steps", "max_epochs"), [(5, None), (None, 1), (None, 3), (10, 3), (100, 3), (21, 3), (19, 3)], ids=str
)
@pytest.mark.parametrize("done", [0, 4, 6, 7, 9])
def test_the_last_step_is_where_a_loop_that_counts_would_end(
    shards: str, tail: str, max_steps: int | None, max_epochs: int | None, done: int
) -> None:
    train = TrainConfig(max_steps=max_steps, max_epochs=max_epochs)
    at = loader(shards, tail=tail)
    step = run_out(at, TrainConfig(max_steps=done), 0)
    planned = last_step(train, at, step)
    reached = run_out(at, train, step)
    assert planned == reached or planned < step == reached


def test_an_epoch_that_goes_on_with_another_global_batch_ends_where_its_samples_do(shards: str) -> None:
    before = loader(shards)
    step = run_out(before, TrainConfig(max_steps=3), 0)
    after = loader(shards, batch=5)
    after.load_state_dict(before.state_dict())
    # 24 of 50 samples are used: 26 more are 6 steps of 5, and each further epoch has 10.
    assert last_step(TrainConfig(max_epochs=3), after, step) == 3 + 6 + 2 * 10
    assert run_out(after, TrainConfig(max_epochs=3), step) == 29


def test_the_horizon_is_that_of_all_epochs_even_if_max_steps_cuts_the_run_short(shards: str) -> None:
    assert schedule_horizon(TrainConfig(max_epochs=3), loader(shards)) == 21
    assert schedule_horizon(TrainConfig(max_epochs=3, max_steps=5), loader(shards)) == 21
    assert schedule_horizon(TrainConfig(max_steps=5), loader(shards)) == 5
    assert schedule_horizon(TrainConfig(max_epochs=3), loader(shards, tail="drop")) == 18


@pytest.mark.parametrize("key", ["max_steps", "max_epochs"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_run_without_a_step_is_refused(shards: str, key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"train.{key}: got {value}, want at least 1"):
        schedule_horizon(TrainConfig(**{key: value}), loader(shards))  # type: ignore[arg-type]


def test_a_run_without_an_end_is_refused(shards: str) -> None:
    with pytest.raises(ConfigError, match=r"train.max_steps and train.max_epochs are both null"):
        schedule_horizon(TrainConfig(), loader(shards))
