"""``torchrun -m dtrain.evaluate run.dir=DIR [checkpoint=best|latest|STEP] [weights=ema|raw] [precision=bf16] [key=value ...]``

Evaluates a checkpoint of a run on its evaluation data, or on ``data.eval=...``: each sample once, the same result at any
number of ranks. The config is the run's own, with the given keys on top.
"""

from __future__ import annotations

import sys

from dtrain.config import app
from dtrain.config.app import Composed
from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.config.run import Run, recompose, take
from dtrain.config.schema import Config
from dtrain.distributed.collectives import decided_by_rank_zero, together
from dtrain.distributed.network import settle_network
from dtrain.distributed.process_group import process_group
from dtrain.distributed.srun import join_srun
from dtrain.tracking.console import print_banner
from dtrain.training import build
from dtrain.training.checkpoint import Checkpoints
from dtrain.training.evaluation import evaluate
from dtrain.training.loaders import check_same_data, eval_loader, prepare_data
from dtrain.training.state import load_weights

USAGE = """Usage
  torchrun --standalone --nproc-per-node=2 -m dtrain.evaluate run.dir=DIR [OPTION=VALUE ...] [KEY=VALUE ...]

Options
  run.dir=DIR                    the run's directory
  checkpoint=best|latest|STEP    which checkpoint (default: best where the run keeps one, else latest)
  weights=ema|raw                moving average or raw weights (default: ema where there is one)
  KEY=VALUE                      any key of the config, such as precision=bf16 or 'data.eval="shards/val-*.tar"'
"""


def run_evaluation(composed: Composed, which: str, weights: str) -> None:
    """Evaluates one checkpoint and prints the result on rank 0.

    Args:
        composed: The run's config.
        which: ``best``, ``latest``, a step, or ``""`` for the default.
        weights: ``ema``, ``raw``, or ``""`` for the default.
    """
    cfg: Config = composed.cfg
    run = Run.of(composed)
    with process_group(cfg.parallel.timeout_start) as world:
        with users_to_fix("checkpoint"):
            checkpoints = Checkpoints.of(run.dir, cfg.checkpoint)
        step = decided_by_rank_zero(lambda: checkpoints.choose(which))
        checkpoint = together(lambda: checkpoints.load(step))
        precision, warnings = together(lambda: build.build_precision(cfg.precision, world.device))
        prepare_data(cfg.data)
        loader = together(lambda: eval_loader(cfg, world, precision))
        if loader is None:
            raise ConfigError("data.eval is not set, so there is nothing to evaluate on. Give data.eval=...")
        check_same_data(None, loader)
        model = build.build_model(cfg.model, world.device)
        used = together(lambda: load_weights(model, checkpoint, weights))
        precision.wrap_keep_fp32(model)
        task = build.by_target("task", cfg.task)
        result = evaluate(model, task, loader, world=world, precision=precision)
        loader.close()
        if world.rank == 0:
            rows = {"checkpoint": f"{checkpoints.path(step)} ({used} weights)", "precision": precision.name}
            rows |= {f"eval/{name}": f"{value:.6g}" for name, value in result.items()}
            print_banner("evaluation", rows)
            for warning in warnings:
                print(warning)


def main() -> None:
    """Command line."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(USAGE)
        return
    join_srun()
    settle_network()
    options, rest = take(sys.argv[1:], checkpoint="", weights="")
    app.run(
        lambda composed: run_evaluation(composed, options["checkpoint"], options["weights"]), rest, rewrite=recompose
    )


if __name__ == "__main__":
    main()
