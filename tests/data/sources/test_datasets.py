"""Datasets without shards. Pillow and plain indexing say what their samples hold."""

from __future__ import annotations

import functools
import io
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import IterableDataset, TensorDataset

from dtrain.data import Limits, ShardLoader, WorkerOptions
from dtrain.data.fields.field import DataError, Field, SampleError
from dtrain.data.sources.datasets import Arrays, Generated, SampleIndex, as_dataset, value_fields, value_of
from tests.property_tests import examples
from tests.refusals import refused
from tests.shards import close, global_batches, read_epoch, valid_keys


def test_a_sample_is_a_row_of_each_array() -> None:
    x, y = np.arange(6).reshape(3, 2), ["a", "b", "c"]
    named, placed = Arrays({"x": x, "y": y}), Arrays((x, torch.arange(3)))
    assert len(named) == len(placed) == 3
    assert (named[1]["x"].tolist(), named[1]["y"]) == ([2, 3], "b")
    assert [value.tolist() for value in placed[2]] == [[4, 5], 2]


@pytest.mark.parametrize(
    ("arrays", "names"), [({"x": np.zeros(3), "y": np.zeros(4)}, ["lengths [3, 4]"]), ({}, ["lengths []"])]
)
def test_arrays_of_different_lengths_are_refused(arrays: Any, names: list[str]) -> None:
    with refused(ValueError, *names):
        Arrays(arrays)


def test_arrays_of_a_file_are_those_that_are_named(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, x=np.arange(3), x_test=np.arange(2.0))
    assert Arrays.from_npz(str(path), x="x_test")[1] == {"x": 1.0}
    assert len(Arrays.from_npz(str(path), x="x")) == 3
    with refused(ValueError, path, "'y'", "x, x_test"):
        Arrays.from_npz(str(path), x="y")


def test_a_file_of_arrays_is_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, x=np.array([{}, []], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        Arrays.from_npz(str(path))


def test_the_fingerprint_of_arrays_tells_them_apart() -> None:
    x = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
    same = {Arrays({"x": copy}).fingerprint for copy in (x, x.copy(), np.asfortranarray(x))}
    others = [
        {"x": x + 1},
        {"x": x[::-1]},
        {"x": x[:-1]},
        {"x": x.astype(np.float64)},
        {"y": x},
        {"x": torch.from_numpy(x).bfloat16()},
        {"x": ["a"] * 500},
        {"x": ["b"] * 500},
        (x,),
    ]
    assert len(same) == 1
    assert len(same | {Arrays(other).fingerprint for other in others}) == 1 + len(others)


def draw(sample: int, rng: np.random.Generator, scale: float = 1.0) -> tuple[float, int]:
    return scale * rng.random(), sample


def test_generated_samples_are_told_apart_by_their_function() -> None:
    assert len(Generated(draw, 7)) == 7
    assert Generated(draw, 7).fingerprint == Generated(functools.partial(draw, scale=2), 9).fingerprint
    assert Generated(draw, 7).fingerprint != Generated(lambda sample, rng: 1, 7).fingerprint
    with pytest.raises(ValueError, match="got length 0"):
        Generated(draw, 0)


def test_dicts_and_tuples_are_arrays_and_map_style_data_sets_are_themselves() -> None:
    assert isinstance(as_dataset({"x": [1]}), Arrays)
    assert isinstance(as_dataset(([1], [2])), Arrays)
    for dataset in ([(1, 2)], TensorDataset(torch.zeros(2)), Generated(draw, 3), np.zeros(3)):
        assert as_dataset(dataset) is dataset


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([1])


def test_what_has_no_length_or_no_items_is_refused_with_the_remedy() -> None:
    with refused(ValueError, "Stream", "__getitem__", "to shards"):
        as_dataset(Stream())
    with refused(ValueError, "int", "__len__", "__getitem__"):
        as_dataset(3)


@pytest.mark.parametrize(
    ("samples", "size", "shards"), [(47, None, 47), (47, 10, 5), (40, 10, 4), (200_000, None, 50_000)]
)
def test_the_row_is_cut_into_equal_shards(samples: int, size: int | None, shards: int) -> None:
    index = SampleIndex("x", samples, size)
    assert len(index.counts) == shards
    assert index.counts.sum() == index.num_samples == samples
    assert set(index.counts[:-1].tolist()) <= {index.shard_size}
    assert 0 < index.counts[-1] <= index.shard_size


def test_a_sample_is_named_by_its_number() -> None:
    assert SampleIndex("mnist", 9).keys(np.array([7, 0])) == ["mnist/7", "mnist/0"]


def test_name_length_cut_and_content_identify_a_data_set() -> None:
    different = [("x", 9), ("y", 9), ("x", 8), ("x", 9, 2), ("x", 9, None, "v2")]
    assert len({SampleIndex(*given).fingerprint for given in different}) == len(different)
    assert SampleIndex("x", 9).difference(SampleIndex("x", 9).describe()) == ""


RGB = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
GREY = RGB[:, :, 0]
SPREAD = np.stack([GREY] * 3, axis=2)


def make_field(role: str | None = "image", **options: Any) -> Field:
    (field,) = value_fields({"x": {"name": "x", "role": role, **options}})
    return field


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(RGB, RGB, id="array"),
        pytest.param(RGB.transpose(2, 0, 1), RGB, id="channels first"),
        pytest.param(torch.from_numpy(RGB), RGB, id="tensor"),
        pytest.param(
            torch.from_numpy(RGB).permute(2, 0, 1), RGB, id="tensor, channels first, as torchvision reads files"
        ),
        pytest.param(GREY, SPREAD, id="grey"),
        pytest.param(torch.from_numpy(GREY)[None], SPREAD, id="grey tensor, channel first"),
        pytest.param(GREY[:, :, None], SPREAD, id="grey, channel last"),
        pytest.param(np.dstack([RGB, GREY]), RGB, id="alpha is dropped"),
        pytest.param(Image.fromarray(RGB), RGB, id="picture"),
        pytest.param(Image.fromarray(GREY), SPREAD, id="grey picture"),
        pytest.param(Image.fromarray(np.dstack([RGB, GREY])), RGB, id="picture with alpha"),
        pytest.param(png(RGB), RGB, id="an encoded image"),
    ],
)
def test_whatever_holds_pixels_becomes_three_channels_of_bytes(raw: Any, expected: np.ndarray) -> None:
    got = value_of(make_field(), raw)
    assert (got.dtype, got.shape) == (np.uint8, (6, 5, 3))
    assert np.array_equal(got, expected)


def test_images_are_brought_to_the_size_of_their_field() -> None:
    for raw in (RGB, png(RGB), Image.fromarray(RGB)):
        assert np.array_equal(value_of(make_field(size=[3, 4]), raw), value_of(make_field(size=[3, 4]), png(RGB)))
        assert value_of(make_field(size=[3, 4]), raw).shape == (3, 4, 3)


def test_a_picture_is_turned_as_its_exif_says_where_that_is_asked_for() -> None:
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 3
    Image.fromarray(RGB).save(stream, "PNG", exif=exif)
    picture = Image.open(stream)
    assert np.array_equal(value_of(make_field(), picture), RGB)
    assert np.array_equal(value_of(make_field(exif=True), picture), RGB[::-1, ::-1])


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (torch.zeros(3, 6, 5), "torch.float32 [3, 6, 5]"),
        (np.zeros((6, 5, 3)), "float64 [6, 5, 3]"),
        (np.zeros((6, 5, 2), np.uint8), "uint8 [6, 5, 2]"),
        ("path/to.jpg", "str"),
    ],
)
def test_what_holds_no_pixels_is_refused_with_the_remedy(raw: Any, told: str) -> None:
    with refused(DataError, key="returns", got=told, remedy="Leave out ToTensor"):
        value_of(make_field(), raw)


def test_everything_else_keeps_its_type() -> None:
    mask = Image.fromarray(np.array([[0, 7]], np.uint8), "P")
    assert value_of(make_field(None), mask).tolist() == [[0, 7]]
    for raw in (3, "text", b"bytes", np.int16(4), {"a": 1}):
        assert value_of(make_field(None), raw) is raw
    weight = torch.ones(2, requires_grad=True)
    assert not value_of(make_field("feature"), weight).requires_grad


def broken(value: Any) -> Any:
    raise {"value": ValueError, "file": OSError, "sample": SampleError, "bug": KeyError}[value](value)


def test_a_decoder_is_given_the_value_and_may_find_it_bad() -> None:
    assert value_of(make_field(None, decoder=str.upper), "a") == "A"
    for raw, told in (("value", "field 'x': ValueError: value"), ("file", "OSError: file"), ("sample", "^sample$")):
        with pytest.raises(SampleError, match=told):
            value_of(make_field(None, decoder=broken), raw)
    with pytest.raises(KeyError):
        value_of(make_field(None, decoder=broken), "bug")
    with pytest.raises(SampleError, match="not a readable image"):
        value_of(make_field(), png(RGB)[:40])


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


def make_loader(dataset: Any, **options: Any) -> ShardLoader:
    given = {"global_batch_size": 6, "num_workers": 0, **options}
    return ShardLoader.over(dataset, given.pop("fields", FIELDS), **given)


def make_ranks(dataset: Any, world: int, **options: Any) -> list[ShardLoader]:
    return [make_loader(dataset, rank=rank, world_size=world, **options) for rank in range(world)]


def epoch_values(ranks: list[ShardLoader], epoch: int = 0) -> dict[str, list[float]]:
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
    batches = list(make_loader(dataset, precision=precision, name="squares"))
    keys = valid_keys(batches)
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
    (batch,) = make_loader(dataset, fields=fields, shuffle="none", global_batch_size=9)
    assert batch["a"].tolist() == [[number, number] for number in range(9)]
    assert batch["b"] == [f"text {number}" for number in range(9)]
    (batch,) = make_loader(np.arange(5.0), fields={"x": {"name": "x"}}, shuffle="none", global_batch_size=5)
    assert batch["x"].tolist() == [0, 1, 2, 3, 4]


def test_keys_of_a_sample_may_be_in_upper_case() -> None:
    (batch,) = make_loader([{"Image": 1}, {"Image": 2}], fields={"Image": {"name": "x"}}, shuffle="none")
    assert batch["x"][batch.valid].tolist() == [1, 2]


def test_samples_that_cannot_be_had_are_masked_and_named() -> None:
    loader = make_loader(Torn(), limits=Limits(max_bad=None), shuffle="none")
    batches = list(loader)
    assert valid_keys(batches) == [f"Torn/{number}" for number in range(47) if number % 5 not in (1, 2)]
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
    with refused(DataError, "'list/", "3 values", "data.fields", "2: x, y"):
        list(make_loader([(1, 2, 3)] * 4))


# -- the same for any topology


@pytest.mark.parametrize("dataset", [Noisy(), Generated(drawn, 47)], ids=["map", "generated"])
def test_what_a_sample_draws_depends_on_seed_epoch_and_sample_only(dataset: Any) -> None:
    alone = epoch_values([make_loader(dataset)])
    assert len({tuple(x) for x in alone.values()}) == 47
    assert epoch_values(make_ranks(dataset, 3, global_batch_size=5, micro_batch_size=1, shuffle="none")) == alone
    assert epoch_values([make_loader(dataset, num_workers=2, workers=WorkerOptions(start_method="fork"))]) == alone
    for other in (epoch_values([make_loader(dataset, seed=1)]), epoch_values([make_loader(dataset)], epoch=1)):
        assert not {tuple(x) for x in other.values()} & {tuple(x) for x in alone.values()}


def test_generated_samples_may_stay_the_same_in_every_epoch() -> None:
    dataset = Generated(drawn, 47, fresh=False)
    assert epoch_values([make_loader(dataset)], epoch=3) == epoch_values([make_loader(dataset)])
    assert epoch_values([make_loader(dataset, seed=1)]) != epoch_values([make_loader(dataset)])


def test_generated_samples_of_an_evaluation_are_not_those_of_training() -> None:
    fixed = {tuple(x) for x in epoch_values([make_loader(Generated(drawn, 47, fresh=False))]).values()}
    for epoch in range(3):
        assert not fixed & {tuple(x) for x in epoch_values([make_loader(Generated(drawn, 47))], epoch=epoch).values()}


def test_generators_of_the_calling_process_are_left_as_they_were() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    list(make_loader(Noisy()))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("shard_size", [None, 4])
def test_global_batches_do_not_depend_on_ranks(world: int, shard_size: int | None) -> None:
    alone = global_batches([make_loader(Squares(), shard_size=shard_size)])
    assert global_batches(make_ranks(Squares(), world, shard_size=shard_size)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_data_sets_travel_to_workers_of_any_start_method(start_method: str) -> None:
    loader = make_loader(Squares(), num_workers=2, workers=WorkerOptions(start_method=start_method))
    assert global_batches([loader]) == global_batches([make_loader(Squares())])
    loader.close()


# -- states


@examples(25)
@given(legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 14), st.integers(0, 6)), min_size=1, max_size=4))
def test_killed_anywhere_and_resumed_anyhow_an_epoch_is_each_sample_once(legs: list[tuple[int, int, int]]) -> None:
    state, used = None, []
    for world, batch, steps in [*legs, (1, 1, 47)]:
        ranks = make_ranks(Squares(), world, global_batch_size=batch, shard_size=3, window=2)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            used += valid_keys(itertools.islice(committed(loader), steps))
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
        (
            {"dataset": (NUMBERS, np.arange(47)), "name": "squares"},
            r"same name and number of samples, but other content",
        ),
    ],
)
def test_another_data_set_is_refused_with_the_difference(other: dict[str, Any], message: str) -> None:
    state = make_loader(Squares(), name="squares").state_dict()
    make_loader(Squares(), name="squares").load_state_dict(state)
    with refused(ValueError, "the dataset changed", message):
        make_loader(**other).load_state_dict(state)


def test_a_fingerprint_of_the_users_own_guards_what_name_and_length_do_not() -> None:
    class Versioned(Squares):
        def __init__(self, fingerprint: str) -> None:
            self.fingerprint = fingerprint

    state = make_loader(Versioned("v1")).state_dict()
    make_loader(Versioned("v1")).load_state_dict(state)
    with refused(ValueError, "the dataset changed"):
        make_loader(Versioned("v2")).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "names"),
    [({"dataset": []}, ["list has 0 samples"]), ({"dataset": [1], "shard_size": 0}, ["data.shard_size", "got 0"])],
)
def test_nothing_to_load_is_refused(options: dict[str, Any], names: list[str]) -> None:
    with refused(ValueError, *names):
        make_loader(**options)


def test_steps_of_a_data_set_without_shards_are_counted_alike(tmp_path: Any) -> None:
    loader = make_loader(Squares(), global_batch_size=10)
    assert (loader.steps_per_epoch, len(read_epoch(loader)), loader.position) == (5, 5, (1, 0))
    assert loader.source.summary() == "47 samples of Squares"


def test_keys_that_differ_in_case_only_are_refused() -> None:
    fields = {"A": {"name": "upper"}, "a": {"name": "lower"}}
    with refused(ValueError, "data.fields", "'A', 'a'", "Rename"):
        ShardLoader.over({"A": [1], "a": [2]}, fields, global_batch_size=1)
