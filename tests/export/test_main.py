"""``dtrain.export``: the weights of the artefact, the errors in its report, and what is refused instead of written."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from dtrain import predict
from dtrain.errors import ConfigError
from dtrain.export import __main__ as export
from dtrain.export import artefact
from dtrain.training.checkpoint.checkpoints import Checkpoint, Checkpoints
from tests.refusals import assert_refused, refused
from tests.toys import NormNet

CPU = torch.device("cpu")
Export = Callable[..., tuple[int, str]]


@pytest.fixture
def own_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be altered."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture
def run_export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Export:
    """Exports the latest checkpoint of a run in this process, without measuring; returns exit code and output."""

    def run(run_dir: Path, *arguments: str) -> tuple[int, str]:
        options = [f"run.dir={run_dir}", "checkpoint=latest", "export.measure=false", *arguments]
        monkeypatch.setattr(sys, "argv", ["export", *options])
        code = 0
        try:
            export.main()
        except SystemExit as exit:
            code = int(exit.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.fixture(scope="module")
def eval_set(digits: Path) -> tuple[Tensor, Tensor]:
    """The test images in stored order, uint8 ``[360, 8, 8, 3]``, and their labels, read with tarfile and Pillow."""
    images, labels = [], []
    for path in sorted(digits.glob("test-*.tar")):
        with tarfile.open(path) as archive:
            files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
        images += [np.asarray(Image.open(io.BytesIO(files[name])).convert("RGB")) for name in files if "png" in name]
        labels += [int(files[name]) for name in files if "cls" in name]
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def trained(run_dir: Path, name: str = "ema") -> dict[str, Tensor]:
    return load_file(run_dir / "checkpoints" / "step-000000015" / f"{name}.safetensors")


def exact_outputs(run_dir: Path, images: Tensor) -> Tensor:
    """Outputs of the trained network, unfolded, in float64."""
    model = NormNet().double().eval()
    model.load_state_dict(trained(run_dir))
    with torch.no_grad():
        return model((images.double() / 255 - 0.5).div(0.5).permute(0, 3, 1, 2))


def alter(run_dir: Path, **changes: Callable[[Tensor], Tensor]) -> None:
    """Replaces the latest checkpoint by one with other averaged weights; ``__`` in a name stands for a dot."""
    checkpoints = Checkpoints(run_dir / "checkpoints", keep_last=9)
    old = checkpoints.load(15)
    tensors = {group: {name: stored[...] for name, stored in found.items()} for group, found in old.tensors.items()}
    for name, change in changes.items():
        key = name.replace("__", ".")
        tensors["ema"][key] = change(tensors["ema"][key])
    checkpoints.save(15, Checkpoint(tensors, old.state))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a pt2 or ONNX artefact, without its preprocessing."""
    if (folder / "model.pt2").exists():
        return dict(torch.export.load(folder / "model.pt2").state_dict)
    stored = onnx.load(folder / "model.onnx").graph.initializer
    named = {tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in stored}
    return {name: tensor for name, tensor in named.items() if name.startswith("model.")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stored_as", "dtype", "error"),
    [
        ("bf16", "pt2", torch.bfloat16, 0.1),
        ("fp16", "onnx", torch.float16, 0.01),
    ],
)
def test_half_precision_halves_the_bytes_and_the_report_has_the_true_errors(
    run_export: Export,
    finished_run: Path,
    eval_set: tuple[Tensor, Tensor],
    tmp_path: Path,
    name: str,
    stored_as: str,
    dtype: torch.dtype,
    error: float,
) -> None:
    out = tmp_path / "artefact"
    code, text = run_export(finished_run, f"export.dtype={name}", f"export.format={stored_as}", f"export.out={out}")
    assert code == 0, text
    tensors = read_weights(out)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    floats = sum(tensor.numel() for tensor in tensors.values())
    report = json.loads((out / "report.json").read_text())
    assert report["bytes"]["exported"] == 2 * floats
    # Folding removes four vectors and the step count of each BatchNorm, and gives conv1 a bias.
    assert report["bytes"]["fp32"] == 4 * (floats + 2 * 4 * 8 - 8) + 2 * 8
    assert report["ratio"] == report["bytes"]["exported"] / report["bytes"]["fp32"]
    images, labels = eval_set
    expected = exact_outputs(finished_run, images)
    loaded = artefact.load(out, CPU)  # also pt2, because this user exported it
    assert not loaded.warnings or stored_as != "onnx"  # fp16 is slow on a CPU in torch only
    outputs = loaded.outputs(images).double()
    compared = report["comparison"]
    assert compared["samples"] == 360
    assert compared["max_abs_error"] == pytest.approx((outputs - expected).abs().max().item(), rel=0.05)
    assert compared["mean_abs_error"] == pytest.approx((outputs - expected).abs().mean().item(), rel=0.05)
    agreement = (outputs.argmax(1) == expected.argmax(1)).double().mean().item()
    assert compared["top1_agreement"] == pytest.approx(agreement)
    assert 0 < compared["max_abs_error"] < error * expected.abs().max().item()
    for kind, logits in (("fp32", expected), ("exported", outputs)):
        accuracy = (logits.argmax(1) == labels).double().mean().item()
        loss = nn.functional.cross_entropy(logits, labels).item()
        assert compared["metrics"]["accuracy"][kind] == pytest.approx(accuracy)
        assert compared["metrics"]["loss"][kind] == pytest.approx(loss, rel=1e-4)
        assert f"{accuracy:.4f}" in text
    description = json.loads((out / "model.json").read_text())
    assert description["source"]["checkpoint_step"] == 15
    assert description["source"]["weights"] == "ema"
    assert description["source"]["metrics"]["eval/samples"] == 360
    assert description["rows"] == {"dtype": "uint8", "shape": [8, 8, 3]}
    assert description["input"] == {
        "field": "image",
        "size": [8, 8],
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "exif": False,
        "shorter_side": None,
        "reduced": False,
        "own_decoder": False,
    }
    assert "step 15" in text
    assert f"{floats * 2:,} bytes" in text


@pytest.mark.slow
def test_norms_are_folded_in_fp32_before_the_cast_and_leave_no_tensors(
    run_export: Export, finished_run: Path, tmp_path: Path
) -> None:
    assert run_export(finished_run, "weights=raw", "samples=0", f"export.out={tmp_path / 'out'}")[0] == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    weights = {name: tensor.double() for name, tensor in trained(finished_run, "model").items()}
    expected = {name: weights[name] for name in ("head.weight", "head.bias")}
    for n in ("1", "2"):
        factor = weights[f"norm{n}.weight"] / (weights[f"norm{n}.running_var"] + 1e-5).sqrt()
        bias = weights.get(f"conv{n}.bias", torch.zeros(8))
        expected[f"conv{n}.weight"] = weights[f"conv{n}.weight"] * factor[:, None, None, None]
        expected[f"conv{n}.bias"] = (bias - weights[f"norm{n}.running_mean"]) * factor + weights[f"norm{n}.bias"]
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        # Half a unit in the last of bf16's 8 bits: the error of rounding the exact value once.
        torch.testing.assert_close(exported[name].double(), tensor, rtol=2**-8, atol=1e-6)


def test_the_default_folder_is_in_the_run_and_a_second_export_replaces_the_first(
    run_export: Export, own_run: Path
) -> None:
    for dtype in ("fp32", "bf16"):
        assert run_export(own_run, f"export.dtype={dtype}", "samples=0")[0] == 0
        assert json.loads((own_run / "export" / "model.json").read_text())["dtype"] == dtype
    files = sorted(path.name for path in (own_run / "export").iterdir())
    assert files == ["config.yaml", "model.json", "model.safetensors", "report.json"]
    assert not [path for path in own_run.iterdir() if path.name.startswith(".export")]
    code, text = run_export(own_run, "export.format=[safetensors,pt2]")
    assert code != 0
    for part in ("export.out", str(own_run / "export"), "is an artefact", "a different folder"):
        assert part in text


def assert_fails(result: tuple[int, str], parts: list[str]) -> None:
    """Expects an error without a traceback that names key, value and remedy."""
    code, text = result
    assert code != 0
    assert_refused(text, *parts)
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["export.format=gguf"], ["export.format", "got 'gguf'", "safetensors"]),
        (["export.format=3"], ["export.format", "got 3", "safetensors"]),
        (["export.format=[pt2,gguf]"], ["export.format", "'gguf'", "aotinductor"]),
        (["export.format=[pt2,onnx]"], ["export.dtype", "bf16", "onnx", "fp16 or fp32"]),
        (["export.format=pt2", "data.eval=null"], ["pt2", "data.eval is not set", "export.format=safetensors"]),
        (["export.tolerance=-1"], ["export.tolerance", "got -1", "from 0 on"]),
        (["export.dtype=int8"], ["export.dtype", "got 'int8'", "fp32, bf16, fp16"]),
        (["export.batch=[0]"], ["export.batch", "got [0]", "from 1 on"]),
        (["checkpoint=3"], ["checkpoint=3", "15"]),
        (["samples=some"], ["samples", "got 'some'", "0 for no comparison"]),
        (["samples=²"], ["samples", "got '²'"]),
        (["precision.keep_fp32=[tail]"], ["precision.keep_fp32", "'tail' matches no submodule", "head"]),
        (["data.eval=nowhere/*.tar"], ["data.eval", "nowhere/*.tar", "matches no file", "samples=0"]),
        (["export.outt=x"], ["export.outt", "'out'"]),
    ],
)
def test_impossible_exports_are_refused_and_nothing_is_written(
    run_export: Export, finished_run: Path, tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    assert_fails(run_export(finished_run, f"export.out={tmp_path / 'out'}", *arguments), parts)
    assert not list(tmp_path.iterdir())


def test_several_processes_are_refused(run_export: Export, finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert_fails(run_export(finished_run), ["dtrain export", "2 processes", "without torchrun"])


def large_value(weight: Tensor) -> Tensor:
    return weight.index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(1e5))


@pytest.mark.parametrize(
    ("changes", "parts", "keep"),
    [
        ({"head__weight": large_value}, ["head.weight", "100000", "65504", "export.dtype=bf16"], "head"),
        (
            {"norm1__running_var": lambda t: t * 0 + 1e-12, "norm1__weight": lambda t: t * 0 + 1e4},
            ["conv1.weight", "norm1 is folded into it", "65504"],
            "conv1,norm1",
        ),
    ],
    ids=["weight", "folded weight"],
)
def test_a_weight_that_overflows_is_refused_by_name_until_its_module_is_kept_in_fp32(
    run_export: Export,
    own_run: Path,
    eval_set: tuple[Tensor, Tensor],
    changes: dict[str, Any],
    parts: list[str],
    keep: str,
) -> None:
    alter(own_run, **changes)
    arguments = ("samples=0", "export.dtype=fp16")
    remedy = f"precision.keep_fp32=[{keep}]"
    assert_fails(run_export(own_run, *arguments), [*parts, f"'{remedy}'"])
    assert not (own_run / "export").exists()

    code, text = run_export(own_run, *arguments, remedy)
    assert code == 0, text
    tensors = load_file(own_run / "export" / "model.safetensors")
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert {*dtypes.values()} == {torch.float16, torch.float32}
    assert {name.partition(".")[0] for name in dtypes if dtypes[name] == torch.float32} == {*keep.split(",")}
    if keep == "head":
        images = eval_set[0][:64]
        outputs, expected = artefact.load(own_run / "export", CPU).outputs(images), exact_outputs(own_run, images)
        torch.testing.assert_close(outputs.double(), expected, rtol=5e-3, atol=5e-2)
        # Outputs of this size would be multiples of 32 if they were rounded to fp16's 11 bits.
        assert (outputs[:, 3] % 32 != 0).any()


def test_weights_that_are_not_finite_are_refused(run_export: Export, own_run: Path) -> None:
    alter(own_run, norm1__running_var=lambda t: t.index_fill(0, torch.tensor(0), float("nan")))
    assert_fails(
        run_export(own_run, "samples=0"), ["conv1.weight", "norm1 is folded into it", "not finite", "weights=raw"]
    )


@pytest.mark.slow
def test_an_activation_that_overflows_is_refused_by_its_module_and_the_old_artefact_stays(
    run_export: Export, own_run: Path, eval_set: tuple[Tensor, Tensor]
) -> None:
    assert run_export(own_run, "samples=0", "export.dtype=fp32")[0] == 0
    alter(own_run, norm1__weight=lambda t: t * 5e3, norm2__weight=lambda t: t * 30)
    model = NormNet().double().eval()
    model.load_state_dict(trained(own_run))
    largest = {}
    for name in ("norm1", "norm2"):
        model.get_submodule(name).register_forward_hook(
            lambda _, args, output, name=name: largest.update({name: output.abs().max().item()})
        )
    model((eval_set[0].double() / 255 - 0.5).div(0.5).permute(0, 3, 1, 2))
    assert largest["norm1"] < 65504 < largest["norm2"]

    code, text = run_export(own_run, "export.dtype=fp16", "samples=64")
    assert_fails(
        (code, text), ["not finite", "norm2: its outputs overflow", "bf16", "'precision.keep_fp32=[conv2,norm2]'"]
    )
    assert "norm1" not in text
    assert json.loads((own_run / "export" / "model.json").read_text())["dtype"] == "fp32"
    assert not [path for path in own_run.iterdir() if path.name.startswith(".export")]


@pytest.mark.slow
def test_all_formats_predict_the_same(
    run_export: Export, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (8, 8), (200, 30, 90)).save(tmp_path / "one.png")
    out = tmp_path / "out"
    arguments = ("samples=70", "export.dtype=bf16", f"export.out={out}")
    code, text = run_export(finished_run, *arguments, "export.format=[safetensors,pt2,aotinductor]")
    assert code == 0, text
    predicted = {}
    for stored_as in ("safetensors", "pt2", "aotinductor"):
        assert json.loads((out / stored_as / "report.json").read_text())["comparison"]["samples"] == 70
        assert predict.main([str(out / stored_as), str(tmp_path / "one.png"), "--json", "--top=10"]) == 0
        predictions = json.loads(capsys.readouterr().out)["predictions"]
        predicted[stored_as] = {one["label"]: one["probability"] for one in predictions}
    for stored_as in ("pt2", "aotinductor"):
        # Compiled code rounds to bf16 less often.
        assert predicted[stored_as] == pytest.approx(predicted["safetensors"], abs=0.02)
    # Compiled code does not check shapes itself.
    with refused(ConfigError, "uint8 [rows, 8, 8, 3]", "got uint8 [1, 9, 8, 3]"):
        artefact.load(out / "aotinductor", CPU).outputs(torch.zeros(1, 9, 8, 3, dtype=torch.uint8))
    assert_fails(run_export(finished_run, *arguments), ["export.out", "is not an artefact"])
