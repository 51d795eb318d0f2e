"""``export.format=onnx``: a graph that needs neither torch nor the training code, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.deployment import artefact
from dtrain.deployment.casting import cast
from dtrain.deployment.formats import FORMATS
from dtrain.deployment.image_input import ImageInput
from dtrain.deployment.probe import Setup
from dtrain.deployment.probing import probing
from dtrain.deployment.program import Program, RowSpec
from dtrain.models import GPT, ViT
from dtrain.precision import Precision
from tests.deployment.described import IMAGE, described
from tests.tiny_run import NormNet

CPU = torch.device("cpu")
ONNX = FORMATS["onnx"]
FILE = ONNX.file
#: Largest error of an output, as a part of the largest one.
ERROR = {"fp32": 1e-5, "fp16": 5e-3}

# What a user without dtrain and torch writes.
PLAIN = """
import sys
sys.modules["dtrain"] = sys.modules["tests"] = sys.modules["torch"] = None
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
with np.load(sys.argv[2]) as rows:
    np.savez(sys.argv[3], **{name: session.run(["outputs"], {"rows": rows[name]})[0] for name in rows.files})
"""


def write(
    folder: Path, model: nn.Module, image: ImageInput | None, example: Tensor, dtype: str, keep: tuple[str, ...] = ()
) -> None:
    """Writes a model, cast; the model itself changes with that."""
    model.eval().requires_grad_(False)
    precision = Precision(dtype, keep)
    kept = precision.wrap_keep_fp32(model)
    cast(model, precision.compute_dtype, kept)
    ONNX.write(Program(model, image, precision.compute_dtype).eval(), example, folder / FILE)


def require_close(got: Tensor, expected: Tensor, dtype: str) -> None:
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < ERROR[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_images_give_the_same_outputs_in_a_process_that_has_only_onnxruntime(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    model = NormNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    exact = NormNet().double().eval()
    exact.load_state_dict(model.state_dict())
    # A single row must not make the number of rows a constant.
    write(tmp_path, model, IMAGE, torch.zeros(1, 8, 8, 3, dtype=torch.uint8), dtype, keep=("head",))
    rows = {str(n): torch.randint(0, 256, (n, 8, 8, 3), dtype=torch.uint8) for n in (1, 2, 7)}
    np.savez(tmp_path / "rows.npz", **{name: pixels.numpy() for name, pixels in rows.items()})
    command = [sys.executable, "-I", "-c", PLAIN, *(str(tmp_path / name) for name in (FILE, "rows.npz", "outputs.npz"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outputs = np.load(tmp_path / "outputs.npz")
    for name, pixels in rows.items():
        mean, std = torch.tensor(IMAGE.mean).double(), torch.tensor(IMAGE.std).double()
        with torch.no_grad():
            expected = exact(((pixels.double() / 255 - mean) / std).permute(0, 3, 1, 2))
        require_close(torch.from_numpy(outputs[name]), expected, dtype)

    graph = onnx.load(tmp_path / FILE)
    assert [(found.domain, str(found.version)) for found in graph.opset_import] == [("", ONNX.versions()["opset"])]
    weights = {found.name: found.data_type for found in graph.graph.initializer if "weight" in found.name}
    half = onnx.TensorProto.FLOAT16 if dtype == "fp16" else onnx.TensorProto.FLOAT
    assert {half, onnx.TensorProto.FLOAT} == set(weights.values())
    assert weights["model.head.weight"] == onnx.TensorProto.FLOAT
    assert Path(__file__).parents[3].as_posix().encode() not in (tmp_path / FILE).read_bytes()


def gpt() -> nn.Module:
    return GPT(width=16, depth=1, heads=2, context=12)


def vit() -> nn.Module:
    model = ViT(size=[16, 1, 2], classes=5, image_size=8, patch=4)
    for parameter in model.parameters():  # its head begins with zeros
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(
    ("build", "rows"),
    [
        (gpt, torch.randint(0, 257, (5, 12), generator=torch.Generator().manual_seed(0))),
        pytest.param(vit, torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0)), marks=pytest.mark.slow),
    ],
    ids=["GPT", "ViT"],
)
def test_a_transformer_takes_any_number_of_rows(tmp_path: Path, build: type[nn.Module], rows: Tensor) -> None:
    torch.manual_seed(0)
    model, exact = build(), build().double().eval()
    exact.load_state_dict(model.state_dict())
    write(tmp_path, model, None, rows[:2], "fp16")
    run = ONNX.read(tmp_path / FILE, described("onnx", "fp16"), CPU)
    for some in (rows[:1], rows):
        with torch.no_grad():
            expected = exact(some.double() if some.is_floating_point() else some)
        require_close(run(some), expected, "fp16")


def test_weights_that_the_cpu_cannot_compute_with_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"got bf16 for export\.format=onnx.*Use export\.dtype=fp16 or fp32"):
        ONNX.check("bf16")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_package_that_is_missing_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    ONNX.check("fp32")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs the package {package}, .*pip install 'dtrain\[onnx\]'"):
        ONNX.check("fp32")


def test_weights_that_no_onnx_file_can_hold_are_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1).expand(2**29), requires_grad=False)
    with pytest.raises(ConfigError, match=r"Module has 2,147,483,648 bytes of weights.*pt2"):
        ONNX.write(Program(model, None, torch.float32), torch.zeros(2, 1), tmp_path / FILE)
    assert not list(tmp_path.iterdir())


class Branching(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows if rows.sum() > 0 else -rows


def test_a_model_that_is_no_graph_is_refused_with_the_reason_and_another_way(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"export\.format=onnx: torch cannot trace Branching.*safetensors"):
        write(tmp_path, Branching(), None, torch.ones(2, 4), "fp32")
    assert not list(tmp_path.iterdir())


def test_what_is_no_graph_is_refused_and_so_is_a_gpu(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no graph")
    with pytest.raises(ConfigError, match=r"cannot be read by onnxruntime \d.*Export again"):
        ONNX.read(tmp_path / FILE, described("onnx"), CPU)
    with pytest.raises(ConfigError, match=r"runs on the CPU, the device is cuda\. Use --device=cpu"):
        ONNX.read(tmp_path / FILE, described("onnx"), torch.device("cuda"))


class Square(nn.Module):
    """Needs 128 TiB a row, more than a process can address."""

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.double()
        return (wide[:, None] * wide[:, :, None]).sum((1, 2))


def test_errors_of_the_runtime_are_those_of_torch(tmp_path: Path) -> None:
    rows = torch.ones(2, 2**22, dtype=torch.uint8)
    write(tmp_path, Square(), None, rows, "fp32")
    run = ONNX.read(tmp_path / FILE, described("onnx"), CPU)
    with pytest.raises(MemoryError, match="node"):
        run(rows)
    with pytest.raises(RuntimeError, match="invalid dimensions"):
        run(rows[:, :5])


@pytest.mark.slow
def test_the_memory_of_a_model_is_what_the_runtime_holds_and_not_what_the_file_does(tmp_path: Path) -> None:
    spec = RowSpec("float32", (2048,))
    rows, peaks = torch.ones(2, 2048), {}
    for dtype in ("fp32", "fp16"):
        folder = tmp_path / dtype
        folder.mkdir()
        compute = Precision(dtype).compute_dtype
        program = Program(nn.Linear(2048, 2048).eval().requires_grad_(False).to(compute), None, compute).eval()
        artefact.write(folder, program, described("onnx", dtype, spec), rows)
        with probing(Setup(str(folder), spec, "cpu")) as probe:
            probe.reply()
            peaks[dtype] = probe.ask(1, 0.0)["peak_bytes"]
        assert (folder / FILE).stat().st_size < 1.3 * peaks[dtype]
    assert peaks["fp32"] < 3 * 4 * 2048**2
    # Kernels that compute in fp32 hold weights in it, and a machine that has others needs half.
    assert 0.4 * peaks["fp32"] < peaks["fp16"] < 2 * peaks["fp32"]
