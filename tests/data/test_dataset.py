from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data import Batch, dataset
from dtrain.data.dataset import MicroBatches, Share, Start
from dtrain.data.field_options import parse_fields
from dtrain.data.order import EpochOrder, Layout, Recipe
from dtrain.data.shard_source import ShardSource
from dtrain.data.wire import Wire
from dtrain.precision import Precision
from tests.data.shards_for_tests import LABEL, UNEVEN, write_numbered


@settings(deadline=None)
@given(batch=st.integers(1, 60), world=st.integers(1, 70), data=st.data())
def test_ranks_and_micro_batches_cover_the_slots_in_order(batch: int, world: int, data: st.DataObject) -> None:
    rows = -(-batch // world)
    micro = data.draw(st.sampled_from([m for m in range(1, rows + 1) if batch % world or rows % m == 0]) | st.none())
    shares = [Share.of(batch, micro, rank, world) for rank in range(world)]
    assert len({share.micro_batches_per_step for share in shares}) == 1
    slots = [share.slots(np.arange(share.micro_batches_per_step)) for share in shares]
    assert {part.shape for part in slots} == {(shares[0].micro_batches_per_step, micro or rows)}
    assert [slot for part in slots for slot in part.ravel().tolist() if slot >= 0] == list(range(batch))
    of_rank = [int((part >= 0).sum()) for part in slots]
    assert max(of_rank) - min(of_rank) <= 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 5, 0, 4), "micro_batch_size: 5 does not fit: each of 4 ranks has 8 .* Sizes that fit: 1, 2, 4, 8"),
        ((32, 16, 0, 4), "16 does not fit"),
        ((32, 0, 0, 4), "0 does not fit"),
        ((0, None, 0, 1), "at least one sample"),
        ((8, None, 2, 2), r"rank 2, world_size 2: .* rank in \[0, world_size\)"),
        ((8, None, -1, 2), "rank -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(
    sizes: tuple[int, int | None, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Share.of(*sizes)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ShardSource:
    return ShardSource.build(write_numbered(tmp_path_factory.mktemp("uneven"), UNEVEN), parse_fields(LABEL))


def stream_of(source: ShardSource, share: Share, start: Start) -> MicroBatches:
    recipe = Recipe(0)
    layout = Layout(share.global_batch_size, share.global_batch_size)
    return MicroBatches(
        source,
        recipe=recipe,
        first_recipe=recipe,
        start=start,
        layout=layout,
        share=share,
        wire=Wire(source.fields, Precision("fp32")),
    )


def handed_over(stream: MicroBatches, workers: int, count: int, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What ``workers`` copies of the stream give in turn, as DataLoader asks them."""

    def worker(number: int) -> Iterator[Batch]:
        monkeypatch.setattr(dataset, "get_worker_info", lambda: SimpleNamespace(id=number, num_workers=workers))
        yield from stream

    turns = itertools.cycle([worker(number) for number in range(workers)])
    return [next(next(turns)).sample_keys for _ in range(count)]


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_workers_in_turn_give_what_one_gives_from_epoch_to_epoch(
    source: ShardSource, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4 steps of 3 micro-batches are left of a first epoch that was cut anew; each one after it has 4 steps too.
    share = Share.of(12, 2, 1, 2)
    stream = stream_of(source, share, Start(4, (Layout(5, 5, 1), Layout(12, 4)), 1))
    alone = [batch.sample_keys for batch in itertools.islice(iter(stream), 45)]
    assert handed_over(stream, workers, 45, monkeypatch) == alone


def test_the_stream_is_that_of_the_order(source: ShardSource) -> None:
    share = Share.of(6, None, 0, 1)
    start = Start(0, (Layout(6, 6),), 3)
    batches = iter(stream_of(source, share, start))
    for epoch, first in ((0, 3), (1, 0)):
        order = EpochOrder(source.index.counts, Recipe(0), epoch, [Layout(6, 6)])
        for step in range(first, order.num_steps):
            samples = order.locate(step, np.arange(6)).tolist()
            assert next(batches).sample_keys == [source.index.key(sample) if sample >= 0 else "" for sample in samples]


def test_a_rank_without_slots_gets_masked_rows_of_the_right_shape(source: ShardSource) -> None:
    ranks = [iter(stream_of(source, Share.of(2, None, rank, 3), Start(0, (Layout(2, 2),), 0))) for rank in range(3)]
    for _ in range(23):  # whole steps of an epoch of 47 samples
        idle, first, second = (next(rank) for rank in ranks)
        assert (idle["label"].shape, idle.valid.tolist(), idle.sample_keys) == ((1,), [False], [""])
        assert first.valid.all()
        assert second.valid.all()
