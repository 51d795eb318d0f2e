"""Loaders whose shards change between starts: whole global batches from real shards, counted by their keys."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from dtrain.data import Growth, Mixture, ShardLoader, WorkerOptions
from dtrain.data.shards import dataset_index
from tests.data.order.growing import Promise, Sample
from tests.refusals import refused
from tests.shards import LABEL, close, make_ranks, valid_keys, write_tar


def write(folder: Path, name: str, size: int) -> None:
    write_tar(folder / name, [(f"{number:02}", {"cls": b"%d" % (number % 10)}) for number in range(size)])


def files_in(folder: Path) -> dict[str, int]:
    return {path.name: int(path.with_suffix(".size").read_text()) for path in sorted(folder.glob("*.tar"))}


def add(rng: random.Random, folder: Path, ever: set[str], number: int) -> None:
    """Writes up to ``number`` new shards, whose names sort before and between those that there are."""
    for _ in range(number):
        name, size = f"{rng.choice('abc')}-{rng.randrange(100):02}.tar", rng.randint(1, 9)
        if name not in ever:
            ever.add(name)
            write(folder, name, size)
            (folder / name).with_suffix(".size").write_text(str(size))


def step_of(ranks: list[ShardLoader], streams: list[Any]) -> list[Sample]:
    """The samples of the next global batch, which is then committed."""
    each = zip(ranks, streams, strict=True)
    batches = [next(stream) for loader, stream in each for _ in range(loader.micro_batches_per_step)]
    for loader in ranks:
        loader.commit()
    return [(key.partition("/")[0], int(key.partition("/")[2])) for key in valid_keys(batches)]


@pytest.mark.parametrize("cases", [8, pytest.param(500, marks=pytest.mark.slow)])
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
                taken = step_of(ranks, streams)
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
    mixture = Mixture({"one": str(folder / "*.tar")})
    with refused(ValueError, "data.grow", "single source", "data.grow=null"):
        ShardLoader(mixture, LABEL, global_batch_size=4, num_workers=0, growth=Growth("now"))


@pytest.mark.parametrize("mapped", [False, True])
def test_workers_of_another_process_know_the_removed_shards(
    folder: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mapped:
        monkeypatch.setattr(dataset_index, "MAPPED_ABOVE", 0)
    state = state_after_a_step(folder)
    write(folder, "a.tar", 5)
    (folder / "b0.tar").unlink()
    loader = loader_on(folder, "now", True, num_workers=1, workers=WorkerOptions(start_method="spawn"))
    loader.load_state_dict(state)
    keys = [key for batch in loader.epoch(1) for key in valid_keys([batch])]
    loader.close()
    assert sorted(keys) == [f"{name}/{n:02}" for name, size in (("a.tar", 5), ("b1.tar", 8)) for n in range(size)]
