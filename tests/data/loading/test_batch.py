"""Batches: transfer dtypes, what arrives, ipc, device copies. The oracle computes in float64 and rounds once."""

from __future__ import annotations

import copy
import math
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dtrain.data import Batch, ShardLoader, TransferOptions
from dtrain.data.fields.field import DataError, Field
from dtrain.data.fields.parse import parse_fields
from dtrain.data.loading import batch as batch_module
from dtrain.data.loading.batch import DeviceCopies, Transfer
from dtrain.data.loading.ipc import IpcBatch
from dtrain.precision import Precision
from dtrain.precision.policy import ROLES
from tests.refusals import refused

FIELDS = parse_fields({"jpg": {"name": "image", "role": "image"}, "txt": {"name": "caption"}, "cls": {"name": "label"}})


def make_batch(precision: str = "bf16") -> Batch:
    columns = {
        "image": torch.arange(24, dtype=torch.uint8).view(1, 4, 2, 3),
        "caption": ["a"],
        "label": torch.tensor([50257]),
    }
    return Batch(columns, ["s/0"], torch.tensor([True]), [{"key": "s/1"}], Transfer(FIELDS, Precision(precision)))


def test_images_are_normalised_when_moved_and_only_once() -> None:
    batch = make_batch()
    moved = batch.to("cpu")
    assert (moved["image"].dtype, moved["image"].shape) == (torch.bfloat16, (1, 3, 4, 2))
    again = moved.to("cpu")
    assert torch.equal(again["image"], moved["image"])
    assert batch["image"].dtype == torch.uint8  # what was handed over is as it was


def test_everything_else_moves_as_it_is() -> None:
    moved = make_batch().to("cpu")
    assert (moved["label"].dtype, moved["label"].tolist()) == (torch.int64, [50257])
    assert moved["caption"] == ["a"]
    assert (moved.sample_keys, moved.valid.tolist(), moved.bad) == (["s/0"], [True], [{"key": "s/1"}])
    assert list(moved) == ["image", "caption", "label"]


def test_bytes_on_the_transfer_dtype_are_those_that_the_worker_sent() -> None:
    batch = make_batch("fp32")
    assert batch.transfer_bytes == 24 + 8
    assert batch.to("cpu").transfer_bytes == 24 + 8


def test_a_batch_without_transfer_dtypes_moves_as_it_is() -> None:
    batch = Batch({"image": torch.zeros(1, 4, 2, 3, dtype=torch.uint8)}, ["s/0"], torch.tensor([True]))
    assert batch.to("cpu")["image"].dtype == torch.uint8


def test_a_copy_is_a_batch_with_all_that_belongs_to_it() -> None:
    batch = make_batch()
    for other in (copy.copy(batch), copy.deepcopy(batch)):
        assert isinstance(other, Batch)
        assert torch.equal(other.to("cpu")["image"], batch.to("cpu")["image"])
        assert (other.sample_keys, other.bad, other.transfer_bytes) == (
            batch.sample_keys,
            batch.bad,
            batch.transfer_bytes,
        )


def test_a_field_that_the_batch_does_not_have_is_named_with_those_that_it_has() -> None:
    batch = Batch({"img": torch.zeros(1), "label": torch.zeros(1)}, ["a"], torch.ones(1, dtype=torch.bool))
    with pytest.raises(KeyError) as raised:
        batch["image"]
    assert isinstance(raised.value, DataError)
    for part in ("'image'", "'img', 'label'", "data.fields"):
        assert part in str(raised.value)
    assert batch.get("image") is None


MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FLOATS = (torch.float16, torch.float32, torch.float64)
COMPUTE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_transfer(precision: str, role: str | None = "feature", **options: str) -> Transfer:
    return Transfer([Field("npy", "x", role)], Precision(precision), TransferOptions(**options))


def image_transfer(precision: str, **options: Any) -> Transfer:
    field = {"name": "image", "role": "image", "mean": MEAN, "std": STD}
    return Transfer(parse_fields({"jpg": field}), Precision(precision), TransferOptions(**options))


def sent(transfer: Transfer, source: Tensor) -> Tensor:
    out = torch.empty(source.shape, dtype=transfer.dtype("x", source.dtype))
    transfer.cast("x", lambda: "shard.tar/sample", source, out)
    return out


@pytest.mark.parametrize("precision", list(COMPUTE))
def test_only_floats_of_features_and_audio_follow_the_precision(precision: str) -> None:
    for role in (None, *ROLES):
        if role in ("image", "video", "text", "bytes", "boxes"):
            continue
        transfer = make_transfer(precision, role)
        for own in FLOATS:
            assert transfer.dtype("x", own) == (COMPUTE[precision] if role in ("feature", "audio") else own)
        for own in (torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64):
            assert transfer.dtype("x", own) == own


@pytest.mark.parametrize("precision", list(COMPUTE))
def test_a_feature_is_rounded_once_and_to_nearest(precision: str) -> None:
    source = torch.from_numpy(np.random.default_rng(0).normal(0, 100, 5000)).float()
    got = sent(make_transfer(precision), source)
    assert got.dtype == COMPUTE[precision]
    bits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[got.dtype]
    fraction, exponent = torch.frexp(source.double())
    assert torch.equal(
        got.double(), torch.ldexp(torch.round(torch.ldexp(fraction, torch.tensor(bits))), exponent - bits)
    )


def test_labels_boxes_and_times_arrive_bit_for_bit() -> None:
    for role in ("label", "id", "coord", "target", "weight", None):
        for source in (
            torch.tensor([50257, 2**62 + 1]),
            torch.tensor([1333.3, 1e30, -0.0, math.inf]),
            torch.tensor([1.7e9 + 1e-7], dtype=torch.float64),
            torch.tensor([6.1e-5], dtype=torch.float16),
        ):
            got = sent(make_transfer("bf16", role), source)
            assert got.dtype == source.dtype
            assert got.numpy().tobytes() == source.numpy().tobytes()


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("beside", [[], [math.nan], [math.inf, -math.inf]], ids=["alone", "by nan", "by infinities"])
def test_what_fp16_cannot_hold_is_named(own: torch.dtype, beside: list[float]) -> None:
    for value, told in ((2.0**17, "131072"), (-(2.0**20), "-1.04858e+06")):
        source = torch.tensor([1.0, value, *beside], dtype=own)
        message = f"sample 'shard.tar/sample': field 'x' holds {told}, outside the range of float16, +-65504"
        with pytest.raises(ValueError, match=re.escape(message)):
            sent(make_transfer("fp16"), source)


def test_what_fp16_can_hold_passes() -> None:
    for values in ([65504.0, -65504.0], [math.nan, math.inf, -math.inf, 1e-9], []):
        source = torch.tensor(values, dtype=torch.float32)
        assert sent(make_transfer("fp16"), source).numpy().tobytes() == source.half().numpy().tobytes()


def test_a_double_that_the_transfer_dtype_cannot_hold_is_named_in_every_precision() -> None:
    for precision in COMPUTE:
        with refused(ValueError, "field 'x'", "1e+300"):
            sent(make_transfer(precision), torch.tensor([1e300], dtype=torch.float64))


@pytest.mark.parametrize(
    ("precision", "value", "helps"),
    [("fp16", 1e5, True), ("fp16", 1e39, False), ("bf16", 1e39, False), ("fp32", 1e39, False)],
)
def test_fp32_is_named_as_a_remedy_only_where_it_helps(precision: str, value: float, helps: bool) -> None:
    with refused(ValueError, "field 'x'", f"{value:g}", "data.on_overflow=clamp") as refusal:
        sent(make_transfer(precision), torch.tensor([value], dtype=torch.float64))
    assert ("data.on_overflow=fp32" in str(refusal.value)) == helps


def test_clamping_moves_what_is_too_large_to_the_edge_and_nothing_else() -> None:
    source = torch.tensor([1e6, -1e6, 3.0, math.nan, math.inf, -math.inf])
    got = sent(make_transfer("fp16", on_overflow="clamp"), source)
    assert got.dtype == torch.float16
    assert got[[0, 1, 2, 4, 5]].tolist() == [65504.0, -65504.0, 3.0, math.inf, -math.inf]
    assert got[3].isnan()


def test_features_travel_in_fp32_where_that_was_asked_for() -> None:
    source = torch.tensor([1e6, 1.000001])
    for transfer in (
        make_transfer("fp16", on_overflow="fp32"),
        make_transfer("fp16", features="fp32"),
        make_transfer("bf16", features="fp32"),
    ):
        assert torch.equal(sent(transfer, source), source)
    # There is nothing to widen where nothing can overflow.
    assert make_transfer("bf16", on_overflow="fp32").dtype("x", torch.float32) == torch.bfloat16


def test_images_arrive_contiguous_where_channels_last_is_not_wanted() -> None:
    pixels = torch.arange(2 * 4 * 5 * 3, dtype=torch.uint8).view(2, 4, 5, 3)
    got = image_transfer("bf16", channels_last=False).arrive("image", pixels)
    assert got.is_contiguous()
    assert torch.equal(got, image_transfer("bf16").arrive("image", pixels))


@pytest.mark.parametrize("precision", list(COMPUTE))
def test_images_arrive_normalised_in_the_compute_dtype_and_channels_last(precision: str) -> None:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 16, 12, 3), dtype=np.uint8))
    pixels[0, 0, :, :] = torch.arange(12).view(12, 1)
    got = image_transfer(precision).arrive("image", pixels)
    exact = (pixels.double() / 255 - torch.tensor(MEAN).double()) / torch.tensor(STD).double()
    exact = exact.permute(0, 3, 1, 2)
    assert got.dtype == COMPUTE[precision]
    assert got.shape == (6, 3, 16, 12)
    assert got.is_contiguous(memory_format=torch.channels_last)
    if got.dtype == torch.float32:
        # The largest is 2.6: two roundings, each of half a unit in the last place.
        assert (got.double() - exact).abs().max() < 2.5e-7
    else:
        assert torch.equal(got, exact.to(got.dtype))


def test_every_grey_level_is_exact_where_mean_and_deviation_are_one_half() -> None:
    transfer = Transfer(parse_fields({"jpg": {"name": "image", "role": "image"}}), Precision("fp32"))
    levels = torch.arange(256, dtype=torch.uint8).view(1, 256, 1, 1).expand(1, 256, 1, 3)
    exact = (levels.double() - 127.5) / 127.5
    assert torch.equal(transfer.arrive("image", levels), exact.float().permute(0, 3, 1, 2))


def test_other_fields_arrive_as_they_are() -> None:
    tensor = torch.tensor([1.5, 2.5])
    assert make_transfer("bf16", "target").arrive("x", tensor) is tensor


def test_images_that_an_evaluation_normalised_first_can_be_trained_on() -> None:
    transfer = image_transfer("fp32")
    with torch.inference_mode():
        transfer.arrive("image", torch.zeros(1, 2, 2, 3, dtype=torch.uint8))
    image = transfer.arrive("image", torch.ones(1, 2, 2, 3, dtype=torch.uint8)).requires_grad_()
    (image**2).sum().backward()
    assert image.grad is not None


def test_the_banner_tells_what_travels() -> None:
    fields = parse_fields(
        {
            "jpg": {"name": "image", "role": "image"},
            "npy": {"name": "sound", "role": "feature"},
            "cls": {"name": "label"},
        }
    )
    assert Transfer(fields, Precision("bf16")).describe() == "image uint8, sound bfloat16, label as stored"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"features": "fp8"}, ["data.transfer", "got 'fp8'", "auto or fp32"]),
        ({"on_overflow": "ignore"}, ["data.on_overflow", "got 'ignore'", "error, clamp, fp32"]),
    ],
)
def test_unknown_modes_are_refused(options: dict[str, str], names: list[str]) -> None:
    with refused(ValueError, *names):
        make_transfer("fp16", **options)


@pytest.mark.parametrize(
    ("precision", "dtype", "role", "saved"),
    [
        ("bf16", torch.float32, None, "2,000"),
        ("fp16", torch.float32, "label", "2,000"),
        ("bf16", torch.float64, None, "6,000"),
        ("fp32", torch.float64, None, "4,000"),
        ("fp32", torch.float32, None, None),
        ("bf16", torch.float32, "coord", None),
        ("bf16", torch.float32, "target", None),
        ("bf16", torch.bfloat16, None, None),
        ("bf16", torch.int64, None, None),
    ],
)
def test_floats_that_nobody_declared_are_told_with_the_bytes_that_a_role_would_save(
    precision: str, dtype: torch.dtype, role: str | None, saved: str | None
) -> None:
    told = make_transfer(precision, role).suggestions({"x": torch.zeros(4, 10, 100, dtype=dtype)})
    assert len(told) == (saved is not None)
    if saved is not None:
        kind = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
        role_now = f"role {role}" if role else "no role"
        for part in ("'x'", "[10, 100]", role_now, "data.fields.npy.role=feature", kind, f"{saved} bytes"):
            assert part in told[0]


def test_a_few_floats_or_fp32_in_transfer_are_worth_no_line() -> None:
    assert make_transfer("bf16", None).suggestions({"x": torch.zeros(4, 100)}) == []
    assert make_transfer("bf16", None).suggestions({"x": ["text"]}) == []
    for options in ({"features": "fp32"}, {"on_overflow": "fp32"}):
        assert make_transfer("fp16", None, **options).suggestions({"x": torch.zeros(4, 1000)}) == []


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.bfloat16, torch.int64])
def test_rows_are_chosen_from_columns_of_any_type(dtype: torch.dtype) -> None:
    column = torch.tensor([[0, 1], [2, 40_000], [4, 5]]).to(dtype)
    batch = Batch({"x": column, "text": ["a", "b", "c"]}, ["s/0", "", "s/2"], torch.tensor([True, False, True]))
    chosen = batch.chosen([1, 1, 0])
    assert chosen["x"].dtype == dtype
    assert chosen["x"].tolist() == [column[row].tolist() for row in (1, 1, 0)]
    assert chosen["text"] == ["b", "b", "a"]
    assert batch.valid_rows()["x"].tolist() == [column[0].tolist(), column[2].tolist()]


def arrived(batch: Batch) -> tuple[Batch, int]:
    """The batch as another process gets it, and how many of its tensors were sent as open files."""
    sent = bytes(ForkingPickler.dumps(IpcBatch(batch)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that of torch for read-only arrays
        got = ForkingPickler.loads(sent).batch
    return got, sum(tensor.is_shared() for tensor in got.tensors())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
)
def test_small_tensors_arrive_as_they_were_sent_without_a_file(dtype: torch.dtype) -> None:
    batch = Batch({"x": torch.arange(12).view(3, 4).to(dtype)}, ["s/0", "", "s/2"], torch.tensor([True, False, True]))
    got, files = arrived(batch)
    assert files == 0
    assert type(got) is Batch
    assert got["x"].dtype == dtype
    assert torch.equal(got["x"], batch["x"])
    assert torch.equal(got.valid, batch.valid)
    assert got.valid.dtype == torch.bool
    got["x"][0] = 1  # it can be written to


def test_large_tensors_are_sent_as_files_and_the_rest_as_it_is() -> None:
    columns = {"image": torch.zeros(64, 64, 64, 3, dtype=torch.uint8), "caption": ["a"] * 64, "label": torch.zeros(64)}
    batch = Batch(columns, ["s/0"] * 64, torch.ones(64, dtype=torch.bool), [{"key": "s/9", "reason": "torn"}])
    got, files = arrived(batch)
    assert files == 1
    assert list(got) == list(columns)
    assert got["caption"] == columns["caption"]
    assert (got.sample_keys, got.bad, got.transfer_bytes) == (batch.sample_keys, batch.bad, batch.transfer_bytes)


def test_empty_rows_arrive() -> None:
    got, _ = arrived(Batch({"x": torch.zeros(2, 0)}, ["s/0", "s/1"], torch.ones(2, dtype=torch.bool)))
    assert got["x"].shape == (2, 0)
    assert got["x"].dtype == torch.float32


def test_on_a_cpu_it_is_a_plain_move() -> None:
    batch, expected = make_batch(), make_batch().to("cpu")
    moved = DeviceCopies(torch.device("cpu"))(batch)
    assert torch.equal(moved["image"], expected["image"])
    assert moved["image"].dtype == torch.bfloat16
    assert batch["image"].dtype == torch.uint8  # and is left as it is
    assert (moved.sample_keys, moved.bad, moved.transfer_bytes) == (
        expected.sample_keys,
        expected.bad,
        expected.transfer_bytes,
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_kernels_wait_for_the_copy_and_the_copy_for_no_kernel() -> None:
    device = torch.device("cuda")
    copies, batch = DeviceCopies(device), make_batch().pin_memory()
    for _ in range(20):
        torch.cuda._sleep(10_000_000)
        moved = copies(batch)
        assert torch.equal(moved["image"].cpu(), batch.to("cpu")["image"])


class Stream:
    """Writes down what is asked of a stream."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self._events = events

    def wait_stream(self, other: Stream) -> None:
        self._events.append(f"{self.name} waits for {other.name}")


class Recorded(torch.Tensor):
    """A tensor that writes down who uses it."""

    events: list[str]

    def record_stream(self, stream: Any) -> None:
        self.events.append(f"{stream.name} uses it")


def test_the_copy_comes_first_then_the_wait_then_everything_is_marked_and_normalised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    copying, compute = Stream("copying", events), Stream("compute", events)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        events.append(f"on {stream.name}")
        yield
        events.append(f"off {stream.name}")

    def copied(self: Batch, device: Any, non_blocking: bool = True) -> Batch:
        events.append("copy")
        return self.mapped(as_recorded)

    def as_recorded(tensor: torch.Tensor) -> Any:
        recorded = tensor.as_subclass(Recorded)
        recorded.events = events
        return recorded

    batch_module._copy_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(Batch, "copied", copied)
    batch = make_batch()
    moved = DeviceCopies(torch.device("cuda"))(batch)
    assert events == [
        "on copying",
        "copy",
        "off copying",
        "compute waits for copying",
        *["compute uses it"] * 3,  # image, label, valid
    ]
    assert moved["image"].shape == (1, 3, 4, 2)
    batch_module._copy_stream.cache_clear()


def test_training_and_evaluations_copy_on_one_stream_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    batch_module._copy_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    for index in (0, 0, 1, 0):
        DeviceCopies(torch.device("cuda", index))
    assert [device.index for device in made] == [0, 1]
    batch_module._copy_stream.cache_clear()


def test_a_copy_of_a_batch_of_a_loader_keeps_its_keys() -> None:
    loader = ShardLoader.over(
        {"x": np.arange(4)}, {"x": {"name": "x", "role": "id"}}, global_batch_size=4, num_workers=0
    )
    for duplicate in (copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch)), copy.copy):
        batch = next(iter(loader))
        assert sorted(duplicate(batch).sample_keys) == sorted(next(iter(loader)).sample_keys)
        assert len(set(batch.sample_keys)) == 4
