"""Copies beside compute. Without a GPU: the same as a plain move, and what is asked of the streams, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dtrain.data import Batch
from dtrain.data.device_copies import DeviceCopies
from tests.data.test_batch import batch_of


def test_on_a_cpu_it_is_a_plain_move() -> None:
    batch, expected = batch_of(), batch_of().to("cpu")
    moved = DeviceCopies(torch.device("cpu"))(batch)
    assert torch.equal(moved["image"], expected["image"])
    assert moved["image"].dtype == torch.bfloat16
    assert batch["image"].dtype == torch.uint8  # and is left as it is
    assert (moved.sample_keys, moved.bad, moved.wire_bytes) == (expected.sample_keys, expected.bad, expected.wire_bytes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_kernels_wait_for_the_copy_and_the_copy_for_no_kernel() -> None:
    device = torch.device("cuda")
    copies, batch = DeviceCopies(device), batch_of().pin_memory()
    for _ in range(20):
        torch.cuda._sleep(10_000_000)
        moved = copies(batch)
        assert torch.equal(moved["image"].cpu(), batch.to("cpu")["image"])


class Stream:
    """Writes down what is asked of a stream."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name = name
        self._said = said

    def wait_stream(self, other: Stream) -> None:
        self._said.append(f"{self.name} waits for {other.name}")


class Recorded(torch.Tensor):
    """A tensor that writes down who uses it."""

    said: list[str]

    def record_stream(self, stream: Any) -> None:
        self.said.append(f"{stream.name} uses it")


def test_the_copy_comes_first_then_the_wait_then_everything_is_marked_and_normalised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    copying, compute = Stream("copying", said), Stream("compute", said)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        said.append(f"on {stream.name}")
        yield
        said.append(f"off {stream.name}")

    def copied(self: Batch, device: Any, non_blocking: bool = True) -> Batch:
        said.append("copy")
        return self._map(as_recorded)

    def as_recorded(tensor: torch.Tensor) -> Any:
        recorded = tensor.as_subclass(Recorded)
        recorded.said = said
        return recorded

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(Batch, "copied", copied)
    batch = batch_of()
    moved = DeviceCopies(torch.device("cuda"))(batch)
    assert said == [
        "on copying",
        "copy",
        "off copying",
        "compute waits for copying",
        *["compute uses it"] * 3,  # image, label, valid
    ]
    assert moved["image"].shape == (1, 3, 4, 2)
