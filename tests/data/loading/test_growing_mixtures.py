"""Loaders of mixtures whose sources change between starts: whole global batches from real shards, counted by their keys."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from dtrain.data import Growth, Mixture, ShardLoader
from tests.data.loading.growing_shards import add, files_in, keys_of_step, sample_of, write
from tests.data.order.growing import SourcePromise
from tests.shards import LABEL, close


def patterns(folder: Path) -> dict[str, str]:
    return {path.name: str(path / "*.tar") for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("cases", [5, pytest.param(500, marks=pytest.mark.slow)])
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
