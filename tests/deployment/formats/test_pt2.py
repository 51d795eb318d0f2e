"""``export.format=pt2``: programs that need no training code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.deployment.casting import cast
from dtrain.deployment.formats import FORMATS
from dtrain.deployment.program import Program, RowSpec
from dtrain.models import GPT
from dtrain.precision import Precision
from tests.deployment.described import IMAGE, described
from tests.tiny_run import NormNet

CPU = torch.device("cpu")
PT2 = FORMATS["pt2"]

# What a user without dtrain writes, with everything out of reach that unpickles.
PLAIN = """
import pickle, sys
import torch
from safetensors.torch import load_file, save_file

def refuse(*args, **kwargs):
    raise RuntimeError("somebody unpickles")

sys.modules["dtrain"] = sys.modules["tests"] = None
pickle.load = pickle.loads = torch.load = torch._C._pickle_load_obj = refuse
program = torch.export.load(sys.argv[1]).module()
save_file({name: program(rows) for name, rows in load_file(sys.argv[2]).items()}, sys.argv[3])
"""


def test_a_program_gives_the_same_outputs_in_a_process_that_has_only_torch_and_never_unpickles(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NormNet().eval().requires_grad_(False)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    kept = Precision("bf16", ("head",)).wrap_keep_fp32(model)
    cast(model, torch.bfloat16, kept)
    program = Program(model, IMAGE, torch.bfloat16).eval()
    path = tmp_path / "model.pt2"
    # A single row must not make the number of rows a constant.
    PT2.write(program, torch.zeros(1, 8, 8, 3, dtype=torch.uint8), path)
    rows = {str(n): torch.randint(0, 256, (n, 8, 8, 3), dtype=torch.uint8) for n in (1, 2, 7)}
    save_file(rows, tmp_path / "rows")
    command = [sys.executable, "-I", "-c", PLAIN, *(str(tmp_path / name) for name in ("model.pt2", "rows", "outputs"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outputs = load_file(tmp_path / "outputs")
    mean, std = torch.tensor(IMAGE.mean), torch.tensor(IMAGE.std)
    for name, pixels in rows.items():
        images = ((pixels.float() - 255 * mean) / (255 * std)).permute(0, 3, 1, 2).bfloat16()
        assert outputs[name].dtype == torch.float32
        torch.testing.assert_close(outputs[name], model(images), rtol=0, atol=0)


def test_a_program_of_tokens_takes_any_number_of_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(width=16, depth=1, heads=2, context=12).eval().requires_grad_(False)
    cast(model, torch.bfloat16, [])
    tokens = torch.randint(0, 257, (5, 12))
    PT2.write(Program(model, None, torch.bfloat16).eval(), tokens[:2], tmp_path / "model.pt2")
    program = PT2.read(tmp_path / "model.pt2", described("pt2"), CPU)
    for rows in (tokens[:1], tokens):
        torch.testing.assert_close(program(rows), model(rows).float(), rtol=0, atol=0)


class Branching(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows if rows.sum() > 0 else -rows


class CountsRows(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.reshape(2, -1)


@pytest.mark.parametrize("model", [Branching(), CountsRows()], ids=lambda model: type(model).__name__)
def test_a_model_that_is_no_graph_is_refused_with_the_reason_and_another_way(tmp_path: Path, model: nn.Module) -> None:
    with pytest.raises(ConfigError) as caught:
        PT2.write(Program(model, None, torch.float32).eval(), torch.ones(2, 4, 3), tmp_path / "model.pt2")
    said = str(caught.value)
    assert f"cannot trace {type(model).__name__}" in said
    assert "export.format=safetensors" in said
    assert len(said) < 700
    assert not list(tmp_path.iterdir())


def test_what_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"PK, or not")
    with pytest.raises(ConfigError, match=r"exported on cpu, cannot be read by torch .* for cpu"):
        PT2.read(tmp_path / "model.pt2", described("pt2"), CPU)


def test_rows_of_another_dtype_or_shape_are_refused_and_floats_are_cast() -> None:
    spec = RowSpec("float32", (3,))
    assert spec.checked(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float32
    for rows in (torch.ones(2, 4), torch.ones(2, 3, dtype=torch.int64), torch.ones(3)):
        with pytest.raises(ConfigError, match=r"takes float32 \[rows, 3\], got"):
            spec.checked(rows)
