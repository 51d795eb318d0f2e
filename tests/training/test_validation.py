"""Wrong values of all groups: each is refused before anything is written, with its key, the value and what to do."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.config.schema import Config, from_plain
from dtrain.errors import ConfigError
from dtrain.training.validation import validate
from tests.config.command_lines import compose
from tests.refusals import refused

#: A value of the digits' config, the key that the message names, the value in it, and the remedy.
WRONG: list[tuple[str, str, str, str]] = [
    ("run.seed=99999999999999999999999", "run.seed", "99999999999999999999999", "want an integer of 64 bits"),
    ("run.resume=yes", "run.resume", "True", "want auto"),
    ("run.max_hours=0", "run.max_hours", "0", "want a number above 0"),
    ("run.max_hours=-1", "run.max_hours", "-1", "want a number above 0"),
    ("train.global_batch_size=0", "train.global_batch_size", "0", "want at least one sample"),
    ("train.global_batch_size=-64", "train.global_batch_size", "-64", "want at least one sample"),
    ("train.micro_batch_size=0", "train.micro_batch_size", "0", "has 64 of the 64 samples of a step"),
    ("train.micro_batch_size=-2", "train.micro_batch_size", "-2", "has 64 of the 64 samples of a step"),
    ("train.max_steps=0", "train.max_steps", "0", "want at least 1"),
    ("train.max_steps=-5", "train.max_steps", "-5", "want at least 1"),
    ("train.max_epochs=0", "train.max_epochs", "0", "want at least 1"),
    ("train.max_epochs=null", "train.max_steps", "null", "Set at least one"),
    ("train.clip_norm=0", "train.clip_norm", "0", "want a number above 0"),
    ("train.clip_norm=-1", "train.clip_norm", "-1", "want a number above 0"),
    ("train.clip_norm=.nan", "train.clip_norm", "nan", "want a number above 0"),
    ("train.log_every=0", "train.log_every", "0", "want at least 1"),
    ("train.eval_every=-1", "train.eval_every", "-1", "want a number of steps"),
    ("train.ema_decay=1.0", "train.ema_decay", "1.0", "want a number in [0"),
    ("train.ema_decay=-0.1", "train.ema_decay", "-0.1", "want a number in [0"),
    ("train.compile=yes please", "train.compile", "yes please", "want true"),
    ("train.compile=[nothing.*]", "train.compile", "nothing.*", "has 0, 1, 2, 3, 4, 5, 6, 7, 8"),
    ("train.compile=3", "train.compile", "3", "want true"),
    (
        "train.checkpoint_activations=[blocks.*]",
        "train.checkpoint_activations",
        "blocks.*",
        "has 0, 1, 2, 3, 4, 5, 6, 7, 8",
    ),
    ("train.hooks=[{_target_: no.such.Hook}]", "train.hooks[0]._target_", "no.such.Hook", "pip install no"),
    ("train.hooks=[{every: 3}]", "train.hooks[0]", "3", "such as train.hooks[0]._target_=package"),
    ("train.hooks=[3]", "train.hooks[0]", "3", "such as train.hooks[0]._target_=package"),
    ("train.hooks=[MyHook]", "train.hooks[0]", "MyHook", "such as train.hooks[0]._target_=package"),
    ("train.max_consecutive_skips=0", "train.max_consecutive_skips", "0", "want at least 1"),
    ("data.train=3", "data.train", "3", "want shards such as 'data"),
    ("data.train=[]", "data.train", "[]", "want shards such as 'data"),
    ("data.train=[1, 2]", "data.train", "[1, 2]", "want shards such as 'data"),
    ("data.train={root: /data}", "data.train", "{'root': '/data'}", "such as data.train._target_=package"),
    (
        "data.train={_target_: dtrain.data.digits.arrayss}",
        "data.train._target_",
        "dtrain.data.digits.arrayss",
        "Did you mean 'arrays'",
    ),
    (
        "data.train={_target_: dtrain.data.digits.arrays, spilt: train}",
        "data.train.spilt",
        "train",
        "Did you mean 'split'",
    ),
    ("data.eval=true", "data.eval", "True", "want shards such as 'data"),
    ("data.fields={}", "data.fields", "", "Declare what to read"),
    ("data.fields={png: image}", "data.fields.png", "image", "want options such as {name: image"),
    ("data.fields={png: {role: image}}", "data.fields.png", "image", "has no name"),
    ("data.fields={png: {name: image, role: imagee}}", "data.fields", "imagee", "Did you mean 'image'"),
    ("data.fields={png: {name: image, sise: 8}}", "data.fields.png", "sise", "Did you mean 'size'"),
    ("data.fields={png: {name: image, size: big}}", "data.fields.png.size", "big", "want pixels: an int"),
    ("data.fields={png: {name: image, size: 0}}", "data.fields", "0", "want at least 1 pixel each way"),
    ("data.fields={png: {name: image, size: [8]}}", "data.fields.png.size", "8", "want pixels: an int"),
    ("data.fields={png: {name: image, mean: [120, 120, 120]}}", "data.fields", "120", "divide values"),
    ("data.fields={png: {name: image, std: 0}}", "data.fields.png.std", "0", "want three numbers"),
    ("data.fields={pickle: {name: image}}", "data.fields", "image", "set a decoder"),
    ("data.fields={png: {name: a}, jpg: {name: a}}", "data.fields", "a", "Each needs its own"),
    (
        "data.fields={png: {name: a, decoder: nothing}}",
        "data.fields.png.decoder",
        "nothing",
        "want a dotted path such as my_package",
    ),
    (
        "data.fields={png: {name: a, decoder: {_target_: my.decoder}}}",
        "data.fields.png.decoder._target_",
        "my.decoder",
        "pip install my",
    ),
    ("data.fields={.png: {name: a}}", "data.fields", "a", "Write it in lower case"),
    ("data.num_workers=-1", "data.num_workers", "-1", "want a number of at least 0"),
    ("data.num_workers=many", "data.num_workers", "many", "want a number of at least 0"),
    ("data.shuffle=yes", "data.shuffle", "True", "want one of window"),
    ("data.shuffle=True", "data.shuffle", "True", "want one of window"),
    ("data.lanes=7", "data.lanes", "7", "Set data.lanes="),
    ("data.lanes=0", "data.lanes", "0", "Set data.lanes="),
    ("data.window=0", "data.window", "0", "want a number of shards of at least 1"),
    ("data.tail=keep", "data.tail", "keep", "want one of pad"),
    ("data.augment={_target_: dtrain.data.augment.RandomCropFlip, padding: -1}", "data.augment", "-1", "want pixels"),
    (
        "data.augment={_target_: dtrain.data.augment.RandomCropFlip, padding: four}",
        "data.augment.padding",
        "four",
        "wants int",
    ),
    (
        "data.augment={_target_: dtrain.data.augment.Compose, transforms: []}",
        "data.augment.transforms",
        "transforms",
        "Valid: steps",
    ),
    ("data.augment=flip", "data.augment", "flip", "such as data.augment._target_=package"),
    ("data.mix={_target_: dtrain.data.mixing.Mix, mixup_alpha: -1, classes: 10}", "data.mix", "-1", "want numbers"),
    (
        "data.mix={_target_: dtrain.data.mixing.Mix, mixup_alpha: 0.2}",
        "data.mix.classes",
        "dtrain.data.mixing.Mix",
        "Set data.mix.classes=",
    ),
    ("data.mix={_target_: dtrain.data.augment.Flip}", "data.mix", "dtrain.data.augment.Flip", "want a dtrain"),
    (
        "data.prepare={_target_: dtrain.data.digits.prepar}",
        "data.prepare._target_",
        "dtrain.data.digits.prepar",
        "Did you mean 'prepare'",
    ),
    ("data.max_bad=-1", "data.max_bad", "-1", "want 0 or more"),
    ("data.max_bad=1.0", "data.max_bad", "1.0", "data.max_bad=100%"),
    ("data.max_bad=all", "data.max_bad", "'all'", "0.5%"),
    ("data.max_bad_consecutive=-1", "data.max_bad_consecutive", "-1", "want 0 or more"),
    ("data.storage=disk", "data.storage", "disk", "want one of auto"),
    ("data.cache.max_gb=0", "data.cache.max_gb", "0", "want a number above 0"),
    ("data.start_method=threads", "data.start_method", "threads", "want one of fork"),
    ("data.prefetch=0", "data.prefetch", "0", "want at least 1 micro-batch"),
    ("data.transfer=fp16", "data.transfer", "fp16", "want auto or fp32"),
    ("data.on_overflow=ignore", "data.on_overflow", "ignore", "want one of error"),
    ("data.shard_size=0", "data.shard_size", "0", "want at least one sample"),
    ("model.width=abc", "model.width", "abc", "wants int"),
    ("model.width=0", "model", "0", "has no elements"),
    ("model.width=-4", "model", "-4", "DTRAIN_TRACEBACK=1"),
    ("model.classes=0", "model", "0", "has no elements"),
    ("model.widht=4", "model.widht", "", "Did you mean 'width'"),
    ("model={width: 4}", "model", "{'width': 4}", "such as model._target_=package"),
    ("model={_target_: torch.nn.Linaer}", "model._target_", "torch.nn.Linaer", "Did you mean 'Linear'"),
    (
        "model={_target_: torch.nn.Linear, in_features: 3}",
        "model.out_features",
        "torch.nn.Linear",
        "Set model.out_features=",
    ),
    ("model={_target_: dtrain.models.ViT, size: huge, classes: 10}", "model", "huge", "want one of tiny"),
    ("model={_target_: dtrain.models.ResNet, depth: 19, classes: 10}", "model", "10", "want a depth of 18"),
    ("task.label_smoothing=2", "task.label_smoothing", "2", "want a number in [0"),
    ("task.label_smoothing=some", "task.label_smoothing", "some", "wants float"),
    ("task.inputt=image", "task.inputt", "", "Did you mean 'input'"),
    ("task.input=nothing", "task.input", "nothing", "Valid: image"),
    ("task={label: label}", "task", "{'label': 'label'}", "such as task._target_=package"),
    ("optimizer.lr=-1", "optimizer", "-1", "Invalid learning rate"),
    ("optimizer.lr=fast", "optimizer.lr", "fast", "want a number such as 0.001"),
    ("optimizer.betas=[0.9]", "optimizer", "[0.9]", "DTRAIN_TRACEBACK=1"),
    ("optimizer.betas=[0.9, 2]", "optimizer", "[0.9, 2]", "Invalid beta parameter at index 1"),
    ("optimizer.weight_decay=-1", "optimizer", "-1", "Invalid weight_decay value"),
    ("optimizer.no_decay=vectors", "optimizer.no_decay", "vectors", "want a list of patterns"),
    ("optimizer.no_decay=[nothing.*]", "optimizer.no_decay", "nothing.*", "Near names: 0.weight"),
    ("optimizer.groups={head: {patterns: [nothing.*]}}", "optimizer.groups", "nothing.*", "Near names: 0.weight"),
    ("train.freeze=[nothing.*]", "train.freeze", "nothing.*", "Near names: 0.weight"),
    ("train.freeze=['*']", "train.freeze", "every parameter", "Change the patterns"),
    ("optimizer.momentum=0.9", "optimizer.momentum", "", "Valid: amsgrad"),
    ("optimizer={lr: 3}", "optimizer", "{'lr': 3}", "such as optimizer._target_=package"),
    ("optimizer={_target_: torch.optim.Adm}", "optimizer._target_", "torch.optim.Adm", "Did you mean 'Adam'"),
    ("optimizer={_target_: torch.optim.Muon}", "optimizer", "torch.optim.Muon", "Muon only supports"),
    ("schedule.warmup=200 %", "schedule", "200", "at least 1"),
    ("schedule.warmup=5 parsecs", "schedule", "5 parsecs", "want a number of steps"),
    ("schedule.warmup=-3", "schedule", "-3", "at least 1"),
    ("schedule.final_fraction=much", "schedule.final_fraction", "much", "wants float"),
    ("schedule.warm_up=3", "schedule.warm_up", "", "Did you mean 'warmup'"),
    (
        "schedule={_target_: dtrain.training.schedule.WarmupSteps, milestones: [30 %, 10 %]}",
        "schedule",
        "milestones",
        "want steps that ascend",
    ),
    (
        "schedule={_target_: dtrain.training.schedule.WarmupCosin}",
        "schedule._target_",
        "dtrain.training.schedule.WarmupCosin",
        "Did you mean 'WarmupCosine'",
    ),
    ("precision.name=fp8", "precision", "fp8", "want one of fp32"),
    ("precision.keep_fp32=[haed]", "precision.keep_fp32", "haed", "Near names: 0"),
    ("precision.loss_scale.init=0", "precision.loss_scale", "0", "want 0 < min <= init <= max < inf"),
    ("precision.loss_scale.init=.inf", "precision.loss_scale", "inf", "want 0 < min <= init <= max < inf"),
    ("precision.loss_scale.growth_factor=0.5", "precision.loss_scale", "0.5", "want > 1"),
    ("precision.loss_scale.backoff_factor=2", "precision.loss_scale", "2", "want between 0 and 1"),
    ("precision.loss_scale.growth_interval=0", "precision.loss_scale", "0", "want >= 1"),
    ("precision.loss_scale.hysteresis=0", "precision.loss_scale", "0", "want >= 1"),
    ("precision.loss_scale.min=0", "precision.loss_scale", "0", "want 0 < min <= init <= max < inf"),
    ("parallel.timeout_step=0", "parallel.timeout_step", "0", "want a number above 0"),
    ("parallel.timeout_start=-1", "parallel.timeout_start", "-1", "want a number above 0"),
    ("parallel.bucket_cap_mb=0", "parallel.bucket_cap_mb", "0", "want a number above 0"),
    ("parallel.shard=zero", "parallel.shard", "zero", "want one of none"),
    ("parallel.shard_size=2", "parallel.shard_size", "2", "set parallel.shard=full"),
    ("parallel.reduce_dtype=int8", "parallel.reduce_dtype", "int8", "want one of fp32"),
    ("checkpoint.every_steps=0", "checkpoint.every_steps", "0", "want at least 1"),
    ("checkpoint.every_minutes=-1", "checkpoint.every_minutes", "-1", "want at least 0"),
    ("checkpoint.keep_last=0", "checkpoint.keep_last", "0", "want at least 1"),
    ("checkpoint.keep_every=0", "checkpoint.keep_every", "0", "want at least 1"),
    ("checkpoint.best_mode=highest", "checkpoint.best_mode", "highest", "want max or min"),
    ("tracker.name=neptune", "tracker.name", "neptune", "known are wandb"),
    ("tracker.mode=on", "tracker.mode", "on", "known are online"),
    ("profile.steps=[5]", "profile.steps", "[5]", "want the first and the last attempted step"),
    ("profile.steps=[9, 5]", "profile.steps", "[9, 5]", "want the first and the last attempted step"),
    ("profile.steps=[0, 3]", "profile.steps", "[0, 3]", "want the first and the last attempted step"),
    ("profile.steps=[1, 1000]", "profile.steps", "[1, 1000]", "want the first and the last attempted step"),
    ("data.train=null", "data.train", "None", "want shards such as 'data"),
    ("task.label_smoothing=1.0", "task.label_smoothing", "1.0", "want a number in [0"),
]


@pytest.fixture(scope="module")
def digits_config() -> Any:
    return compose("experiment=digits", "tracker=none").cfg


def changed(config: Any, *assignments: str) -> Any:
    """A copy with other values; values are YAML."""
    plain = asdict(config)
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        *parents, name = key.split(".")
        section = plain
        for parent in parents:
            section = section[parent]
        section[name] = yaml.safe_load(value)
    return from_plain(Config, plain)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("assignment", "key", "got", "remedy"), WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_value_is_refused(digits_config: Any, assignment: str, key: str, got: str, remedy: str) -> None:
    with refused(ConfigError, key, got, remedy) as raised:
        validate(changed(digits_config, assignment))
    message = str(raised.value)
    assert message.count("\n") == 0
    assert not message.endswith("..")
    assert message.startswith(key)


def test_all_wrong_values_are_in_one_message(digits_config: Any) -> None:
    with refused(ConfigError, "3 values are wrong", "train.log_every: got 0", "data.tail: got 'keep'", "model.widht"):
        validate(changed(digits_config, "train.log_every=0", "data.tail=keep", "model.widht=3"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["experiment=digits"],
        ["experiment=digits", "precision=fp16", "optimizer=sgd", "schedule=step"],
        ["experiment=digits", "model._target_=torch.nn.Linear", "model.in_features=3", "model.out_features=2"],
        ["experiment=line"],
        ["experiment=checkerboard"],
        ["experiment=imagenet_vit_s", "data.train=a.tar", "parallel=fsdp"],
        ["experiment=imagenet_resnet50", "data.train=a.tar", "optimizer=muon"],
    ],
    ids=" ".join,
)
def test_a_right_config_is_accepted_without_touching_random_numbers(arguments: list[str]) -> None:
    import torch

    before = torch.get_rng_state()
    validate(compose(*arguments, "tracker=none").cfg)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_size_of_a_micro_batch_is_compared_with_the_ranks(digits_config: Any, monkeypatch) -> None:
    validate(changed(digits_config, "train.micro_batch_size=24"))  # the number of ranks is not known
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with refused(ConfigError, "train.micro_batch_size", "24", "Sizes that fit: 1, 2, 4, 8, 16, 32"):
        validate(changed(digits_config, "train.micro_batch_size=24"))


SHARDED: list[tuple[list[str], tuple[str, ...]]] = [
    (["parallel.shard_modules=[blocks.*]"], ("parallel.shard_modules", "blocks.*", "has 0, 1, 2")),
    (["parallel.static_graph=true"], ("parallel.static_graph", "True", "shard=none")),
    (["parallel.shard=hybrid", "parallel.shard_size=3"], ("parallel.shard_size", "3", "the 4 ranks")),
    (["train.compile=true"], ("train.compile", "true", "[blocks.*]")),
    (
        ["optimizer={_target_: torch.distributed.optim.ZeroRedundancyOptimizer, optimizer_class: x}"],
        ("optimizer", "ZeroRedundancyOptimizer", "parallel=fsdp"),
    ),
]


@pytest.mark.parametrize(("assignments", "named"), SHARDED, ids=[" ".join(row[0]) for row in SHARDED])
def test_what_a_sharded_run_cannot_do_is_refused_before_it_starts(
    digits_config: Any, monkeypatch, assignments: list[str], named: tuple[str, ...]
) -> None:
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "4")
    validate(changed(digits_config, "parallel.shard=full"))
    with refused(ConfigError, *named):
        validate(changed(digits_config, "parallel.shard=full", *assignments))


@pytest.mark.parametrize("section", ["task", "optimizer", "schedule", "model"])
def test_a_section_that_is_not_set_is_refused_with_what_to_choose(digits_config: Any, section: str) -> None:
    with refused(ConfigError, f"{section} is not set", f"{section}=", f"{section}._target_="):
        validate(changed(digits_config, f"{section}=???"))


class Counting:
    """Counts how often it was built."""

    built = 0

    def __init__(self, words: list[str]) -> None:
        type(self).built += 1


def test_classes_of_others_are_not_built(digits_config: Any) -> None:
    here = f"{__name__}.Counting"
    nodes = ("task", "data.augment", "data.train", "data.prepare")
    cfg = changed(digits_config, *(f"{key}={{_target_: {here}, words: []}}" for key in nodes))
    validate(cfg)
    assert Counting.built == 0


def test_nothing_is_written(digits_config: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    validate(digits_config)
    assert list(tmp_path.iterdir()) == []
