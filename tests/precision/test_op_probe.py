"""The operation probe: `python -m dtrain.doctor numerics --ops`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain import doctor
from dtrain.precision.audit.op_cases import OpCase, op_cases
from dtrain.precision.audit.op_probe import OpResult, probe

CPU = torch.device("cpu")
LOW = (torch.bfloat16, torch.float16)
WIDE = torch.float32

#: The list that texts on autocast have, called by hand on tensors of the given dtypes.
TEXTBOOK: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor]]] = {
    "__matmul__": ([(2, 3), (3, 2)], lambda a, b: a @ b),
    "matmul": ([(2, 3), (3, 2)], torch.matmul),
    "addbmm": ([(2, 2), (4, 2, 3), (4, 3, 2)], torch.addbmm),
    "addmm": ([(2, 2), (2, 3), (3, 2)], torch.addmm),
    "addmv": ([(2,), (2, 3), (3,)], torch.addmv),
    "addr": ([(2, 3), (2,), (3,)], torch.addr),
    "baddbmm": ([(4, 2, 2), (4, 2, 3), (4, 3, 2)], torch.baddbmm),
    "bmm": ([(4, 2, 3), (4, 3, 2)], torch.bmm),
    "chain_matmul": ([(2, 3), (3, 2), (2, 4)], lambda *matrices: torch.chain_matmul(*matrices)),
    "conv1d": ([(1, 2, 5), (3, 2, 3), (3,)], F.conv1d),
    "conv2d": ([(1, 2, 5, 5), (3, 2, 3, 3), (3,)], F.conv2d),
    "conv3d": ([(1, 2, 5, 5, 5), (3, 2, 3, 3, 3), (3,)], F.conv3d),
    "conv_transpose1d": ([(1, 2, 5), (2, 3, 3), (3,)], F.conv_transpose1d),
    "conv_transpose2d": ([(1, 2, 5, 5), (2, 3, 3, 3), (3,)], F.conv_transpose2d),
    "conv_transpose3d": ([(1, 2, 5, 5, 5), (2, 3, 3, 3, 3), (3,)], F.conv_transpose3d),
    "linear": ([(2, 3), (4, 3), (4,)], F.linear),
    "mm": ([(2, 3), (3, 2)], torch.mm),
    "mv": ([(2, 3), (3,)], torch.mv),
    "prelu": ([(2, 3), (3,)], F.prelu),
}


def by_hand(name: str, inputs: tuple[torch.dtype, ...], dtype: torch.dtype) -> torch.dtype | None:
    """Dtype of the result under autocast; None if the call or its backward fails."""
    shapes, call = TEXTBOOK[name]
    tensors = [torch.rand(shape).to(wanted).requires_grad_() for shape, wanted in zip(shapes, inputs, strict=True)]
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", dtype=dtype):
            warnings.simplefilter("ignore")
            out = call(*tensors)
        out.backward(torch.ones_like(out))
    except RuntimeError:
        return None
    assert [tensor.grad.dtype for tensor in tensors if tensor.grad is not None] == list(inputs)
    return out.dtype


@pytest.fixture(scope="module")
def cases() -> dict[str, OpCase]:
    return {case.name: case for case in op_cases()}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", TEXTBOOK)
def test_the_nineteen_do_what_a_call_by_hand_does_with_wide_low_and_mixed_inputs(
    cases: dict[str, OpCase], name: str, dtype: torch.dtype
) -> None:
    result = probe(cases[name], dtype, CPU)
    outputs = {}
    for call in result.calls:
        outputs[call.inputs] = by_hand(name, call.inputs, dtype)
        assert (call.output if call.gradients else None) == outputs[call.inputs], call
        assert bool(call.error) == (outputs[call.inputs] is None)
    number = len(TEXTBOOK[name][0])
    assert outputs.keys() >= {(WIDE,) * number, (dtype,) * number}
    assert any(len(set(inputs)) == 2 for inputs in outputs)  # fp32 and 16 bits in one call
    kinds = set(outputs.values())
    if None in kinds:
        assert result.behaviour == "error"
    elif len(kinds) == 1:
        assert result.behaviour == ("16-bit" if kinds == {dtype} else "fp32")
    else:
        assert result.behaviour in ("widest", "error")
    if name in ("matmul", "mm", "bmm", "linear", "conv2d"):
        assert result.behaviour == "16-bit"


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU])
def test_recurrent_layers_do_what_the_modules_do(
    cases: dict[str, OpCase], module: type[nn.Module], dtype: torch.dtype
) -> None:
    result = probe(cases[module.__name__], dtype, CPU)
    layer = module(3, 4)
    for call in result.calls:
        if len(set(call.inputs[1:])) > 1 or call.inputs[1] != WIDE:
            continue  # weights in 16 bits are not what a run has
        x = torch.rand(5, 2, 3).to(call.inputs[0]).requires_grad_()
        output = None
        try:
            with torch.autocast("cpu", dtype=dtype):
                out = layer(x)[0]
            output = out.dtype
            out.float().sum().backward()
            assert x.grad is not None
            assert x.grad.dtype == call.inputs[0]
        except RuntimeError:
            assert call.result == "error"
            continue
        assert call.output == output
        assert not call.error
    assert {call.inputs[0] for call in result.calls} == {WIDE, dtype}


def _lower(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).to(torch.get_autocast_dtype("cpu"))


def _raise(x: Tensor, y: Tensor) -> Tensor:
    if y.dtype != x.dtype:
        raise RuntimeError("cannot mix\nsecond line")
    return x + y


def _strange(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).double()


@pytest.mark.parametrize(
    ("call", "behaviour", "mixed"),
    [
        (_lower, "16-bit", "bf16"),
        (lambda x, y: (x + y).float(), "fp32", "fp32"),
        (torch.add, "widest", "fp32"),
        (_raise, "error", "error"),
        (_strange, "error", "fp64"),
        (lambda x, y: x.detach() + y, "error", "error"),
    ],
)
def test_every_behaviour_is_told_apart(call: Callable[..., Tensor], behaviour: str, mixed: str) -> None:
    result = probe(OpCase("made up", ((2, 3), (2, 3)), (), call), torch.bfloat16, CPU)
    assert (result.behaviour, result.mixed) == (behaviour, mixed)
    assert {call.inputs for call in result.mixtures} == {(WIDE, torch.bfloat16), (torch.bfloat16, WIDE)}


def test_a_failure_is_told_with_its_inputs_and_its_first_line() -> None:
    result = probe(OpCase("made up", ((2, 3), (2, 3)), (), _raise), torch.float16, CPU)
    assert result.error == "(fp32, fp16): cannot mix"
    detached = probe(OpCase("made up", ((2,), (2,)), (), lambda x, y: x.detach() + y), torch.float16, CPU)
    assert "gradients are" in detached.error


def test_parameters_stay_in_fp32_in_the_mixtures() -> None:
    case = OpCase("made up", ((2,), (2,)), ((2,),), lambda x, y, weight: (x + y) * weight.to(x.dtype))
    result = probe(case, torch.bfloat16, CPU)
    low = torch.bfloat16
    assert {call.inputs for call in result.mixtures} == {(WIDE, low, WIDE), (low, WIDE, WIDE)}
    one = probe(OpCase("made up", ((2,),), ((2,),), lambda x, weight: x * weight.to(x.dtype)), low, CPU)
    assert [call.inputs for call in one.mixtures] == [(low, WIDE)]
    assert one.behaviour == "widest"  # of the activations
    promoted = probe(OpCase("made up", ((2,),), ((2,),), torch.mul), low, CPU)
    assert promoted.mixed == "fp32"
    assert promoted.behaviour == "widest"  # of all inputs


def test_an_operation_that_this_torch_does_not_have_is_an_error_of_its_own() -> None:
    missing = OpCase("made up", ((2,),), (), lambda x: torch.no_such_operation(x))  # type: ignore[attr-defined]
    result: OpResult = probe(missing, torch.bfloat16, CPU)
    assert result.behaviour == "error"
    assert "no_such_operation" in result.error


def test_the_command_shows_every_operation_on_this_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ops.json"
    assert doctor.main(["numerics", "--ops", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    content: list[dict[str, Any]] = json.loads(out.read_text())
    assert len(content) == 2 * len(op_cases())
    assert f"torch {torch.__version__}" in shown
    lines = shown.splitlines()
    for case in op_cases():
        assert any(line.split()[:1] == [case.name] for line in lines), case.name
    for name in ("softmax", "layer_norm", "batch_norm", "cross_entropy", "embedding", "cat", "add", "LSTM", "GRU"):
        assert {row["autocast"] for row in content if row["operation"] == name} == {"bf16", "fp16"}
    assert {row["behaviour"] for row in content} <= {"16-bit", "fp32", "widest", "error"}


def test_a_config_beside_ops_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["numerics", "--ops", "experiment=digits"])
    assert ended.value.code == 2
    assert "experiment=digits" in capsys.readouterr().err
