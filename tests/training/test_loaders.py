from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dtrain.config.errors import ConfigError
from dtrain.config.schema import Config
from dtrain.data import ShardLoader
from dtrain.precision import Precision
from dtrain.training.loaders import check_same_data, declared_fields, eval_loader, prepare_data, train_loader
from tests.ranks import run_ranks
from tests.training.shards import FIELDS, numbered_shards, numbers_of
from tests.training.toys import world

HERE = "tests.training.test_loaders"
FP32 = Precision("fp32")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered_shards(tmp_path_factory.mktemp("shards"), 50)


def config(**data: Any) -> Config:
    """A config with these keys of ``data``; 12 samples a step, no workers."""
    given = {"train": {"global_batch_size": 12}, "data": {"fields": FIELDS, "num_workers": 0, **data}}
    cfg: Config = OmegaConf.merge(OmegaConf.structured(Config), given)  # type: ignore[assignment]
    return cfg


def numbers(loader: ShardLoader) -> list[int]:
    """The samples of an epoch, in the order in which they are handed over."""
    return [int(n) for batch in loader for n in batch["number"][batch.valid]]


class AddOne:
    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**sample, "x": sample["x"] + 1}


def decode_reversed(payload: bytes) -> np.ndarray:
    return np.frombuffer(payload[-12:], dtype="<f4")[::-1].copy()


def leave_a_mark(path: str) -> None:
    time.sleep(0.2)
    with open(path, "a") as file:
        file.write("prepared\n")


def cannot_prepare() -> None:
    raise OSError("no network")


def test_training_is_shuffled_and_evaluation_is_in_stored_order(shards: str) -> None:
    cfg = config(train=shards, eval=shards)
    trained = numbers(train_loader(cfg, world(), FP32))
    assert sorted(trained) == list(range(50))
    assert trained != list(range(50))
    evaluated = eval_loader(cfg, world(), FP32)
    assert evaluated is not None
    assert numbers(evaluated) == list(range(50))


def test_what_is_dropped_or_augmented_in_training_is_not_in_evaluation(shards: str) -> None:
    cfg = config(train=shards, eval=shards, tail="drop", augment={"_target_": f"{HERE}.AddOne"})
    training, evaluation = train_loader(cfg, world(), FP32), eval_loader(cfg, world(), FP32)
    assert evaluation is not None
    assert len(numbers(training)) == 48
    assert numbers(evaluation) == list(range(50))
    plain = next(iter(evaluation))
    augmented = {int(n): x for batch in training for n, x in zip(batch["number"], batch["x"], strict=True)}
    first = int(plain["number"][0])
    if first in augmented:
        assert augmented[first].tolist() == pytest.approx((plain["x"][0] + 1).tolist())


def test_a_decoder_of_the_users_own_is_found_by_its_target(shards: str) -> None:
    fields = {
        "npy": {"name": "x", "role": "feature", "decoder": {"_target_": f"{HERE}.reversing"}},
        "cls": FIELDS["cls"],
    }
    plain = next(iter(train_loader(config(train=shards), world(), FP32)))
    own = next(iter(train_loader(config(train=shards, fields=fields), world(), FP32)))
    assert own["x"].tolist() == plain["x"].flip(1).tolist()


def reversing() -> Any:
    return decode_reversed


def test_without_shards_to_evaluate_on_there_is_no_loader(shards: str) -> None:
    assert eval_loader(config(train=shards), world(), FP32) is None


def test_without_shards_to_train_on_the_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data.train is not set. Name shards, such as 'data.train="):
        train_loader(config(), world(), FP32)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_what_the_loader_refuses_is_told_by_its_key(shards: str, split: str, tmp_path: Path) -> None:
    cfg = config(**{"train": shards, "eval": shards, split: str(tmp_path / "none-*.tar")})
    with pytest.raises(ConfigError, match=rf"data.{split}: .*none-"):
        {"train": train_loader, "eval": eval_loader}[split](cfg, world(), FP32)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": {"_target_": "builtins.iter", "_args_": [[1]]}}, "data.train: got a list_iterator, want a data set"),
        ({"train": {"_target_": f"{HERE}.nowhere"}}, r"data.train._target_: .*nowhere' cannot be imported"),
        ({"train": {"root": "/data"}}, "data.train: has no _target_"),
        ({"num_workers": "many"}, "data.train: num_workers: got 'many', want a number from 0 on, or auto"),
    ],
)
def test_data_that_cannot_be_loaded_are_told_by_their_key(shards: str, data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_loader(config(**({"train": shards} | data)), world(), FP32)


def numbered(count: int) -> dict[str, np.ndarray]:
    return {"npy": np.stack([numbers_of(sample) for sample in range(count)]), "cls": np.arange(count)}


def test_a_data_set_by_its_target_is_loaded_as_shards_are(shards: str) -> None:
    target = {"_target_": f"{HERE}.numbered", "count": 50}
    loaded = {}
    for given in (shards, target):
        cfg = config(train=given, eval=given, shuffle="none", augment={"_target_": f"{HERE}.AddOne"})
        loaded[str(given)] = [
            torch.cat([batch["x"] for batch in loader])
            for loader in (train_loader(cfg, world(), FP32), eval_loader(cfg, world(), FP32))
            if loader is not None
        ]
        assert [field.role for field in declared_fields(cfg.data)] == ["feature", "label"]
    (in_shards, evaluated), (in_memory, evaluated_in_memory) = loaded.values()
    assert torch.equal(in_shards, in_memory)
    assert torch.equal(evaluated, evaluated_in_memory)
    assert torch.equal(in_shards[:50], evaluated[:50] + 1)


def test_lists_of_patterns_are_patterns(shards: str) -> None:
    first, rest = shards.replace("*", "0"), shards.replace("*", "[12]")
    assert sorted(numbers(train_loader(config(train=[first, rest]), world(), FP32))) == list(range(50))


def test_ranks_that_see_other_data_end_together_before_the_first_step(tmp_path: Path) -> None:
    folders = [tmp_path / "here", tmp_path / "there"]
    nodes = []
    for folder, count in zip(folders, (50, 40), strict=True):
        folder.mkdir()
        nodes.append(numbered_shards(folder, count))

    def rank(number: int) -> str:
        same = train_loader(config(train=nodes[0]), world(), FP32)
        check_same_data(same, None)
        with pytest.raises(ConfigError) as told:
            check_same_data(same, eval_loader(config(eval=nodes[number]), world(), FP32))
        return str(told.value)

    first, second = run_ranks(2, rank)
    assert first == second
    assert first.startswith("data.eval: ranks 0 and 1 see other data: ")
    assert "num_samples 50 and 40" in first


def test_data_are_prepared_by_one_rank_while_the_others_wait(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = config(prepare={"_target_": f"{HERE}.leave_a_mark", "path": str(mark)}).data

    def rank(number: int) -> str:
        prepare_data(data)
        return mark.read_text()

    assert run_ranks(3, rank) == ["prepared\n"] * 3


def test_what_cannot_be_prepared_is_an_error_on_every_rank() -> None:
    data = config(prepare={"_target_": f"{HERE}.cannot_prepare"}).data

    def rank(number: int) -> str:
        with pytest.raises(ConfigError) as raised:
            prepare_data(data)
        return str(raised.value)

    assert run_ranks(2, rank) == ["data.prepare: no network"] * 2
