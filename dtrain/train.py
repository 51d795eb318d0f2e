"""``torchrun -m dtrain.train experiment=NAME [key=value ...]``: from a config to a trained model.

``--help`` lists the groups and keys. ``python -m dtrain.train`` is a world of one. The same command again continues the
run where it was.
"""

from __future__ import annotations

from typing import Any

from dtrain.config import app
from dtrain.config.app import Composed
from dtrain.config.errors import users_to_fix
from dtrain.config.run import Run, without_secrets
from dtrain.config.schema import Config
from dtrain.data.ledger import cut_ledgers
from dtrain.distributed.collectives import decided_by_rank_zero, together
from dtrain.distributed.hang import HangWatch
from dtrain.distributed.network import settle_network
from dtrain.distributed.orphan import end_with_torchrun
from dtrain.distributed.process_group import process_group
from dtrain.distributed.run_lock import run_locked
from dtrain.distributed.srun import join_srun
from dtrain.distributed.stop import StopRequests
from dtrain.distributed.time_limit import TimeLimit
from dtrain.tracking.console import print_banner
from dtrain.tracking.failure import failures_recorded
from dtrain.tracking.rank_log import close_rank_log, open_rank_log
from dtrain.tracking.sinks import NullSinks, Sinks, build_sinks, tracker_mode
from dtrain.tracking.status import read_status, write_status
from dtrain.training import build
from dtrain.training.banner import banner
from dtrain.training.ema import Ema
from dtrain.training.faults import Faults
from dtrain.training.loaders import check_same_data, eval_loader, prepare_data, train_loader
from dtrain.training.parts import Parts, Progress
from dtrain.training.plan import last_step, schedule_horizon
from dtrain.training.schedule import Lengths
from dtrain.training.seed import be_deterministic, seed_generators
from dtrain.training.step import TrainStep
from dtrain.training.warm_start import starting_weights


def train(composed: Composed) -> None:
    """Trains the run that a config describes, from its newest checkpoint if it has one."""
    app.require_choice(composed)
    cfg: Config = composed.cfg
    run = Run.of(composed)
    end_with_torchrun()
    with (
        failures_recorded(run.dir, app.rank()) as failure,
        process_group(cfg.parallel.timeout_start) as world,
        run_locked(run.dir),
    ):
        # -- run: rank 0 alone writes the shared files of its directory
        faults = together(lambda: Faults.of(cfg.faults, run.dir, world.rank))
        decided_by_rank_zero(lambda: tracker_mode(cfg.tracker))  # before hours of indexing, not after
        with users_to_fix("checkpoint"):
            checkpoints = faults.checkpoints(cfg.checkpoint)
        changes = decided_by_rank_zero(run.changes)
        resumed, problems = decided_by_rank_zero(lambda: checkpoints.to_resume(cfg.run.resume))
        decided_by_rank_zero(run.save)
        open_rank_log(run.dir, world.rank)
        failure.step = lambda: resumed or 0  # from here on the directory is this run's
        time_limit = together(lambda: TimeLimit.of(cfg.run.max_hours, world.rank))

        # -- precision and data
        precision, warnings = together(lambda: build.build_precision(cfg.precision, world.device))
        prepare_data(cfg.data)
        train_data = together(lambda: train_loader(cfg, world, precision))
        eval_data = together(lambda: eval_loader(cfg, world, precision))
        check_same_data(train_data, eval_data)
        horizon = schedule_horizon(cfg.train, train_data)

        # -- model, optimizer, schedule: built by `_target_`, wrapped once
        if cfg.train.deterministic:
            be_deterministic()
        seed_generators(world.device, cfg.run.seed)
        model = together(lambda: build.build_model(cfg.model, world.device, cfg.train.channels_last))
        model = build.equip(model, cfg.train, cfg.parallel, world)
        precision.wrap_keep_fp32(model)
        with users_to_fix("train.ema_decay"):
            ema = Ema(model, cfg.train.ema_decay) if cfg.train.ema_decay is not None else None
        task = together(lambda: build.by_target("task", cfg.task))
        optimizer = together(lambda: build.build_optimizer(cfg.optimizer, model, world.device))
        wrapped, guard = build.wrap(model, cfg.parallel, world, cfg.train.deterministic)
        step = TrainStep(
            wrapped,
            task,
            optimizer,
            world=world,
            precision=precision,
            loss_scale=build.build_loss_scale(cfg.precision.loss_scale, precision, world.device),
            nominal=cfg.train.global_batch_size,
            schedule=build.build_schedule(
                cfg.schedule, Lengths(horizon, train_data.steps_per_epoch, cfg.train.global_batch_size)
            ),
            clip_norm=cfg.train.clip_norm,
            ema=ema,
            guard=guard,
            seed=cfg.run.seed,
            max_consecutive_skips=cfg.train.max_consecutive_skips,
        )
        failure.step = lambda: step.step

        # -- checkpoint: everything or nothing; a new run may begin with the weights of another
        parts = Parts(
            cfg, run.dir, world, precision, train_data, eval_data, model, task, optimizer, step, ema, Progress()
        )
        if resumed is not None:
            together(lambda: parts.restore(checkpoints.load(resumed)))
            start = f"after step {step.step}, from {checkpoints.path(resumed)}"
        elif (weights := starting_weights(cfg.run, model)) is not None:
            weights.load(model, *([ema.module] if ema is not None else []))
            start = f"new, {weights.said}"
        else:
            start = "new"
        parts.progress.interrupted(decided_by_rank_zero(lambda: status_before(run)))
        failure.facts = parts.progress.times
        end = last_step(cfg.train, train_data, step.step)
        if step.step >= end and not parts.progress.evaluation_due:
            report(run, parts, "finished", end, "already; raise train.max_steps or train.max_epochs")
            return

        # -- loop
        sinks = together(lambda: open_sinks(run, parts, end))
        if world.rank == 0:
            rows = banner(run, parts, start, end, horizon) | {
                "restarts": parts.progress.interruptions(),
                "time limit": str(time_limit),
                "FAULTS": str(faults),
            }
            print_banner("dtrain", {name: text for name, text in rows.items() if text})
        for line in (*problems, *(f"changed since the last start: {change}" for change in changes), *warnings):
            sinks.note(line)
        failure.tell = lambda reason: sinks.finish("failed", reason)
        try:
            with (
                HangWatch(run.dir / "logs", world, cfg.parallel, failure.write) as watch,
                StopRequests(
                    run.dir / "STOP" if world.rank == 0 else None,
                    failure.write,
                    time_limit=time_limit,
                    stuck=watch.declare,
                ) as stop,
            ):
                loop = faults.loop(parts, end, checkpoints, sinks, stop)
                watch.follow(loop.place)
                state, reason = loop.run()
            sinks.finish(state, reason)
        finally:
            train_data.close()
            if eval_data is not None:
                eval_data.close()
        report(run, parts, state, end, reason)


def open_sinks(run: Run, parts: Parts, end: int) -> Sinks | NullSinks:
    """Rank 0's sinks, and its files cut back to where ``parts`` are; nothing on the other ranks."""
    if parts.world.rank != 0:
        return NullSinks()
    step, due = parts.step.step, parts.progress.evaluation_due
    cut_ledgers(run.dir / "logs", step)
    with users_to_fix("tracker"):
        return build_sinks(
            parts.cfg.tracker,
            run.dir,
            run.name,
            without_secrets(run.config),
            step,
            evaluation_due=due,
            total_steps=end,
        )


def status_before(run: Run) -> dict[str, Any] | None:
    """What the last start of the run has left behind."""
    with users_to_fix("run.dir"):
        return read_status(run.dir)


def report(run: Run, parts: Parts, state: str, end: int, reason: str | None) -> None:
    """The last word, on rank 0: status.json, and a line that says where everything is."""
    close_rank_log()
    step = parts.step.step
    if parts.world.rank == 0:
        write_status(run.dir, state, step, reason, last_step=end, **parts.progress.times())
        print(f"{state} at step {step}{f' ({reason})' if reason else ''}: {run.dir}", flush=True)


def main() -> None:
    """Command line."""
    join_srun()
    settle_network()
    app.run(train)


if __name__ == "__main__":
    main()
