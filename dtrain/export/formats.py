"""Storage formats of an artefact, each one file: safetensors, pt2, AOTInductor, ONNX.

* ``safetensors`` stores the weights only. Loading it needs the code of the model, which is built by its ``_target_``.
* The other formats are *traced* with example rows and need no model code. The number of rows stays free; dtype and shape of a
  row are fixed. ``pt2`` is a graph for torch, ``aotinductor`` the same compiled for one kind of device, ``onnx`` a graph for
  other runtimes.
* ``pt2`` and ``aotinductor`` *hold code* that runs when they are loaded; an ONNX graph holds standard operators only.

``FORMATS`` maps each value of ``export.format`` to its format.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import ClassVar
from zipfile import BadZipFile

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from dtrain.errors import ConfigError
from dtrain.export.description import DTYPES, Description
from dtrain.export.fold_cast import cast, fold
from dtrain.export.program import Program
from dtrain.extras import install_command
from dtrain.precision import Precision
from dtrain.training.build import build_model
from dtrain.training.checkpoint.state import host_copy, load_module
from dtrain.training.checkpoint.tensors import contiguous

# Errors of torch.export.load and aoti_load_package for a file that they cannot read.
_UNREADABLE = (RuntimeError, ValueError, KeyError, AssertionError, BadZipFile)
_REASON_CHARACTERS = 300


class Format(ABC):
    """A storage format.

    Attributes:
        name: Value of ``export.format``.
        file: Name of the file that holds the model; unique among the formats.
        dtypes: Dtypes that the weights may have.
        traced: Whether it is traced with example rows and accepts only such rows; otherwise it needs the model's code.
        holds_code: Whether the file holds code that runs when it is loaded.
        in_torch: Whether torch runs it; otherwise a runtime that copies the weights into its own layout.
    """

    name: ClassVar[str]
    file: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    traced: ClassVar[bool] = True
    holds_code: ClassVar[bool] = False
    in_torch: ClassVar[bool] = True

    def check(self, dtype: str) -> None:  # noqa: B027 - most formats need nothing
        """Checks, before an export starts, that this machine can export weights in ``dtype``, one of ``DTYPES``.

        Raises:
            ConfigError: If a package or compiler is missing, or the format does not support the dtype.
        """

    def runs_on(self, device: torch.device) -> torch.device:
        """The device that the format runs on, on a machine whose best device is ``device``."""
        return device

    def versions(self) -> dict[str, str]:
        """Versions to record in ``model.json``, besides dtrain's and torch's."""
        return {}

    @abstractmethod
    def write(
        self, program: Program, example: Tensor | None, path: Path, facts: Mapping[str, str] | None = None
    ) -> None:
        """Writes a program.

        Args:
            program: In eval mode, its weights cast.
            example: Example rows on the program's device; may be None only if the format is not ``traced``.
            path: File to write; its name is ``file``.
            facts: About the model, for whoever opens the file; stored if the format has a place for them.

        Raises:
            ConfigError: If the model cannot be stored in this format.
            OSError: On a write failure.
        """

    @abstractmethod
    def read(self, path: Path, description: Description, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Loads the file ``path`` as a function that maps rows on ``device`` to fp32 outputs on it.

        Raises:
            ConfigError: If the file cannot be read, or not for this device.
        """


class Safetensors(Format):
    """Weights in a safetensors file: the smallest format, for any machine that has the model's code."""

    name = "safetensors"
    file = "model.safetensors"
    traced = False

    def write(
        self, program: Program, example: Tensor | None, path: Path, facts: Mapping[str, str] | None = None
    ) -> None:
        try:
            tensors = contiguous(host_copy(program.model.state_dict()))
            safetensors.torch.save_file(tensors, path, metadata={"format": "pt", **(facts or {})})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        _sort_metadata(path)

    def read(self, path: Path, description: Description, device: torch.device) -> Callable[[Tensor], Tensor]:
        """As ``Format.read``; also refuses a model whose code has changed since the export."""
        try:
            tensors = safetensors.torch.load_file(path)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read ({error}). Export the run again.") from error
        channels_last = description.channels_last
        model = build_model(description.model, device, channels_last).eval().requires_grad_(False)
        try:
            fold(model, description.folded)
        except AttributeError as error:
            raise ConfigError(
                f"{path.parent}: the model that {description.model.get('_target_')} builds here has changed since the export "
                f"({error}). Use the code that it was exported with."
            ) from error
        dtype = Precision(description.dtype).compute_dtype
        cast(model, dtype, description.keep_fp32)
        load_module(model, tensors, str(path.parent))
        return Program(model, description.input, dtype, channels_last)


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata of a safetensors file: the library writes them in any order, so equal models would differ."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # in the place of the old header, filled up with spaces as safetensors does
            file.seek(8)
            file.write(text.ljust(size))


class Pt2(Format):
    """A graph that ``torch.export.load(path).module()`` reads without dtrain, in the same or a later torch, on any device.

    The file holds strings that torch executes as code. It holds no pickle: ``torch.export.save`` would pickle the example
    inputs, so they are dropped.
    """

    name = "pt2"
    file = "model.pt2"
    holds_code = True

    def write(
        self, program: Program, example: Tensor | None, path: Path, facts: Mapping[str, str] | None = None
    ) -> None:
        graph = _trace(self.name, program, example)
        graph.example_inputs = None
        with warnings.catch_warnings():
            # Weights in channels_last layout are dense, so the written storage is complete.
            warnings.filterwarnings("ignore", message="No complete tensor found in the group")
            # To memory first, because torch aborts the process on a write failure.
            buffer = io.BytesIO()
            torch.export.save(graph, buffer)
        path.write_bytes(buffer.getbuffer())

    def read(self, path: Path, description: Description, device: torch.device) -> Callable[[Tensor], Tensor]:
        try:
            graph = torch.export.load(path)
            if description.device != device.type:
                graph = move_to_device_pass(graph, device)
            return graph.module()
        except _UNREADABLE as error:
            raise _unreadable(path, description, device, error) from error


class AotInductor(Format):
    """A shared library, compiled for one kind of device, that ``torch._inductor.aoti_load_package(path)`` reads without dtrain.

    It is machine code and does not check its inputs; ``Artefact.outputs`` does.
    """

    name = "aotinductor"
    file = "model.compiled.pt2"
    holds_code = True

    def check(self, dtype: str) -> None:
        """As ``Format.check``: looks for a C++ compiler."""
        # Imported here because importing it takes a second.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ConfigError(
                f"export.format={self.name} needs a C++ compiler, and none works here ({error}). Install g++ or clang++, set "
                "the environment variable CXX to one, or use export.format=pt2."
            ) from error

    def write(
        self, program: Program, example: Tensor | None, path: Path, facts: Mapping[str, str] | None = None
    ) -> None:
        graph = _trace(self.name, program, example)
        with _torch_errors_explained(self.name, program.model, "compile"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about code inside torch
            torch._inductor.aoti_compile_and_package(graph, package_path=str(path))

    def read(self, path: Path, description: Description, device: torch.device) -> Callable[[Tensor], Tensor]:
        compiled_for = description.device
        if compiled_for != device.type:
            raise ConfigError(
                f"{path} is compiled for {compiled_for}, the device is {device.type}. Use --device={compiled_for}, or export "
                f"again on a machine with {device.type}."
            )
        index = -1 if device.index is None else device.index
        try:
            return torch._inductor.aoti_load_package(str(path), device_index=index)
        except _UNREADABLE as error:
            raise _unreadable(path, description, device, error) from error


class Onnx(Format):
    """A graph of standard operators with its weights, for runtimes other than torch; dtrain runs it with ``onnxruntime``.

    The input is ``rows``, any number of them; the output is ``outputs``, fp32. onnxruntime 1.31 computes fp16 in fp32 on a
    CPU, with weights that it converts when it loads them. It has neither convolutions nor matrix products in bf16 there, so
    bf16 is refused.
    """

    name = "onnx"
    file = "model.onnx"
    dtypes = ("fp32", "fp16")
    in_torch = False

    # The native opset of torch's exporter, which may silently fail to convert to others.
    _OPSET: ClassVar[int] = 18
    # A protocol buffer has at most 2 GiB, and the graph needs some of it in addition to the weights.
    _MAX_BYTES: ClassVar[int] = 2**31 - 2**24
    _INPUT: ClassVar[str] = "rows"
    _OUTPUT: ClassVar[str] = "outputs"

    def check(self, dtype: str) -> None:
        """As ``Format.check``: looks for the packages and refuses bf16."""
        if dtype not in self.dtypes:
            raise ConfigError(
                f"export.dtype: got {dtype} for export.format={self.name}, but onnxruntime has no convolution and no matrix "
                f"product in {dtype} on a CPU, so the artefact could not be checked. Use export.dtype=fp16 or fp32, or "
                "export.format=safetensors or pt2."
            )
        for package in ("onnx", "onnxscript", "onnxruntime"):
            _import_onnx_package(package)

    def runs_on(self, device: torch.device) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def versions(self) -> dict[str, str]:
        """The opset, and the version of onnxruntime that checked the artefact."""
        return {"opset": str(self._OPSET), "onnxruntime": _import_onnx_package("onnxruntime").__version__}

    def write(
        self, program: Program, example: Tensor | None, path: Path, facts: Mapping[str, str] | None = None
    ) -> None:
        """As ``Format.write``; also refuses weights that do not fit into one file."""
        size = sum(tensor.nbytes for tensor in (*program.parameters(), *program.buffers()))
        if size > self._MAX_BYTES:
            raise ConfigError(
                f"export.format={self.name}: {type(program.model).__name__} has {size:,} bytes of weights, and an ONNX file "
                "has at most 2 GiB. Use export.dtype=fp16 if that is enough, or export.format=safetensors or pt2."
            )
        graph = _trace(self.name, program, example)
        with _torch_errors_explained(self.name, program.model, "convert"), _onnx_exporter_silenced():
            converted = torch.onnx.export(
                graph,
                dynamo=True,
                verbose=False,
                opset_version=self._OPSET,
                input_names=[self._INPUT],
                output_names=[self._OUTPUT],
                dynamic_shapes=({0: self._INPUT},),
            )
            assert converted is not None
            for node in converted.model.graph.all_nodes():
                # These entries are half of a small file, and contain source lines with local paths.
                for key in [key for key in node.metadata_props if key.startswith("pkg.")]:
                    del node.metadata_props[key]
            content = converted.model_proto.SerializeToString()
        path.write_bytes(content)

    def read(self, path: Path, description: Description, device: torch.device) -> Callable[[Tensor], Tensor]:
        if device.type != "cpu":
            raise ConfigError(f"{path} runs on the CPU, the device is {device.type}. Use --device=cpu.")
        runtime = _import_onnx_package("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # An arena never returns the memory of the largest batch. Without one, calls are equally fast for one row and 2 to 6 %
        # slower for 16 images.
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 4  # errors are raised, so logging them is not needed
        try:
            session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the errors of onnxruntime have no common base class
            raise ConfigError(
                f"{path} cannot be read by onnxruntime {runtime.__version__} ({_shortened(error)}). Export the run again "
                "with this version."
            ) from error

        def run(rows: Tensor) -> Tensor:
            with _onnxruntime_errors_as_torch():
                (outputs,) = session.run([self._OUTPUT], {self._INPUT: rows.numpy()})
            return torch.from_numpy(outputs)

        return run


#: Value of ``export.format`` to its format.
FORMATS: dict[str, Format] = {form.name: form for form in (Safetensors(), Pt2(), AotInductor(), Onnx())}


def _trace(form: str, program: Program, example: Tensor | None) -> torch.export.ExportedProgram:
    """Traces a program with a free number of rows."""
    assert example is not None  # see Format.write
    # torch.export takes a dimension of length 1 for a constant.
    rows = example if len(example) > 1 else example.repeat(2, *[1] * (example.dim() - 1))
    with _torch_errors_explained(form, program.model, "trace"):
        return torch.export.export(program, (rows,), dynamic_shapes=({0: torch.export.Dim("rows")},))


@contextmanager
def _torch_errors_explained(form: str, model: nn.Module, verb: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # forward is user code and may raise anything when traced
        raise ConfigError(
            f"export.format={form}: torch cannot {verb} {type(model).__name__} ({_shortened(error)}). If its forward branches "
            "on values of tensors or on the number of rows, use torch.where; or use export.format=safetensors."
        ) from error


def _unreadable(path: Path, description: Description, device: torch.device, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path}, exported on {description.device}, cannot be read by torch {torch.__version__} for {device.type} "
        f"({_shortened(error)}). Export the run again with this version, on this kind of device."
    )


def _shortened(error: BaseException) -> str:
    """Type and first words of an error; torch appends pages of advice."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_REASON_CHARACTERS]}{'...' if len(text) > _REASON_CHARACTERS else ''}"


def _import_onnx_package(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"An ONNX artefact needs the package {package}, which cannot be imported ({error}). Run: "
            f"{install_command('onnx')}."
        ) from error


@contextmanager
def _onnx_exporter_silenced() -> Iterator[None]:
    """Hides messages of torch's exporter about itself and about torchvision."""
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
def _onnxruntime_errors_as_torch() -> Iterator[None]:
    """Raises MemoryError for a failed allocation and RuntimeError for anything else, as torch does."""
    try:
        yield
    except Exception as error:  # the errors of onnxruntime have no common base class
        failed_allocation = any(text in str(error) for text in ("bad_alloc", "Failed to allocate memory"))
        raise (MemoryError if failed_allocation else RuntimeError)(_shortened(error)) from error
