"""Storage formats: the same outputs without dtrain and without the training code, and what cannot be stored or read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

from dtrain.errors import ConfigError
from dtrain.export.fold_cast import cast
from dtrain.export.formats import FORMATS
from dtrain.export.program import ImageInput, Program
from dtrain.models import GPT, ViT
from dtrain.precision import Precision
from tests.export.helpers import CPU, IMAGE, Branching, described
from tests.refusals import refused
from tests.toys import NormNet
from tests.whole_runs import ROOT

#: Largest error of an output, as a fraction of the largest one.
ERROR = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 0.05}

# What a user without dtrain writes: with torch only and every function that unpickles disabled, and without torch.
WITH_TORCH = """
import pickle, sys
import numpy as np
import torch

def refuse(*args, **kwargs):
    raise RuntimeError("something unpickles")

sys.modules["dtrain"] = sys.modules["tests"] = None
pickle.load = pickle.loads = torch.load = torch._C._pickle_load_obj = refuse
program = torch.export.load(sys.argv[1]).module()
with np.load(sys.argv[2]) as rows:
    with torch.no_grad():
        np.savez(sys.argv[3], **{name: program(torch.from_numpy(rows[name])).numpy() for name in rows.files})
"""
WITH_ONNXRUNTIME = """
import sys
sys.modules["dtrain"] = sys.modules["tests"] = sys.modules["torch"] = None
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
with np.load(sys.argv[2]) as rows:
    np.savez(sys.argv[3], **{name: session.run(["outputs"], {"rows": rows[name]})[0] for name in rows.files})
"""


def write(
    folder: Path,
    stored_as: str,
    model: nn.Module,
    example: Tensor,
    dtype: str = "fp32",
    image: ImageInput | None = None,
    keep: tuple[str, ...] = (),
) -> Path:
    """Casts a model in place and writes it; returns the file."""
    model.eval().requires_grad_(False)
    precision = Precision(dtype, keep)
    kept = precision.wrap_keep_fp32(model)
    cast(model, precision.compute_dtype, kept)
    form = FORMATS[stored_as]
    form.write(Program(model, image, precision.compute_dtype).eval(), example, folder / form.file)
    return folder / form.file


def require_close(outputs: Tensor, expected: Tensor, dtype: str) -> None:
    assert outputs.dtype == torch.float32
    assert outputs.shape == expected.shape
    assert (outputs - expected).abs().max() < ERROR[dtype] * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(("stored_as", "dtype"), [("pt2", "bf16"), ("onnx", "fp32"), ("onnx", "fp16")])
def test_images_give_the_same_outputs_in_a_process_without_dtrain_for_any_number_of_rows(
    tmp_path: Path, stored_as: str, dtype: str
) -> None:
    torch.manual_seed(0)
    model = NormNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact = NormNet().double().eval()
    exact.load_state_dict(model.state_dict())
    # Traced with one row, whose number must stay free all the same.
    file = write(tmp_path, stored_as, model, torch.zeros(1, 8, 8, 3, dtype=torch.uint8), dtype, IMAGE, keep=("head",))
    rows = {str(n): torch.randint(0, 256, (n, 8, 8, 3), dtype=torch.uint8) for n in (1, 2, 7)}
    np.savez(tmp_path / "rows.npz", **{name: pixels.numpy() for name, pixels in rows.items()})
    script = WITH_TORCH if stored_as == "pt2" else WITH_ONNXRUNTIME
    command = [sys.executable, "-I", "-c", script, *(str(tmp_path / name) for name in (file, "rows.npz", "out.npz"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outputs = np.load(tmp_path / "out.npz")
    mean, std = torch.tensor(IMAGE.mean).double(), torch.tensor(IMAGE.std).double()
    for name, pixels in rows.items():
        images = ((pixels.double() / 255 - mean) / std).permute(0, 3, 1, 2)
        with torch.no_grad():
            expected = exact(images)
            if stored_as == "pt2":  # the same kernels as the cast model, so the same bits
                images = ((pixels.float() - 255 * mean.float()) / (255 * std.float())).permute(0, 3, 1, 2)
                torch.testing.assert_close(torch.from_numpy(outputs[name]), model(images.bfloat16()), rtol=0, atol=0)
        require_close(torch.from_numpy(outputs[name]), expected, dtype)
    if stored_as == "onnx":
        assert ROOT.as_posix().encode() not in file.read_bytes()
        graph = onnx.load(file)
        opset = FORMATS["onnx"].versions()["opset"]
        assert [(found.domain, str(found.version)) for found in graph.opset_import] == [("", opset)]
        weights = {found.name: found.data_type for found in graph.graph.initializer if "weight" in found.name}
        cast_type = onnx.TensorProto.FLOAT16 if dtype == "fp16" else onnx.TensorProto.FLOAT
        assert {cast_type, onnx.TensorProto.FLOAT} == set(weights.values())
        assert weights["model.head.weight"] == onnx.TensorProto.FLOAT


def gpt() -> nn.Module:
    return GPT(width=16, depth=1, heads=2, context=12)


def vit() -> nn.Module:
    model = ViT(size=[16, 1, 2], classes=5, image_size=8, patch=4)
    for parameter in model.parameters():  # its head is initialised with zeros
        nn.init.normal_(parameter, std=0.3)
    return model


TOKENS = torch.randint(0, 257, (5, 12), generator=torch.Generator().manual_seed(0))
IMAGES = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored_as", "dtype", "build", "rows"),
    [
        pytest.param("pt2", "bf16", gpt, TOKENS, id="pt2-GPT"),
        pytest.param("onnx", "fp16", gpt, TOKENS, id="onnx-GPT"),
        pytest.param("onnx", "fp16", vit, IMAGES, id="onnx-ViT"),
    ],
)
def test_a_transformer_takes_any_number_of_rows(
    tmp_path: Path, stored_as: str, dtype: str, build: Callable[[], nn.Module], rows: Tensor
) -> None:
    torch.manual_seed(0)
    model, exact = build(), build().double().eval()
    exact.load_state_dict(model.state_dict())
    file = write(tmp_path, stored_as, model, rows[:2], dtype)
    run = FORMATS[stored_as].read(file, described(stored_as, dtype), CPU)
    for part in (rows[:1], rows):
        with torch.no_grad():
            expected = exact(part.double() if part.is_floating_point() else part)
            require_close(run(part), expected, dtype)


class CountsRows(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.reshape(2, -1)


@pytest.mark.parametrize("stored_as", ["pt2", "onnx"])
@pytest.mark.parametrize("model", [Branching(), CountsRows()], ids=lambda model: type(model).__name__)
def test_a_model_that_cannot_be_traced_is_refused_briefly_with_another_format(
    tmp_path: Path, stored_as: str, model: nn.Module
) -> None:
    with refused(
        ConfigError, f"export.format={stored_as}", f"trace {type(model).__name__}", "export.format=safetensors"
    ) as caught:
        write(tmp_path, stored_as, model, torch.ones(2, 4, 3))
    assert len(str(caught.value)) < 700
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stored_as", "exported_on", "device", "parts"),
    [
        ("pt2", "cpu", "cpu", ["exported on cpu", f"torch {torch.__version__}", "Export the run again"]),
        ("aotinductor", "cpu", "cpu", ["exported on cpu", f"torch {torch.__version__}", "Export the run again"]),
        ("aotinductor", "cuda", "cpu", ["compiled for cuda", "device is cpu", "--device=cuda"]),
        ("onnx", "cpu", "cpu", ["onnxruntime", "Export the run again"]),
        ("onnx", "cpu", "cuda", ["runs on the CPU", "device is cuda", "--device=cpu"]),
        ("safetensors", "cpu", "cpu", ["cannot be read", "Export the run again"]),
    ],
)
def test_an_unreadable_file_or_one_for_another_device_is_refused(
    tmp_path: Path, stored_as: str, exported_on: str, device: str, parts: list[str]
) -> None:
    form = FORMATS[stored_as]
    (tmp_path / form.file).write_bytes(b"PK, or not")
    with refused(ConfigError, str(tmp_path / form.file), *parts):
        form.read(tmp_path / form.file, described(stored_as, device=exported_on), torch.device(device))


def test_a_model_whose_code_has_changed_since_the_export_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "safetensors", nn.Linear(3, 3), torch.ones(2, 3))
    node = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 3}
    with refused(ConfigError, str(tmp_path), "torch.nn.Linear", "has changed", "Use the code"):
        FORMATS["safetensors"].read(file, described(model=node, folded=[("conv", "norm")]), CPU)


def test_compiling_without_a_compiler_is_refused_with_a_remedy() -> None:
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",)}),
        refused(
            ConfigError, "export.format=aotinductor", "no-such-compiler", "Install g++", "CXX", "export.format=pt2"
        ),
    ):
        FORMATS["aotinductor"].check("bf16")


def test_onnx_refuses_a_dtype_without_kernels() -> None:
    with refused(ConfigError, "export.dtype", "got bf16", "export.format=onnx", "export.dtype=fp16 or fp32"):
        FORMATS["onnx"].check("bf16")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    FORMATS["onnx"].check("fp32")
    monkeypatch.setitem(sys.modules, package, None)
    with refused(ConfigError, f"package {package}", "pip install 'dtrain[onnx]'"):
        FORMATS["onnx"].check("fp32")


def test_weights_that_do_not_fit_into_an_onnx_file_are_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1).expand(2**29), requires_grad=False)
    with refused(
        ConfigError, "export.format=onnx", "Module has 2,147,483,648 bytes", "2 GiB", "export.format=safetensors or pt2"
    ):
        FORMATS["onnx"].write(Program(model, None, torch.float32), torch.zeros(2, 1), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


class Square(nn.Module):
    """Needs 128 TiB for each row, more than a process can address."""

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.double()
        return (wide[:, None] * wide[:, :, None]).sum((1, 2))


@pytest.mark.slow
def test_errors_of_onnxruntime_have_the_types_of_torch_s(tmp_path: Path) -> None:
    rows = torch.ones(2, 2**22, dtype=torch.uint8)
    file = write(tmp_path, "onnx", Square(), rows)
    run = FORMATS["onnx"].read(file, described("onnx"), CPU)
    with pytest.raises(MemoryError, match="node"):
        run(rows)
    with pytest.raises(RuntimeError, match="invalid dimensions"):
        run(rows[:, :5])
