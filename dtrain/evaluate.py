"""``torchrun -m dtrain.evaluate run.dir=DIR [checkpoint=best|latest|STEP] [weights=ema|raw] [precision=fp32,bf16] ...``

Evaluates a checkpoint of a run on its evaluation data, or on ``data.eval=...``: each sample once, the same result at any
number of ranks. The config is the run's own, with the given keys on top. Several precisions evaluate the same weights in
turn and are shown side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dtrain.config import app
from dtrain.config.app import Composed
from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.config.run import Run, recompose, take
from dtrain.config.schema import Config
from dtrain.data.class_names import class_names
from dtrain.distributed.collectives import decided_by_rank_zero, together
from dtrain.distributed.network import settle_network
from dtrain.distributed.process_group import process_group
from dtrain.distributed.srun import join_srun
from dtrain.distributed.world import World
from dtrain.tracking import evaluation_files, per_class
from dtrain.tracking.console import print_banner
from dtrain.tracking.evaluated import Evaluated, aligned, banner, not_finite, side_by_side
from dtrain.training import build
from dtrain.training.checkpoint_evaluation import evaluate_checkpoint
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.loaders import prepare_data

USAGE = """Usage
  torchrun --standalone --nproc-per-node=2 -m dtrain.evaluate run.dir=DIR [OPTION=VALUE ...] [KEY=VALUE ...]

Options
  run.dir=DIR                    the run's directory
  checkpoint=best|latest|STEP    which checkpoint (default: best where the run keeps one, else latest)
  weights=ema|raw                moving average or raw weights (default: ema where there is one)
  precision=NAME[,NAME ...]      the precision, or several side by side: precision=fp32,bf16,fp16 (default: the run's)
  out=DIR2                       where to write the result as JSON, and a picture (default: DIR/evaluations)
  KEY=VALUE                      any key of the config, such as 'data.eval="shards/val-*.tar"'
"""


def run_evaluation(configs: Sequence[Composed], which: str, weights: str, out: str) -> None:
    """Evaluates one checkpoint; prints and writes the result on rank 0.

    Args:
        configs: The run's config in each precision.
        which: ``best``, ``latest``, a step, or ``""`` for the default.
        weights: ``ema``, ``raw``, or ``""`` for the default.
        out: Folder to write to, or ``""`` for the default.

    Raises:
        ConfigError: On every rank, if something cannot be evaluated, or a metric is not finite; then all is printed and
            written before.
    """
    cfg: Config = configs[0].cfg
    run = Run.of(configs[0])
    with process_group(cfg.parallel.timeout_start) as world:
        if not cfg.data.eval:
            raise ConfigError("data.eval is not set, so there is nothing to evaluate on. Give data.eval=...")
        with users_to_fix("checkpoint"):
            checkpoints = Checkpoints.of(run.dir, cfg.checkpoint)
        step = decided_by_rank_zero(lambda: checkpoints.choose(which))
        checkpoint = together(lambda: checkpoints.load(step))
        for warning in together(lambda: refuse_early(configs, world)):
            if world.rank == 0:
                print(warning, flush=True)
        prepare_data(cfg.data)
        names = together(lambda: class_names(cfg.data))
        path = checkpoints.path(step)
        found = [evaluate_checkpoint(one, precision_name(one), world, checkpoint, path, weights) for one in configs]
        if world.rank == 0:
            show(found, names)
        folder = Path(out).expanduser().absolute() if out else run.dir / "evaluations"
        decided_by_rank_zero(lambda: keep(found, names, folder))
        if problem := not_finite(found):
            raise ConfigError(problem)


def refuse_early(configs: Sequence[Composed], world: World) -> list[str]:
    """Sees that this device can compute in all of the precisions, before hours are spent on the first.

    Returns:
        What a user should be warned of.
    """
    return [warning for one in configs for warning in build.build_precision(one.cfg.precision, world.device)[1]]


def precision_name(composed: Composed) -> str:
    """The preset that the command line names, of which there may be several for one dtype; else what the config says."""
    chosen = [override.partition("=")[2] for override in composed.overrides if override.startswith("precision=")]
    return chosen[-1].replace("/", "-") if chosen else str(composed.cfg.precision.name)


def show(found: Sequence[Evaluated], names: Sequence[str] | None) -> None:
    """Prints the metrics, of several precisions side by side, and the classes of the first."""
    first = found[0]
    head = banner(first)
    if len(found) > 1:
        head = {name: head[name] for name in ("checkpoint", "data")}
    print_banner("evaluation", head)
    if len(found) > 1:
        print(aligned(side_by_side(found)), flush=True)
    if "confusion" in first.tables:
        classes = per_class.per_class(first.tables["confusion"], names)
        print(f"classes in {first.precision}, the worst first\n{aligned(per_class.table(classes))}", flush=True)
        if left_out := per_class.rest(classes):
            print(f"  {left_out}", flush=True)


def keep(found: Sequence[Evaluated], names: Sequence[str] | None, folder: Path) -> None:
    """Writes the files, on the rank that calls it."""
    with users_to_fix(f"out: the result cannot be written to {folder}"):
        for one in found:
            for path in evaluation_files.write(folder, one, names):
                print(f"written: {path}", flush=True)


def one_for_each_precision(arguments: Sequence[str]) -> list[list[str]]:
    """The command line once for each of the precisions that it names with commas between them."""
    given = [argument for argument in arguments if argument.startswith("precision=")]
    if len(given) != 1:
        return [list(arguments)]
    names = dict.fromkeys(given[0].removeprefix("precision=").split(","))
    return [[f"precision={name}" if one is given[0] else one for one in arguments] for name in names]


def main() -> None:
    """Command line."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(USAGE)
        return
    join_srun()
    settle_network()
    options, rest = take(sys.argv[1:], checkpoint="", weights="", out="")
    *others, last = one_for_each_precision(rest)
    configs: list[Composed] = []
    for arguments in others:
        app.run(configs.append, arguments, rewrite=recompose)
    app.run(
        lambda composed: run_evaluation(
            [*configs, composed], options["checkpoint"], options["weights"], options["out"]
        ),
        last,
        rewrite=recompose,
    )


if __name__ == "__main__":
    main()
