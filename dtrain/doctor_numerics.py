"""``python -m dtrain.doctor numerics ...``: what a run computes in, how large its values are, what to set, and which lines
of its model go another way.

    python -m dtrain.doctor numerics experiment=digits precision=bf16 [steps=5] [key=value ...]
    python -m dtrain.doctor numerics --ops

The first trains a few steps of the configured run, in one process and without its directory: nothing is saved, and a
checkpoint is not looked for. It also runs each step in fp32, and needs the memory for that. The second asks torch what
autocast does with each operation on this device.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from rich.console import Console
from torch import Tensor

from dtrain.config import app
from dtrain.config.app import Composed
from dtrain.config.errors import ConfigError
from dtrain.config.json_option import add_json_option, write_json
from dtrain.config.run import recompose_if_run, take
from dtrain.config.schema import Config
from dtrain.data import Batch, ShardLoader
from dtrain.distributed.process_group import process_group
from dtrain.distributed.world import World
from dtrain.precision.audit import NumericsAudit, Report
from dtrain.precision.audit.advice import advice
from dtrain.precision.audit.op_probe import probe_all
from dtrain.precision.audit.op_table import print_op_table
from dtrain.precision.audit.summary import code, summary
from dtrain.precision.audit.table import print_tables
from dtrain.tracking.console import print_banner
from dtrain.training import build
from dtrain.training.loaders import prepare_data, train_loader
from dtrain.training.plan import schedule_horizon
from dtrain.training.schedule import Lengths
from dtrain.training.seed import be_deterministic, seed_generators
from dtrain.training.step import Outcome, TrainStep

# A terminal says how wide it is; a file takes tables as wide as they are.
_WIDE = 200


def main(arguments: Sequence[str]) -> int:
    """Runs ``doctor numerics``; returns the exit code.

    Args:
        arguments: The command line after ``numerics``.

    Raises:
        SystemExit: If the config cannot be composed or the run fails.
    """
    options, rest = _parser().parse_known_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    if options.ops:
        if rest:
            _parser().error(f"--ops asks about this machine and takes no config; got {' '.join(rest)}")
        device = World.of().device
        results = probe_all(device)
        print_op_table(results, device, console)
        write_json(options.json, [result.to_json() for result in results])
        return 0
    chosen, rest = take(rest, steps="5", ranks="1")

    def job(composed: Composed) -> None:
        app.require_choice(composed)
        steps, ranks = (_positive(name, chosen[name]) for name in ("steps", "ranks"))
        report, outcomes = audit(composed.cfg, steps, ranks)
        print_tables(report, console, options.all)
        bounds = composed.cfg.precision.loss_scale
        print_banner("numerics", {"run": _told(report, outcomes)} | summary(report, bounds.min, bounds.max))
        told = {
            "losses": [_loss(outcome) for outcome in outcomes],
            "applied_steps": sum(outcome.tally.applied for outcome in outcomes),
            "advice": advice(report, bounds.min, bounds.max),
        }
        write_json(options.json, report.to_json() | told)

    app.run(job, rest, rewrite=recompose_if_run)
    return 0


def audit(cfg: Config, steps: int, ranks: int = 1) -> tuple[Report, list[Outcome]]:
    """Trains and measures.

    Args:
        cfg: The composed config.
        steps: Optimizer steps.
        ranks: Take the part of one of so many ranks.

    Returns:
        What was found, and how each step went.
    """
    processes = World.of().size
    if processes > 1:
        raise ConfigError(
            f"doctor numerics: got {processes} processes, want one. Start it with python -m, without torchrun; "
            f"ranks={processes} shows what one of {processes} ranks sees."
        )
    with process_group(cfg.parallel.timeout_start) as world:
        precision, warnings = build.build_precision(cfg.precision, world.device)
        for warning in warnings:
            print(warning, file=sys.stderr)
        prepare_data(cfg.data)
        loader = train_loader(cfg, dataclasses.replace(world, size=ranks), precision)
        with closing(loader):
            if cfg.train.deterministic:
                be_deterministic()
            seed_generators(world.device, cfg.run.seed)
            model = build.build_model(cfg.model, world.device, cfg.train.channels_last)
            kept = precision.wrap_keep_fp32(model)
            numerics = NumericsAudit(model, precision=precision, device=world.device, kept=kept)
            task = numerics.watched(build.by_target("task", cfg.task))
            # One rank multiplies its loss sum by ranks / global batch.
            nominal = max(cfg.train.global_batch_size // ranks, 1)
            step = TrainStep(
                model,
                task,
                build.build_optimizer(cfg.optimizer, model, world.device),
                world=world,
                precision=precision,
                loss_scale=build.build_loss_scale(cfg.precision.loss_scale, precision, world.device),
                nominal=nominal,
                schedule=build.build_schedule(
                    cfg.schedule,
                    Lengths(schedule_horizon(cfg.train, loader), loader.steps_per_epoch, cfg.train.global_batch_size),
                ),
                clip_norm=cfg.train.clip_norm,
                seed=cfg.run.seed,
                max_consecutive_skips=steps + 1,
            )
            model.train()
            outcomes: list[Outcome] = []
            with _said_if_it_fails(numerics):
                for window in _windows(loader, world, steps):
                    with numerics.fp32_pass():
                        for number, batch in enumerate(window):
                            # As TrainStep does, so that dropout is the same.
                            seed_generators(world.device, cfg.run.seed, step.step, number, world.rank)
                            (task(model, _in_fp32(batch)).loss_sum / nominal).backward()
                    with numerics.configured_pass():
                        step.accumulate(window, len(window))
                    step.apply()
                    outcomes += filter(None, [step.settle()])
            return numerics.report(), outcomes


@contextmanager
def _said_if_it_fails(numerics: NumericsAudit) -> Iterator[None]:
    """Shows what was found in the code so far if the run fails, which may be the reason."""
    try:
        yield
    except RuntimeError:
        if found := code(numerics.report()):
            print_banner("numerics: found before it failed", found, sys.stderr)
        raise


def _windows(loader: ShardLoader, world: World, steps: int) -> Iterator[list[Batch]]:
    """The micro-batches of each step, on the device; the next epoch follows the last."""
    batches = iter(loader)
    for _ in range(steps):
        epoch, _position = loader.position
        yield [next(batches).to(world.device) for _ in range(loader.micro_batches_per_step)]
        loader.commit()
        if loader.position[0] != epoch:
            batches = iter(loader)


def _in_fp32(batch: Batch) -> Batch:
    """The batch with its 16-bit columns cast up."""
    wide = copy.copy(batch)
    for name, column in batch.items():
        if isinstance(column, Tensor) and column.is_floating_point() and column.itemsize == 2:
            wide[name] = column.float()
    return wide


def _told(report: Report, outcomes: list[Outcome]) -> str:
    applied = sum(outcome.tally.applied for outcome in outcomes)
    losses = [loss for loss in map(_loss, outcomes) if loss is not None]
    loss = f", loss {losses[0]:.4g} -> {losses[-1]:.4g}" if losses else ""
    return f"precision={report.precision} on {report.device}, {applied} of {len(outcomes)} steps applied{loss}"


def _loss(outcome: Outcome) -> float | None:
    """The mean loss of a step; None if it overflowed."""
    return outcome.tally.loss_sum / outcome.tally.count if outcome.tally.count else None


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"doctor numerics: {name}={text}, want a whole number from 1 on.")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtrain.doctor numerics",
        usage="%(prog)s experiment=NAME [steps=N] [ranks=N] [key=value ...] [--json FILE] [--all]\n"
        "       %(prog)s --ops [--json FILE]",
        description="Shows what every module of a run computes in, how large its values are, what to set, and lines of the\n"
        "model that only fp32 forgives. It trains steps=N steps (default 5) of the run that the config describes, and\n"
        "saves nothing. ranks=N shows what one of N ranks sees: its micro-batches are smaller, its gradients larger.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ops", action="store_true", help="show what autocast does with each operation here")
    add_json_option(parser)
    parser.add_argument("--all", action="store_true", help="a row for each module, however many they are")
    return parser
