"""``dtrain train experiment=NAME [key=value ...]``: from a config to a trained model.

``--help`` lists the groups and keys. torchrun and srun start this module, too. The same command again resumes the run;
``run.dir=DIR`` alone, or with keys to change such as ``train.max_steps``, resumes the run in that directory.

``train`` has four phases: checks, data and model, restore, loop. The first three do all validation and leave the run directory
untouched. Rank 0 alone or all ranks together take each decision, so a wrong config ends every rank with the same message.
"""

from __future__ import annotations

from collections.abc import Callable

from dtrain import command_line
from dtrain.config import compose
from dtrain.config.schema import Config
from dtrain.data.loading.sample_log import read_deadly
from dtrain.distributed.collectives import from_rank0, on_all_ranks
from dtrain.distributed.hang import HangWatch
from dtrain.distributed.lock import has_own_run_dir, run_lock
from dtrain.distributed.process_exit import CLEANUP, exit_with_torchrun, exit_without_threads
from dtrain.distributed.process_group import process_group, settle_network
from dtrain.distributed.stop import StopRequests, TimeLimit
from dtrain.distributed.torchrun import launched_rank
from dtrain.distributed.world import World, join_srun
from dtrain.runs.recompose import recompose_if_run, refuse_foreign_links
from dtrain.runs.run_dir import FailureRecord, failures_recorded, open_rank_log, save_run, write_status
from dtrain.runs.run_spec import RunSpec
from dtrain.tracking import sends_alerts, tracker_mode
from dtrain.training.breakpoints import breakpoints
from dtrain.training.build import build_run
from dtrain.training.checkpoint.mirror import RunMirror, run_mirror
from dtrain.training.checkpoint.resume import EarlierStarts, pin_weights, restore
from dtrain.training.hook_calls import build_hooks
from dtrain.training.loop import Loop
from dtrain.training.micro_batch import AUTO, choose_micro_batch, remember
from dtrain.training.monitor.run_logger import RunLogger, print_end, print_start_banner, write_final_status
from dtrain.training.recovery import Recovery
from dtrain.training.validation import validate


def train(composed: compose.Composed) -> None:
    """Trains the run that a config describes, from its newest checkpoint if it has one."""
    cfg = composed.cfg
    compose.require_choice(composed)
    validate(cfg)
    spec = RunSpec.from_composed(composed)
    if not composed.trusted:
        refuse_foreign_links(spec.dir)
    exit_with_torchrun()
    recovery = Recovery(spec.dir, cfg.parallel)
    with run_mirror(cfg, spec) as mirror, failures_recorded(spec.dir, launched_rank()) as failure:
        recovery.run(lambda: train_on_ranks(cfg, spec, failure, recovery, mirror))


def train_on_ranks(cfg: Config, spec: RunSpec, failure: FailureRecord, recovery: Recovery, mirror: RunMirror) -> None:
    """Joins the other ranks and trains until the run ends."""
    with (
        process_group(cfg.parallel.timeout_start, recovery.join) as world,
        breakpoints(world.size),
        HangWatch(world, cfg.parallel, failure.write) as watch,
        run_lock(recovery.run_lock) as claim_run_dir,
        recovery.lost_ranks(world),
    ):
        # -- checks: before the loaders, which may index shards for hours
        rank0_overrides = from_rank0(lambda: list(spec.overrides))
        on_all_ranks(lambda: spec.require_same_overrides(rank0_overrides))
        from_rank0(lambda: tracker_mode(cfg.tracker, spec.dir))
        mirror.fetch()
        cfg, spec = pin_weights(cfg, spec, mirror.source)
        hooks = on_all_ranks(lambda: build_hooks(cfg))
        time_limit = on_all_ranks(lambda: TimeLimit.from_config(cfg.run.max_hours, world.rank, began=recovery.began))
        with mirror.named():
            earlier = EarlierStarts.from_config(cfg, spec, mirror.source)
        if (message := earlier.nothing_left(spec, cfg.train)) is not None:
            keep_finished(spec, world, claim_run_dir, mirror, earlier)
            if world.rank == 0:
                print(message, flush=True)
            return

        cfg = earlier.with_same_shards(cfg, spec)

        # -- data and model: loaders first, since the length of an epoch decides the schedule
        run, warnings = build_run(cfg, spec.dir, world)
        run.hooks = hooks  # their states are restored, too
        if run.compile_cache is not None:
            warnings = [*warnings, *run.compile_cache.load()]

        # -- restore: everything or nothing
        start = recovery.restore(run) or restore(run, earlier)
        run.totals.add_restart(earlier.status)
        run.train_loader.mask(from_rank0(lambda: read_deadly(mirror.source / "logs")))
        end = earlier.last_step(run)
        if cfg.train.micro_batch_size == AUTO:
            warnings = [*warnings, *choose_micro_batch(run)]

        # -- loop: accumulate -> vote -> apply or skip -> commit; all ranks evaluate, save and stop at the same steps
        claim_run_dir()
        mirror.move_in()
        earlier.prepare(run)
        from_rank0(lambda: save_run(spec))
        if cfg.train.micro_batch_size == AUTO:
            remember(run)
        is_apart = has_own_run_dir(spec.dir, world)
        failure.run_started(world.rank, lambda: run.step.step, run.status_entries)
        on_all_ranks(lambda: open_rank_log(spec.dir, world.rank))
        run_logger = on_all_ranks(lambda: RunLogger.open(run, spec, end))
        from_rank0(lambda: mirror.start(run, run_logger))
        print_start_banner(spec, run, start, end, {"time limit": str(time_limit)} | hooks.banner_rows)
        changes = [f"changed since the last start: {it}" for it in earlier.changes]
        for line in (*mirror.notes, *earlier.problems, *changes, *hooks.notes, *warnings):
            run_logger.note(line)
        failure.on_failure = lambda reason: run_logger.finish("failed", reason)
        try:
            stop_file = spec.dir / "STOP" if world.rank == 0 or is_apart else None
            with StopRequests(
                stop_file, time_limit=time_limit, stuck=watch.declare, reason=recovery.requested_stop
            ) as stop:
                hooks.call("on_start", run)
                loop = Loop(run, end, run_logger, stop, hooks)
                recovery.arm(run, loop, run_logger, stop)
                with watch.following(loop.place, spec.dir / "logs"), recovery.lost_ranks(world):
                    state, reason = loop.run()
            if world.rank == 0 and sends_alerts(cfg.tracker, spec.dir):
                from dtrain.report.health import problems_of  # importing it takes 0.1 s

                if problems := problems_of(spec.dir):
                    run_logger.alert(problems)
            run_logger.finish(state, reason)
        finally:
            run.train_loader.close()
            if run.eval_loader is not None:
                run.eval_loader.close()
        # Written last: once its state is "finished", all other files are complete.
        if world.rank == 0 or is_apart:
            write_final_status(run, state, reason, end)
        print_end(run, state, reason)
        mirror.finish()
        if mirror.uploads is not None:  # the result of the last upload
            write_final_status(run, state, reason, end)
        recovery.end()


def keep_finished(
    spec: RunSpec, world: World, claim_run_dir: Callable[[], None], mirror: RunMirror, earlier: EarlierStarts
) -> None:
    """Collective. Puts a finished run that was fetched from its mirror into the run directory, for those who use it here."""
    if mirror.is_fetched:
        claim_run_dir()
        mirror.move_in()
        from_rank0(lambda: save_run(spec))
    if has_own_run_dir(spec.dir, world) and earlier.status is not None:
        spec.dir.mkdir(parents=True, exist_ok=True)
        write_status(spec.dir, "finished", int(earlier.status["step"]))  # for the launcher of this machine


def main() -> None:
    """Command line."""
    join_srun()
    settle_network()
    try:
        command_line.run(train, rewrite=recompose_if_run)
    except SystemExit as end:
        if end.code:
            exit_without_threads(CLEANUP, end.code if isinstance(end.code, int) else 1)
        raise


if __name__ == "__main__":
    main()
