"""Batches, masks and commits: the same for any topology, each sample once. ``tarfile`` says what there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from dtrain.data import WorkerOptions
from tests.refusals import refused
from tests.shards import (
    close,
    global_batches,
    make_loader,
    make_ranks,
    read_epoch,
    stored_keys,
    stored_members,
    valid_keys,
    write_numbered,
    write_tar,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores, on purpose


# -- the same global batches for any topology


@pytest.mark.parametrize("shuffle", ["window", "full", "none"])
@pytest.mark.parametrize("batch", [12, 7])
def test_global_batches_do_not_depend_on_ranks_or_micro_batches(uneven: list[str], batch: int, shuffle: str) -> None:
    options = {"global_batch_size": batch, "shuffle": shuffle, "seed": 3}
    alone = global_batches([make_loader(uneven, **options)])
    assert sorted(itertools.chain(*alone)) == sorted(stored_keys(uneven))
    for world, micro in ((1, 1), (2, 2), (3, 4), (5, None), (5, 2), (7, 1), (batch + 3, None)):
        rows = -(-batch // world)
        if micro is not None and (micro > rows or (batch % world == 0 and rows % micro)):
            micro = None
        assert global_batches(make_ranks(uneven, world, micro_batch_size=micro, **options)) == alone


def check_workers(shards: list[str], world: int, num_workers: int, start_method: str | None) -> None:
    options = {"global_batch_size": 12, "micro_batch_size": None if 12 % world else 2}
    alone = [batch for epoch in (0, 1) for batch in global_batches([make_loader(shards, **options)], epoch)]
    ranks = make_ranks(
        shards, world, num_workers=num_workers, workers=WorkerOptions(start_method=start_method), **options
    )
    assert [batch for epoch in (0, 1) for batch in global_batches(ranks, epoch)] == alone
    close(ranks)


@pytest.mark.parametrize(("world", "num_workers"), [(1, 1), (1, 3), (2, 2), (3, 1), (5, 2)])
def test_global_batches_do_not_depend_on_workers(uneven: list[str], world: int, num_workers: int) -> None:
    check_workers(uneven, world, num_workers, "fork")


@pytest.mark.slow
def test_global_batches_do_not_depend_on_the_start_method(uneven: list[str]) -> None:
    check_workers(uneven, 1, 2, "forkserver")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "num_workers", "start_method"), [(1, 3, "spawn"), (2, 1, "spawn"), (2, 2, "forkserver"), (1, 3, None)]
)
def test_global_batches_do_not_depend_on_any_start_method(
    uneven: list[str], world: int, num_workers: int, start_method: str | None
) -> None:
    check_workers(uneven, world, num_workers, start_method)


def test_ranks_of_other_environments_are_not_believed(uneven: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # What a worker finds there is not its own rank under forkserver and spawn; webdataset reads it all the same.
    expected = [global_batches(make_ranks(uneven, 2))]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks = make_ranks(uneven, 2, num_workers=1)
    assert [global_batches(ranks)] == expected
    close(ranks)


def test_epochs_differ_and_the_same_epoch_is_the_same(uneven: list[str]) -> None:
    loader = make_loader(uneven)
    first, second = global_batches([loader]), global_batches([loader])
    assert first != second
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))
    assert global_batches([loader], 1) == second
    assert global_batches([make_loader(uneven, seed=1)]) != first


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[53], [50, 2, 1]], ids=["1 shard", "3 shards"])
def test_eight_workers_give_each_sample_once_where_the_naive_data_set_gives_it_eight_times(
    tmp_path: Path, counts: list[int]
) -> None:
    class NaiveTar(IterableDataset[str]):
        """As in many a tutorial: every worker reads every shard."""

        def __iter__(self) -> Iterator[str]:
            return iter(stored_keys(shards))

    shards = write_numbered(tmp_path, counts)
    naive = list(DataLoader(NaiveTar(), batch_size=None, num_workers=8))
    assert sorted(naive) == sorted(stored_keys(shards) * 8)
    loader = make_loader(shards, num_workers=8, micro_batch_size=2)
    assert sorted(valid_keys(itertools.chain(*read_epoch(loader)))) == sorted(stored_keys(shards))
    loader.close()


def test_more_shards_than_samples_in_a_batch_are_fine_in_the_calling_process(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [1, 0, 2] * 12 + [3])
    assert len(shards) == 37
    loader = make_loader(shards, global_batch_size=4)
    assert sorted(valid_keys(itertools.chain(*read_epoch(loader)))) == sorted(stored_keys(shards))


def test_shards_of_one_name_in_two_folders_are_never_mixed_up(tmp_path: Path) -> None:
    shards = [
        write_tar(tmp_path / folder / "000.tar", [("a", {"cls": label}), ("b", {"cls": label})])
        for folder, label in (("train", b"1"), ("test", b"2"))
    ]
    (step,) = read_epoch(make_loader(shards, shuffle="none"))
    (batch,) = step
    assert batch.sample_keys == ["train/000.tar/a", "train/000.tar/b", "test/000.tar/a", "test/000.tar/b", "", ""]
    assert batch["label"].tolist()[:4] == [1, 1, 2, 2]


# -- masks


@pytest.mark.parametrize(("batch", "world", "micro"), [(10, 1, 5), (10, 3, 2), (3, 7, None), (100, 2, None)])
def test_masks_keys_and_repeated_rows_agree(uneven: list[str], batch: int, world: int, micro: int | None) -> None:
    options = {"global_batch_size": batch, "micro_batch_size": micro}
    labels = {key: int(members["cls"][0]) for key, members in stored_members(uneven).items()}
    for loader in make_ranks(uneven, world, **options):
        for step in read_epoch(loader):
            assert len(step) == loader.micro_batches_per_step
            for micro_batch in step:
                keys, valid, label = micro_batch.sample_keys, micro_batch.valid, micro_batch["label"]
                assert len(keys) == len(valid) == len(label) == loader.rows_per_micro_batch
                assert [key != "" for key in keys] == valid.tolist()
                assert [labels[key] for key in keys if key] == label[valid].tolist()
                real = set(label[valid].tolist())
                assert set(label.tolist()) == real or not real


@pytest.mark.parametrize(("batch", "left"), [(6, 5), (47, 0), (46, 1)])
def test_drop_leaves_out_what_does_not_fill_a_batch(uneven: list[str], batch: int, left: int) -> None:
    loader = make_loader(uneven, global_batch_size=batch, tail="drop")
    keys = valid_keys(itertools.chain(*read_epoch(loader)))
    assert len(set(keys)) == len(keys) == 47 - left
    with refused(ValueError, "global batch of 48", "47 samples", "data.tail=pad"):
        make_loader(uneven, global_batch_size=48, tail="drop")


# -- commits


def test_a_step_is_committed_after_all_its_micro_batches_and_once(uneven: list[str]) -> None:
    loader = make_loader(uneven, micro_batch_size=2)
    with refused(RuntimeError, "step 0 of epoch 0", "rank 0", "0 of its 3 micro-batches"):
        loader.commit()
    batches = iter(loader)
    next(batches), next(batches)
    with refused(RuntimeError, "rank 0", "2 of its 3 micro-batches"):
        loader.commit()
    next(batches)
    assert loader.commit() == 6
    assert loader.position == (0, 6)
    with pytest.raises(RuntimeError, match="step 1 of epoch 0"):
        loader.commit()


def test_commits_count_samples_and_end_at_the_start_of_the_next_epoch(uneven: list[str]) -> None:
    loader = make_loader(uneven, global_batch_size=10)
    assert loader.steps_per_epoch == loader.steps_left == 5
    used = []
    for batch in loader:
        assert len(batch.sample_keys) == 10
        used.append(loader.commit())
    assert used == [10, 10, 10, 10, 7]
    assert loader.position == (1, 0)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    assert loader.steps_left == 5


def test_an_epoch_goes_on_where_it_was_committed_and_another_begins_at_its_start(uneven: list[str]) -> None:
    loader, whole = make_loader(uneven), global_batches([make_loader(uneven)])
    batches = loader.epoch(0)
    for _ in range(3):
        next(batches)
    loader.commit()  # three handed over, one of them used
    assert global_batches([loader], 0) == whole[1:]
    assert loader.position == (1, 0)
    second = global_batches([make_loader(uneven)], 1)
    assert global_batches([loader], 1) == second
    assert global_batches([loader], 0) == whole  # from its start, for the state is that of epoch 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_was_left_goes_on_from_the_commit(uneven: list[str], num_workers: int) -> None:
    loader, whole = make_loader(uneven, num_workers=num_workers), global_batches([make_loader(uneven)])
    seen = []
    for taken, committed in ((1, 1), (2, 1), (3, 3), (1, 0), (9, 3)):
        for batch in itertools.islice(loader, taken):
            if len(seen) < 8 and committed:
                seen.append(valid_keys([batch]))
                loader.commit()
                committed -= 1
    assert seen == whole
    loader.close()


def test_there_is_one_iterator_at_a_time(uneven: list[str]) -> None:
    loader = make_loader(uneven)
    earlier = iter(loader)
    next(earlier)
    later = iter(loader)
    # Not an early end, which would look as if the epoch were over.
    with pytest.raises(RuntimeError, match="iterator was opened"):
        next(earlier)
    assert valid_keys([next(later)]) == global_batches([make_loader(uneven)])[0]


def test_a_closed_loader_says_so_and_can_be_used_again(uneven: list[str]) -> None:
    loader, whole = make_loader(uneven, num_workers=1), global_batches([make_loader(uneven)])
    batches = iter(loader)
    next(batches)
    loader.commit()
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="the loader was closed"):
        next(batches)
    assert global_batches([loader]) == whole[1:]
    loader.close()


def test_an_iterator_that_is_finished_stays_finished(uneven: list[str]) -> None:
    loader = make_loader(uneven)
    batches = iter(loader)
    assert len(list(batches)) == 8
    assert list(batches) == []
    assert list(iter(make_loader(uneven).epoch(3))) != []
    with refused(ValueError, "epoch", -1):
        loader.epoch(-1)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"prefetch": 0}, ["data.prefetch", "got 0", "at least 1"]),
        ({"start_method": "forked"}, ["data.start_method", "got 'forked'", "spawn"]),
    ],
)
def test_how_workers_cannot_be_started_is_told_before_they_are(options: dict[str, Any], names: list[str]) -> None:
    with refused(ValueError, *names):
        WorkerOptions(**options)
