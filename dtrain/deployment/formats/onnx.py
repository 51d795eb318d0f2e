"""``export.format=onnx``: a graph for runtimes other than torch, on phones, in browsers, in C#; here ``onnxruntime`` runs it.

It is data: a graph of operators that the standard names. Nothing of it is code, so anybody's may be read.

dtrain runs it on the CPU, by ``CPUExecutionProvider``. That has fp32 kernels for nearly everything, computes fp16 in fp32
with weights that it converts when it reads them, and has neither convolutions nor matrix products in bf16 (onnxruntime
1.31), which is therefore refused.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtrain.config.errors import ConfigError
from dtrain.deployment.formats.format import Format
from dtrain.deployment.formats.tracing import refused, short, trace
from dtrain.deployment.program import Program

if TYPE_CHECKING:
    from dtrain.deployment.description import Description

# What torch's exporter is written in. It converts to others, and when it cannot, goes on.
_OPSET = 18
# A protocol buffer ends at 2 GiB, and the graph has to find room beside the weights.
_MOST_BYTES = 2**31 - 2**24
_ROWS, _OUTPUTS = "rows", "outputs"
_OUT_OF_MEMORY = ("bad_alloc", "Failed to allocate memory")


class Onnx(Format):
    """One file, weights included: ``rows`` in, any number of them, ``outputs`` out, fp32."""

    name = "onnx"
    file = "model.onnx"
    dtypes = ("fp32", "fp16")
    in_torch = False

    def check(self, dtype: str) -> None:
        """As ``Format.check``: looks for the packages, and for kernels of this dtype."""
        if dtype not in self.dtypes:
            raise ConfigError(
                f"export.dtype: got {dtype} for export.format={self.name}, and onnxruntime has no convolution and no matrix "
                f"product in {dtype} on a CPU, so nobody could check the artefact. Use export.dtype=fp16 or fp32, or "
                "export.format=safetensors or pt2."
            )
        for package in ("onnx", "onnxscript", "onnxruntime"):
            _imported(package)

    def runs_on(self, device: torch.device) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def versions(self) -> dict[str, str]:
        """The opset, and the package that the artefact was checked with."""
        return {"opset": str(_OPSET), "onnxruntime": _imported("onnxruntime").__version__}

    def write(self, program: Program, example: Tensor | None, path: Path) -> None:
        """As ``Format.write``; also refuses weights that one file cannot hold."""
        assert example is not None
        size = sum(tensor.nbytes for tensor in (*program.parameters(), *program.buffers()))
        if size > _MOST_BYTES:
            raise ConfigError(
                f"export.format={self.name}: {type(program.model).__name__} has {size:,} bytes of weights, and an ONNX file "
                "ends at 2 GiB. Use export.dtype=fp16 where that halves it, or export.format=safetensors or pt2."
            )
        graph = trace(self.name, program, example)
        with refused(self.name, program.model, "convert"), _quiet():
            converted = torch.onnx.export(
                graph,
                dynamo=True,
                verbose=False,
                opset_version=_OPSET,
                input_names=[_ROWS],
                output_names=[_OUTPUTS],
                dynamic_shapes=({0: _ROWS},),
            )
            assert converted is not None
            for node in converted.model.graph.all_nodes():
                # Torch's notes are half of a small file, and have lines of source with the folders of whoever exported it.
                for note in [key for key in node.metadata_props if key.startswith("pkg.")]:
                    del node.metadata_props[note]
            content = converted.model_proto.SerializeToString()
        path.write_bytes(content)

    def read(self, path: Path, description: Description, device: torch.device) -> Callable[[Tensor], Tensor]:
        """As ``Format.read``."""
        if device.type != "cpu":
            raise ConfigError(f"{path} runs on the CPU, the device is {device.type}. Use --device=cpu.")
        runtime = _imported("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # An arena keeps the memory of the largest batch for ever. Measured: as fast without for one row, 2 to 6 % slower
        # for 16 images.
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 4  # what it has to say is in its errors
        try:
            session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own have no base in common
            raise ConfigError(
                f"{path} cannot be read by onnxruntime {runtime.__version__} ({short(error)}). Export again with this version."
            ) from error

        def run(rows: Tensor) -> Tensor:
            with _torchs_errors():
                (outputs,) = session.run([_OUTPUTS], {_ROWS: rows.numpy()})
            return torch.from_numpy(outputs)

        return run


def _imported(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"An ONNX artefact needs the package {package}, which cannot be imported ({error}). Run: pip install "
            "'dtrain[onnx]' (in a checkout: pip install -e '.[onnx]')."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter says of itself and of torchvision."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _torchs_errors() -> Iterator[None]:
    """Errors of the runtime as torch would raise them, so that callers need not know which of the two runs.

    Raises:
        MemoryError: If an allocation failed.
        RuntimeError: If anything else did.
    """
    try:
        yield
    except Exception as error:  # onnxruntime's own have no base in common
        kind = MemoryError if any(words in str(error) for words in _OUT_OF_MEMORY) else RuntimeError
        raise kind(short(error)) from error
