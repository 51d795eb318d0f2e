"""Runs one artefact in its own process, which loads it from disk and reports outputs, call times and peak memory.

* ``Probe`` is the parent's side: it starts the process and sends requests. The process holds only the artefact, so its peak
  memory is the artefact's. It computes only on request, so several probes can take turns on one device.
* ``python -m dtrain.export.probe ARTEFACT DEVICE [--trust]`` is the process. It prints ``{"threads"}`` when the artefact is
  loaded. Requests and replies are lines of JSON: ``{"batch", "seconds"}`` is answered by ``{"calls", "peak_bytes"}`` or
  ``{"out_of_memory"}``; ``{"inputs", "outputs"}``, paths of safetensors files, by ``{}``.
* *Memory* on a GPU is ``torch.cuda.max_memory_allocated``. On a CPU it is the size of the weights plus the growth of resident
  memory after loading; for a runtime that copies the weights into its own layout, the growth since before loading. Memory of
  Python, torch and the model's code does not count. It is only available on Linux.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.export import artefact
from dtrain.export.formats import FORMATS
from dtrain.export.program import RowSpec
from dtrain.training.monitor.memory import forget_peak, is_out_of_memory, peak_bytes, proc_bytes

_STATUS, _MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")
_OUTPUT_BATCH = 64  # rows of one forward of ``Probe.outputs``


class Probe:
    """A process that holds one artefact. A context manager: the process starts on entry and is killed on exit.

    Args:
        folder: The artefact.
        device: Device on which it runs.
        trust: As for ``artefact.load``.
    """

    def __init__(self, folder: Path, device: torch.device, trust: bool = False) -> None:
        self._folder = folder
        self._command = [sys.executable, "-m", "dtrain.export.probe", str(folder), str(device)]
        self._command += ["--trust"] * trust

    def __enter__(self) -> Probe:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        # So that the process can import the user's modules.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes
        self._errors.close()

    def wait_until_loaded(self) -> int:
        """Waits until the artefact is loaded; call it once, first. Returns the number of torch's threads in the process.

        Raises:
            ConfigError: If the artefact cannot be loaded.
        """
        return int(self._reply()["threads"])

    def run(self, batch: int, seconds: float) -> dict[str, Any]:
        """Runs the artefact on batches of ``batch`` rows for ``seconds``, at least once.

        Returns:
            ``calls``, the seconds of each call, and ``peak_bytes``, None if the system does not report it; or only
            ``out_of_memory``, the allocator's message.

        Raises:
            ConfigError: If the artefact fails.
        """
        return self._request({"batch": batch, "seconds": seconds}, batch)

    def outputs(self, rows: Tensor) -> Tensor:
        """Computes the artefact's outputs, fp32 on the CPU, as ``Artefact.outputs`` does.

        Raises:
            ConfigError: If the artefact fails.
        """
        with tempfile.TemporaryDirectory(prefix="dtrain-export-") as scratch:
            inputs, outputs = (Path(scratch) / f"{name}.safetensors" for name in ("inputs", "outputs"))
            safetensors.torch.save_file({"rows": rows.contiguous()}, inputs)
            self._request({"inputs": str(inputs), "outputs": str(outputs)}, min(len(rows), _OUTPUT_BATCH))
            return safetensors.torch.load_file(outputs)["rows"]

    def _request(self, content: dict[str, Any], batch: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended; _reply raises with its exit code
            _send(self._process.stdin, content)
        return self._reply(f" with {batch:,} rows")

    def _reply(self, request: str = "") -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return dict(json.loads(line))
        code = self._process.wait()
        self._errors.seek(0)
        output = "".join(f"    {line}\n" for line in self._errors.read().strip().splitlines()[-8:])
        end = f"was killed by signal {-code}, perhaps out of memory" if code < 0 else f"ended with code {code}"
        raise ConfigError(f"export: {self._folder} fails{request} in its own process, which {end}.\n{output}".rstrip())


def made_up_rows(spec: RowSpec, batch: int) -> Tensor:
    """Input rows for a measurement: one row of noise, repeated.

    Integers other than uint8 are zeros, because they may be tokens and the size of the vocabulary is unknown.

    Returns:
        Contiguous, in the dtype of ``spec``, ``[batch, *spec.shape]``.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        row = torch.rand(spec.shape, generator=generator).to(dtype)
    elif dtype == torch.uint8:
        row = torch.randint(256, spec.shape, generator=generator, dtype=dtype)
    else:
        row = torch.zeros(spec.shape, dtype=dtype)
    return row.expand(batch, *spec.shape).contiguous()


class PeakMemory:
    """Peak memory of a model since ``reset``.

    Args:
        device: Device of the model.
        weights: Bytes of the model if it is already loaded, else 0.
    """

    def __init__(self, device: torch.device, weights: int) -> None:
        self._device = device
        self._baseline = 0
        self.reset()
        if device.type != "cuda":
            self._baseline = peak_bytes(device) - weights

    def reset(self) -> None:
        """Restarts from the memory that is in use now, without memory that allocators cache."""
        libc = ctypes.CDLL(None)
        if self._device.type != "cuda" and hasattr(libc, "malloc_trim"):  # glibc only
            libc.malloc_trim(0)
        self._supported = forget_peak(self._device)

    def peak_bytes(self) -> int | None:
        """The peak in bytes; None on a CPU whose system does not report it."""
        return max(peak_bytes(self._device) - self._baseline, 0) if self._supported else None


class _Runner:
    """The artefact in the probe's process, and its memory."""

    def __init__(self, folder: Path, device: torch.device, trust: bool) -> None:
        self._device = device
        self._artefact = artefact.load(folder, device, trust=trust)
        description = self._artefact.description
        form = FORMATS[description.stored_as]
        assert description.rows is not None  # the parent starts no probe for other artefacts
        self._spec = description.rows
        if form.in_torch:
            self._memory = PeakMemory(device, (folder / form.file).stat().st_size)
        else:
            # Loading and calling it for the first time also loads the runtime, so it is loaded again to measure the weights.
            self._artefact.outputs(made_up_rows(self._spec, 1))
            del self._artefact
            self._memory = PeakMemory(device, 0)
            self._artefact = artefact.load(folder, device, trust=trust)
        if device.type == "cpu":
            _limit_to_free_memory()
        self._rows: Tensor | None = None
        self._peak: int | None = None

    def run(self, batch: int, seconds: float) -> dict[str, Any]:
        """Replies to ``Probe.run``."""
        try:
            if self._rows is None or len(self._rows) != batch:
                self._prepare(batch)
            calls: list[float] = []
            while not calls or sum(calls) < seconds:
                calls.append(self._call())
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._rows = None
            return {"out_of_memory": (str(error) or type(error).__name__).splitlines()[0]}
        return {"calls": calls, "peak_bytes": self._peak}

    def outputs(self, inputs: str, outputs: str) -> dict[str, Any]:
        """Replies to ``Probe.outputs``."""
        parts = safetensors.torch.load_file(inputs)["rows"].split(_OUTPUT_BATCH)
        rows = torch.cat([self._artefact.outputs(part).cpu() for part in parts])
        safetensors.torch.save_file({"rows": rows.contiguous()}, outputs)
        return {}

    def _prepare(self, batch: int) -> None:
        """Warms up, then measures the memory of one call: an allocator keeps memory between several."""
        self._rows = None
        self._rows = made_up_rows(self._spec, batch)
        self._call()
        self._memory.reset()
        self._call()
        self._peak = self._memory.peak_bytes()

    def _call(self) -> float:
        """Seconds from rows in host memory to outputs on the device, synchronised."""
        assert self._rows is not None
        started = time.perf_counter()
        self._artefact.outputs(self._rows)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started


def main(arguments: Sequence[str]) -> int:
    """Answers requests until standard input ends; returns the exit code."""
    folder, device, *flags = arguments
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a model prints must not mix with the replies
    try:
        runner = _Runner(Path(folder), torch.device(device), "--trust" in flags)
        _send(replies, {"threads": torch.get_num_threads()})
        for line in sys.stdin:
            request = json.loads(line)
            _send(replies, runner.run(**request) if "batch" in request else runner.outputs(**request))
    except (ConfigError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _limit_to_free_memory() -> None:
    """Makes allocations beyond the free memory fail, so that the kernel does not kill a process for lack of memory."""
    if not _MEMINFO.exists():
        return
    limit = proc_bytes(_STATUS, "VmData") + proc_bytes(_MEMINFO, "MemAvailable")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _send(stream: IO[str], content: dict[str, Any]) -> None:
    stream.write(json.dumps(content) + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
