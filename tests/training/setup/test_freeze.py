"""Frozen parameters against a plain loop that does not have them, and whole runs that freeze."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.fault_hook import faulty
from dtrain.errors import ConfigError
from dtrain.training.setup.ema import Ema
from dtrain.training.setup.freeze import Frozen, freeze
from dtrain.training.setup.optimizer import build_optimizer
from tests.ranks import RanksFailed, run_ranks
from tests.refusals import refused
from tests.toys import Net, NetWithBatchNorm, averages, micro_batches, run_steps, samples, train_step, world
from tests.training.test_step import decide_on_device
from tests.whole_runs import metrics, records, status, train_on, weights

ROWS, STEPS, UNTIL = 12, 6, 3
TRUNK = [{"patterns": ["trunk"], "until": UNTIL}]
SGD = {"_target_": "torch.optim.SGD", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.1}


def windows(rank: int = 0, ranks: int = 1, rows: int | None = None) -> list[Any]:
    return [micro_batches(step, ROWS, ranks=ranks, rank=rank, rows=rows) for step in range(STEPS)]


def plain_loop(node: dict[str, Any], until: float) -> tuple[Tensor, list[float]]:
    """Weights and gradient norms of one process in float64, whose trunk has no gradients in the first ``until`` steps."""
    model = Net().double()
    kind = getattr(torch.optim, node["_target_"].rpartition(".")[2])
    optimizer = kind(
        model.parameters(), **{key: value for key, value in node.items() if key not in ("_target_", "foreach")}
    )
    norms = []
    for step in range(STEPS):
        x, y = samples(step, ROWS)
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).square().mean().backward()
        if step < until:
            model.trunk.zero_grad()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
    return flat(model), norms


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def trained(
    entries: Sequence[Any], node: dict[str, Any], rank: int = 0, ranks: int = 1, **ddp: Any
) -> tuple[Tensor, list[float]]:
    """The same with the step, in DDP with the options ``ddp`` if there are several ranks."""
    rows, on_device = ddp.pop("rows", None), ddp.pop("on_device", False)
    bare = Net()
    freeze(bare, entries)
    optimizer = build_optimizer(node, bare)
    model = DistributedDataParallel(bare, **ddp) if ranks > 1 else bare
    frozen = Frozen(bare, entries, optimizer)
    ema = Ema(bare, 0.5)
    before = bare.trunk.weight.clone()
    step = train_step(model, optimizer, world=world(rank, ranks), nominal=ROWS, clip_norm=0.2, frozen=frozen, ema=ema)
    if on_device:
        decide_on_device(step)
    norms = [outcome.grad_norm for outcome in run_steps(step, windows(rank, ranks, rows)[:UNTIL])]
    assert torch.equal(bare.trunk.weight, before)
    assert torch.equal(averages(ema)["trunk.weight"], before)
    assert not any(name.startswith("trunk") for name, p in bare.named_parameters() if optimizer.state[p])
    norms += [outcome.grad_norm for outcome in run_steps(step, windows(rank, ranks, rows)[UNTIL:])]
    return flat(bare), norms


def assert_equal(found: tuple[Tensor, list[float]], expected: tuple[Tensor, list[float]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-4)


@pytest.mark.parametrize(
    "node", [SGD, ADAMW, {**SGD, "foreach": True}], ids=["fused sgd", "fused adamw", "foreach sgd"]
)
@pytest.mark.parametrize(("entries", "until"), [(TRUNK, UNTIL), (["trunk"], STEPS)], ids=["until", "for ever"])
def test_frozen_parameters_have_no_part_in_norm_clipping_decay_and_momentum(
    node: dict[str, Any], entries: list[Any], until: int
) -> None:
    assert_equal(trained(entries, node), plain_loop(node, until))


@pytest.mark.parametrize("node", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_a_decision_on_the_device_freezes_as_one_on_the_host(node: dict[str, Any]) -> None:
    assert_equal(trained(TRUNK, node, on_device=True), plain_loop(node, UNTIL))


def test_all_ways_of_ddp_freeze_alike() -> None:
    options: list[dict[str, Any]] = [
        {"gradient_as_bucket_view": True, "rows": 3},
        {"find_unused_parameters": True},
        {"static_graph": True, "rows": 2},
    ]
    expected = plain_loop(SGD, UNTIL), plain_loop(SGD, STEPS)
    results = run_ranks(2, lambda rank: [[trained(e, SGD, rank, 2, **o) for e in (TRUNK, ["trunk"])] for o in options])
    for found in results[0]:
        assert_equal(found[0], expected[0])
        assert_equal(found[1], expected[1])


def test_batchnorm_of_a_frozen_module_keeps_its_statistics_on_request() -> None:
    for keys, changes in ({"batchnorm": "eval"}, [False, True]), ({}, [True, True]):
        model = NetWithBatchNorm()
        entries = [{"patterns": ["1"], "until": 2, **keys}]
        freeze(model, entries)
        optimizer = build_optimizer(SGD, model)
        step = train_step(model, optimizer, nominal=ROWS, frozen=Frozen(model, entries, optimizer))
        seen = []
        for _ in range(2):
            before = model.get_buffer("1.running_mean").clone()
            run_steps(step, windows()[:2])
            seen.append(not torch.equal(before, model.get_buffer("1.running_mean")))
            model.train()  # as after an evaluation
        assert seen == changes


@pytest.mark.parametrize(
    ("entries", "names"),
    [
        (["trnk.*"], ["trnk.*", "matches no parameter or module", "Near names: trunk"]),
        ([3], ["got 3", "want a pattern"]),
        ([{"until": 3}], ["{'until': 3}", "patterns: [stem.*]"]),
        ([{"patterns": "trunk"}], ["'trunk'", "want a list"]),
        ([{"patterns": ["trunk"], "untill": 3}], ["untill", "Did you mean 'until'?"]),
        ([{"patterns": ["trunk"], "until": 0}], ["until", "got 0", "at least 1"]),
        ([{"patterns": ["trunk"], "until": 2.5}], ["until", "got 2.5", "last frozen step"]),
        ([{"patterns": ["trunk"], "batchnorm": "off"}], ["batchnorm", "'off'", "train or eval"]),
        ([{"patterns": ["trunk"], "batchnorm": "eval"}], ["batchnorm", "trunk matches no BatchNorm"]),
        (["trunk", {"patterns": ["head"], "until": 3}], ["nothing to train", "Change the patterns"]),
    ],
)
def test_an_impossible_rule_is_refused(entries: list[Any], names: list[str]) -> None:
    with refused(ConfigError, "train.freeze", *names):
        freeze(Net(), entries)


def test_fused_sgd_with_dampening_cannot_train_parameters_later() -> None:
    model = Net()
    optimizer = build_optimizer({**SGD, "dampening": 0.1}, model)
    with refused(ConfigError, "optimizer.dampening", "until", "optimizer.fused=false"):
        Frozen(model, TRUNK, optimizer)


def test_the_last_rule_that_freezes_a_parameter_decides_and_tied_names_are_one() -> None:
    model = Net()
    model.also = model.head  # type: ignore[assignment]
    freeze(model, ["also.bias", {"patterns": ["trunk"], "until": 2}, {"patterns": ["trunk.bias"], "until": 1}])
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.bias"]


# -- whole runs

LATE = "train.freeze=['0', {patterns: ['2'], until: 7}]"
SMALL = (
    "model.width=4",
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=9",
    "checkpoint.best=null",
    "train.ema_decay=0.9",
    "train.max_steps=10",
)


@pytest.mark.usefixtures("digits")
def test_a_run_says_what_it_trains_and_is_refused_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RanksFailed):
        train_on(1, tmp_path / "none", "train.freeze=[conv9]", *SMALL)
    assert "train.freeze: 'conv9' matches no parameter or module of the model. Near names: " in capfd.readouterr().err
    assert not (tmp_path / "none").exists()
    train_on(1, tmp_path / "run", LATE, "optimizer.groups={head: {patterns: ['8'], lr: 10}}", *SMALL)
    assert "1,746 parameters, 1,634 of them trained" in capfd.readouterr().out
    end = status(tmp_path / "run")
    assert (end["parameters"], end["trained_parameters"], sorted(end["data"])) == (1746, 1634, ["eval", "train"])
    assert "0.weight/exp_avg" not in weights(tmp_path / "run", 10, "optimizer")
    assert "2.weight/exp_avg" in weights(tmp_path / "run", 10, "optimizer")
    first, last = weights(tmp_path / "run", 6), weights(tmp_path / "run", 10)
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert moved == {f"{layer}.{name}" for layer in (2, 4, 8) for name in ("weight", "bias")}
    for record in records(tmp_path / "run"):
        if "train/lr" in record:
            assert record["train/lr/head"] == pytest.approx(10 * record["train/lr"])
            assert record["train/lr/default"] == record["train/lr"]


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
@pytest.mark.parametrize(
    ("ranks", "parallel", "killed"),
    [
        (1, "ddp", 4),
        *((2, kind, step) for kind in ("ddp", "fsdp") for step in (4, 8, 9)),
    ],
)
def test_a_killed_run_ends_bit_for_bit_as_an_undisturbed_one(
    tmp_path: Path, ranks: int, parallel: str, killed: int
) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    options = (LATE, f"parallel={parallel}", "optimizer=sgd", "train.eval_every=0", *SMALL)
    train_on(ranks, whole, *options)
    with pytest.raises(RanksFailed):
        train_on(ranks, run_dir, *options, faulty(f"kill@rank={ranks - 1},step={killed}"))
    train_on(ranks, run_dir, *options)
    assert metrics(run_dir) == metrics(whole)
    for name in ("model", "ema", "optimizer"):
        ours, theirs = weights(run_dir, 10, name), weights(whole, 10, name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
