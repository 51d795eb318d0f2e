"""Programs that run without the code of their model: a graph for torch (``pt2``), or compiled for one kind of device
(``aotinductor``).

Both are torch's own files: ``torch.export.load(path).module()`` and ``torch._inductor.aoti_load_package(path)`` read them
without dtrain. The number of rows is free, everything else is fixed by the example that the graph was traced with.

Either is code, as a Python module is: torch runs strings and machine instructions that the file holds. Nothing in it is
pickled, however: ``torch.export.save`` would pickle the example inputs, so they are left out.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from dtrain.config.errors import ConfigError
from dtrain.deployment.program import Program

PT2, AOTINDUCTOR = "pt2", "aotinductor"
_REASON_CHARACTERS = 300


def require_compiler() -> None:
    """Looks for the C++ compiler that ``aotinductor`` calls.

    Raises:
        ConfigError: If there is none.
    """
    # Takes a second, which those who compile nothing need not wait; so does torch._inductor, which torch imports at its use.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            f"export.format={AOTINDUCTOR} compiles C++, and no compiler works here ({error}). Install g++ or clang++, name "
            f"one in the environment variable CXX, or use export.format={PT2}."
        ) from error


def write(form: str, program: Program, example: Tensor, path: Path) -> None:
    """Traces a program and writes it.

    Args:
        form: ``PT2`` or ``AOTINDUCTOR``.
        program: In eval mode.
        example: Rows as they will come; their number stays free.
        path: A file with the ending ``.pt2``.

    Raises:
        ConfigError: If torch cannot trace or compile the model; says why.
        OSError: If the disk refuses.
    """
    graph = _trace(form, program, example)
    if form == AOTINDUCTOR:
        with _refused(form, program.model, "compile"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, about itself
            torch._inductor.aoti_compile_and_package(graph, package_path=str(path))
        return
    graph.example_inputs = None
    with warnings.catch_warnings():
        # Weights in channels_last layout are dense, so the storage that is written is all of them.
        warnings.filterwarnings("ignore", message="No complete tensor found in the group")
        # By way of memory: where the disk refuses, torch ends the process.
        buffer = io.BytesIO()
        torch.export.save(graph, buffer)
    path.write_bytes(buffer.getbuffer())


def read(form: str, path: Path, exported_on: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """What ``write`` wrote, ready to be called with rows on the device.

    Args:
        form: ``PT2`` or ``AOTINDUCTOR``.
        path: The file.
        exported_on: Type of the device that the program was traced on.
        device: Where to.

    Raises:
        ConfigError: If this torch cannot read the file, or the program is for another kind of device.
    """
    if form == AOTINDUCTOR and exported_on != device.type:
        raise ConfigError(
            f"{path} is compiled for {exported_on}, the device is {device.type}. Use --device={exported_on}, or export again "
            f"where there is a {device.type}."
        )
    try:
        if form == AOTINDUCTOR:
            return torch._inductor.aoti_load_package(
                str(path), device_index=-1 if device.index is None else device.index
            )
        graph = torch.export.load(path)
        if exported_on != device.type:
            graph = move_to_device_pass(graph, device)
        return graph.module()
    except (RuntimeError, ValueError, KeyError, AssertionError, BadZipFile) as error:
        raise ConfigError(
            f"{path}, exported on {exported_on}, cannot be read by torch {torch.__version__} for {device.type} "
            f"({_short(error)}). Export again with this version, on this kind of device."
        ) from error


def _trace(form: str, program: Program, example: Tensor) -> torch.export.ExportedProgram:
    # torch takes a length of 1 for a constant.
    rows = example if len(example) > 1 else example.repeat(2, *[1] * (example.dim() - 1))
    with _refused(form, program.model, "trace"):
        return torch.export.export(program, (rows,), dynamic_shapes=({0: torch.export.Dim("rows")},))


@contextmanager
def _refused(form: str, model: nn.Module, verb: str) -> Iterator[None]:
    """Turns torch's refusal into a message.

    Raises:
        ConfigError: If the block raises anything.
    """
    try:
        yield
    except Exception as error:  # a forward that meets a symbolic tensor may raise anything
        raise ConfigError(
            f"export.format={form}: torch cannot {verb} {type(model).__name__} ({_short(error)}). If its forward branches on "
            "values of tensors or on the number of rows, write it with torch.where; or use export.format=safetensors."
        ) from error


def _short(error: BaseException) -> str:
    """Kind and first words of an error; torch adds pages of advice."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_REASON_CHARACTERS]}{'...' if len(text) > _REASON_CHARACTERS else ''}"
