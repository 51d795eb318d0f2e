"""Data sets without shards, through the same loader. Plain indexing says what their samples hold."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data import Generated, ShardLoader
from dtrain.data.fields import DataError
from tests.data.shards_for_tests import close, epoch_of, global_batches, keys_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
FIELDS = {"x": {"name": "x", "role": "feature"}, "y": {"name": "y", "role": "label"}}
NUMBERS = np.random.default_rng(0).normal(size=(47, 3)).astype(np.float32)


class Squares:
    """47 samples: three numbers each, and a square."""

    def __len__(self) -> int:
        return 47

    def __getitem__(self, sample: int) -> Any:
        return {"x": NUMBERS[sample], "y": sample**2, "more": None}


class Noisy(Squares):
    """Draws from the generators that everyone shares, as torchvision's transforms do."""

    def __getitem__(self, sample: int) -> Any:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64), sample


class Torn(Squares):
    """Some samples cannot be had."""

    def __getitem__(self, sample: int) -> Any:
        if sample % 5 == 1:
            raise OSError(f"no such file: {sample}")
        return {"x": NUMBERS[sample]} | ({"y": 1} if sample % 5 != 2 else {})


def drawn(sample: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    return rng.normal(size=3), sample


def loader_of(dataset: Any, **options: Any) -> ShardLoader:
    given = {"global_batch_size": 6, "num_workers": 0, **options}
    return ShardLoader.over(dataset, given.pop("fields", FIELDS), **given)


def ranks_of(dataset: Any, world: int, **options: Any) -> list[ShardLoader]:
    return [loader_of(dataset, rank=rank, world_size=world, **options) for rank in range(world)]


def values_of(ranks: list[ShardLoader], epoch: int = 0) -> dict[str, list[float]]:
    """``x`` of each sample of an epoch, by its key."""
    found = {
        key: x.tolist()
        for loader in ranks
        for batch in loader.epoch(epoch)
        for key, x in zip(batch.sample_keys, batch["x"], strict=True)
        if key
    }
    close(ranks)
    return found


# -- what comes out


@pytest.mark.parametrize("dataset", [Squares(), (NUMBERS, np.arange(47) ** 2)], ids=["map", "arrays"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_sample_comes_once_in_the_dtypes_of_the_run(dataset: Any, precision: str) -> None:
    batches = list(loader_of(dataset, precision=precision, name="squares"))
    keys = keys_of(batches)
    assert sorted(keys) == sorted(f"squares/{number}" for number in range(47))
    order = [int(key.partition("/")[2]) for key in keys]
    assert order != list(range(47))
    valid = torch.cat([batch.valid for batch in batches])
    x, y = (torch.cat([batch[name] for batch in batches])[valid] for name in "xy")
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert torch.equal(x, torch.from_numpy(NUMBERS[order]).to(compute))
    assert y.tolist() == [number**2 for number in order]


def test_values_of_a_tuple_come_in_the_order_of_the_fields() -> None:
    dataset = [(np.full(2, number, np.float32), f"text {number}") for number in range(9)]
    fields = {"Numbers": {"name": "a"}, "caption": {"name": "b", "role": "text"}}
    (batch,) = loader_of(dataset, fields=fields, shuffle="none", global_batch_size=9)
    assert batch["a"].tolist() == [[number, number] for number in range(9)]
    assert batch["b"] == [f"text {number}" for number in range(9)]
    (batch,) = loader_of(np.arange(5.0), fields={"x": {"name": "x"}}, shuffle="none", global_batch_size=5)
    assert batch["x"].tolist() == [0, 1, 2, 3, 4]


def test_keys_of_a_sample_may_be_in_upper_case() -> None:
    (batch,) = loader_of([{"Image": 1}, {"Image": 2}], fields={"Image": {"name": "x"}}, shuffle="none")
    assert batch["x"][batch.valid].tolist() == [1, 2]


def test_samples_that_cannot_be_had_are_masked_and_named() -> None:
    loader = loader_of(Torn(), max_bad=None, shuffle="none")
    batches = list(loader)
    assert keys_of(batches) == [f"Torn/{number}" for number in range(47) if number % 5 not in (1, 2)]
    lines = {line["key"]: line for batch in batches for line in batch.bad}
    assert len(lines) == loader.bad_samples == 19
    assert lines["Torn/6"] == {
        "key": "Torn/6",
        "epoch": 0,
        "shard": "Torn",
        "offset": 6,
        "reason": "OSError: no such file: 6",
    }
    assert lines["Torn/7"]["reason"] == "has no 'y', but 'x'"


def test_a_sample_of_another_number_of_values_ends_the_run() -> None:
    with pytest.raises(DataError, match=r"sample 'list/\d' has 3 values, data\.fields names 2: x, y\."):
        list(loader_of([(1, 2, 3)] * 4))


# -- the same for any topology


@pytest.mark.parametrize("dataset", [Noisy(), Generated(drawn, 47)], ids=["map", "generated"])
def test_what_a_sample_draws_depends_on_seed_epoch_and_sample_only(dataset: Any) -> None:
    alone = values_of([loader_of(dataset)])
    assert len({tuple(x) for x in alone.values()}) == 47
    assert values_of(ranks_of(dataset, 3, global_batch_size=5, micro_batch_size=1, shuffle="none")) == alone
    assert values_of([loader_of(dataset, num_workers=2, start_method="fork")]) == alone
    for other in (values_of([loader_of(dataset, seed=1)]), values_of([loader_of(dataset)], epoch=1)):
        assert not {tuple(x) for x in other.values()} & {tuple(x) for x in alone.values()}


def test_generated_samples_may_stay_the_same_in_every_epoch() -> None:
    dataset = Generated(drawn, 47, fresh=False)
    assert values_of([loader_of(dataset)], epoch=3) == values_of([loader_of(dataset)])
    assert values_of([loader_of(dataset, seed=1)]) != values_of([loader_of(dataset)])


def test_generators_of_the_calling_process_are_left_as_they_were() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    list(loader_of(Noisy()))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("shard_size", [None, 4])
def test_global_batches_do_not_depend_on_ranks(world: int, shard_size: int | None) -> None:
    alone = global_batches([loader_of(Squares(), shard_size=shard_size)])
    assert global_batches(ranks_of(Squares(), world, shard_size=shard_size)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_data_sets_travel_to_workers_of_any_start_method(start_method: str) -> None:
    loader = loader_of(Squares(), num_workers=2, start_method=start_method)
    assert global_batches([loader]) == global_batches([loader_of(Squares())])
    loader.close()


# -- states


@settings(deadline=None, max_examples=25)
@given(legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 14), st.integers(0, 6)), min_size=1, max_size=4))
def test_killed_anywhere_and_resumed_anyhow_an_epoch_is_each_sample_once(legs: list[tuple[int, int, int]]) -> None:
    state, used = None, []
    for world, batch, steps in [*legs, (1, 1, 47)]:
        ranks = ranks_of(Squares(), world, global_batch_size=batch, shard_size=3, window=2)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            used += keys_of(itertools.islice(committed(loader), steps))
        state = ranks[0].state_dict()
        if state["epoch"]:
            break
    assert sorted(used) == sorted(f"Squares/{number}" for number in range(47))


def committed(loader: ShardLoader) -> Iterator[Any]:
    for batch in loader.epoch(0):
        loader.commit()
        yield batch


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dataset": [(1, 2)] * 46, "name": "squares"}, r"samples 47 -> 46"),
        ({"dataset": Squares()}, r"name squares -> Squares"),
        ({"dataset": Squares(), "name": "squares", "shard_size": 2}, r"samples in a shard 1 -> 2"),
        ({"dataset": (NUMBERS, np.arange(47)), "name": "squares"}, r"as many samples of the same name, but other ones"),
    ],
)
def test_another_data_set_is_refused_with_the_difference(other: dict[str, Any], message: str) -> None:
    state = loader_of(Squares(), name="squares").state_dict()
    loader_of(Squares(), name="squares").load_state_dict(state)
    with pytest.raises(ValueError, match=rf"the data set changed.*{message}"):
        loader_of(**other).load_state_dict(state)


def test_a_fingerprint_of_the_users_own_guards_what_name_and_length_do_not() -> None:
    class Versioned(Squares):
        def __init__(self, fingerprint: str) -> None:
            self.fingerprint = fingerprint

    state = loader_of(Versioned("v1")).state_dict()
    loader_of(Versioned("v1")).load_state_dict(state)
    with pytest.raises(ValueError, match="the data set changed"):
        loader_of(Versioned("v2")).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dataset": []}, "list has 0 samples"), ({"dataset": [1], "shard_size": 0}, "data.shard_size: got 0")],
)
def test_nothing_to_load_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of(**options)


def test_steps_of_a_data_set_without_shards_are_counted_alike(tmp_path: Any) -> None:
    loader = loader_of(Squares(), global_batch_size=10)
    assert (loader.steps_per_epoch, len(epoch_of(loader)), loader.position) == (5, 5, (1, 0))
    assert loader.source.summary() == "47 samples of Squares"


def test_keys_that_differ_in_case_only_are_refused() -> None:
    fields = {"A": {"name": "upper"}, "a": {"name": "lower"}}
    with pytest.raises(ValueError, match="'A', 'a' some differ in upper and lower case only"):
        ShardLoader.over({"A": [1], "a": [2]}, fields, global_batch_size=1)
