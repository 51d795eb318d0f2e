from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from dtrain.data import Batch, Limits, Stream
from dtrain.data.fields.field import DataError
from dtrain.data.loading.stream import StreamLoader
from tests.property_tests import examples
from tests.refusals import refused
from tests.shards import close, write_numbered

FIELDS = {"x": {"name": "x", "role": "feature"}, "n": {"name": "number", "role": "label"}}


class Numbers(IterableDataset[dict[str, Any]]):
    """``count`` samples, rotated by the epoch; with ``divided``, each worker of each rank yields its part."""

    def __init__(self, count: int, divided: bool = False, rank: int = 0, world_size: int = 1) -> None:
        self.count, self.divided, self.rank, self.world_size = count, divided, rank, world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first, step = self.rank + worker * self.world_size, self.world_size * workers
        if not self.divided:
            first, step = 0, 1
        for place in range(first, self.count, step):
            n = (place + self.epoch) % self.count
            yield {"x": np.float32([n, 0.5]), "n": n}


def loader(
    count: int,
    batch: int = 8,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    divided: bool = False,
    length: int | None = None,
    micro: int | None = None,
) -> StreamLoader:
    stream = Stream(Numbers(count, divided, rank, world_size), count if length is None else length, divided)
    return StreamLoader(
        stream,
        FIELDS,
        global_batch_size=batch,
        micro_batch_size=micro,
        rank=rank,
        world_size=world_size,
        num_workers=workers,
        shuffle="none",
        limits=Limits(max_bad=None),
    )


def numbers(batch: Batch) -> list[int]:
    values = batch["number"][batch.valid].tolist()
    assert batch["x"][batch.valid][:, 0].tolist() == values  # columns belong together
    return values


def epoch_of(one: StreamLoader, epoch: int = 0) -> list[list[int]]:
    """The numbers of each step of a rank."""
    steps, taken = [], []
    for batch in one.epoch(epoch):
        taken.append(numbers(batch))
        if len(taken) == one.micro_batches_per_step:
            steps.append([number for micro in taken for number in micro])
            taken = []
            one.commit()
    assert not taken
    return steps


@examples(60)
@given(
    count=st.integers(1, 60),
    world_size=st.integers(1, 3),
    micro=st.integers(1, 5),
    micros=st.integers(1, 3),
    data=st.data(),
)
def test_over_all_ranks_each_sample_occurs_once_in_an_equal_number_of_steps(
    count: int, world_size: int, micro: int, micros: int, data: st.DataObject
) -> None:
    count = max(count, world_size)
    batch = micro * micros * world_size
    for epoch in (0, 2):
        ranks = [epoch_of(loader(count, batch, rank, world_size, micro=micro), epoch) for rank in range(world_size)]
        assert {len(steps) for steps in ranks} == {-(-count // batch)}
        assert sorted(n for steps in ranks for step in steps for n in step) == list(range(count))


@pytest.mark.parametrize(("divided", "count"), [(False, 61), (True, 61)])
def test_worker_processes_divide_the_stream(divided: str, count: int) -> None:
    seen = []
    for rank in range(2):
        one = loader(count, 16, rank, 2, workers=3, divided=divided, micro=4)
        for epoch in (0, 1):
            steps = epoch_of(one, epoch)
            assert len(steps) == 4
            seen += [(epoch, n) for step in steps for n in step]
        close([one])
    assert sorted(seen) == sorted(itertools.product((0, 1), range(count)))


@pytest.mark.parametrize("micro", [None, 4])
def test_a_run_resumes_in_the_middle_of_an_epoch_as_it_would_have_gone_on(micro: int | None) -> None:
    whole = epoch_of(loader(50, 8, workers=2, micro=micro))
    begun = loader(50, 8, workers=2, micro=micro)
    batches = begun.epoch(0)
    before = []
    for _ in range(3):
        before.append([number for _ in range(begun.micro_batches_per_step) for number in numbers(next(batches))])
        begun.commit()
    resumed = loader(50, 8, workers=2, micro=micro)
    resumed.load_state_dict(begun.state_dict())
    assert before + epoch_of(resumed) == whole
    assert resumed.position == (1, 0)
    close([begun, resumed])


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"workers": 2}, "workers 0 -> 2"),
        ({"batch": 4}, "rows 8 -> 4"),
        ({"world_size": 2}, "ranks 1 -> 2"),
        ({"batch": 16, "micro": 8}, "micro-batches 1 -> 2"),
    ],
)
def test_another_division_is_refused_in_the_middle_of_an_epoch_only(other: dict[str, Any], named: str) -> None:
    one = loader(50, 8)
    loader(50, **{"batch": 8, **other}).load_state_dict(one.state_dict())
    next(one.epoch(0))
    one.commit()
    with refused(ValueError, named, "shards"):
        loader(50, **{"batch": 8, **other}).load_state_dict(one.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("count", "what"), [(49, "ended"), (47, "ended"), (51, "continues"), (80, "continues")])
def test_a_stream_of_another_length_is_refused(count: int, what: str, workers: int) -> None:
    one = loader(count, 8, workers=workers, length=50)
    with refused(DataError, what, "50", "length"):
        epoch_of(one)
    close([one])


def test_an_endless_stream_ends_with_its_declared_length() -> None:
    stream = Stream(_Endless(), 20, endless=True)
    one = StreamLoader(stream, {"n": FIELDS["n"]}, global_batch_size=8, num_workers=0, shuffle="none")
    for epoch in (0, 1):
        assert [batch["number"][batch.valid].tolist() for batch in one.epoch(epoch)] == [
            [*range(8)], [*range(8, 16)], [*range(16, 20)]
        ]  # fmt: skip
        for _ in range(3):
            one._uncommitted = 1
            one.commit()


class _Endless:
    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"n": n} for n in itertools.count())


def test_a_webdataset_pipeline_gives_the_samples_of_its_shards(tmp_path: Path) -> None:
    paths = write_numbered(tmp_path, (6, 6, 6, 6), image=True)
    pipeline = webdataset.DataPipeline(
        webdataset.SimpleShardList(paths),
        webdataset.split_by_worker,
        webdataset.tarfile_to_samples(),
        webdataset.decode("pil"),
        webdataset.to_tuple("jpg", "cls"),
    )
    fields = {"image": {"name": "image", "role": "image"}, "label": {"name": "label", "role": "label"}}
    stream = Stream(pipeline, 24, divided=True)
    one = StreamLoader(stream, fields, global_batch_size=10, num_workers=2, shuffle="none")
    batches = list(one.epoch(0))
    close([one])
    assert sorted(n for batch in batches for n in batch["label"][batch.valid].tolist()) == list(range(24))
    assert batches[0]["image"].shape == (10, 8, 8, 3)
    assert batches[0]["image"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"shuffle": "window"}, ["data.shuffle", "window", "none"]),
        ({"tail": "drop"}, ["data.tail", "drop", "pad"]),
        ({"mix": object()}, ["data.mix", "null"]),
        ({"global_batch_size": 9, "world_size": 2}, ["train.global_batch_size", "9", "2 ranks"]),
        ({"num_workers": "auto"}, ["data.num_workers", "'auto'", "data.num_workers=2"]),
    ],
)
def test_options_that_need_samples_by_number_are_refused(options: dict[str, Any], named: list[str]) -> None:
    with refused(ValueError, *named):
        StreamLoader(Stream(Numbers(9), 9), FIELDS, **{"global_batch_size": 8, "shuffle": "none", **options})


def test_a_stream_without_a_shuffle_is_refused_as_the_default_is() -> None:
    with refused(ValueError, "data.shuffle", "'window'", "data.shuffle=none"):
        StreamLoader(Stream(Numbers(9), 9), FIELDS, global_batch_size=8)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((3, 9), ["dataset", "int", "iterable"]),
        ((Numbers(9), 0), ["length", "0", "at least 1"]),
    ],
)
def test_impossible_streams_are_refused(arguments: tuple[Any, ...], named: list[str]) -> None:
    with refused(ValueError, *named):
        Stream(*arguments)
