"""``dtrain.export``: what the artefact's weights are, how far from fp32, and what is refused rather than written."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dtrain import export, predict
from dtrain.config.errors import ConfigError
from dtrain.deployment import artefact
from dtrain.deployment.casting import cast, check_range
from dtrain.deployment.folding import fold, foldable, outside
from dtrain.deployment.program import Program
from dtrain.training.checkpoint import Checkpoint
from dtrain.training.checkpoints import Checkpoints
from tests.tiny_run import STEPS, NormNet, tiny_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    return tiny_run(tmp_path_factory.getbasetemp())


@pytest.fixture
def run_export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command in this process, without measuring; returns its exit code and what it said."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["export", "export.measure=false", *arguments])
        code = 0
        try:
            export.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def own_run(run_dir: Path, tmp_path: Path) -> Path:
    """A copy to alter."""
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


def alter(run_dir: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Replaces the newest checkpoint by one with other averaged weights."""
    checkpoints = Checkpoints(run_dir / "checkpoints", keep_last=9)
    old = checkpoints.load(STEPS)
    change(old.tensors["ema"])
    checkpoints.save(STEPS, Checkpoint(old.tensors, old.state))


def trained(run_dir: Path, name: str = "ema") -> dict[str, Tensor]:
    return load_file(run_dir / "checkpoints" / f"step-{STEPS:09d}" / f"{name}.safetensors")


def test_set(shards: Path) -> tuple[Tensor, Tensor]:
    """The test images in stored order, uint8 ``[360, 8, 8, 3]``, and their labels, read with tarfile and Pillow."""
    images, labels = [], []
    for path in sorted(shards.glob("test-*.tar")):
        with tarfile.open(path) as archive:
            files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
        images += [np.asarray(Image.open(io.BytesIO(files[name])).convert("RGB")) for name in files if "png" in name]
        labels += [int(files[name]) for name in files if "cls" in name]
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


test_set.__test__ = False  # type: ignore[attr-defined]


def fp64_outputs(weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """What the unfolded network says in float64."""
    model = NormNet().double().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model((images.double() / 255 - 0.5).div(0.5).permute(0, 3, 1, 2))


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of an artefact, those of its preprocessing left out."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    if (folder / "model.pt2").exists():
        return dict(torch.export.load(folder / "model.pt2").state_dict)
    stored = onnx.load(folder / "model.onnx").graph.initializer
    named = {tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in stored}
    return {name: tensor for name, tensor in named.items() if name.startswith("model.")}


@pytest.mark.parametrize(
    ("name", "form", "dtype", "error"),
    [
        ("bf16", "pt2", torch.bfloat16, 0.1),
        ("fp16", "safetensors", torch.float16, 0.01),
        ("fp16", "onnx", torch.float16, 0.01),
    ],
)
def test_half_precision_halves_the_bytes_and_the_report_tells_the_true_error(
    run_export: Callable[..., tuple[int, str]],
    run_dir: Path,
    digits: Path,
    tmp_path: Path,
    name: str,
    form: str,
    dtype: torch.dtype,
    error: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "artefact"
    code, said = run_export(
        f"run.dir={run_dir}", f"export.dtype={name}", f"export.format={form}", f"export.out={out}", "checkpoint=latest"
    )
    assert code == 0, said
    tensors = weights_of(out)
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    floats = sum(tensor.numel() for tensor in tensors.values())
    report = json.loads((out / "report.json").read_text())
    assert report["bytes"]["exported"] == 2 * floats
    # Folding drops four vectors for each BatchNorm and its step count, and gives conv1 a bias.
    assert report["bytes"]["fp32"] == 4 * (floats + 2 * 4 * 8 - 8) + 2 * 8
    assert report["ratio"] == report["bytes"]["exported"] / report["bytes"]["fp32"]
    if form != "safetensors":
        Image.new("RGB", (20, 20)).save(tmp_path / "one.png")
        assert predict.main([str(out), str(tmp_path / "one.png")]) == 0  # it was made here
        monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "of another user"))
        if form == "pt2":
            with pytest.raises(ConfigError, match=r"model\.pt2 is a program with code of its own.*--trust"):
                artefact.load(out, CPU)
        else:
            assert not artefact.load(out, CPU).warnings  # fp16 is slow on a CPU in torch only
    images, labels = test_set(digits)
    expected = fp64_outputs(trained(run_dir), images)
    got = artefact.load(out, CPU, trust=True).outputs(images).double()
    compared = report["comparison"]
    assert compared["samples"] == 360
    assert compared["max_abs_error"] == pytest.approx((got - expected).abs().max().item(), rel=0.05)
    assert compared["mean_abs_error"] == pytest.approx((got - expected).abs().mean().item(), rel=0.05)
    assert compared["top1_agreement"] == pytest.approx((got.argmax(1) == expected.argmax(1)).double().mean().item())
    assert 0 < compared["max_abs_error"] < error * expected.abs().max().item()
    for kind, outputs in (("fp32", expected), ("exported", got)):
        accuracy = (outputs.argmax(1) == labels).double().mean().item()
        loss = nn.functional.cross_entropy(outputs, labels).item()
        assert compared["metrics"]["accuracy"][kind] == pytest.approx(accuracy)
        assert compared["metrics"]["loss"][kind] == pytest.approx(loss, rel=1e-4)
        assert f"{accuracy:.4f}" in said
    description = json.loads((out / "model.json").read_text())
    assert description["source"]["checkpoint_step"] == STEPS
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
    assert f"step {STEPS}" in said
    assert f"{floats * 2:,} bytes" in said


def test_norms_are_folded_before_the_cast_and_leave_nothing_behind(
    run_export: Callable[..., tuple[int, str]], run_dir: Path, tmp_path: Path
) -> None:
    arguments = (
        f"run.dir={run_dir}",
        "checkpoint=latest",
        "weights=raw",
        "samples=0",
        f"export.out={tmp_path / 'out'}",
    )
    assert run_export(*arguments)[0] == 0
    got = load_file(tmp_path / "out" / "model.safetensors")
    weights = {name: tensor.double() for name, tensor in trained(run_dir, "model").items()}
    expected = {name: weights[name] for name in ("head.weight", "head.bias")}
    for n in ("1", "2"):
        factor = weights[f"norm{n}.weight"] / (weights[f"norm{n}.running_var"] + 1e-5).sqrt()
        bias = weights.get(f"conv{n}.bias", torch.zeros(8))
        expected[f"conv{n}.weight"] = weights[f"conv{n}.weight"] * factor[:, None, None, None]
        expected[f"conv{n}.bias"] = (bias - weights[f"norm{n}.running_mean"]) * factor + weights[f"norm{n}.bias"]
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        # Half a unit of bf16's 8 bits: what one rounding of the exact value costs, and no more.
        torch.testing.assert_close(got[name].double(), tensor, rtol=2**-8, atol=1e-6)


def test_the_run_s_own_folder_is_the_default_and_a_second_export_takes_its_place(
    run_export: Callable[..., tuple[int, str]], own_run: Path
) -> None:
    for dtype in ("fp32", "bf16"):
        assert run_export(f"run.dir={own_run}", f"export.dtype={dtype}", "samples=0")[0] == 0
        assert json.loads((own_run / "export" / "model.json").read_text())["dtype"] == dtype
    assert sorted(path.name for path in (own_run / "export").iterdir()) == [
        "model.json",
        "model.safetensors",
        "report.json",
    ]
    assert not [path for path in own_run.iterdir() if path.name.startswith(".export")]
    code, said = run_export(f"run.dir={own_run}", "export.format=[safetensors,pt2]")
    assert code != 0
    assert "is an artefact, and" in said


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["export.format=gguf"], ["export.format", "'gguf'", "safetensors"]),
        (["export.format=3"], ["export.format: got 3", "safetensors"]),
        (["export.format=[pt2,gguf]"], ["export.format", "'gguf'", "aotinductor"]),
        (["export.format=[pt2,onnx]"], ["export.dtype", "bf16", "onnx", "fp16 or fp32"]),
        (["export.format=pt2", "data.eval=null"], ["pt2", "data.eval is not set", "safetensors"]),
        (["export.tolerance=-1"], ["export.tolerance", "-1"]),
        (["export.dtype=int8"], ["export.dtype", "'int8'", "fp32, bf16, fp16"]),
        (["checkpoint=3"], ["checkpoint=3", "15"]),
        (["samples=some"], ["samples", "'some'"]),
        (["samples=²"], ["samples", "'²'"]),
        (["precision.keep_fp32=[tail]"], ["'tail' matches no submodule", "head"]),
        (["data.eval=nowhere/*.tar"], ["data.eval", "matches no file", "samples=0"]),
        (["export.outt=x"], ["export.outt", "'out'"]),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    run_export: Callable[..., tuple[int, str]],
    run_dir: Path,
    tmp_path: Path,
    arguments: list[str],
    parts: list[str],
) -> None:
    code, said = run_export(f"run.dir={run_dir}", f"export.out={tmp_path / 'out'}", *arguments)
    assert code != 0
    assert "Traceback" not in said
    for part in parts:
        assert part in said
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_artefact_is_left_alone(
    run_export: Callable[..., tuple[int, str]], run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    code, said = run_export(f"run.dir={run_dir}", f"export.out={tmp_path}", "samples=0")
    assert code != 0
    assert "thesis.tex" in said
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_several_processes_are_refused(
    run_export: Callable[..., tuple[int, str]], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, said = run_export(f"run.dir={run_dir}")
    assert code != 0
    assert "--nproc-per-node=1" in said


def test_an_overflow_is_refused_by_name_until_its_module_is_kept_in_fp32(
    run_export: Callable[..., tuple[int, str]], own_run: Path, digits: Path
) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors["head.weight"][3, 2] = 1e5

    alter(own_run, enlarge)
    arguments = (f"run.dir={own_run}", "checkpoint=latest", "samples=0", "export.dtype=fp16")
    code, said = run_export(*arguments)
    assert code != 0
    for part in ("head.weight", "100000", "65504", "export.dtype=bf16", "'precision.keep_fp32=[head]'"):
        assert part in said
    assert not (own_run / "export").exists()

    code, said = run_export(*arguments, "precision.keep_fp32=[head]")
    assert code == 0, said
    tensors = load_file(own_run / "export" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype != torch.float16} == {
        "head.weight": torch.float32,
        "head.bias": torch.float32,
    }
    images = test_set(digits)[0][:64]
    got, expected = artefact.load(own_run / "export", CPU).outputs(images), fp64_outputs(trained(own_run), images)
    torch.testing.assert_close(got.double(), expected, rtol=5e-3, atol=5e-2)
    # fp16 has 11 bits: a rounded output of this size would be a multiple of 32.
    assert (got[:, 3] % 32 != 0).any()


def test_weights_that_are_not_finite_are_refused(run_export: Callable[..., tuple[int, str]], own_run: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["norm1.running_var"][0] = float("nan")

    alter(own_run, spoil)
    code, said = run_export(f"run.dir={own_run}", "checkpoint=latest", "samples=0")
    assert code != 0
    for part in ("conv1.weight", "norm1 is folded into it", "not finite"):
        assert part in said


def test_weights_that_fit_until_they_are_folded_are_refused_with_both_modules(
    run_export: Callable[..., tuple[int, str]], own_run: Path
) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors["norm1.running_var"][:] = 1e-12
        tensors["norm1.weight"][:] = 1e4

    alter(own_run, enlarge)
    arguments = (f"run.dir={own_run}", "checkpoint=latest", "samples=0", "export.dtype=fp16")
    code, said = run_export(*arguments)
    assert code != 0
    for part in ("conv1.weight", "norm1 is folded into it", "65504", "'precision.keep_fp32=[conv1,norm1]'"):
        assert part in said
    assert not (own_run / "export").exists()
    assert run_export(*arguments, "precision.keep_fp32=[conv1,norm1]")[0] == 0


def test_an_activation_that_overflows_is_refused_by_its_module_and_the_old_artefact_stays(
    run_export: Callable[..., tuple[int, str]], own_run: Path, digits: Path
) -> None:
    assert run_export(f"run.dir={own_run}", "samples=0", "export.dtype=fp32")[0] == 0

    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors["norm1.weight"] *= 5e3
        tensors["norm2.weight"] *= 30

    alter(own_run, enlarge)
    model = NormNet().double().eval()
    model.load_state_dict(trained(own_run))
    largest = {}
    for name in ("norm1", "norm2"):
        model.get_submodule(name).register_forward_hook(
            lambda _, args, output, name=name: largest.update({name: output.abs().max().item()})
        )
    model((test_set(digits)[0].double() / 255 - 0.5).div(0.5).permute(0, 3, 1, 2))
    assert largest["norm1"] < 65504 < largest["norm2"]

    code, said = run_export(f"run.dir={own_run}", "checkpoint=latest", "export.dtype=fp16", "samples=64")
    assert code != 0
    for part in ("not finite", "norm2: its outputs overflow", "bf16", "'precision.keep_fp32=[conv2,norm2]'"):
        assert part in said
    assert "norm1" not in said
    assert json.loads((own_run / "export" / "model.json").read_text())["dtype"] == "fp32"
    assert not [path for path in own_run.iterdir() if path.name.startswith(".export")]


@pytest.mark.slow
def test_every_format_predicts_the_same(
    run_export: Callable[..., tuple[int, str]], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (8, 8), (200, 30, 90)).save(tmp_path / "one.png")
    out = tmp_path / "out"
    arguments = (f"run.dir={run_dir}", "samples=70", "export.dtype=bf16", f"export.out={out}")
    code, said = run_export(*arguments, "export.format=[safetensors,pt2,aotinductor]")
    assert code == 0, said
    predicted = {}
    for form in ("safetensors", "pt2", "aotinductor"):
        assert json.loads((out / form / "report.json").read_text())["comparison"]["samples"] == 70
        assert predict.main([str(out / form), str(tmp_path / "one.png"), "--json", "--top=10"]) == 0
        found = json.loads(capsys.readouterr().out)["predictions"]
        predicted[form] = {one["label"]: one["probability"] for one in found}
    for form in ("pt2", "aotinductor"):
        # Compiled code rounds to bf16 less often.
        assert predicted[form] == pytest.approx(predicted["safetensors"], abs=0.02)
    # Compiled code looks at no shapes by itself.
    with pytest.raises(ConfigError, match=r"takes uint8 \[rows, 8, 8, 3\], got uint8 \[1, 9, 8, 3\]"):
        artefact.load(out / "aotinductor", CPU, trust=True).outputs(torch.zeros(1, 9, 8, 3, dtype=torch.uint8))
    code, said = run_export(*arguments)
    assert code != 0
    assert "is not an artefact" in said


class Awkward(nn.Module):
    """Convolutions whose BatchNorm must stay, each for another reason, and one that may go."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.plain_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.seen, self.seen_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.twice, self.twice_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.batch, self.batch_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)
        self.first_norm, self.after = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain_norm(self.plain(x))
        seen = self.seen(x)
        x = self.seen_norm(seen) + seen
        x = self.twice_norm(self.twice(self.twice(x)))
        x = self.batch_norm(self.batch(x))
        return self.after(self.first_norm(x))


def test_only_a_norm_that_alone_sees_its_convolution_is_folded() -> None:
    torch.manual_seed(0)
    model = Awkward()
    model(torch.randn(16, 3, 4, 4))  # gives the statistics some values
    model.eval()
    rows = torch.randn(5, 3, 4, 4)
    with torch.no_grad():
        before = model(rows)
        pairs, reason = foldable(model)
        fold(model, pairs)
        torch.testing.assert_close(model(rows), before)
    assert pairs == [("plain", "plain_norm")]
    assert reason is None


def test_pairs_within_a_module_that_is_kept_in_fp32_are_not_folded() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    pairs, _ = foldable(nn.Sequential(block(), block(), block(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval())
    assert pairs == [("0.0", "0.1"), ("1.0", "1.1"), ("2.0", "2.1"), ("3", "4")]
    assert outside(["0", "1.1"], pairs) == [("2.0", "2.1"), ("3", "4")]
    assert outside([], pairs) == pairs


def test_a_model_that_cannot_be_traced_stays_unfolded_and_says_so() -> None:
    class Branches(NormNet):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images if images.sum() > 0 else -images)

    pairs, reason = foldable(Branches().eval())
    assert pairs == []
    assert reason is not None
    assert "Branches" in reason


def test_tied_weights_stay_tied_and_masks_of_infinity_are_no_overflow() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("mask", torch.full((3,), float("-inf")), persistent=False)
            self.register_buffer("small", torch.tensor([1e-9, 0.0, 1.0]))

    model = Tied()
    assert check_range(model, torch.float16, [], {}) == {"small": 1}
    cast(model, torch.float16, [])
    assert model.head.weight is model.embed.weight
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.float16}


def test_an_artefact_that_was_altered_or_is_of_another_version_is_refused(
    run_export: Callable[..., tuple[int, str]], run_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run_export(f"run.dir={run_dir}", "samples=0", f"export.out={out}")[0] == 0
    description = json.loads((out / "model.json").read_text())

    (out / "model.json").write_text(json.dumps(description | {"version": 99}))
    with pytest.raises(ConfigError, match="version 99"):
        artefact.load(out, CPU)
    (out / "model.json").write_text(json.dumps({key: description[key] for key in description if key != "folded"}))
    with pytest.raises(ConfigError, match="folded"):
        artefact.load(out, CPU)
    (out / "model.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        artefact.load(out, CPU)
    (out / "model.json").write_text(json.dumps(description))
    save_file({"head.weight": torch.zeros(1)}, out / "model.safetensors")
    with pytest.raises(ConfigError, match="SHA-256"):
        artefact.load(out, CPU)


def test_only_classes_of_modules_are_built_from_a_foreign_artefact_unless_the_user_trusts_it(
    run_export: Callable[..., tuple[int, str]], run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    target = "model._target_=tests.tiny_run.norm_net"
    assert run_export(f"run.dir={run_dir}", "samples=0", f"export.out={out}", target)[0] == 0
    assert isinstance(artefact.load(out, CPU).program, Program)  # it was made here
    monkeypatch.setenv("DTRAIN_CACHE", str(tmp_path / "of another user"))
    with pytest.raises(ConfigError, match=r"norm_net.*--trust"):
        artefact.load(out, CPU)
    loaded = artefact.load(out, CPU, trust=True).program
    assert isinstance(loaded, Program)
    assert isinstance(loaded.model, NormNet)
    description = json.loads((out / "model.json").read_text())
    description["model"] = {"_target_": "tests.tiny_run.NormNet", "classes": {"_target_": "os.getpid"}}
    (out / "model.json").write_text(json.dumps(description))
    with pytest.raises(ConfigError, match=r"os\.getpid"):
        artefact.load(out, CPU)
    # What OmegaConf computes while a model is built may be another node.
    call = "{_target_: pathlib.Path.touch, _args_: [{_target_: pathlib.Path, _args_: [%s]}]}" % (tmp_path / "owned")
    for node in ({"_args_": [f"${{oc.create:'{call}'}}"]}, {"classes": "${oc.env:HOME}"}):
        description["model"] = {"_target_": "torch.nn.Sequential", **node}
        (out / "model.json").write_text(json.dumps(description))
        with pytest.raises(ConfigError, match=r"could stand for anything.*--trust"):
            artefact.load(out, CPU)
    assert not (tmp_path / "owned").exists()
