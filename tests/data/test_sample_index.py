from __future__ import annotations

import numpy as np
import pytest

from dtrain.data.sample_index import SampleIndex


@pytest.mark.parametrize(
    ("samples", "size", "shards"), [(47, None, 47), (47, 10, 5), (40, 10, 4), (200_000, None, 50_000)]
)
def test_the_row_is_cut_into_equal_shards(samples: int, size: int | None, shards: int) -> None:
    index = SampleIndex("x", samples, size)
    assert len(index.counts) == shards
    assert index.counts.sum() == index.num_samples == samples
    assert set(index.counts[:-1].tolist()) <= {index.shard_size}
    assert 0 < index.counts[-1] <= index.shard_size


def test_a_sample_is_named_by_its_number() -> None:
    assert SampleIndex("mnist", 9).keys(np.array([7, 0])) == ["mnist/7", "mnist/0"]


def test_name_length_cut_and_content_identify_a_data_set() -> None:
    different = [("x", 9), ("y", 9), ("x", 8), ("x", 9, 2), ("x", 9, None, "v2")]
    assert len({SampleIndex(*given).fingerprint for given in different}) == len(different)
    assert SampleIndex("x", 9).difference(SampleIndex("x", 9).describe()) == ""
