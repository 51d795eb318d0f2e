"""Loaders whose shards change between starts: whole global batches from real shards, counted by their keys."""

from __future__ import annotations

import random
import shutil
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data import BadShards, Growth, Mixture, ShardLoader, WorkerOptions
from dtrain.data.shards import index_builder
from dtrain.data.sources.datasets import SampleSource
from dtrain.data.sources.mixture import EvaluationSets
from tests.data.loading.growing_shards import add, files_in, keys_of_step, sample_of, write
from tests.data.order.growing import Promise
from tests.refusals import refused
from tests.shards import LABEL, close, make_ranks, valid_keys


@pytest.mark.parametrize("cases", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_every_sample_is_loaded_as_often_as_promised(tmp_path: Path, cases: int) -> None:
    for case in range(cases):
        rng, folder, ever = random.Random(case), tmp_path / str(case), set[str]()
        shuffle = rng.choice(["window", "window", "full", "none"])
        add(rng, folder, ever, rng.randint(3, 6))
        promise, state = Promise(), None
        for _ in range(rng.randint(2, 4)):
            when = rng.choice(["next_epoch", "now"])
            if state is not None:
                add(rng, folder, ever, rng.randint(0, 3))
                if rng.random() < 0.3:
                    paths = sorted(folder.glob("*.tar"))
                    for path in rng.sample(paths, rng.randint(0, len(paths) // 2)):
                        path.unlink()
            batch = rng.randint(4, 12)
            ranks = make_ranks(
                sorted(map(str, folder.glob("*.tar"))),
                rng.randint(1, 4),
                global_batch_size=batch,
                shuffle=shuffle,
                window=rng.randint(1, 3),
                growth=Growth(when, allow_removed=True),
            )
            if state is not None:
                for loader in ranks:
                    loader.load_state_dict(state)
            promise.start(files_in(folder), now=when == "now")
            streams: list[Any] = []
            for _ in range(rng.randint(0, 12)):
                epoch = ranks[0].position[0]
                streams = streams or [iter(loader) for loader in ranks]
                taken = [sample_of(key) for key in keys_of_step(ranks, streams)]
                is_last = ranks[0].position[0] > epoch
                promise.take(epoch, taken, is_last)
                streams = [] if is_last else streams
            states = [loader.state_dict() for loader in ranks]
            assert all(each == states[0] for each in states)
            state = states[0]
            del streams  # the batches that were read ahead are lost, as in a kill
            close(ranks)
        shutil.rmtree(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b0.tar", "b1.tar"):
        write(tmp_path / "shards", name, 8)
    return tmp_path / "shards"


def loader_on(folder: Path, *growth: Any, **options: Any) -> ShardLoader:
    options = {"global_batch_size": 4, "num_workers": 0} | options
    return ShardLoader(str(folder / "*.tar"), LABEL, growth=Growth(*growth), **options)


def state_after_a_step(folder: Path) -> dict[str, Any]:
    loader = loader_on(folder)
    next(iter(loader))
    loader.commit()
    return loader.state_dict()


def test_a_shard_without_its_end_mark_waits_and_joins_when_it_is_written(folder: Path) -> None:
    state = state_after_a_step(folder)
    write(folder, "a.tar", 5)
    whole = (folder / "a.tar").read_bytes()
    (folder / "a.tar").write_bytes(whole[:1536])
    with pytest.warns(UserWarning, match=r"1 of 3 shards, such as .*a\.tar.*next start"):
        loader = loader_on(folder, "now")
    loader.load_state_dict(state)
    assert (loader.index.num_samples, loader.data_changes) == (16, [])
    (folder / "a.tar").write_bytes(whole)
    again = loader_on(folder, "now")
    again.load_state_dict(loader.state_dict())
    assert again.index.num_samples == 21
    assert again.data_changes == ["new: 1 shard with 5 samples, joining the rest of epoch 0"]


def test_a_known_shard_that_was_cut_short_is_refused_and_not_taken_for_a_removed_one(folder: Path) -> None:
    state = state_after_a_step(folder)
    (folder / "b1.tar").write_bytes((folder / "b1.tar").read_bytes()[:1536])
    with pytest.warns(UserWarning, match="end mark"):
        loader = loader_on(folder, "now", True)
    with refused(ValueError, "b1.tar", "end mark", "again"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("growth", [("now",), ("next_epoch",), (None,)])
def test_a_known_shard_with_other_samples_is_refused_whatever_may_grow(folder: Path, growth: tuple[Any, ...]) -> None:
    state = state_after_a_step(folder)
    write(folder, "b0.tar", 7)
    write(folder, "a.tar", 5)
    with refused(ValueError, "the dataset changed", "samples 16 -> 20", "start a new run"):
        loader_on(folder, *growth).load_state_dict(state)


def test_a_shard_that_returns_is_refused(folder: Path) -> None:
    state = state_after_a_step(folder)
    content = (folder / "b1.tar").read_bytes()
    (folder / "b1.tar").unlink()
    loader = loader_on(folder, None, True)
    loader.load_state_dict(state)
    without = loader.state_dict()
    loader.load_state_dict(without)  # a second time
    (folder / "b1.tar").write_bytes(content)
    with refused(ValueError, "b1.tar", "removed", "different name"):
        loader_on(folder, "now", True).load_state_dict(without)


def test_new_shards_of_a_removed_name_in_another_folder_are_refused(folder: Path) -> None:
    for part in ("x", "y"):
        write(folder / part, "s.tar", 4)
    both = [str(folder / "x" / "s.tar"), str(folder / "y" / "s.tar")]
    loader = ShardLoader(both, LABEL, global_batch_size=4, num_workers=0)
    one = ShardLoader(both[0], LABEL, global_batch_size=4, num_workers=0, growth=Growth("now", allow_removed=True))
    with refused(ValueError, "y/s.tar", "same file name", "of their own"):
        one.load_state_dict(loader.state_dict())


def test_samples_that_are_excluded_stay_so_when_numbers_change(folder: Path) -> None:
    state = state_after_a_step(folder)
    write(folder, "a.tar", 5)
    loader = loader_on(folder, "now")
    loader.exclude(["b0.tar/03", "a.tar/01"])
    loader.load_state_dict(state)
    keys = [key for _ in range(2) for batch in iter(loader) for key in [valid_keys([batch]), loader.commit()][0]]
    assert "a.tar/01" not in keys
    assert keys.count("a.tar/02") == 2
    assert keys.count("b0.tar/03") == 0


def test_excluded_samples_may_be_in_shards_that_were_removed(folder: Path) -> None:
    state = state_after_a_step(folder)
    (folder / "b1.tar").unlink()
    loader = loader_on(folder, None, True)
    with pytest.warns(UserWarning, match=r"1 excluded keys such as b1\.tar/03"):
        loader.exclude(["b0.tar/02", "b1.tar/03"])
    loader.load_state_dict(state)
    keys = [key for batch in loader.epoch(1) for key in valid_keys([batch])]
    assert sorted(keys) == [f"b0.tar/{number:02}" for number in range(8) if number != 2]


def test_an_impossible_value_and_sources_that_cannot_grow_are_refused(folder: Path) -> None:
    with refused(ValueError, "data.grow", "'later'", "next_epoch or now"):
        Growth("later")
    arrays = {"label": np.arange(8)}
    fixed: list[Any] = [
        SampleSource.build(arrays, {"label": {"name": "label"}}),
        Mixture({"one": arrays}),
        EvaluationSets({"one": str(folder / "*.tar")}),
    ]
    for shards in fixed:
        fields = {"label": {"name": "label"}} if isinstance(shards, Mixture) else LABEL
        with refused(ValueError, "data.grow", "only shards for training", "data.grow=null"):
            ShardLoader(shards, fields, global_batch_size=4, num_workers=0, growth=Growth("now"))


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
def test_workers_of_another_process_know_the_removed_shards(
    folder: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mapped:
        monkeypatch.setattr(index_builder, "MAPPED_ABOVE", 0)
    state = state_after_a_step(folder)
    write(folder, "a.tar", 5)
    (folder / "b0.tar").unlink()
    loader = loader_on(folder, "now", True, num_workers=1, workers=WorkerOptions(start_method="spawn"))
    loader.load_state_dict(state)
    keys = [key for batch in loader.epoch(1) for key in valid_keys([batch])]
    loader.close()
    assert sorted(keys) == [f"{name}/{n:02}" for name, size in (("a.tar", 5), ("b1.tar", 8)) for n in range(size)]


def cut(path: Path) -> bytes:
    """Takes away the end of a shard of several samples; returns its whole content."""
    whole = path.read_bytes()
    path.write_bytes(whole[:1536])
    return whole


def committed(loader: ShardLoader, steps: int = 1) -> dict[str, Any]:
    for _ in range(steps):
        for _ in range(loader.micro_batches_per_step):
            next(stream := iter(loader))
        loader.commit()
        del stream
    return loader.state_dict()


def of_earlier_start(loader: ShardLoader) -> BadShards:
    return BadShards("skip", None, loader.bad_shards, decided=True)


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("repaired", [False, True])
@pytest.mark.parametrize("grew_before", [False, True])
def test_a_shard_that_was_left_out_is_not_new_at_a_later_start(folder: Path, repaired: bool, grew_before: bool) -> None:
    write(folder, "b2.tar", 6)
    whole = cut(folder / "b2.tar")
    if grew_before:  # with its end mark, so that it does not wait
        (folder / "b2.tar").write_bytes(b"no tar" * 100 + bytes(1024))
    first = loader_on(folder, "now" if grew_before else None, bad_shards=BadShards("skip", None))
    assert list(first.bad_shards[""]) == ["b2.tar"]
    state = committed(first)
    write(folder, "a.tar", 5)
    if repaired:
        (folder / "b2.tar").write_bytes(whole)
    for _ in range(2):
        loader = loader_on(folder, "now", bad_shards=of_earlier_start(first))
        loader.load_state_dict(state)
        assert loader.index.names == ["b0.tar", "b1.tar", "a.tar"]
        assert (loader.bad_shards, loader.source.waiting) == (first.bad_shards, ())
        assert "21 samples in 3 shards, without 1 damaged: b2.tar" in loader.source.summary()
        state, first = committed(loader), loader
    keys = valid_keys(list(loader.epoch(1)))
    assert sorted(keys) == [
        f"{name}/{n:02}" for name, size in (("a.tar", 5), ("b0.tar", 8), ("b1.tar", 8)) for n in range(size)
    ]


def test_a_shard_that_waits_does_not_count_as_damaged(folder: Path) -> None:
    write(folder, "a.tar", 5)
    whole = cut(folder / "a.tar")
    with pytest.warns(UserWarning, match="wait") as warned:
        first = loader_on(folder, "now", bad_shards=BadShards("skip", 0))
    assert (len(warned), first.bad_shards, len(first.source.waiting)) == (1, {}, 1)
    state = committed(first)
    (folder / "a.tar").write_bytes(whole)
    loader = loader_on(folder, "now", bad_shards=of_earlier_start(first))
    loader.load_state_dict(state)
    assert loader.data_changes == ["new: 1 shard with 5 samples, joining the rest of epoch 0"]


def test_a_start_needs_a_shard_that_does_not_wait(folder: Path) -> None:
    for name in ("b0.tar", "b1.tar"):
        cut(folder / name)
    with refused(ValueError, "2 of 2 shards", "b0.tar", "end mark", "At least one"):
        loader_on(folder, "now", bad_shards=BadShards("skip"))


@pytest.mark.parametrize("name", ["a.tar", "b1.tar"])
def test_a_shard_that_is_damaged_at_a_later_start_is_refused(folder: Path, name: str) -> None:
    first = loader_on(folder, "now", bad_shards=BadShards("skip"))
    (folder / name).write_bytes(b"no tar" * 100 + bytes(1024))
    with refused(ValueError, name, "data.bad_shards=skip", "also with data.grow", "take it out of data.train"):
        loader_on(folder, "now", True, bad_shards=of_earlier_start(first))


@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_known_shard_that_was_left_out_now_is_not_taken_for_a_removed_one(folder: Path) -> None:
    state = state_after_a_step(folder)
    (folder / "b1.tar").write_bytes(b"no tar" * 100 + bytes(1024))
    loader = loader_on(folder, "now", True, bad_shards=BadShards("skip"))
    with refused(ValueError, "data.bad_shards=skip", "b1.tar", "data.grow_allow_removed=true"):
        loader.load_state_dict(state)
    (folder / "b1.tar").unlink()
    loader = loader_on(folder, "now", True, bad_shards=BadShards("skip"))
    loader.load_state_dict(state)
    assert loader.data_changes[0].startswith("removed: 1 shard with 8 samples")


@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_shard_that_was_left_out_is_known_by_a_longer_or_shorter_name(folder: Path) -> None:
    write(folder / "x", "s.tar", 6)
    cut(folder / "x" / "s.tar")
    both = [str(folder / "x" / "s.tar"), str(folder / "b0.tar")]
    options: dict[str, Any] = {"global_batch_size": 4, "num_workers": 0, "growth": Growth("now", allow_removed=True)}
    first = ShardLoader(both, LABEL, **options | {"growth": Growth()}, bad_shards=BadShards("skip"))
    assert list(first.bad_shards[""]) == ["s.tar"]
    write(folder / "y", "s.tar", 4)
    with refused(ValueError, "s.tar", "data.bad_shards", "data.grow", "of their own"):
        ShardLoader([*both, str(folder / "y" / "s.tar")], LABEL, **options, bad_shards=of_earlier_start(first))
    longer = BadShards("skip", None, {"": {"x/s.tar": "cut"}}, decided=True)
    for shards in (both, [*both, str(folder / "y" / "s.tar")]):
        loader = ShardLoader(shards, LABEL, **options, bad_shards=longer)
        assert loader.bad_shards == {"": {"x/s.tar": "cut"}}
        assert len(loader.index.shards) == len(shards) - 1


def test_a_step_back_after_the_data_grew_is_to_the_same_samples(folder: Path) -> None:
    state = state_after_a_step(folder)
    write(folder, "a.tar", 5)
    (folder / "b0.tar").unlink()
    loader = loader_on(folder, "now", True)
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="no commit"):
        loader.step_back(2)
    for rows in (4, 2, 1):  # steps of two epochs, each twice
        for _ in range(4):
            before, position = loader.state_dict(), copy(loader._position)
            stream = iter(loader)
            taken = valid_keys([next(stream) for _ in range(loader.micro_batches_per_step)])
            loader.commit()
            after = loader.state_dict()
            assert position.state_dict() == before != after
            loader.step_back(rows)
            assert loader.state_dict() == before
            stream = iter(loader)
            again = valid_keys([next(stream) for _ in range(loader.micro_batches_per_step)])
            loader.commit()
            assert (again, loader.state_dict()) == (taken, after)
    assert loader.position[0] >= 2
    del stream
    loader.epoch(loader.position[0] + 3)
    loader.step_back(1)
    assert loader.state_dict() == before
    loader.load_state_dict(before)
    with pytest.raises(RuntimeError, match="no commit"):
        loader.step_back(4)


def test_samples_that_are_masked_stay_so_when_numbers_change(folder: Path) -> None:
    state = state_after_a_step(folder)
    write(folder, "a.tar", 5)
    (folder / "b1.tar").unlink()
    loader = loader_on(folder, "now", True)
    loader.mask(dict.fromkeys(("b0.tar/03", "a.tar/01"), "killed"))
    loader.load_state_dict(state)
    bad = [record["key"] for batch in loader.epoch(1) for record in batch.bad]
    assert sorted(bad) == ["a.tar/01", "b0.tar/03"]


def test_a_list_of_shards_grows_and_shrinks(folder: Path) -> None:
    write(folder, "a.tar", 5)
    listed = folder / "shards.txt"
    options: dict[str, Any] = {"global_batch_size": 4, "num_workers": 0, "growth": Growth("now", allow_removed=True)}
    listed.write_text("b0.tar\nb1.tar\n")
    state = committed(ShardLoader(f"@{listed}", LABEL, **options))
    listed.write_text("a.tar\nb1.tar\n")
    loader = ShardLoader(f"@{listed}", LABEL, **options)
    loader.load_state_dict(state)
    assert [text.partition(" with")[0] for text in loader.data_changes] == ["new: 1 shard", "removed: 1 shard"]
    keys = valid_keys(list(loader.epoch(1)))
    assert sorted(keys) == [f"{name}/{n:02}" for name, size in (("a.tar", 5), ("b1.tar", 8)) for n in range(size)]
