"""The precision policy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.precision.policy import ROLES, Precision
from tests.refusals import Refusal

# As Any: torch has no type stubs for these knobs.
BACKENDS: Any = torch.backends
PRESETS = ("fp32", "tf32", "bf16", "fp16")


@pytest.fixture(autouse=True)
def knobs() -> Iterator[None]:
    """Leaves torch's fp32 knobs as a fresh process has them."""
    yield
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for backend in (BACKENDS.cudnn, BACKENDS.mkldnn):
        backend.conv.fp32_precision = backend.rnn.fp32_precision = "none"
    BACKENDS.cudnn.allow_tf32 = True


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU that has bf16 and TF32."""
    fake_cuda(monkeypatch, bf16=True)


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, bf16: bool) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU")
    # What `including_emulation=True` answers is not hardware: Volta then claims bf16.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)


def test_each_preset_answers() -> None:
    half = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name in PRESETS:
        precision = Precision.parse(name)
        assert precision.compute_dtype == half[name]
        assert precision.scales_gradients == (name == "fp16")
        assert precision.fp32_mode == ("tf32" if name == "tf32" else "ieee")
        assert Precision.parse(precision) is precision


@pytest.mark.parametrize("name", PRESETS)
def test_only_what_a_model_computes_with_has_a_transfer_dtype(name: str) -> None:
    precision = Precision(name)
    dtypes = {role: precision.transfer_dtype(role) for role in ROLES}
    assert dtypes.pop("image") == dtypes.pop("video") == torch.uint8
    assert dtypes.pop("feature") == dtypes.pop("audio") == precision.compute_dtype
    assert set(dtypes.values()) == {None}


def test_policy_travels_to_spawned_workers() -> None:
    precision = Precision("bf16", keep_fp32=["head"])  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(precision)) == precision
    assert hash(precision) == hash(Precision("bf16", ("head",)))


@pytest.mark.parametrize("name", PRESETS)
def test_autocast_is_a_context_manager_and_a_decorator(name: str) -> None:
    precision = Precision(name)
    a = torch.randn(2, 2)

    @precision.autocast("cpu")
    def decorated() -> torch.Tensor:
        return a @ a

    with precision.autocast("cpu"):
        assert (a @ a).dtype == precision.compute_dtype
        with torch.autocast("cpu", enabled=False):
            assert (a @ a).dtype == torch.float32
    assert decorated().dtype == precision.compute_dtype
    assert (a @ a).dtype == torch.float32


def test_a_models_own_autocast_works_in_an_fp32_run() -> None:
    a = torch.randn(2, 2)
    with Precision("fp32").autocast("cpu"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16


@pytest.mark.parametrize("before", ["nothing", "old knobs", "new knobs", "medium"])
@pytest.mark.parametrize("name", PRESETS)
def test_apply_sets_both_kinds_of_tf32_knobs(name: str, before: str, ampere: None) -> None:
    if before == "old knobs":
        BACKENDS.cuda.matmul.allow_tf32 = BACKENDS.cudnn.allow_tf32 = True
    elif before == "new knobs":
        BACKENDS.cuda.matmul.fp32_precision = BACKENDS.cudnn.conv.fp32_precision = "tf32"
    elif before == "medium":
        torch.set_float32_matmul_precision("medium")
    # The device index is not touched: apply only asks about it.
    assert Precision(name).apply(torch.device("cuda")) == []
    tf32 = name == "tf32"
    mode = "tf32" if tf32 else "ieee"
    # torch raises on reading either kind where the two disagree.
    assert BACKENDS.cuda.matmul.allow_tf32 is tf32
    assert BACKENDS.cudnn.allow_tf32 is tf32
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert BACKENDS.cuda.matmul.fp32_precision == mode
    assert BACKENDS.cudnn.conv.fp32_precision == mode
    assert BACKENDS.cudnn.rnn.fp32_precision == mode
    assert BACKENDS.mkldnn.matmul.fp32_precision != "bf16"


def test_fp32_holds_against_a_process_wide_tf32(ampere: None) -> None:
    BACKENDS.fp32_precision = "tf32"
    try:
        Precision("fp32").apply(torch.device("cuda"))
        assert BACKENDS.cuda.matmul.fp32_precision == "ieee"
        assert BACKENDS.cudnn.conv.fp32_precision == "ieee"
        assert BACKENDS.mkldnn.conv.fp32_precision == "ieee"
    finally:
        BACKENDS.fp32_precision = "none"


def test_bf16_needs_hardware_and_not_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, bf16=False)
    NO_BF16.check()
    assert Precision("fp16").apply(torch.device("cuda")) == []
    assert "no TF32 units" in Precision("tf32").apply(torch.device("cuda"))[0]


@pytest.mark.parametrize("kernels", [True, False])
def test_half_precision_on_a_cpu_without_kernels_is_a_warning(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: kernels)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: kernels)
    cpu = torch.device("cpu")
    assert Precision("fp32").apply(cpu) == []
    for name in ("bf16", "fp16"):
        warnings = Precision(name).apply(cpu)
        assert len(warnings) == (0 if kernels else 1)
        assert all("\n" not in line and f"precision={name}" in line for line in warnings)


@pytest.mark.parametrize(
    ("keep", "frozen", "named"),
    [
        ((), (), "'0' and 1 other"),
        (("0",), (), "'2.0'"),
        ((), ("0",), "'2.0'"),
        (("0", "2"), (), ""),
        ((), ("0", "2.0"), ""),
    ],
)
def test_convolutions_that_train_in_fp16_on_a_cpu_are_a_warning(
    keep: tuple[str, ...], frozen: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without any fp16 kernels there is a warning for all layers.
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Sequential(nn.Conv1d(4, 4, 1)))
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    fp16 = Precision("fp16", keep_fp32=keep)
    fp16.wrap_keep_fp32(model)
    warnings = fp16.slow_layers(model, torch.device("cpu"))
    assert len(warnings) == bool(named)
    assert all(named in line and "precision=bf16" in line for line in warnings)
    assert fp16.slow_layers(model, torch.device("meta")) == []
    assert Precision("bf16").slow_layers(model, torch.device("cpu")) == []
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    assert fp16.slow_layers(model, torch.device("cpu")) == []


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.trunk(x)
        return features, self.head(features)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_kept_modules_compute_in_fp32_and_keep_their_names(name: str) -> None:
    torch.manual_seed(0)
    model = Tower()
    keys = list(model.state_dict())
    x = torch.randn(3, 4)
    precision = Precision(name, ("he*",))
    assert precision.wrap_keep_fp32(model) == ["head"]
    assert precision.wrap_keep_fp32(model) == ["head"]
    assert list(model.state_dict()) == keys
    assert isinstance(model.head, nn.Linear)
    assert repr(model.head) == repr(nn.Linear(4, 2))
    with precision.autocast("cpu"):
        features, logits = model(x)
    assert features.dtype == precision.compute_dtype
    assert logits.dtype == torch.float32
    expected = features.float() @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    logits.sum().backward()
    assert model.trunk[0].weight.grad is not None


def test_a_copy_of_a_kept_module_computes_with_its_own_weights() -> None:
    model = Tower()
    Precision("bf16", ("head",)).wrap_keep_fp32(model)
    average = copy.deepcopy(model)
    with torch.no_grad():
        average.head.weight.zero_()
        average.head.bias.zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(1, 4))[1].abs().sum() > 0
        assert average(torch.randn(1, 4))[1].abs().sum() == 0


def test_kept_modules_cast_nested_and_named_inputs() -> None:
    class Mixed(nn.Module):
        def forward(
            self, pair: list[torch.Tensor], *, mask: torch.Tensor, extra: dict[str, torch.Tensor]
        ) -> list[object]:
            return [pair[0].dtype, pair[1].dtype, mask.dtype, extra["x"].dtype]

    holder = nn.Sequential(Mixed())
    Precision("fp16", ("0",)).wrap_keep_fp32(holder)
    half = torch.zeros(1, dtype=torch.float16)
    seen = holder[0]([half, half.int()], mask=half.bool(), extra={"x": half.bfloat16()})
    assert seen == [torch.float32, torch.int32, torch.bool, torch.float32]


def test_a_kept_lstm_works_where_fp16_has_no_kernel() -> None:
    model = nn.Sequential(nn.LSTM(3, 3))
    Precision("fp16", ("0",)).wrap_keep_fp32(model)
    with Precision("fp16").autocast("cpu"):
        packed = nn.utils.rnn.pack_sequence([torch.randn(2, 3, dtype=torch.float16)])
        out, _ = model(packed)
    assert out.data.dtype == torch.float32


# -- refusals


REFUSED = {
    "unknown precision": Refusal(lambda: Precision("bfloat16"), "precision", "'bfloat16'", "'bf16'"),
    "unknown role": Refusal(lambda: Precision("fp32").transfer_dtype("labels"), "role", "'labels'", "'label'"),
    "string of patterns": Refusal(
        lambda: Precision("bf16", keep_fp32="head"),  # type: ignore[arg-type]
        "precision.keep_fp32",
        "'head'",
        "list of patterns",
    ),
    "pattern without a module": Refusal(
        lambda: Precision("bf16", ("haed",)).wrap_keep_fp32(Tower()), "precision.keep_fp32", "'haed'", "head"
    ),
    "device type without autocast": Refusal(lambda: Precision("fp16").autocast("meta"), "precision=fp16", "'meta'", ""),
}
NO_CUDA = {
    f"{name}, {method}": Refusal(call, f"precision={name}", "cuda", "CUDA build of torch")
    for name in PRESETS
    for method, call in {
        "apply": lambda name=name: Precision(name).apply(torch.device("cuda")),
        "autocast": lambda name=name: Precision(name).autocast("cuda"),
    }.items()
    if method == "apply" or Precision(name).compute_dtype != torch.float32
}
TF32_IN_ENVIRONMENT = Refusal(
    lambda: Precision("fp32").apply(torch.device("cuda")),
    "precision=fp32",
    "NVIDIA_TF32_OVERRIDE=1",
    "nset that variable",
)
NO_BF16 = Refusal(lambda: Precision("bf16").apply(torch.device("cuda")), "precision=bf16", "Fake GPU", "precision=fp16")


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED)
def test_what_is_not_a_precision_is_refused(refusal: Refusal) -> None:
    refusal.check()


@pytest.mark.parametrize("refusal", NO_CUDA.values(), ids=NO_CUDA)
def test_cuda_is_refused_where_there_is_none(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refusal.check()


# -- memory


def checkerboard() -> nn.Sequential:
    """The network that learns a checkerboard from coordinates: 2-256-256-256-1, 1x1 convolutions, BatchNorm, ReLU."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (2, 256, 256):
        layers += [nn.Conv2d(inputs, 256, 1), nn.BatchNorm2d(256), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(256, 1, 1))


def saved_bytes(precision: str) -> int:
    """Bytes of all storages that a forward holds until its backward: parameters do not count, their 16-bit copies do."""
    model = checkerboard()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    x = torch.rand(1, 2, 32, 32)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        Precision(precision).autocast("cpu"),
    ):
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_at_least_a_third_fewer_bytes_are_saved_for_the_backward(precision: str) -> None:
    assert saved_bytes(precision) <= 2 / 3 * saved_bytes("fp32")
