"""The promises of the loader: same batches anywhere, exactly once, resumable. ``tarfile`` says what there is."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from dtrain.data import Batch, ShardLoader
from dtrain.data.loader import TooManyBadSamples, check_bad_samples
from dtrain.data.storage import ShardChanged
from dtrain.data.writer import write_shards
from tests.data.shards_for_tests import (
    IMAGE,
    LABEL,
    UNEVEN,
    epoch_of,
    global_batches,
    jpeg,
    keys_of,
    npy,
    stored_keys,
    stored_members,
    write_numbered,
    write_tar,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores, on purpose


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_numbered(tmp_path_factory.mktemp("uneven"), UNEVEN)


def loader_of(shards: Sequence[str], fields: dict[str, Any] = LABEL, **options: Any) -> ShardLoader:
    given = {"global_batch_size": 6, "num_workers": 0, **options}
    return ShardLoader(shards, fields, **given)


def ranks_of(shards: Sequence[str], world: int, **options: Any) -> list[ShardLoader]:
    return [loader_of(shards, rank=rank, world_size=world, **options) for rank in range(world)]


def close(loaders: Sequence[ShardLoader]) -> None:
    for loader in loaders:
        loader.close()


# -- the same global batches for any topology


@pytest.mark.parametrize("shuffle", ["window", "full", "none"])
@pytest.mark.parametrize("batch", [12, 7])
def test_global_batches_do_not_depend_on_ranks_or_micro_batches(uneven: list[str], batch: int, shuffle: str) -> None:
    options = {"global_batch_size": batch, "shuffle": shuffle, "seed": 3}
    alone = global_batches([loader_of(uneven, **options)])
    assert sorted(itertools.chain(*alone)) == sorted(stored_keys(uneven))
    for world, micro in ((1, 1), (2, 2), (3, 4), (5, None), (5, 2), (7, 1), (batch + 3, None)):
        rows = -(-batch // world)
        if micro is not None and (micro > rows or (batch % world == 0 and rows % micro)):
            micro = None
        assert global_batches(ranks_of(uneven, world, micro_batch_size=micro, **options)) == alone


def check_workers(shards: list[str], world: int, num_workers: int, start_method: str | None) -> None:
    options = {"global_batch_size": 12, "micro_batch_size": None if 12 % world else 2}
    alone = [batch for epoch in (0, 1) for batch in global_batches([loader_of(shards, **options)], epoch)]
    ranks = ranks_of(shards, world, num_workers=num_workers, start_method=start_method, **options)
    assert [batch for epoch in (0, 1) for batch in global_batches(ranks, epoch)] == alone
    close(ranks)


@pytest.mark.parametrize(("world", "num_workers"), [(1, 1), (1, 3), (2, 2), (3, 1), (5, 2)])
def test_global_batches_do_not_depend_on_workers(uneven: list[str], world: int, num_workers: int) -> None:
    check_workers(uneven, world, num_workers, "fork")


def test_global_batches_do_not_depend_on_the_start_method(uneven: list[str]) -> None:
    check_workers(uneven, 1, 2, "forkserver")


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "forkserver", None])
@pytest.mark.parametrize(("world", "num_workers"), [(1, 3), (2, 2), (5, 1)])
def test_global_batches_do_not_depend_on_any_start_method(
    uneven: list[str], world: int, num_workers: int, start_method: str | None
) -> None:
    check_workers(uneven, world, num_workers, start_method)


def test_ranks_of_other_environments_are_not_believed(uneven: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # What a worker finds there is not its own rank under forkserver and spawn; webdataset reads it all the same.
    expected = [global_batches(ranks_of(uneven, 2))]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks = ranks_of(uneven, 2, num_workers=1)
    assert [global_batches(ranks)] == expected
    close(ranks)


def test_epochs_differ_and_the_same_epoch_is_the_same(uneven: list[str]) -> None:
    loader = loader_of(uneven)
    first, second = global_batches([loader]), global_batches([loader])
    assert first != second
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))
    assert global_batches([loader], 1) == second
    assert global_batches([loader_of(uneven, seed=1)]) != first


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
    loader = loader_of(shards, num_workers=8, micro_batch_size=2)
    assert sorted(keys_of(itertools.chain(*epoch_of(loader)))) == sorted(stored_keys(shards))
    loader.close()


def test_more_shards_than_samples_in_a_batch_are_fine_in_the_calling_process(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [1, 0, 2] * 12 + [3])
    assert len(shards) == 37
    loader = loader_of(shards, global_batch_size=4)
    assert sorted(keys_of(itertools.chain(*epoch_of(loader)))) == sorted(stored_keys(shards))


def test_shards_of_one_name_in_two_folders_are_never_mixed_up(tmp_path: Path) -> None:
    shards = [
        write_tar(tmp_path / folder / "000.tar", [("a", {"cls": label}), ("b", {"cls": label})])
        for folder, label in (("train", b"1"), ("test", b"2"))
    ]
    (step,) = epoch_of(loader_of(shards, shuffle="none"))
    (batch,) = step
    assert batch.sample_keys == ["train/000.tar/a", "train/000.tar/b", "test/000.tar/a", "test/000.tar/b", "", ""]
    assert batch["label"].tolist()[:4] == [1, 1, 2, 2]


# -- masks


@pytest.mark.parametrize(("batch", "world", "micro"), [(10, 1, 5), (10, 3, 2), (3, 7, None), (100, 2, None)])
def test_masks_keys_and_repeated_rows_agree(uneven: list[str], batch: int, world: int, micro: int | None) -> None:
    options = {"global_batch_size": batch, "micro_batch_size": micro}
    labels = {key: int(members["cls"][0]) for key, members in stored_members(uneven).items()}
    for loader in ranks_of(uneven, world, **options):
        for step in epoch_of(loader):
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
    loader = loader_of(uneven, global_batch_size=batch, tail="drop")
    keys = keys_of(itertools.chain(*epoch_of(loader)))
    assert len(set(keys)) == len(keys) == 47 - left
    with pytest.raises(ValueError, match=r"47 samples do not fill one global batch of 48.*data\.tail=pad"):
        loader_of(uneven, global_batch_size=48, tail="drop")


# -- commits


def test_a_step_is_committed_after_all_its_micro_batches_and_once(uneven: list[str]) -> None:
    loader = loader_of(uneven, micro_batch_size=2)
    with pytest.raises(RuntimeError, match=r"step 0 of epoch 0, but rank 0 was handed 0 of its 3 micro-batches"):
        loader.commit()
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(RuntimeError, match=r"handed 2 of its 3 micro-batches\. Commit once after"):
        loader.commit()
    next(batches)
    assert loader.commit() == 6
    assert loader.position == (0, 6)
    with pytest.raises(RuntimeError, match="step 1 of epoch 0"):
        loader.commit()


def test_commits_count_samples_and_end_at_the_start_of_the_next_epoch(uneven: list[str]) -> None:
    loader = loader_of(uneven, global_batch_size=10)
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
    loader, whole = loader_of(uneven), global_batches([loader_of(uneven)])
    batches = loader.epoch(0)
    for _ in range(3):
        next(batches)
    loader.commit()  # three handed over, one of them used
    assert global_batches([loader], 0) == whole[1:]
    assert loader.position == (1, 0)
    second = global_batches([loader_of(uneven)], 1)
    assert global_batches([loader], 1) == second
    assert global_batches([loader], 0) == whole  # from its start, for the state is that of epoch 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_was_left_goes_on_from_the_commit(uneven: list[str], num_workers: int) -> None:
    loader, whole = loader_of(uneven, num_workers=num_workers), global_batches([loader_of(uneven)])
    seen = []
    for taken, committed in ((1, 1), (2, 1), (3, 3), (1, 0), (9, 3)):
        for batch in itertools.islice(loader, taken):
            if len(seen) < 8 and committed:
                seen.append(keys_of([batch]))
                loader.commit()
                committed -= 1
    assert seen == whole
    loader.close()


def test_there_is_one_iterator_at_a_time(uneven: list[str]) -> None:
    loader = loader_of(uneven)
    earlier = iter(loader)
    next(earlier)
    later = iter(loader)
    # Not an early end, which would look as if the epoch were over.
    with pytest.raises(RuntimeError, match="another iterator was opened"):
        next(earlier)
    assert keys_of([next(later)]) == global_batches([loader_of(uneven)])[0]


def test_a_closed_loader_says_so_and_can_be_used_again(uneven: list[str]) -> None:
    loader, whole = loader_of(uneven, num_workers=1), global_batches([loader_of(uneven)])
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
    loader = loader_of(uneven)
    batches = iter(loader)
    assert len(list(batches)) == 8
    assert list(batches) == []
    assert list(iter(loader_of(uneven).epoch(3))) != []
    with pytest.raises(ValueError, match="epoch: got -1"):
        loader.epoch(-1)


# -- states


def test_loading_while_an_iterator_is_open_is_refused(uneven: list[str]) -> None:
    loader = loader_of(uneven)
    state = loader.state_dict()
    batches = iter(loader)
    next(batches)
    with pytest.raises(RuntimeError, match="iterator of this loader is open"):
        loader.load_state_dict(state)
    del batches
    loader.load_state_dict(state)
    list(loader)
    loader.load_state_dict(state)


def test_what_was_handed_over_before_a_state_was_loaded_cannot_be_committed(uneven: list[str]) -> None:
    loader = loader_of(uneven)
    state = loader.state_dict()
    next(iter(loader))
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="handed 0"):
        loader.commit()


def kept(state: dict[str, Any]) -> dict[str, Any]:
    """A state that went through a file."""
    text = json.dumps(state)
    assert len(text) < 500 + 20 * len(state["layouts"])
    loaded: dict[str, Any] = json.loads(text)
    return loaded


topologies = st.tuples(st.integers(1, 5), st.integers(1, 14), st.integers(1, 3))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shuffle=st.sampled_from(["window", "full", "none"]),
    tail=st.sampled_from(["pad", "drop"]),
    legs=st.lists(st.tuples(topologies, st.integers(0, 9)), min_size=2, max_size=5),
)
def test_killed_anywhere_and_resumed_anyhow_an_epoch_is_each_sample_once(
    uneven: list[str], shuffle: str, tail: str, legs: list[tuple[tuple[int, int, int], int]]
) -> None:
    state, used = None, []
    for (world, batch, parts), steps in legs:
        rows = -(-batch // world)
        micro = max(1, rows // parts) if batch % world else rows
        ranks = ranks_of(
            uneven, world, global_batch_size=batch, micro_batch_size=micro, shuffle=shuffle, tail=tail, window=2
        )
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
        assert len({loader.position for loader in ranks}) == 1
        if ranks[0].position[0] == 1:
            break  # what was left is less than one of the new batches, and dropped
        assert tail == "drop" or ranks[0].position[1] == len(used)
        of_rank = [list(itertools.islice(steps_committed(loader), steps)) for loader in ranks]
        used += keys_of(batch for rank in of_rank for step in rank for batch in step)
        states = [kept(loader.state_dict()) for loader in ranks]
        assert all(other == states[0] for other in states)  # equal on all ranks
        state = states[0]
        if state["epoch"] == 1:
            break
    else:
        ranks = ranks_of(uneven, 1, global_batch_size=1, shuffle=shuffle, tail=tail)
        ranks[0].load_state_dict(state)
        used += keys_of(batch for step in epoch_of(ranks[0]) for batch in step)
        assert len(used) == 47
    assert len(set(used)) == len(used)
    assert tail == "drop" or sorted(used) == sorted(stored_keys(uneven))


def steps_committed(loader: ShardLoader) -> Iterator[list[Batch]]:
    """Steps of the state's epoch; each is committed when it is handed out."""
    batches = iter(loader)
    for _ in range(loader.steps_left):
        step = [next(batches) for _ in range(loader.micro_batches_per_step)]
        loader.commit()
        yield step


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_at_every_step_the_same_batches_follow_also_in_the_next_epoch(
    uneven: list[str], num_workers: int
) -> None:
    options = {"global_batch_size": 12, "window": 2}
    whole = [batch for epoch in (0, 1) for batch in global_batches([loader_of(uneven, **options)], epoch)]
    interrupted = loader_of(uneven, **options)
    for step in range(4):
        ranks = ranks_of(uneven, 2, num_workers=num_workers, **options)
        for loader in ranks:
            loader.load_state_dict(kept(interrupted.state_dict()))
        assert global_batches(ranks) + global_batches(ranks) == whole[step:]
        close(ranks)
        next(steps_committed(interrupted))
    assert global_batches([interrupted]) == whole[4:]


def test_the_first_batch_after_a_resume_needs_the_bytes_of_its_samples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = write_numbered(tmp_path, [40, 25, 60], image=True)
    interrupted = loader_of(shards, IMAGE | LABEL)
    list(itertools.islice(steps_committed(interrupted), 11))
    loader = loader_of(shards, IMAGE | LABEL)
    loader.load_state_dict(interrupted.state_dict())
    read, opened = [0], []
    pread, open_file = os.pread, os.open

    def counting_pread(descriptor: int, size: int, offset: int) -> bytes:
        data = pread(descriptor, size, offset)
        read[0] += len(data)
        return data

    monkeypatch.setattr(os, "pread", counting_pread)
    monkeypatch.setattr(
        os, "open", lambda path, *more, **options: opened.append(path) or open_file(path, *more, **options)
    )
    keys = keys_of(next(steps_committed(loader)))
    monkeypatch.undo()
    members = [stored_members(shards)[key].values() for key in keys]
    # From the first byte of a sample's first field to the last of its last one, the header between them included.
    spans = [max(at + len(data) for data, at in fields) - min(at for _, at in fields) for fields in members]
    assert read[0] == sum(spans)
    assert {Path(path).name for path in opened} == {key.partition("/")[0] for key in keys}
    assert len(opened) == len(set(opened))


def test_a_run_of_other_defaults_keeps_what_it_had_and_what_was_asked_for_counts(uneven: list[str]) -> None:
    old = loader_of(uneven, global_batch_size=12, lanes=3, window=1)
    next(steps_committed(old))
    state = kept(old.state_dict())
    rest, second = global_batches([old]), global_batches([old], 1)
    default = loader_of(uneven, global_batch_size=12)
    default.load_state_dict(state)
    assert [global_batches([default]), global_batches([default], 1)] == [rest, second]
    asked = loader_of(uneven, global_batch_size=12, lanes=6, window=2)
    asked.load_state_dict(state)
    assert global_batches([asked]) == rest  # an epoch ends as it was begun
    assert global_batches([asked]) == global_batches([loader_of(uneven, global_batch_size=12, lanes=6, window=2)], 1)


def test_another_shuffle_begins_with_the_next_epoch(uneven: list[str]) -> None:
    old = loader_of(uneven, shuffle="full", tail="drop")
    next(steps_committed(old))
    new = loader_of(uneven, shuffle="none")
    new.load_state_dict(kept(old.state_dict()))
    assert global_batches([new]) == global_batches([old])
    assert list(itertools.chain(*global_batches([new]))) == stored_keys(uneven)


def test_another_shuffle_and_batch_size_cut_the_rest_as_the_old_shuffle_does(uneven: list[str]) -> None:
    old = loader_of(uneven, shuffle="full")
    next(steps_committed(old))
    new = loader_of(uneven, global_batch_size=12, lanes=4)
    new.load_state_dict(kept(old.state_dict()))
    # The old line without its first six samples, in larger steps.
    assert list(itertools.chain(*global_batches([new]))) == list(itertools.chain(*global_batches([old])))


def test_a_rest_that_fills_no_batch_of_the_new_size_is_dropped_at_once(uneven: list[str]) -> None:
    old = loader_of(uneven, tail="drop")
    list(itertools.islice(steps_committed(old), 6))
    new = loader_of(uneven, tail="drop", global_batch_size=12)
    new.load_state_dict(kept(old.state_dict()))
    assert new.position == (1, 0)
    assert len(global_batches([new])) == 3


def test_restarts_that_used_nothing_leave_no_trace_in_the_state(uneven: list[str]) -> None:
    loader = loader_of(uneven)
    next(steps_committed(loader))
    state, expected = kept(loader.state_dict()), global_batches([loader])
    for batch in (5, 9, 4, 6):
        flapping = loader_of(uneven, global_batch_size=batch)
        flapping.load_state_dict(state)
        state = kept(flapping.state_dict())
        assert len(state["layouts"]) == (1 if batch == 6 else 2)
    assert global_batches([flapping]) == expected


def test_the_state_of_a_large_data_set_is_a_few_numbers(uneven: list[str]) -> None:
    loader = loader_of(uneven)
    next(steps_committed(loader))
    state = loader.state_dict()
    assert {name: state[name] for name in ("version", "seed", "shuffle", "window", "tail", "epoch", "position")} == {
        "version": 1, "seed": 0, "shuffle": "window", "window": 8, "tail": "pad", "epoch": 0, "position": 6
    }  # fmt: skip
    assert state["layouts"] == [[6, 6, 1]]
    assert set(state["data"]) == {"num_shards", "num_samples", "bytes", "fingerprint"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda counts: [*counts, 4], r"shards 6 -> 7, samples 47 -> 51", id="more shards"),
        pytest.param(lambda counts: [*counts[:-1], 5], r"samples 47 -> 41", id="fewer samples"),
        pytest.param(lambda counts: counts[::-1], r"as many shards", id="another order"),
    ],
)
def test_a_changed_data_set_is_refused_with_the_difference(
    tmp_path: Path, uneven: list[str], change: Any, message: str
) -> None:
    state = loader_of(uneven).state_dict()
    other = loader_of(write_numbered(tmp_path, change(list(UNEVEN))))
    with pytest.raises(ValueError, match=rf"the data set changed.*{message}.*old shards, or start a new run"):
        other.load_state_dict(state)


def test_moved_shards_are_the_same_data_set(tmp_path: Path, uneven: list[str]) -> None:
    moved = write_numbered(tmp_path / "elsewhere", UNEVEN)
    loader_of(moved).load_state_dict(loader_of(uneven).state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, "seed: the state was saved with 7, this loader has 0"),
        ({"version": 99}, r"not a state of this loader: version 99 \(want 1\)"),
        ({"layouts": None, "epoch": None}, "missing keys: epoch, layouts"),
    ],
)
def test_what_is_no_state_of_this_loader_is_refused(uneven: list[str], change: dict[str, Any], message: str) -> None:
    state = {name: value for name, value in (loader_of(uneven).state_dict() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        loader_of(uneven).load_state_dict(state)


# -- bad samples


def torn_shards(folder: Path, bad: Sequence[int], count: int = 40) -> list[str]:
    samples = []
    for number in range(count):
        members = {"jpg": jpeg(number), "cls": str(number).encode()}
        if number in bad:
            members |= [{"jpg": jpeg(number)[:-50]}, {"jpg": b"garbage"}, {"cls": b"cat"}][number % 3]
        if number in bad and number % 4 == 3:
            del members["jpg"]
        samples.append((f"sample{number:05d}", members))
    return [
        write_tar(folder / f"shard-{shard}.tar", samples[shard * 20 : shard * 20 + 20]) for shard in range(count // 20)
    ]


def test_bad_samples_keep_their_position_on_every_topology(tmp_path: Path) -> None:
    bad = [0, 1, 2, 7, 19, 20, 39]
    torn, whole = torn_shards(tmp_path / "torn", bad), torn_shards(tmp_path / "whole", [])
    options = {"fields": IMAGE | LABEL, "global_batch_size": 8, "max_bad": None}
    bad_keys = {f"shard-{number // 20}.tar/sample{number:05d}" for number in bad}
    expected = [[key for key in step if key not in bad_keys] for step in global_batches([loader_of(whole, **options)])]
    for world, num_workers in ((1, 0), (3, 0), (2, 2)):
        ranks = ranks_of(torn, world, num_workers=num_workers, **options)
        assert global_batches(ranks) == expected
        assert sum(loader.bad_samples for loader in ranks) == len(bad)
        named = [
            line["key"] for loader in ranks for step in epoch_of(loader, 0) for batch in step for line in batch.bad
        ]
        assert sorted(named) == sorted(bad_keys)
        close(ranks)


def test_a_run_of_bad_samples_longer_than_a_batch_is_survived(tmp_path: Path) -> None:
    shards = torn_shards(tmp_path, range(5, 30))
    loader = loader_of(shards, IMAGE | LABEL, global_batch_size=4, shuffle="none", max_bad=None)
    steps = epoch_of(loader)
    assert len(keys_of(itertools.chain(*steps))) == 15
    assert all(batch["image"].shape == (4, 8, 8, 3) for step in steps for batch in step)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_bad_samples_than_the_budget_allows_end_the_run(tmp_path: Path, num_workers: int) -> None:
    shards = torn_shards(tmp_path, range(0, 40, 2))
    loader = loader_of(shards, IMAGE | LABEL, global_batch_size=1, max_bad=5, num_workers=num_workers)
    with pytest.raises(
        TooManyBadSamples, match=r"6 of \d+ samples could not be read, more than data\.max_bad=5.*shard-.*sample000"
    ):
        list(loader)
    loader.close()


def test_masked_rows_are_no_samples_to_the_budget(tmp_path: Path) -> None:
    loader = loader_of(torn_shards(tmp_path, range(20)), IMAGE | LABEL, global_batch_size=100, max_bad=0.3)
    with pytest.raises(TooManyBadSamples, match="20 of 40 samples"):
        list(loader)


def test_the_budget_is_a_count_a_share_or_nothing_at_all() -> None:
    last = {"key": "a.tar/1", "reason": "torn"}
    for bad, handed, budget in ((0, 10, 0), (10, 20, 0.01), (50, 5000, 0.01), (3, 4, 3), (1, 1, 1)):
        check_bad_samples(bad, handed, budget, last)
    for bad, handed, budget in ((1, 10_000, 0), (11, 20, 0.01), (51, 5000, 0.01), (4, 4, 3), (2, 2, 1)):
        with pytest.raises(TooManyBadSamples, match=r"a\.tar/1: torn"):
            check_bad_samples(bad, handed, budget, last)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("change", [os.unlink, lambda path: os.truncate(path, 700)], ids=["vanishes", "shrinks"])
def test_a_shard_that_changes_during_the_run_is_named(tmp_path: Path, num_workers: int, change: Any) -> None:
    shards = write_numbered(tmp_path, [30] * 4)
    loader = loader_of(shards, shuffle="none", num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    change(shards[3])
    with pytest.raises(ShardChanged, match=r"shard-003\.tar"):
        list(batches)
    # What other workers hold is not handed over as if nothing were missing.
    with pytest.raises(RuntimeError, match="an error ended its workers"):
        next(batches)
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_images_of_different_sizes_are_refused_naming_both(tmp_path: Path, num_workers: int) -> None:
    samples = [("small", {"jpg": jpeg(0, 8, 8)}), ("large", {"jpg": jpeg(0, 16, 8)})]
    loader = loader_of([write_tar(tmp_path / "a.tar", samples)], IMAGE, num_workers=num_workers, shuffle="none")
    with pytest.raises(ValueError, match=r"a\.tar/large.*a\.tar/small.*data\.fields\.jpg\.size=224"):
        list(loader)
    loader.close()


# -- what travels


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_wire_carries_bytes_for_pixels_and_half_for_features(tmp_path: Path, num_workers: int) -> None:
    sound = np.random.default_rng(0).normal(size=(8, 4000)).astype(np.float32)
    boxes = np.array([[1333.3, 0.1, 7.0, 1e4]], np.float32)
    samples = [
        (str(i), {"jpg": jpeg(i, 64, 64), "npy": npy(sound[i]), "box.npy": npy(boxes + i), "cls": b"50257"})
        for i in range(8)
    ]
    shards = [write_tar(tmp_path / "a.tar", samples)]
    fields = {
        **IMAGE,
        "npy": {"name": "sound", "role": "feature"},
        "box.npy": {"name": "box", "role": "coord"},
        "cls": {"name": "token", "role": "id"},
    }
    sent = {}
    for precision in ("fp32", "bf16", "fp16"):
        loader = loader_of(
            shards, fields, global_batch_size=8, shuffle="none", precision=precision, num_workers=num_workers
        )
        (batch,) = loader
        loader.close()
        compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        assert (batch["image"].dtype, batch["image"].shape) == (torch.uint8, (8, 64, 64, 3))
        assert torch.equal(batch["sound"], torch.from_numpy(sound).to(compute))
        assert torch.equal(batch["box"], torch.from_numpy(np.stack([boxes + i for i in range(8)])))
        assert batch["token"].tolist() == [50257] * 8
        sent[precision] = batch.wire_bytes
        arrived = batch.to("cpu")
        assert (arrived["image"].dtype, arrived["image"].shape) == (compute, (8, 3, 64, 64))
        assert arrived["image"].is_contiguous(memory_format=torch.channels_last)
    others = 8 * (64 * 64 * 3 + 4 * 4 + 8)
    assert sent["fp32"] - others == 8 * 4000 * 4
    assert sent["bf16"] - others == sent["fp16"] - others == 8 * 4000 * 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_feature_that_fp16_cannot_hold_is_named_clamped_or_sent_in_fp32(tmp_path: Path, num_workers: int) -> None:
    samples = [(f"{i}", {"npy": npy(np.array([1.0, 1e5 * i], np.float32))}) for i in range(2)]
    shards = [write_tar(tmp_path / "a.tar", samples)]
    fields = {"npy": {"name": "depth", "role": "feature"}}
    options = {"precision": "fp16", "global_batch_size": 2, "shuffle": "none", "num_workers": num_workers}
    with pytest.raises(ValueError, match=r"sample 'a\.tar/1': field 'depth' holds 100000, .*data\.on_overflow=fp32"):
        list(loader_of(shards, fields, **options))
    (batch,) = loader_of(shards, fields, on_overflow="clamp", **options)
    assert (batch["depth"].dtype, batch["depth"].tolist()) == (torch.float16, [[1, 0], [1, 65504]])
    (batch,) = loader_of(shards, fields, on_overflow="fp32", **options)
    assert (batch["depth"].dtype, batch["depth"].tolist()) == (torch.float32, [[1, 0], [1, 1e5]])


def shift(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"image": np.roll(sample["image"], int(rng.integers(64)), axis=1), "label": int(rng.integers(2**62))}


def test_a_sample_is_augmented_alike_everywhere_and_anew_in_every_epoch(tmp_path: Path) -> None:
    shards = write_numbered(tmp_path, [10, 17], image=True)

    def augmented(world: int, num_workers: int, **options: Any) -> dict[str, tuple[int, bytes]]:
        found = {}
        ranks = ranks_of(shards, world, fields=IMAGE | LABEL, augment=shift, num_workers=num_workers, **options)
        for loader in ranks:
            for batch in loader.epoch(options.get("epoch", 0)):
                for row, key in enumerate(batch.sample_keys):
                    if key:
                        found[key] = int(batch["label"][row]), batch["image"][row].numpy().tobytes()
        close(ranks)
        return found

    alone = augmented(1, 0)
    assert len(alone) == 27
    assert augmented(3, 0, global_batch_size=5, micro_batch_size=1) == alone
    assert augmented(1, 2, global_batch_size=9, shuffle="none") == alone
    loader = loader_of(shards, IMAGE | LABEL, augment=shift)
    second = {
        key: int(label)
        for batch in loader.epoch(1)
        for key, label in zip(batch.sample_keys, batch["label"], strict=True)
        if key
    }
    assert not {label for label, _ in alone.values()} & set(second.values())


# -- webdataset


@pytest.mark.parametrize("writer", ["webdataset", "dtrain"])
def test_webdataset_and_the_loader_find_the_same_keys_and_bytes(tmp_path: Path, writer: str) -> None:
    rng = np.random.default_rng(0)
    samples = [
        {
            "__key__": f"folder/{'n' * (i % 4 * 40)}ü{i}",
            "jpg": jpeg(i),
            "txt": f"caption {i}",
            "cls": i,
            "bin": rng.bytes(i * 37),
        }
        for i in range(25)
    ]
    if writer == "webdataset":
        with webdataset.ShardWriter(str(tmp_path / "shard-%06d.tar"), maxcount=9, verbose=0) as out:
            for sample in samples:
                out.write(sample)
    else:
        write_shards(samples, tmp_path, prefix="shard", shards=3)
    shards = sorted(str(path) for path in tmp_path.glob("*.tar"))
    assert len(shards) == 3
    extensions = ("jpg", "txt", "cls", "bin")
    theirs = [
        (f"{Path(sample['__url__']).name}/{sample['__key__']}", *(sample[ext] for ext in extensions))
        for sample in webdataset.WebDataset(shards, shardshuffle=False)
    ]
    loader = loader_of(shards, {ext: {"name": ext, "role": "bytes"} for ext in extensions}, shuffle="none")
    ours = [
        (key, *(batch[ext][row] for ext in extensions))
        for batch in loader
        for row, key in enumerate(batch.sample_keys)
        if key
    ]
    assert ours == theirs
    assert len(ours) == 25
