from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dtrain.data.column import Column
from dtrain.data.field_options import parse_fields
from dtrain.data.wire import Wire
from dtrain.precision import Precision


def column_of(rows: int, ext: str = "npy", precision: str = "fp32", **options: Any) -> Column:
    fields = parse_fields({ext: {"name": "x", **options}})
    return Column(fields[0], rows, Wire(fields, Precision(precision)))


def filled(column: Column, values: list[Any]) -> Tensor | list[Any]:
    for row, value in enumerate(values):
        column.put(row, value, f"shard.tar/{row}")
    return column.data()


@pytest.mark.parametrize(
    "dtype", ["uint8", "int16", "int32", "int64", "uint16", "bool", "float16", "float32", "float64", "complex64"]
)
def test_arrays_become_one_tensor_of_their_type(dtype: str) -> None:
    values = [(np.arange(6).reshape(2, 3) * row).astype(dtype) for row in range(4)]
    got = filled(column_of(4), values)
    assert isinstance(got, Tensor)
    assert got.numpy().dtype == dtype
    assert np.array_equal(got.numpy(), np.stack(values))


def test_arrays_may_be_strided_read_only_or_tensors() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    frozen = base[:, :3].copy()
    frozen.flags.writeable = False
    values = [base[:, ::2], base[::-1, :3], frozen, torch.from_numpy(base[:, :3])]
    got = filled(column_of(4), values)
    assert isinstance(got, Tensor)
    assert np.array_equal(got.numpy(), np.stack([np.asarray(value) for value in values]))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "float32", "bool"])
def test_masked_rows_repeat_others_of_any_type(dtype: str) -> None:
    column = column_of(4)
    for row in (1, 3):
        column.put(row, np.array([row, 0]).astype(dtype), "shard.tar/x")
    column.repeat([1, 3], [0, 2])
    got = column.data()
    assert isinstance(got, Tensor)
    assert got.numpy().tolist() == np.array([[1, 0], [1, 0], [3, 0], [3, 0]]).astype(dtype).tolist()


def test_bf16_tensors_pass_through() -> None:
    values = [torch.tensor([1.5, row], dtype=torch.bfloat16) for row in range(3)]
    for role in (None, "feature"):
        got = filled(column_of(3, precision="bf16", role=role), values)
        assert isinstance(got, Tensor)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, torch.stack(values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([3, 1, 2**62], torch.tensor([3, 1, 2**62]), id="integers"),
        pytest.param([True, False], torch.tensor([1, 0]), id="truth values"),
        pytest.param([np.True_, np.False_], torch.tensor([1, 0]), id="numpy's truth values"),
        pytest.param([1, 2.5], torch.tensor([1.0, 2.5]), id="numbers"),
        pytest.param([np.int32(3), np.float32(2.5)], torch.tensor([3.0, 2.5]), id="numpy's numbers"),
    ],
)
def test_numbers_become_a_tensor_of_int64_or_fp32(values: list[Any], expected: Tensor) -> None:
    got = filled(column_of(len(values), "json"), values)
    assert isinstance(got, Tensor)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_numbers_that_are_features_travel_in_the_compute_dtype() -> None:
    got = filled(column_of(3, "json", "bf16", role="feature"), [1, 2.5, 3])
    assert isinstance(got, Tensor)
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [1, 2.5, 3]
    with pytest.raises(ValueError, match=r"'shard\.tar/1': field 'x' holds 100000"):
        filled(column_of(2, "json", "fp16", role="feature"), [1.0, 1e5])


def test_everything_else_becomes_a_list() -> None:
    for values in (["a", "b"], [b"a", b""], [{"a": 1}, None], [None, 3], [[1, 2], []], ["a", 3]):
        assert filled(column_of(2, "json"), values) == values


def test_a_decoder_may_write_into_the_column() -> None:
    column = column_of(3, "jpg", role="image")
    assert column.target(0) is None  # nobody knows the size yet
    column.put(0, np.full((2, 4, 3), 7, np.uint8), "a")
    target = column.target(2)
    assert target is not None
    assert target.shape == (2, 4, 3)
    target[...] = 9
    column.put(2, target, "c")
    column.target(1)
    column.put(1, np.full((2, 4, 3), 8, np.uint8), "b")  # another array than the target counts
    got = column.data()
    assert isinstance(got, Tensor)
    assert [row.unique().tolist() for row in got] == [[7], [8], [9]]


def test_only_images_have_a_target() -> None:
    column = column_of(2, "npy")
    column.put(0, np.zeros((2, 4, 3), np.uint8), "a")
    assert column.target(1) is None


def test_rows_are_repeated_in_tensors_and_in_lists() -> None:
    for ext, values in (("npy", [np.array([row]) for row in range(4)]), ("txt", ["0", "1", "2", "3"])):
        column = column_of(6, ext)
        for row, value in zip((0, 2, 3, 4), values, strict=True):
            column.put(row, value, "key")
        column.repeat([3, 0], [1, 5])
        got = column.data()
        found = got.flatten().tolist() if isinstance(got, Tensor) else [int(value) for value in got]
        assert found == [0, 2, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        pytest.param(np.zeros((3, 4)), np.zeros((4, 3)), r"float64 \[4, 3\].*float64 \[3, 4\]", id="shape"),
        pytest.param(
            np.zeros(3, int), np.zeros(3), r"float64 \[3\].*int64 \[3\]", id="a cast that would lose something"
        ),
        pytest.param(np.zeros(3), "a", r"is str, 'shard.tar/0' is float64 \[3\]", id="an object after arrays"),
        pytest.param("a", np.zeros(3), r"is float64 \[3\], 'shard.tar/0' is str", id="an array after objects"),
    ],
)
def test_values_that_do_not_go_together_name_both_samples_and_the_remedy(first: Any, second: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"field 'x': sample 'shard.tar/1' .*{said}.*size: 224"):
        filled(column_of(2), [first, second])


@pytest.mark.parametrize(
    "value",
    [np.zeros((4, 4, 3), np.float32), np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4), np.uint8), torch.zeros(3, 4, 4)],
    ids=["floats", "channels first", "grey", "a float tensor"],
)
def test_an_image_that_is_no_pixels_any_more_is_refused(value: Any) -> None:
    # Cast to uint8, an image on [0, 1] would be black, and nothing would fail.
    with pytest.raises(ValueError, match=r"field 'x': sample 'shard.tar/0' is .*uint8 \[height, width, 3\]"):
        filled(column_of(1, "jpg", role="image"), [value])


def test_what_no_tensor_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 'shard.tar/0' is an array of <U3, which no tensor can hold"):
        filled(column_of(1), [np.array(["abc"])])


def test_a_number_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"field 'x'.*64 bits"):
        filled(column_of(2, "json"), [1, 2**64])


def test_rows_of_images_begin_where_libjpeg_turbo_writes_through_the_caches() -> None:
    column = column_of(4, "jpg")
    column.put(0, np.zeros((32, 32, 3), np.uint8), "a")
    tensor = column.data()
    assert isinstance(tensor, torch.Tensor)
    assert tensor.data_ptr() % 32 == 16
    assert tensor.is_contiguous()
