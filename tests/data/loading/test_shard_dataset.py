from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dtrain.data import ShardDataset, ShardLoader
from dtrain.data.augment import RandomResizedCrop
from dtrain.data.fields.field import DataError
from tests.property_tests import examples
from tests.ranks import run_ranks
from tests.refusals import refused
from tests.shards import IMAGE, LABEL, UNEVEN, write_numbered, write_tar

TOTAL = sum(UNEVEN)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_numbered(tmp_path_factory.mktemp("shards"), UNEVEN, image=True)


def labels(dataset: Any, workers: int = 0) -> list[int]:
    return [sample["label"] for sample in DataLoader(dataset, batch_size=None, num_workers=workers)]


def test_a_text_is_a_row_of_tokens_and_its_mask(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", [("0", {"txt": b"ab"})])
    (sample,) = ShardDataset(shard, {"txt": {"name": "caption", "tokenizer": "bytes", "length": 5}})
    assert sample["caption"].tolist() == [97, 98, 256, 0, 0]
    assert sample["caption_mask"].tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("shuffle", ["window", "full", "none"])
@pytest.mark.parametrize("world_size", [1, 3, 60])
def test_over_all_ranks_each_sample_occurs_once_and_lengths_differ_by_at_most_one(
    shards: list[str], shuffle: str, world_size: int
) -> None:
    ranks = [
        ShardDataset(shards, LABEL, shuffle=shuffle, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for epoch in (0, 7):
        for dataset in ranks:
            dataset.set_epoch(epoch)
        seen = [labels(dataset) for dataset in ranks]
        assert sorted(label for one in seen for label in one) == list(range(TOTAL))
        assert [len(one) for one in seen] == [len(dataset) for dataset in ranks]
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@pytest.mark.parametrize("workers", [2, 5])
def test_the_sequence_does_not_depend_on_the_number_of_workers(shards: list[str], workers: int) -> None:
    dataset = ShardDataset(shards, LABEL, rank=1, world_size=2)
    assert labels(dataset, workers) == labels(dataset)


def test_persistent_workers_follow_set_epoch(shards: list[str]) -> None:
    dataset = ShardDataset(shards, LABEL)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    first, again = ([sample["label"] for sample in loader] for _ in range(2))
    assert list(first) == list(again)
    dataset.set_epoch(1)
    second = [sample["label"] for sample in loader]
    assert sorted(second) == list(range(TOTAL))
    assert second == labels(dataset)
    assert second != labels(ShardDataset(shards, LABEL))


def test_epochs_differ_and_stored_order_is_kept_without_shuffle(shards: list[str]) -> None:
    assert labels(ShardDataset(shards, LABEL, shuffle="none")) == list(range(TOTAL))
    dataset = ShardDataset(shards, LABEL)
    first = labels(dataset)
    dataset.set_epoch(1)
    assert labels(dataset) != first
    assert labels(ShardDataset(shards, LABEL, seed=1)) != first


def test_samples_have_named_fields_keys_and_batches_of_the_default_collation(shards: list[str]) -> None:
    dataset = ShardDataset(shards, IMAGE | LABEL, shuffle="none")
    loader = DataLoader(dataset, batch_size=4)
    batch = next(iter(loader))
    assert batch["image"].shape == (4, 8, 8, 3)
    assert batch["image"].dtype == torch.uint8
    assert batch["label"].tolist() == [0, 1, 2, 3]
    assert batch["__key__"][1].endswith("shard-000.tar/sample00001")
    assert len(loader) == -(-TOTAL // 4)


def test_an_augmentation_draws_the_numbers_that_shard_loader_draws(shards: list[str]) -> None:
    augment = RandomResizedCrop(size=6)
    dataset = ShardDataset(shards, IMAGE | LABEL, shuffle="none", augment=augment)
    loader = ShardLoader(shards, IMAGE | LABEL, global_batch_size=TOTAL, shuffle="none", augment=augment, num_workers=0)
    (batch,) = loader.epoch(0)
    for sample in dataset:
        np.testing.assert_array_equal(sample["image"], batch["image"][sample["label"]])


def test_a_sample_is_augmented_anew_in_each_epoch_and_equally_if_it_is_repeated(shards: list[str]) -> None:
    dataset = ShardDataset(shards, IMAGE, shuffle="none", augment=RandomResizedCrop(size=6))

    def epoch(number: int) -> list[bytes]:
        dataset.set_epoch(number)
        return [sample["image"].tobytes() for sample in dataset]

    first, second = epoch(0), epoch(1)
    assert sum(map(bytes.__eq__, first, second)) < TOTAL / 2
    assert (epoch(0), epoch(1)) == (first, second)


def test_only_the_first_iteration_after_a_resume_skips_samples(shards: list[str]) -> None:
    begun, resumed = ShardDataset(shards, LABEL), ShardDataset(shards, LABEL)
    whole = labels(begun)
    samples = iter(begun)
    for _ in range(20):
        next(samples)
    resumed.load_state_dict(begun.state_dict())
    assert [labels(resumed) for _ in range(3)] == [whole[20:], whole, whole]


@examples(40)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any),
    world_size=st.integers(1, 4),
    workers=st.integers(1, 4),
    stop=st.integers(0, 12),
    shuffle=st.sampled_from(["window", "full", "none"]),
)
def test_a_loaded_state_yields_the_rest_on_every_worker(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[int],
    world_size: int,
    workers: int,
    stop: int,
    shuffle: str,
) -> None:
    paths = write_numbered(tmp_path_factory.mktemp("shards"), counts)
    seen = []
    for rank in range(world_size):
        for worker in range(workers):
            dataset, resumed = (
                _InWorker(
                    worker, workers, ShardDataset(paths, LABEL, shuffle=shuffle, rank=rank, world_size=world_size)
                )
                for _ in range(2)
            )
            before = dataset.take(stop)
            resumed.load_state_dict(dataset.state_dict())
            seen += before + resumed.take(1000)
    assert sorted(seen) == list(range(sum(counts)))


class _InWorker:
    """A dataset as it is in one worker of a DataLoader, without the process."""

    def __init__(self, worker: int, workers: int, dataset: ShardDataset) -> None:
        self._info = (worker, workers)
        self._dataset = dataset

    def take(self, most: int) -> list[int]:
        with self._in_worker():
            return [sample["label"] for _, sample in zip(range(most), self._dataset, strict=False)]

    def state_dict(self) -> dict[str, Any]:
        with self._in_worker():
            return self._dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._in_worker():
            self._dataset.load_state_dict(state)

    @contextmanager
    def _in_worker(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dtrain.data.loading.shard_dataset._worker", lambda: self._info)
            yield


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_resumes_in_the_middle_of_an_epoch(shards: list[str], workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        dataset = ShardDataset(shards, LABEL)
        dataset.set_epoch(3)
        return stateful(dataset, batch_size=4, num_workers=workers)

    whole = [batch["label"].tolist() for batch in loader()]
    first = loader()
    iterator = iter(first)
    before = [next(iterator)["label"].tolist() for _ in range(5)]
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    assert before + [batch["label"].tolist() for batch in second] == whole
    assert sorted(label for batch in whole for label in batch) == list(range(TOTAL))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 1}, "seed 1 -> 0"),
        ({"world_size": 2}, "world_size 2 -> 1"),
        ({"workers": 4}, "workers 4 -> 1"),
        ({"data": {"fingerprint": "other", "samples": 3}}, "dataset changed"),
    ],
)
def test_a_state_of_another_order_is_refused(shards: list[str], changed: dict[str, Any], named: str) -> None:
    dataset = ShardDataset(shards, LABEL)
    with pytest.raises(ValueError, match=named):
        dataset.load_state_dict(dataset.state_dict() | changed)
    with pytest.raises(ValueError, match="yielded"):
        dataset.load_state_dict({key: value for key, value in dataset.state_dict().items() if key != "yielded"})


def test_impossible_arguments_are_refused(shards: list[str]) -> None:
    for arguments in ({"rank": 0}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"shuffle": "some"}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            ShardDataset(shards, LABEL, **arguments)
    with pytest.raises(ValueError, match="epoch: got -1"):
        ShardDataset(shards, LABEL).set_epoch(-1)


def test_a_bad_sample_is_named_with_its_shard(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("one", {"cls": b"1"}), ("two", {"cls": b"x"})])
    with pytest.raises(DataError, match=r"a\.tar/two'.*a\.tar at byte \d+: .*ShardLoader"):
        list(ShardDataset(path, LABEL, shuffle="none"))


def _own_labels(rank: int, pattern: str) -> list[int]:
    return labels(ShardDataset(pattern, LABEL), workers=2)


def test_ranks_are_those_of_the_process_group(tmp_path: Path) -> None:
    write_numbered(tmp_path, UNEVEN)
    seen = run_ranks(3, _own_labels, str(tmp_path / "*.tar"))
    assert sorted(label for one in seen for label in one) == list(range(TOTAL))


def test_a_data_set_packed_again_is_refused(tmp_path: Path) -> None:
    samples = [(str(number), {"cls": b"1"}) for number in range(4)]
    first, again = (
        ShardDataset(write_tar(tmp_path / folder / "0.tar", packed), LABEL)
        for folder, packed in (("first", samples), ("again", samples[::-1]))
    )
    with refused(ValueError, "dataset changed", "keys or member sizes"):
        again.load_state_dict(first.state_dict())
