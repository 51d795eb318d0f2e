"""``torchrun -m dtrain.train experiment=NAME [key=value ...]``: from a config to a trained model.

``--help`` lists the groups and keys. ``python -m dtrain.train`` trains in one process. The same command again resumes the run.

``train`` has four phases: run and ranks, data and model, restore, loop. Each decision is taken by rank 0 alone or by all ranks
together, so a wrong config ends every rank with the same message.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.config import compose
from dtrain.config.run import Run
from dtrain.config.schema import Config
from dtrain.distributed.collectives import from_rank0, on_all_ranks
from dtrain.distributed.hang import HangWatch
from dtrain.distributed.lock import run_lock
from dtrain.distributed.process_exit import exit_with_torchrun
from dtrain.distributed.process_group import process_group, settle_network
from dtrain.distributed.stop import StopRequests, TimeLimit
from dtrain.distributed.world import World, join_srun
from dtrain.tracking import close_rank_log, failures_recorded, open_rank_log, tracker_mode
from dtrain.training.build import build_run
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.hooks import Hooks, build_hooks
from dtrain.training.loop import Loop
from dtrain.training.run_logger import RunLogger, previous_status, print_start_banner, write_final_status
from dtrain.training.state import TrainState
from dtrain.training.warm_start import starting_weights


def train(composed: compose.Composed) -> None:
    """Trains the run that a config describes, from its newest checkpoint if it has one."""
    compose.require_choice(composed)
    cfg: Config = composed.cfg
    identity = Run.of(composed)
    exit_with_torchrun()
    with (
        failures_recorded(identity.dir, compose.rank()) as failure,
        process_group(cfg.parallel.timeout_start) as world,
        run_lock(identity.dir),
    ):
        # -- run and ranks: refuse early what can be refused early, then claim the run directory
        opened = open_run(cfg, identity, world)
        failure.step = lambda: opened.resume_from or 0

        # -- data and model: loaders first, since the length of an epoch decides the schedule
        run, warnings = build_run(cfg, identity.dir, world)
        failure.step = lambda: run.step.step

        # -- restore: everything or nothing
        start = restore(run, opened)
        run.totals.add_restart(from_rank0(lambda: previous_status(identity)))
        failure.extra = run.totals.times
        end = run.last_step
        if run.step.step >= end and not run.totals.evaluation_due:
            close_rank_log()
            write_final_status(run, "finished", "already; raise train.max_steps or train.max_epochs", end)
            return

        # -- loop: accumulate -> vote -> apply or skip -> commit; all ranks evaluate, save and stop at the same steps
        run_logger = on_all_ranks(lambda: RunLogger.open(run, identity, end))
        time_limit = {"time limit": str(opened.time_limit)}
        print_start_banner(identity, run, start, end, time_limit | opened.hooks.banner_rows)
        for line in (*opened.notes, *warnings):
            run_logger.note(line)
        failure.on_failure = lambda reason: run_logger.finish("failed", reason)
        try:
            with (
                HangWatch(identity.dir / "logs", world, cfg.parallel, failure.write) as watch,
                StopRequests(
                    identity.dir / "STOP" if world.rank == 0 else None,
                    failure.write,
                    time_limit=opened.time_limit,
                    stuck=watch.declare,
                ) as stop,
            ):
                opened.hooks.call("on_start", run)
                loop = Loop(run, end, run_logger, stop, opened.hooks)
                watch.follow(loop.place)
                state, reason = loop.run()
            run_logger.finish(state, reason)
        finally:
            run.train_loader.close()
            if run.eval_loader is not None:
                run.eval_loader.close()
        close_rank_log()
        # The last file that a run writes: once its state is "finished", all other files are complete.
        write_final_status(run, state, reason, end)


@dataclass(frozen=True)
class OpenedRun:
    """The result of the first phase, equal on all ranks.

    Attributes:
        resume_from: Step of the checkpoint to resume from; None for a new run.
        notes: Lines for the user: broken checkpoints, changes of the config since the last start.
        hooks: ``train.hooks``, and fault injection.
        time_limit: When this start must stop (``run.max_hours``).
    """

    resume_from: int | None
    notes: list[str]
    hooks: Hooks
    time_limit: TimeLimit


def open_run(cfg: Config, identity: Run, world: World) -> OpenedRun:
    """Collective. Checks hooks, tracker and the run directory; then writes the config to the directory.

    Raises:
        ConfigError: On every rank, if one of them is impossible; the directory is unchanged.
    """
    hooks = on_all_ranks(lambda: build_hooks(cfg, identity.dir, world.rank))

    def decide() -> tuple[int | None, list[str]]:
        tracker_mode(cfg.tracker)  # refuses a missing login before hours of indexing, not after
        changes = identity.changes()
        step, problems = Checkpoints.of(identity.dir, cfg.checkpoint).to_resume(cfg.run.resume)
        identity.save()
        return step, [*problems, *(f"changed since the last start: {change}" for change in changes)]

    step, notes = from_rank0(decide)
    open_rank_log(identity.dir, world.rank)
    return OpenedRun(step, notes, hooks, on_all_ranks(lambda: TimeLimit.of(cfg.run.max_hours, world.rank)))


def restore(run: TrainState, opened: OpenedRun) -> str:
    """Collective. Restores the run from the first of these that exists; returns a description for the banner.

    1. Its own newest good checkpoint.
    2. Weights of another run (``run.weights_from``, ``run.warm_start``).
    3. Nothing: the model keeps its initialisation.

    Raises:
        ConfigError: On every rank, if the checkpoint or the weights do not fit the model.
    """
    step = opened.resume_from
    if step is not None:
        on_all_ranks(lambda: run.restore(run.checkpoints.load(step)))
        return f"after step {run.step.step}, from {run.checkpoints.path(step)}"
    if (weights := starting_weights(run.cfg.run, run.model)) is None:
        return "new"
    weights.load(run.model, *([run.ema.module] if run.ema is not None else []))
    return f"new, {weights.description}"


def main() -> None:
    """Command line."""
    join_srun()
    settle_network()
    compose.run(train)


if __name__ == "__main__":
    main()
