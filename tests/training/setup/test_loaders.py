from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.config.schema import Config, DataConfig
from dtrain.data import ShardLoader, digits
from dtrain.data.sources import shard_reader
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.training.setup.loaders import (
    check_same_data,
    class_names,
    corpus_beside,
    declared_fields,
    eval_loader,
    on_all_ranks_alike,
    prepare_data,
    train_loader,
)
from tests.configs import config_of
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import assert_refused, refused
from tests.shards import VECTOR_FIELDS, vector, write_vectors
from tests.toys import world
from tests.whole_runs import metrics, records, status, train_on

# -- loaders


HERE = "tests.training.setup.test_loaders"
FP32 = Precision("fp32")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vectors(tmp_path_factory.mktemp("shards"), 50)


def config(**data: Any) -> Config:
    """A config with these keys of ``data``; 12 samples a step, no workers."""
    given = {"train": {"global_batch_size": 12}, "data": {"fields": VECTOR_FIELDS, "num_workers": 0, **data}}
    return config_of(given)


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


def test_random_offsets_need_the_shards_of_a_text() -> None:
    for named in ({"train": {"_target_": f"{HERE}.Anything"}}, {"mixture": {"a": {"shards": "a.tar"}}}):
        with refused(ConfigError, "data.random_offset=true", "data.train", "data.random_offset=false"):
            train_loader(config(random_offset=True, **named), world(0, 1), FP32)


def test_training_is_shuffled_and_evaluation_is_in_stored_order_if_asked_for(shards: str) -> None:
    cfg = config(train=shards, eval=shards)
    trained = numbers(train_loader(cfg, world(), FP32))
    assert sorted(trained) == list(range(50))
    assert trained != list(range(50))
    evaluated, stored = eval_loader(cfg, world(), FP32), eval_loader(cfg, world(), FP32, in_stored_order=True)
    assert evaluated is not None
    assert stored is not None
    assert sorted(numbers(evaluated)) == numbers(stored) == list(range(50))


def test_each_rank_opens_its_share_of_the_evaluation_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(eval=write_vectors(tmp_path, 100, shards=12))
    opened: set[str] = set()
    open_shard = shard_reader.open_shard
    monkeypatch.setattr(shard_reader, "open_shard", lambda path: opened.add(path) or open_shard(path))
    batches = {}
    for size in (1, 2, 4):
        ranks = []
        for rank in range(size):
            loader = eval_loader(cfg, replace(world(), rank=rank, size=size), FP32)
            assert loader is not None
            opened.clear()
            ranks.append([batch["number"][batch.valid].tolist() for batch in loader])
            assert len(opened) <= 12 // size + 1, (rank, size)
        batches[size] = [[number for part in step for number in part] for step in zip(*ranks, strict=True)]
        assert sorted(number for step in batches[size] for number in step) == list(range(100))
    assert batches[1] == batches[2] == batches[4]  # the same global batches for any number of ranks


def test_an_evaluation_resumes_on_other_ranks(tmp_path: Path) -> None:
    cfg = config(eval=write_vectors(tmp_path, 100, shards=12))
    first = eval_loader(cfg, world(), FP32)
    assert first is not None
    used = []
    for batch in itertools.islice(first, 3):
        used += batch["number"][batch.valid].tolist()
        first.commit()
    for rank in range(2):
        rest = eval_loader(cfg, replace(world(), rank=rank, size=2), FP32)
        assert rest is not None
        rest.load_state_dict(first.state_dict())
        used += numbers(rest)
    assert sorted(used) == list(range(100))


def test_what_is_dropped_or_augmented_in_training_is_not_in_evaluation(shards: str) -> None:
    cfg = config(train=shards, eval=shards, tail="drop", augment={"_target_": f"{HERE}.AddOne"})
    training, evaluation = train_loader(cfg, world(), FP32), eval_loader(cfg, world(), FP32)
    assert evaluation is not None
    assert len(numbers(training)) == 48
    assert sorted(numbers(evaluation)) == list(range(50))
    plain = next(iter(evaluation))
    augmented = {int(n): x for batch in training for n, x in zip(batch["number"], batch["x"], strict=True)}
    first = int(plain["number"][0])
    if first in augmented:
        assert augmented[first].tolist() == pytest.approx((plain["x"][0] + 1).tolist())


def test_a_decoder_of_the_users_own_is_found_by_its_target(shards: str) -> None:
    fields = {
        "npy": {"name": "x", "role": "feature", "decoder": {"_target_": f"{HERE}.reversing"}},
        "cls": VECTOR_FIELDS["cls"],
    }
    plain = next(iter(train_loader(config(train=shards), world(), FP32)))
    own = next(iter(train_loader(config(train=shards, fields=fields), world(), FP32)))
    assert own["x"].tolist() == plain["x"].flip(1).tolist()


def reversing() -> Any:
    return decode_reversed


def test_without_shards_to_evaluate_on_there_is_no_loader(shards: str) -> None:
    assert eval_loader(config(train=shards), world(), FP32) is None


def test_without_shards_to_train_on_the_key_is_named() -> None:
    with refused(ConfigError, "data.train", "is not set", "'data.train="):
        train_loader(config(), world(), FP32)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_what_the_loader_refuses_is_told_by_its_key(shards: str, split: str, tmp_path: Path) -> None:
    cfg = config(**{"train": shards, "eval": shards, split: str(tmp_path / "none-*.tar")})
    with refused(ConfigError, f"data.{split}: ", "none-"):
        {"train": train_loader, "eval": eval_loader}[split](cfg, world(), FP32)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"train": {"_target_": "builtins.iter", "_args_": [[1]]}}, ["data.train", "got a list_iterator", "dataset"]),
        ({"train": {"_target_": f"{HERE}.nowhere"}}, ["data.train._target_", "nowhere' cannot be imported"]),
        ({"train": {"root": "/data"}}, ["data.train", "{'root': '/data'}", "data.train._target_="]),
        ({"num_workers": "many"}, ["data.num_workers", "got 'many'"]),
    ],
)
def test_data_that_cannot_be_loaded_are_told_by_their_key(shards: str, data: dict[str, Any], names: list[str]) -> None:
    with refused(ConfigError, *names):
        train_loader(config(**({"train": shards} | data)), world(), FP32)


def numbered(count: int) -> dict[str, np.ndarray]:
    return {"npy": np.stack([vector(sample) for sample in range(count)]), "cls": np.arange(count)}


def test_a_data_set_by_its_target_is_loaded_as_shards_are(shards: str) -> None:
    target = {"_target_": f"{HERE}.numbered", "count": 50}
    loaded = {}
    for given in (shards, target):
        cfg = config(train=given, eval=given, shuffle="none", lanes=12, augment={"_target_": f"{HERE}.AddOne"})
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
        nodes.append(write_vectors(folder, count))

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


def test_a_shard_that_is_damaged_on_one_rank_is_left_out_by_all(tmp_path: Path) -> None:
    nodes = []
    for number in range(2):
        nodes.append(write_vectors(tmp_path / str(number), 50, shards=5))
    os.truncate(tmp_path / "1" / "part-3.tar", 900)

    def rank(number: int) -> tuple[dict[str, dict[str, str]], str]:
        cfg = config(train=nodes[number], eval=nodes[number], bad_shards="skip", num_workers=0)
        here = replace(world(), rank=number, size=2)
        training = on_all_ranks_alike(lambda also_bad: train_loader(cfg, here, FP32, also_bad))
        evaluation = on_all_ranks_alike(lambda also_bad: eval_loader(cfg, here, FP32, also_bad))
        check_same_data(training, evaluation)
        cfg.data.max_bad_shards = 0
        with pytest.raises(ConfigError) as told:
            on_all_ranks_alike(lambda also_bad: train_loader(cfg, here, FP32, also_bad))
        assert evaluation is not None
        assert evaluation.bad_shards == training.bad_shards
        return training.bad_shards, str(told.value)

    (first, told), (second, _) = run_ranks(2, rank)
    assert list(first[""]) == list(second[""]) == ["part-3.tar"]
    assert_refused(told, "data.train", "data.max_bad_shards=0", "part-3.tar")


def test_sources_of_a_mixture_and_sets_leave_out_their_own_shards(tmp_path: Path) -> None:
    web, books = write_vectors(tmp_path / "web", 30), write_vectors(tmp_path / "books", 30)
    os.truncate(tmp_path / "books" / "part-1.tar", 900)
    (tmp_path / "web.txt").write_text("web/part-*.tar\n")
    listed = f"@{tmp_path / 'web.txt'}"
    mixture = {"web": {"shards": listed}, "books": {"shards": books}}
    cfg = config(mixture=mixture, eval={"web": web, "books": books}, bad_shards="skip")
    with pytest.warns(UserWarning, match="part-1.tar"):
        training, evaluation = train_loader(cfg, world(), FP32), eval_loader(cfg, world(), FP32)
    assert evaluation is not None
    for loader in (training, evaluation):
        assert {source: list(names) for source, names in loader.bad_shards.items()} == {"books": ["part-1.tar"]}
        assert loader.index.num_samples == 50
    cfg.data.bad_shards = "refuse"
    with refused(ConfigError, "books", "part-1.tar", "data.bad_shards=skip"):
        train_loader(cfg, world(), FP32)


def test_files_beside_the_shards_of_a_list_are_found(tmp_path: Path) -> None:
    write_vectors(tmp_path / "s", 6)
    (tmp_path / "s" / "classes.json").write_text('["cat", "dog"]')
    for first in ("part-0.tar", "missing.tar"):
        (tmp_path / "s.txt").write_text(f"s/{first}\ns/part-1.tar\n")
        assert class_names(config(train=f"@{tmp_path / 's.txt'}").data) == ["cat", "dog"]


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

    for message in run_ranks(2, rank):
        assert_refused(message, "data.prepare", remedy="no network")


# -- data sources


SMALL = ("model.width=4", "data.num_workers=0", "checkpoint.every_minutes=null", "checkpoint.best=null")


class Digits:
    """Map-style: a dict for each sample."""

    def __init__(self, split: str, count: int = 100) -> None:
        self._arrays = digits.arrays(split)
        self._count = count
        self.fingerprint = "v1"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, sample: int) -> dict[str, Any]:
        return {name: array[sample] for name, array in self._arrays.items()}


class DiskThatGoes(Digits):
    """Nothing can be read from sample 48 on."""

    def __getitem__(self, sample: int) -> dict[str, Any]:
        if sample >= 48:
            raise OSError("no such device")
        return super().__getitem__(sample)


def noise(sample: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"image": rng.integers(0, 256, (8, 8, 3), dtype=np.uint8), "label": sample % 10}


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_digits_in_memory_give_the_losses_of_digits_in_shards(tmp_path: Path) -> None:
    common = (*SMALL, "train.max_steps=6", "data.shuffle=none")
    train_on(1, tmp_path / "shards", *common)
    train_on(2, tmp_path / "memory", "data=memory", *common)
    assert metrics(tmp_path / "memory") == pytest.approx(metrics(tmp_path / "shards"), rel=1e-4)
    name = "eval/accuracy"
    assert metrics(tmp_path / "memory", name) == pytest.approx(metrics(tmp_path / "shards", name), abs=1 / 360)


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_a_map_style_data_set_is_trained_on_and_resumed_on_other_ranks(tmp_path: Path) -> None:
    target = f"data.train={{_target_: {HERE}.Digits, split: train}}"
    data = ("data=map", target, "data.fields.image.size=null")
    evaluated = f"data.eval={{_target_: {HERE}.Digits, split: test, count: 30}}"
    for ranks, end in ((2, 3), (1, 7)):
        options = ("train.global_batch_size=16", f"train.max_steps={end}", "data.record_keys=true")
        train_on(ranks, tmp_path, *data, evaluated, *SMALL, *options)
    lines = [json.loads(line) for path in tmp_path.glob("logs/keys-*") for line in path.read_text().splitlines()]
    assert sorted(key for line in lines for key in line["keys"]) == sorted(f"Digits/{number}" for number in range(100))
    assert records(tmp_path)[-1]["eval/samples"] == 30


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_generated_samples_are_trained_on_by_as_many_workers_as_they_need(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = f"{{_target_: dtrain.data.Generated, length: 40, function: {{_target_: {HERE}.noise, _partial_: true}}}}"
    data = ("data=map", f"data.train={target}", "data.fields.image.size=null", "data.num_workers=auto")
    small = (option for option in SMALL if "num_workers" not in option)
    train_on(1, tmp_path, *data, *small, "train.global_batch_size=16", "train.max_steps=4")
    assert len(metrics(tmp_path)) == 4
    message = " ".join(capfd.readouterr().out.split())
    assert "40 samples of Generated" in message
    assert "for each rank (a micro-batch takes" in message


@pytest.mark.usefixtures("digits")
@pytest.mark.slow
def test_a_row_of_bad_samples_ends_the_run_on_every_rank_alike(tmp_path: Path) -> None:
    target = f"data.train={{_target_: {HERE}.DiskThatGoes, split: train}}"
    data = ("data=map", target, "data.fields.image.size=null", "data.shuffle=none")
    budget = ("data.max_bad=1000", "data.max_bad_consecutive=20", "train.global_batch_size=16", "train.max_epochs=1")
    with pytest.raises(RanksFailed) as failed:
        train_on(2, tmp_path, *data, *budget, *SMALL)
    assert set(failed.value.reports) == {0, 1}
    assert not failed.value.hung
    assert status(tmp_path)["state"] == "failed"
    told = "32 samples in a row could not be read, more than data.max_bad_consecutive=20 allows"
    assert told in status(tmp_path)["reason"]


# -- class names


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    (tmp_path / "a-0.tar").touch()
    return DataConfig(eval=f"{tmp_path}/a-*.tar")


def test_names_are_those_beside_the_first_shards_that_have_any(data: DataConfig, tmp_path: Path) -> None:
    assert class_names(data) is None  # and data.train is not set
    (tmp_path / "classes.json").write_text(json.dumps(["cat", "dog"]))
    data.train = "gone/*.tar"
    assert class_names(data) == ["cat", "dog"]


@pytest.mark.parametrize("content", ["{", '{"cat": 0}', '["cat", 1]', '"cat"'])
def test_a_file_that_is_no_list_of_names_is_refused(data: DataConfig, tmp_path: Path, content: str) -> None:
    (tmp_path / "classes.json").write_text(content)
    with refused(ConfigError, "classes.json", remedy="Correct or delete it"):
        class_names(data)


# -- mixtures and evaluation sets


def mixture(first: str, **of_second: Any) -> dict[str, Any]:
    """Two sources: vectors, weight 3, and a generated one, weight 1."""
    second = {
        "shards": {"_target_": f"{HERE}.more_vectors"},
        "fields": {"x": {"name": "x", "role": "feature"}, "n": {"name": "number", "role": "label"}},
    }
    return {"first": {"shards": first, "weight": 3}, "second": {**second, **of_second}}


def more_vectors() -> dict[str, np.ndarray]:
    return {"x": np.zeros((30, 3), np.float32), "n": np.arange(1000, 1030)}


def test_the_mixture_of_a_config_replaces_data_train(shards: str) -> None:
    given = mixture(shards, augment={"_target_": f"{HERE}.AddOne"})
    loader = train_loader(config(train="nowhere/*.tar", mixture=given), world(), FP32)
    batch = next(iter(loader))
    is_second = batch["source"] == 1
    assert is_second.sum() == 3
    assert torch.equal(batch["number"] >= 1000, is_second)
    assert (batch["x"][is_second] == 1).all()
    assert batch.sources == ("first", "second")
    assert loader.samples_by_source() == {"first": 0, "second": 0}
    loader.commit()
    assert loader.samples_by_source() == {"first": 9, "second": 3}


def test_sets_of_data_eval_have_the_fields_of_their_sources(shards: str) -> None:
    given = mixture(shards)
    sets = {name: source["shards"] for name, source in given.items()}
    cfg = config(mixture=given, eval=sets)
    loader = eval_loader(cfg, world(), FP32, in_stored_order=True)
    assert loader is not None
    assert numbers(loader) == [*range(50), *range(1000, 1030)]
    assert [field.name for field in declared_fields(cfg.data)] == ["x", "number"]


@pytest.mark.parametrize(
    ("of_second", "names"),
    [
        ({"wieght": 1}, ["data.mixture.second", "'wieght'", "weight"]),
        ({"shards": None}, ["data.mixture.second", "shards: PATTERN"]),
        ({"shards": 5}, ["data.mixture.second.shards", "5", "_target_"]),
        ({"weight": -1}, ["data.mixture.second.weight", "-1", "at least 0"]),
        (
            {"shards": {"_target_": "dtrain.data.Stream", "dataset": [1], "length": 1}},
            ["data.mixture.second.shards", "stream", "shards"],
        ),
        ({"fields": {"x": {"name": "x", "role": "target"}}}, ["field 'x'", "first", "second", "role"]),
    ],
)
def test_impossible_sources_are_told_by_their_key(shards: str, of_second: dict[str, Any], names: list[str]) -> None:
    with refused(ConfigError, *names):
        train_loader(config(mixture=mixture(shards, **of_second)), world(), FP32)


def test_an_unknown_source_of_epoch_of_is_refused(shards: str) -> None:
    with refused(ConfigError, "data.epoch_of", "'third'", "first, second"):
        train_loader(config(mixture=mixture(shards), epoch_of="third"), world(), FP32)


def described(folder: Path, shards: str, **facts: Any) -> str:
    """The shards in a folder of their own, with a ``dataset.json`` of these facts."""
    folder.mkdir()
    for path in Path(shards).parent.glob("*.tar"):
        (folder / path.name).symlink_to(path)
    (folder / "dataset.json").write_text(json.dumps(facts))
    return str(folder / "*.tar")


def test_a_dataset_json_of_another_tool_is_not_read(tmp_path: Path, shards: str) -> None:
    assert corpus_beside(config(train=described(tmp_path / "a", shards, labels=[["0.png", 1]])).data) is None
    damaged = described(tmp_path / "b", shards, tokenizer="bytes")
    with refused(ConfigError, tmp_path / "b" / "dataset.json", "vocab_size", "Pack the text again"):
        corpus_beside(config(train=damaged).data)


def test_texts_of_other_tokenizers_are_refused(tmp_path: Path, shards: str) -> None:
    facts = {"tokenizer": "tokenizers:0", "vocab_size": 9, "end_of_text": 3, "padding": None, "bytes_per_token": 4.5}
    train = described(tmp_path / "train", shards, **facts)
    other_end = described(tmp_path / "end", shards, **facts | {"end_of_text": 4})
    mixture = {"a": {"shards": train, "weight": 1}, "b": {"shards": other_end, "weight": 1}}
    with refused(ConfigError, "data.mixture", "end of text 4", "same way", tmp_path / "end"):
        corpus_beside(config(mixture=mixture).data)
    other = described(tmp_path / "other", shards, **facts | {"tokenizer": "bytes"})
    for named in (other, {"near": train, "far": other}):
        with refused(ConfigError, "data.eval", "bytes", f"vocabulary:{tmp_path / 'train'}", tmp_path / "other"):
            corpus_beside(config(train=train, eval=named).data)
    padded = described(tmp_path / "padded", shards, **facts | {"padding": 9})
    corpus = corpus_beside(config(train=train, eval=padded).data)
    assert corpus is not None
    assert corpus.padding == 9  # only rows to evaluate on have it, and they must not count it
    left = corpus_beside(config(train=str(tmp_path / "deleted" / "*.tar"), eval=padded).data)
    assert left is not None
    assert left.padding == 9


def test_sources_with_other_class_names_are_refused(tmp_path: Path, shards: str) -> None:
    given = {name: {"shards": write_vectors(tmp_path / name, 3)} for name in ("cats", "dogs")}
    (tmp_path / "cats" / "classes.json").write_text('["a", "b"]')
    assert class_names(config(mixture=given).data) == ["a", "b"]
    (tmp_path / "dogs" / "classes.json").write_text('["b", "a"]')
    with refused(ConfigError, "data.mixture", str(tmp_path / "dogs"), "same classes"):
        class_names(config(mixture=given).data)
