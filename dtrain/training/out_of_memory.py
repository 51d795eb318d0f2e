"""Out of memory: which step, which sizes, and what to try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class OutOfMemory(RuntimeError):
    """A step needed more memory than this rank has."""


@contextmanager
def out_of_memory_explained(step: Callable[[], int], *, rows: int, share: int, device: torch.device) -> Iterator[None]:
    """Turns errors of the allocators into one that says what to do.

    Args:
        step: Gives the attempted step that is being done.
        rows: Of a micro-batch.
        share: Rows of a rank's share of the global batch.
        device: Where the step computes.

    Raises:
        OutOfMemory: From torch's or Python's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        advice = ["precision=bf16 or fp16", "activation checkpointing in the model", "more ranks"]
        if rows > 1:
            smaller = next(size for size in range(rows - 1, 0, -1) if share % size == 0)
            advice.insert(0, f"train.micro_batch_size={smaller}, which keeps the global batch and so the result")
        raise OutOfMemory(
            f"out of memory in step {step()}, with micro-batches of {rows} rows on {_describe(device)}. Try "
            f"{'; '.join(advice)}. {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of torch or Python has raised it."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return "the CPU"
    total = torch.cuda.get_device_properties(device).total_memory
    return (
        f"{torch.cuda.get_device_name(device)}: {torch.cuda.memory_allocated(device) / 2**30:.2f} GiB in tensors, at most "
        f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} so far, of {total / 2**30:.2f}"
    )
