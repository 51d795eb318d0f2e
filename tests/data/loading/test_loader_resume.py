"""States: killed anywhere, resumed anyhow, an epoch is still each sample exactly once."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data import Batch, Mixture, ShardLoader
from tests.property_tests import examples
from tests.refusals import refused
from tests.shards import (
    IMAGE,
    LABEL,
    UNEVEN,
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


def test_loading_while_an_iterator_is_open_is_refused(uneven: list[str]) -> None:
    loader = make_loader(uneven)
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
    loader = make_loader(uneven)
    state = loader.state_dict()
    next(iter(loader))
    loader.load_state_dict(state)
    with refused(RuntimeError, "received 0"):
        loader.commit()


def kept(state: dict[str, Any]) -> dict[str, Any]:
    """A state that went through a file."""
    text = json.dumps(state)
    assert len(text) < 500 + 20 * len(state["layouts"])
    loaded: dict[str, Any] = json.loads(text)
    return loaded


topologies = st.tuples(st.integers(1, 5), st.integers(1, 14), st.integers(1, 3))


@examples(60)
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
        ranks = make_ranks(
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
        used += valid_keys(batch for rank in of_rank for step in rank for batch in step)
        states = [kept(loader.state_dict()) for loader in ranks]
        assert all(other == states[0] for other in states)  # equal on all ranks
        state = states[0]
        if state["epoch"] == 1:
            break
    else:
        ranks = make_ranks(uneven, 1, global_batch_size=1, shuffle=shuffle, tail=tail)
        ranks[0].load_state_dict(state)
        used += valid_keys(batch for step in read_epoch(ranks[0]) for batch in step)
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
    whole = [batch for epoch in (0, 1) for batch in global_batches([make_loader(uneven, **options)], epoch)]
    interrupted = make_loader(uneven, **options)
    for step in range(4):
        ranks = make_ranks(uneven, 2, num_workers=num_workers, **options)
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
    interrupted = make_loader(shards, IMAGE | LABEL)
    list(itertools.islice(steps_committed(interrupted), 11))
    loader = make_loader(shards, IMAGE | LABEL)
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
    keys = valid_keys(next(steps_committed(loader)))
    monkeypatch.undo()
    members = [stored_members(shards)[key].values() for key in keys]
    # From the first byte of a sample's first field to the last of its last one, the header between them included.
    spans = [max(at + len(data) for data, at in fields) - min(at for _, at in fields) for fields in members]
    assert read[0] == sum(spans)
    assert {Path(path).name for path in opened} == {key.partition("/")[0] for key in keys}
    assert len(opened) == len(set(opened))


def test_a_run_of_other_defaults_keeps_what_it_had_and_what_was_asked_for_counts(uneven: list[str]) -> None:
    old = make_loader(uneven, global_batch_size=12, lanes=3, window=1)
    next(steps_committed(old))
    state = kept(old.state_dict())
    rest, second = global_batches([old]), global_batches([old], 1)
    default = make_loader(uneven, global_batch_size=12)
    default.load_state_dict(state)
    assert [global_batches([default]), global_batches([default], 1)] == [rest, second]
    asked = make_loader(uneven, global_batch_size=12, lanes=6, window=2)
    asked.load_state_dict(state)
    assert global_batches([asked]) == rest  # an epoch ends as it was begun
    assert global_batches([asked]) == global_batches([make_loader(uneven, global_batch_size=12, lanes=6, window=2)], 1)


def test_another_shuffle_begins_with_the_next_epoch(uneven: list[str]) -> None:
    old = make_loader(uneven, shuffle="full", tail="drop")
    next(steps_committed(old))
    new = make_loader(uneven, shuffle="none")
    new.load_state_dict(kept(old.state_dict()))
    assert global_batches([new]) == global_batches([old])
    assert list(itertools.chain(*global_batches([new]))) == stored_keys(uneven)


def test_the_state_of_a_large_data_set_is_a_few_numbers(uneven: list[str]) -> None:
    loader = make_loader(uneven)
    next(steps_committed(loader))
    state = loader.state_dict()
    assert {name: state[name] for name in ("version", "seed", "shuffle", "window", "tail", "epoch", "position")} == {
        "version": 2, "seed": 0, "shuffle": "window", "window": 8, "tail": "pad", "epoch": 0, "position": 6
    }  # fmt: skip
    assert state["layouts"] == [[6, 6, 1]]
    assert set(state["data"]) == {"num_shards", "num_samples", "bytes", "shards_fingerprint", "fingerprint"}


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
    state = make_loader(uneven).state_dict()
    other = make_loader(write_numbered(tmp_path, change(list(UNEVEN))))
    with refused(ValueError, "the dataset changed", message, "start a new run"):
        other.load_state_dict(state)


def repacked(folder: Path, order: int = 1) -> list[str]:
    """Two shards of four samples, whose members have 1 to 4 bytes, in this or the opposite order."""
    samples = [(f"key{number}", {"cls": b"7" * (1 + number % 4)}) for number in range(8)]
    return [write_tar(folder / f"{shard}.tar", samples[4 * shard :][:4][::order]) for shard in (0, 1)]


def test_a_data_set_packed_again_in_another_order_is_refused(tmp_path: Path) -> None:
    loader = make_loader(repacked(tmp_path / "before"), global_batch_size=2)
    next(steps_committed(loader))
    state = kept(loader.state_dict())
    again, in_order = repacked(tmp_path / "after", order=-1), repacked(tmp_path / "copy")
    make_loader(in_order, global_batch_size=2).load_state_dict(state)
    with refused(ValueError, "the dataset changed", "keys", "member sizes", "start a new run"):
        make_loader(again, global_batch_size=2).load_state_dict(state)


def test_moved_shards_are_the_same_data_set(tmp_path: Path, uneven: list[str]) -> None:
    moved = write_numbered(tmp_path / "elsewhere", UNEVEN)
    make_loader(moved).load_state_dict(make_loader(uneven).state_dict())


MANY = 96  # ranks, more than the 64 lanes of a run on fewer


def lanes_of(loader: ShardLoader) -> int:
    """Lanes of the next epoch."""
    return int(loader.segment()["settings"]["lanes"])


@pytest.fixture
def many_shards(tmp_path: Path) -> list[str]:
    return write_numbered(tmp_path, [4] * (2 * MANY))


def test_a_run_on_more_than_64_ranks_has_a_lane_for_each_and_a_rank_opens_only_its_shards(
    many_shards: list[str],
) -> None:
    samples = {rank: [] for rank in (0, 41, MANY - 1)}
    for rank, taken in samples.items():
        loader = make_loader(many_shards, global_batch_size=2 * MANY, rank=rank, world_size=MANY, window=1)
        assert lanes_of(loader) == MANY
        taken += [label for step in read_epoch(loader) for batch in step for label in batch["label"].tolist()]
    assert [len({label // 4 for label in taken}) for taken in samples.values()] == [2, 2, 2]
    assert lanes_of(make_loader(many_shards, global_batch_size=2 * MANY, world_size=64)) == 64


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("first", "then"), [(MANY, 2), (2, MANY)])
def test_a_run_keeps_its_order_on_more_or_fewer_ranks(
    many_shards: list[str], first: int, then: int, mixed: bool
) -> None:
    data: Any = Mixture({"a": many_shards[:MANY], "b": many_shards[MANY:]}) if mixed else many_shards

    def started(ranks: int, state: dict[str, Any] | None = None) -> ShardLoader:
        loader = make_loader(data, global_batch_size=2 * MANY, world_size=ranks)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    def contents(loader: ShardLoader) -> list[list[list[int]]]:
        """Epoch and sample of each row of the next global batches: the rest of the epoch, and a whole one."""
        steps = loader.steps_left + loader.steps_per_epoch
        return [[column.tolist() for column in loader._position.samples_of(step)] for step in range(steps)]

    loader = started(first)
    assert lanes_of(loader) == max(64, first)
    next(iter(loader))
    loader.commit()
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = started(then, state)
    assert lanes_of(resumed) == max(64, first)
    assert contents(resumed) == contents(started(first, state)) == contents(loader)
    assert contents(resumed) != contents(started(then))[1:]
