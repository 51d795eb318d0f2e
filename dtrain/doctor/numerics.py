"""``dtrain doctor numerics``: dtypes and value ranges of a run, recommended settings, and code unsafe below fp32.

    dtrain doctor numerics experiment=digits precision=bf16 [steps=5] [key=value ...]

It trains a few steps of the configured run in one process, each also in fp32, and needs the memory for that. It reads and
writes nothing in the run directory and loads no checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

from rich.console import Console
from torch import Tensor

from dtrain import command_line
from dtrain.command_line import add_json_option, write_json
from dtrain.config import compose
from dtrain.config.compose import Composed
from dtrain.config.schema import Config, LossScaleConfig
from dtrain.console import print_banner
from dtrain.data import Batch
from dtrain.data.order.randomness import seed_generators
from dtrain.distributed.process_group import process_group
from dtrain.distributed.world import World
from dtrain.doctor.measure import endless_batches
from dtrain.errors import ConfigError
from dtrain.precision.audit import NumericsAudit, Report
from dtrain.precision.audit.summary import advice, code_findings, print_tables, summary
from dtrain.runs.recompose import recompose_if_run, take
from dtrain.training.build import build_run
from dtrain.training.step import StepOutcome

_FILE_WIDTH = 200  # characters of a line that is not printed to a terminal


def main(arguments: Sequence[str]) -> int:
    """Runs ``doctor numerics`` with the arguments after ``numerics``; returns the exit code.

    Raises:
        SystemExit: If the config cannot be composed or the run fails.
    """
    options, rest = _parser().parse_known_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)
    chosen, rest = take(rest, steps="5", ranks="1")

    def job(composed: Composed) -> None:
        compose.require_choice(composed)
        steps, ranks = (_positive(name, chosen[name]) for name in ("steps", "ranks"))
        report, outcomes = audit(composed.cfg, steps, ranks)
        print_tables(report, console, options.all)
        loss_scale = composed.cfg.precision.loss_scale
        bounds = LossScaleConfig() if loss_scale == "none" else loss_scale
        skipped = sum(not outcome.stats.applied for outcome in outcomes), len(outcomes)
        rows = summary(report, bounds.min, bounds.max, skipped)
        print_banner("numerics", {"run": _result(report, outcomes)} | rows)
        more = {
            "losses": [_loss(outcome) for outcome in outcomes],
            "applied_steps": sum(outcome.stats.applied for outcome in outcomes),
            "advice": advice(report, bounds.min, bounds.max),
        }
        write_json(options.json, report.to_json() | more)

    command_line.run(job, rest, rewrite=recompose_if_run)
    return 0


def audit(cfg: Config, steps: int, ranks: int = 1) -> tuple[Report, list[StepOutcome]]:
    """Trains a few steps and measures dtypes and value ranges.

    Args:
        cfg: The composed config.
        steps: Number of optimizer steps.
        ranks: Number of ranks of which one is measured, on its share of the global batch.

    Returns:
        The report, and the outcome of each step.

    Raises:
        ConfigError: If the config is wrong, or the command was started with several processes.
    """
    World.of_one_process("doctor numerics", " ranks=N measures one of N ranks.")
    with process_group(cfg.parallel.timeout_start) as world:
        # Not prepared: the audit's hooks need modules that are neither compiled nor recomputed.
        run, warnings = build_run(
            cfg, Path(), world, prepared=False, data_ranks=ranks, with_eval_data=False, max_consecutive_skips=steps + 1
        )
        for warning in warnings:
            print(warning, file=sys.stderr)
        step, loader = run.step, run.train_loader
        with closing(loader):
            in_fp32 = run.precision.wrap_keep_fp32(run.model)  # already wrapped; returns the names of the modules
            numerics = NumericsAudit(run.model, precision=run.precision, device=world.device, kept=in_fp32)
            task = step.task = numerics.watched(run.task)
            # A rank divides its loss sum by its share of the global batch.
            nominal = max(cfg.train.global_batch_size // ranks, 1)
            run.model.train()
            outcomes: list[StepOutcome] = []
            batches = endless_batches(loader)
            with _findings_printed_on_error(numerics):
                for _ in range(steps):
                    window = [batch.to(world.device) for batch in islice(batches, loader.micro_batches_per_step)]
                    with numerics.fp32_pass():
                        for number, batch in enumerate(window):
                            # As in TrainStep, so that dropout masks are the same.
                            seed_generators(world.device, cfg.run.seed, step.step, number, world.rank)
                            (task(run.model, _in_fp32(batch)).loss_sum / nominal).backward()
                    with numerics.configured_pass():
                        step.accumulate(window, len(window))
                    step.apply()
                    outcomes += filter(None, [step.settle()])
            return numerics.report(), outcomes


@contextmanager
def _findings_printed_on_error(numerics: NumericsAudit) -> Iterator[None]:
    """Prints the findings in the code if the run fails, because one of them may be the cause."""
    try:
        yield
    except RuntimeError:
        if found := code_findings(numerics.report()):
            print_banner("numerics: found before the error", found, sys.stderr)
        raise


def _in_fp32(batch: Batch) -> Batch:
    """The batch with 16-bit floats cast to fp32."""
    wide = copy.copy(batch)
    for name, column in batch.items():
        if isinstance(column, Tensor) and column.is_floating_point() and column.itemsize == 2:
            wide[name] = column.float()
    return wide


def _result(report: Report, outcomes: list[StepOutcome]) -> str:
    applied = sum(outcome.stats.applied for outcome in outcomes)
    losses = [loss for loss in map(_loss, outcomes) if loss is not None]
    loss = f", loss {losses[0]:.4g} -> {losses[-1]:.4g}" if losses else ""
    return f"precision={report.precision} on {report.device}, {applied} of {len(outcomes)} steps applied{loss}"


def _loss(outcome: StepOutcome) -> float | None:
    """The mean loss of a step; None if no rows counted."""
    return outcome.stats.loss_sum / outcome.stats.count if outcome.stats.count else None


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"doctor numerics: got {name}={text}, want a whole number of at least 1.")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtrain doctor numerics",
        usage="%(prog)s experiment=NAME [steps=N] [ranks=N] [key=value ...] [--json FILE] [--all]",
        description="Shows the dtypes and value ranges of every module of a run, advised settings, and lines of the model\n"
        "that are only safe in fp32. It trains steps=N steps (default 5) of the configured run and saves nothing. With\n"
        "ranks=N it measures one rank of a run on N ranks, with its smaller micro-batches and larger gradients.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_json_option(parser)
    parser.add_argument("--all", action="store_true", help="show one row for each module, even if there are many")
    return parser
