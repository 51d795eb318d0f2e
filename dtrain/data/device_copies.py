"""Batches on their way to a GPU, beside what it computes.

A copy that is queued on the stream of the kernels waits for all of them. On a stream of its own it starts at once: the loop
asks for a batch while the GPU still works on the step before, so the copy is done when its turn comes. That takes
page-locked memory (``ShardLoader(pin_memory=True)``) and two promises to torch's allocators:

* The stream of the kernels waits for the copy.
* The memory of the copy belongs to the copying stream, so it is told who else uses it (``Tensor.record_stream``), else the
  next copy could be written into what a kernel still reads. The page-locked source is watched by torch itself.
"""

from __future__ import annotations

from copy import copy

import torch

from dtrain.data.batch import Batch


class DeviceCopies:
    """``batch.to(device)``, with the copy on a stream of its own where the device is a GPU, and without one on a CPU.

    Args:
        device: Where batches go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        """The batch on the device, ready for the current stream; see ``Batch.to``."""
        if self._stream is None:
            return copy(batch).arrived()  # its tensors are there
        with torch.cuda.stream(self._stream):
            copied = batch.copied(self._device)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._stream)
        for tensor in copied.tensors():
            tensor.record_stream(compute)
        # Normalising is a kernel: it is queued where the others are.
        return copied.arrived()
