"""Loaders of mixtures whose sources change between starts: whole global batches from real shards, counted by their keys."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data import BadShards, Growth, Mixture, ShardLoader, WorkerOptions
from tests.data.loading.growing_shards import add, files_in, keys_of_step, sample_of, write
from tests.data.order.growing import SourcePromise
from tests.refusals import refused
from tests.shards import LABEL, close, valid_keys


@pytest.mark.parametrize("cases", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_every_sample_of_every_source_is_loaded_as_often_as_promised(tmp_path: Path, cases: int) -> None:
    for case in range(cases):
        rng, folder = random.Random(case), tmp_path / str(case)
        sources = ["web", "books", "code"][: rng.randint(1, 3)]
        ever = {name: set[str]() for name in sources}
        for name in sources:
            write(folder / name, "b-50.tar", 5)
            (folder / name / "b-50.size").write_text("5")
            ever[name].add("b-50.tar")
            add(rng, folder / name, ever[name], rng.randint(0, 5))
        options: dict[str, Any] = {"shuffle": rng.choice(["window", "window", "full", "none"]), "num_workers": 0}
        options |= {"lanes": rng.choice([None, 3]), "window": rng.randint(1, 3)}
        promises, state = {name: SourcePromise() for name in sources}, None
        for _ in range(rng.randint(2, 4)):
            when = rng.choice(["next_epoch", "now"])
            if state is not None:
                for name in rng.sample(sources, rng.randint(1, len(sources))):
                    add(rng, folder / name, ever[name], rng.randint(0, 3))
                    paths = sorted((folder / name).glob("*.tar"))
                    for path in rng.sample(paths, rng.randint(0, len(paths) // 2)) * rng.choice([0, 0, 1]):
                        path.unlink()
            weights = {name: rng.choice([0.2, 1.0, 3.0, rng.random()]) for name in sources}
            ranks = [
                ShardLoader(
                    Mixture({name: str(folder / name / "*.tar") for name in sources}, weights),
                    LABEL,
                    global_batch_size=batch,
                    rank=rank,
                    world_size=world,
                    growth=Growth(when, allow_removed=True),
                    **options,
                )
                for world, batch in [(rng.randint(1, 4), rng.randint(4, 12))]
                for rank in range(world)
            ]
            if state is not None:
                for loader in ranks:
                    loader.load_state_dict(state)
            for name in sources:
                promises[name].start(files_in(folder / name), now=when == "now")
            streams: list[Any] = []
            for _ in range(rng.randint(0, 12)):
                epoch, before = ranks[0].position[0], ranks[0].samples_by_source()
                epochs = ranks[0].epochs_by_source()
                streams = streams or [iter(loader) for loader in ranks]
                taken = keys_of_step(ranks, streams)
                for name, count in ranks[0].samples_by_source().items():
                    own = [sample_of(key.partition("/")[2]) for key in taken if key.startswith(f"{name}/")]
                    promises[name].take_in_any_epoch(count - before[name], own)
                    assert ranks[0].epochs_by_source()[name] >= epochs[name]
                streams = [] if ranks[0].position[0] > epoch else streams
            states = [loader.state_dict() for loader in ranks]
            assert all(each == states[0] for each in states)
            state = states[0]
            del streams  # the batches that were read ahead are lost, as in a kill
            close(ranks)
        shutil.rmtree(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for source, names in (("web", ("b0.tar", "b1.tar")), ("books", ("c0.tar", "c1.tar"))):
        for name in names:
            write(tmp_path / source, name, 8)
    return tmp_path


def loader_on(folder: Path, *growth: Any, **options: Any) -> ShardLoader:
    options = {"global_batch_size": 4, "num_workers": 0} | options
    mixture = Mixture({name: str(folder / name / "*.tar") for name in ("web", "books")})
    return ShardLoader(mixture, LABEL, growth=Growth(*growth), **options)


def state_after_a_step(folder: Path, **options: Any) -> dict[str, Any]:
    loader = loader_on(folder, **options)
    next(iter(loader))
    loader.commit()
    return loader.state_dict()


def test_a_shard_of_a_source_without_its_end_mark_waits_for_the_next_start(folder: Path) -> None:
    state = state_after_a_step(folder)
    write(folder / "books", "a.tar", 5)
    whole = (folder / "books" / "a.tar").read_bytes()
    (folder / "books" / "a.tar").write_bytes(whole[:1536])
    with pytest.warns(UserWarning, match=r"1 of 3 shards, such as .*a\.tar.*next start"):
        loader = loader_on(folder, "now")
    loader.load_state_dict(state)
    assert (loader.index.num_samples, loader.data_changes) == (32, [])
    (folder / "books" / "a.tar").write_bytes(whole)
    again = loader_on(folder, "now")
    again.load_state_dict(loader.state_dict())
    assert again.data_changes == ["books: new: 1 shard with 5 samples, joining the rest of epoch 0"]
    (folder / "web" / "b1.tar").write_bytes((folder / "web" / "b1.tar").read_bytes()[:1536])
    with pytest.warns(UserWarning, match="end mark"):
        loader = loader_on(folder, "now", True)
    with refused(ValueError, "data.mixture.web", "b1.tar", "cut short"):
        loader.load_state_dict(state)


def shifted(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "label": sample["label"] + np.int64(rng.integers(1000) * 10)}


def test_samples_of_other_sources_keep_their_augmentation_and_order(folder: Path) -> None:
    alone, state = loader_on(folder, augment=shifted), state_after_a_step(folder, augment=shifted)
    write(folder / "web", "a.tar", 5)
    grown = loader_on(folder, "now", augment=shifted)
    grown.load_state_dict(state)
    for loader, steps in ((alone, 1), (grown, 0)):
        for _ in range(steps):
            next(stream := iter(loader))
            loader.commit()
            del stream
    for _ in range(3):
        both = []
        for loader in (alone, grown):
            batch = next(stream := iter(loader))
            loader.commit()
            del stream
            rows = zip(batch.sample_keys, batch["label"].tolist(), strict=True)
            both.append([(key, value) for key, value in rows if key.startswith("books")])
        assert both[0] == both[1] != []


@pytest.mark.slow
def test_workers_of_another_process_know_the_removed_shards_of_each_source(folder: Path) -> None:
    state = state_after_a_step(folder)
    write(folder / "web", "a.tar", 5)
    (folder / "web" / "b0.tar").unlink()
    loader = loader_on(folder, "now", True, num_workers=1, workers=WorkerOptions(start_method="spawn"))
    loader.exclude(["web/b1.tar/03"])
    loader.mask({"web/a.tar/01": "killed", "web/b0.tar/01": "killed"})
    loader.load_state_dict(state)
    batches = [*loader.epoch(1), *loader.epoch(2)]  # a step at an end has samples of both
    loader.close()
    keys = {key for key in valid_keys(batches) if key.startswith("web/")}
    assert "29 samples of 2 sources" in loader.source.summary()
    assert keys == {f"web/{name}/{n:02}" for name, size in (("a.tar", 5), ("b1.tar", 8)) for n in range(size)} - {
        "web/b1.tar/03",
        "web/a.tar/01",
    }


@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_damaged_shard_of_a_source_is_not_new_at_a_later_start(folder: Path) -> None:
    (folder / "web" / "b2.tar").write_bytes(b"no tar" * 100 + bytes(1024))
    first = loader_on(folder, bad_shards=BadShards("skip", None))
    next(iter(first))
    first.commit()
    write(folder / "web", "b2.tar", 6)
    write(folder / "web", "a.tar", 5)
    decided = BadShards("skip", None, first.bad_shards, decided=True)
    loader = loader_on(folder, "now", bad_shards=decided)
    loader.load_state_dict(first.state_dict())
    assert loader.data_changes == ["web: new: 1 shard with 5 samples, joining the rest of epoch 0"]
    assert loader.bad_shards == first.bad_shards
