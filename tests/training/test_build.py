from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dtrain.config.schema import LossScaleConfig, ParallelConfig, PrecisionConfig
from dtrain.errors import ConfigError
from dtrain.precision import Precision
from dtrain.training import build
from dtrain.training.schedule import Lengths, WarmupCosine
from dtrain.training.setup.optimizer import build_optimizer
from tests.ranks import run_ranks
from tests.refusals import refused
from tests.toys import CPU, Net, micro_batches, run_steps, train_step, world


def node(target: str | None = None, **keys: Any) -> Any:
    return {**({"_target_": target} if target else {}), **keys}


HERE = "tests.training.test_build"
LENGTHS = Lengths(horizon=100, steps_per_epoch=10, global_batch_size=32)


def wrapped(kind: str) -> nn.Module:
    if kind == "ddp":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return DistributedDataParallel(Net())
    return DataParallel(Net())


def no_module() -> str:
    return "a model"


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def raises() -> nn.Module:
    raise ImportError("the model's own import failed")


def joins(parts: list[str]) -> str:
    return "".join(parts)


def my_optimizer(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": params[:1], "lr": 2 * lr}, {"params": params[1:]}]
    return torch.optim.SGD(groups, lr=lr)


def no_optimizer(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return params


# -- by name


@pytest.mark.parametrize("given", [None, {}, {"width": 3}], ids=str)
def test_a_node_without_a_target_is_refused(given: Any) -> None:
    with refused(ConfigError, "model: ", "no _target_", "model._target_=package.Class"):
        build.by_target("model", given)


@pytest.mark.parametrize("target", ["nowhere.Model", f"{HERE}.Nothing", "dtrain.models.Nothing"])
def test_a_target_that_cannot_be_imported_is_refused_by_name(target: str) -> None:
    with refused(ConfigError, "model._target_", f"'{target}'", "cannot be imported"):
        build.by_target("model", node(target))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("lr", -1, "Invalid learning rate: -1"), ("lr", "fast", "torch.optim.AdamW(lr='fast')")],
)
def test_a_value_that_the_optimizer_refuses_is_a_mistake_in_the_config(key: str, value: object, message: str) -> None:
    with refused(ConfigError, "optimizer: ", message):
        build_optimizer(node("torch.optim.AdamW", **{key: value}), nn.Linear(1, 1))


def test_what_a_target_itself_raises_is_named_with_its_place() -> None:
    with refused(ConfigError, "model: ", f"{HERE}.raises()", "the model's own import failed (test_build.py, line "):
        build.build_model(node(f"{HERE}.raises"), CPU)


@pytest.mark.parametrize(
    ("target", "keys", "names"),
    [
        ("dtrain.models.SmallCNN", {"widht": 3}, ["model.widht: dtrain.models.SmallCNN", "Did you mean 'width'?"]),
        (f"{HERE}.wrapped", {}, ["model.kind is not set", "wrapped needs kind", "Set model.kind"]),
    ],
    ids=["one too many", "one is missing"],
)
def test_keys_that_a_target_does_not_take_are_refused_by_name(
    target: str, keys: dict[str, Any], names: list[str]
) -> None:
    with refused(ConfigError, *names):
        build.build_model(node(target, **keys), CPU)


def test_a_type_error_inside_a_target_is_not_taken_for_a_wrong_key() -> None:
    with refused(ConfigError, "model: ", f"{HERE}.joins(parts=3)", "can only join an iterable"):
        build.by_target("model", node(f"{HERE}.joins", parts=3))


# -- model


def test_a_model_is_built_with_its_keys_in_channels_last() -> None:
    model = build.build_model(node("torch.nn.Conv2d", in_channels=3, out_channels=4, kernel_size=3), CPU)
    assert isinstance(model, nn.Conv2d)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_model_keeps_the_layout_it_has_where_channels_last_is_not_wanted() -> None:
    keys = {"in_channels": 3, "out_channels": 4, "kernel_size": 3}
    assert build.build_model(node("torch.nn.Conv2d", **keys), CPU, channels_last=False).weight.is_contiguous()
    assert build.build_model(node("torch.nn.Conv3d", **keys), CPU)(torch.randn(2, 3, 4, 4, 4)).shape == (2, 4, 2, 2, 2)


@pytest.mark.parametrize(("kind", "name"), [("ddp", "DistributedDataParallel"), ("dp", "DataParallel")])
def test_a_wrapped_model_is_refused_with_the_reason(kind: str, name: str) -> None:
    def rank(number: int) -> str:
        with pytest.raises(ConfigError) as raised:
            build.build_model(node(f"{HERE}.wrapped", kind=kind), CPU)
        return str(raised.value)

    (message,) = run_ranks(1, rank, init=False)
    assert f"a model wrapped in {name}" in message
    assert "twice" in message


def test_what_is_no_module_is_refused() -> None:
    with refused(ConfigError, "no_module", "str", "torch.nn.Module"):
        build.build_model(node(f"{HERE}.no_module"), CPU)


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d())


def test_a_lazy_module_is_refused_by_name() -> None:
    with refused(ConfigError, "model", "1.weight of a LazyBatchNorm1d", "nn.Linear instead of nn.LazyLinear"):
        build.build_model(node(f"{HERE}.lazy"), CPU)


# -- optimizer


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_an_optimizer_is_fused_where_it_can_be(name: str) -> None:
    optimizer = build_optimizer(node(f"torch.optim.{name}", lr=0.1), Net())
    assert optimizer.defaults["fused"] is True


def test_adagrad_of_a_torch_that_fuses_it_on_cpus_only_is_trained_on_a_gpu() -> None:
    adagrad = torch.optim.Adagrad([torch.zeros(1)], fused=True)
    with FakeTensorMode():
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(3, device="cuda"))
        model.weight.grad = torch.empty_like(model.weight)
        optimizer = build_optimizer(node("torch.optim.Adagrad", lr=0.1), model)
        if hasattr(adagrad, "_step_supports_amp_scaling"):
            assert optimizer.defaults["fused"]
            return
        optimizer.step()
        with refused(ConfigError, "optimizer.fused", "got true", "Leave it out", "Adagrad"):
            build_optimizer(node("torch.optim.Adagrad", lr=0.1, fused=True), model)


class Spectral(Net):
    """Has a complex parameter, and with ``sparse`` an embedding with sparse gradients instead."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.extra = (
            nn.Embedding(5, 3, sparse=True) if sparse else nn.ParameterList([torch.ones(2, dtype=torch.complex64)])
        )

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.extra, nn.Embedding):
            return super().forward(x + self.extra(torch.tensor([1, 3, 1, 3])))
        return super().forward(x) * self.extra[0].abs().sum()


@pytest.mark.parametrize(("name", "sparse"), [("AdamW", False), ("SGD", False), ("SGD", True), ("Adagrad", True)])
def test_complex_and_sparse_parameters_are_trained_without_fused_kernels(name: str, sparse: bool) -> None:
    model = Spectral(sparse)
    step = train_step(model, build_optimizer(node(f"torch.optim.{name}", lr=0.1), model), clip_norm=1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (outcome,) = run_steps(step, [micro_batches(0, 4)])
    assert outcome.stats.applied
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(("sparse", "reason"), [(False, "extra.0 is complex"), (True, "extra.weight are sparse")])
def test_a_fused_optimizer_is_refused_for_a_parameter_that_it_cannot_train(sparse: bool, reason: str) -> None:
    with refused(ConfigError, "optimizer.fused", "got true", "Leave it out", reason):
        build_optimizer(node("torch.optim.SGD", lr=0.1, fused=True), Spectral(sparse))


def test_an_optimizer_without_sparse_gradients_is_refused_for_an_embedding_that_has_them() -> None:
    with refused(ConfigError, "optimizer", "torch.optim.AdamW", "sparse=False", "extra.weight", "Adagrad"):
        build_optimizer(node("torch.optim.AdamW", lr=0.1), Spectral(sparse=True))


@pytest.mark.parametrize("keys", [{"fused": False}, {"foreach": True}, {"fused": None}], ids=str)
def test_what_the_config_says_about_the_implementation_stays(keys: dict[str, Any]) -> None:
    optimizer = build_optimizer(node("torch.optim.AdamW", lr=0.1, **keys), Net())
    assert not optimizer.defaults["fused"]
    assert optimizer.defaults["foreach"] == keys.get("foreach")


def test_an_optimizer_without_a_fused_form_and_one_from_a_function_are_built_as_they_are() -> None:
    assert isinstance(build_optimizer(node("torch.optim.RMSprop", lr=0.1), Net()), torch.optim.RMSprop)
    groups = build_optimizer(node(f"{HERE}.my_optimizer", lr=0.1), Net()).param_groups
    assert [group["lr"] for group in groups] == [0.2, 0.1]


def test_only_what_is_trainable_is_optimized() -> None:
    model = Net()
    model.trunk.requires_grad_(False)
    optimizer = build_optimizer(node("torch.optim.SGD", lr=0.1), model)
    assert optimizer.param_groups[0]["params"] == list(model.head.parameters())


@pytest.mark.parametrize(
    ("target", "model", "names"),
    [
        ("torch.optim.SGD", frozen, ["no parameter that requires a gradient"]),
        (f"{HERE}.no_optimizer", Net, ["no_optimizer returns list", "torch Optimizer"]),
        ("torch.optim.Adamm", Net, ["'torch.optim.Adamm' cannot be imported"]),
    ],
)
def test_an_impossible_optimizer_is_refused(target: str, model: Any, names: list[str]) -> None:
    with refused(ConfigError, *names):
        build_optimizer(node(target), model())


# -- schedule, precision, loss scale


def test_a_schedule_has_the_horizon_of_the_run_unless_it_has_one_of_its_own() -> None:
    target = "dtrain.training.schedule.WarmupCosine"
    assert build.build_schedule(node(target), LENGTHS) == WarmupCosine(100)
    assert build.build_schedule(node(target, horizon=None), LENGTHS) == WarmupCosine(100)
    assert build.build_schedule(node(target, horizon=7, warmup=3), LENGTHS) == WarmupCosine(7, 3)


def test_durations_of_a_schedule_are_steps_epochs_samples_or_shares() -> None:
    target = "dtrain.training.schedule.WarmupCosine"
    for warmup in ("20 steps", "2 epochs", "640 samples", "20 %", "20%", 20):
        assert build.build_schedule(node(target, warmup=warmup), LENGTHS) == WarmupCosine(100, 20)
    with refused(ConfigError, "schedule: ", "warmup 200", "'5 epochs'"):
        build.build_schedule(node(target, warmup="20 epochs"), LENGTHS)


def test_a_schedule_that_cannot_be_called_is_refused() -> None:
    with refused(ConfigError, "schedule: ", "builtins.dict", "callable"):
        build.build_schedule(node("builtins.dict"), LENGTHS)


def test_an_unknown_precision_and_an_impossible_scale_are_refused_by_their_keys() -> None:
    with refused(ConfigError, "precision", "got 'fp8'"):
        build.build_precision(PrecisionConfig(name="fp8"), CPU)
    with refused(ConfigError, key="", got="growth_factor=0.5"):
        build.build_loss_scale(LossScaleConfig(growth_factor=0.5), Precision("fp16"), CPU)


@pytest.mark.parametrize(("name", "scaled"), [("fp32", False), ("tf32", False), ("bf16", False), ("fp16", True)])
def test_only_fp16_has_a_loss_scale(name: str, scaled: bool) -> None:
    scale = build.build_loss_scale(LossScaleConfig(init=8.0), Precision(name), CPU)
    assert (float(scale.scale) if scale is not None else None) == (8.0 if scaled else None)


# -- DDP


def test_one_rank_needs_no_ddp_and_several_have_it_as_the_config_says() -> None:
    model = Net()
    assert build.wrap(model, ParallelConfig(), world(), False) is model

    def rank(number: int) -> list[Any]:
        plain = build.wrap(Net(), ParallelConfig(bucket_cap_mb=3, static_graph=True), world(number, 2), False)
        exact = build.wrap(Net(), ParallelConfig(static_graph=True), world(number, 2), True)
        assert isinstance(plain, DistributedDataParallel)
        assert isinstance(exact, DistributedDataParallel)
        return [
            [plain.bucket_bytes_cap, plain.static_graph, plain.find_unused_parameters],
            # What keeps the layout of the buckets, and with it the order of summation, over a restart.
            [exact.static_graph, exact.find_unused_parameters],
        ]

    assert run_ranks(2, rank) == [[[3 * 2**20, True, False], [False, True]]] * 2


# -- classes


def test_the_number_of_classes_is_compared_with_the_names_beside_the_shards() -> None:
    with refused(ConfigError, "model.classes", "10", "model.classes=3"):
        build.check_classes(node("dtrain.models.SmallCNN", classes=10), ["a", "b", "c"])
    build.check_classes(node("dtrain.models.SmallCNN", classes=3), ["a", "b", "c"])
    build.check_classes(node("dtrain.models.SmallCNN", classes=10), None)
    build.check_classes(node("dtrain.models.SmallCNN"), ["a", "b", "c"])
