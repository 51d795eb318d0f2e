"""Peak memory of this process, and out-of-memory errors with a remedy.

*Peak memory* is the largest amount in torch's tensors on a GPU, and the largest resident set of the process on a CPU.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from dtrain.console import size_text

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)
_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in a unit of ru_maxrss


class OutOfMemory(RuntimeError):
    """A step needed more memory than this rank has."""


@contextmanager
def out_of_memory_explained(
    step: Callable[[], int],
    *,
    rows: Callable[[], int],
    share: int,
    device: torch.device,
    ranks: int = 1,
    state: Callable[[], int] | None = None,
    why_not: Callable[[], str] = str,
) -> Iterator[None]:
    """Converts allocation errors of the block to an ``OutOfMemory`` that names sizes and remedies.

    Args:
        step: Returns the current attempted step.
        rows: Returns the rows of a micro-batch.
        share: Rows of the global batch for each rank.
        device: The device of the step.
        ranks: Number of ranks.
        state: Returns the bytes of what each rank holds as a whole but could share (``state_bytes``); None: nothing.
        why_not: Returns why the step is not repeated with smaller micro-batches; "": the message does not mention it.

    Raises:
        OutOfMemory: In place of torch's or Python's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        advice = ["precision=bf16 or fp16", "train.checkpoint_activations=[PATTERN of modules]"]
        if state is not None and ranks > 1:
            whole = state()
            advice.append(
                f"parallel=fsdp, with which each of the {ranks} ranks holds {size_text(whole / ranks)} of the "
                f"{size_text(whole)} of parameters, gradients and optimizer state"
            )
        advice.append("more ranks")
        if (size_now := rows()) > 1:
            smaller = next(size for size in range(size_now - 1, 0, -1) if share % size == 0)
            advice.insert(0, f"train.micro_batch_size={smaller}, which keeps the global batch and so the result")
        kept = f" The step was not repeated with smaller micro-batches: {reason}." if (reason := why_not()) else ""
        raise OutOfMemory(
            f"out of memory in step {step()}, with micro-batches of {size_now} rows on {_describe(device)}. Try "
            f"{'; '.join(advice)}. `dtrain doctor memory ranks={ranks}` with the arguments of this run computes what "
            f"fits.{kept} {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def state_bytes(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Bytes of parameters, gradients and optimizer state of this rank; gradients count even if there are none at present."""
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    parameters = list(model.parameters())
    gradients = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(tensor.nbytes for tensor in (*tensors, *parameters, *gradients))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of torch or Python raised ``error``."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def forget_peak(device: torch.device) -> bool:
    """Resets the peak to the memory in use now. Returns False where that is impossible (a CPU without Linux)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int:
    """Peak memory in bytes since ``forget_peak``."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        # getrusage starts with the peak of the process that forked this one.
        return proc_bytes(_STATUS, "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def peak(device: torch.device) -> tuple[str, float]:
    """Name and value of the metric: ``memory/max_allocated_gib`` on a GPU, ``memory/max_resident_gib`` on a CPU."""
    name = "memory/max_allocated_gib" if device.type == "cuda" else "memory/max_resident_gib"
    return name, peak_bytes(device) / 2**30


def proc_bytes(file: Path, name: str) -> int:
    """The entry ``name``, in kB, of a file in Linux's ``/proc``, as bytes."""
    return next(int(line.split()[1]) * 1024 for line in file.read_text().splitlines() if line.startswith(f"{name}:"))


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return "the CPU"
    total = torch.cuda.get_device_properties(device).total_memory
    return (
        f"{torch.cuda.get_device_name(device)}: {torch.cuda.memory_allocated(device) / 2**30:.2f} GiB in tensors, at most "
        f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} so far, of {total / 2**30:.2f}"
    )
