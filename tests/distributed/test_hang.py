from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtrain.config.schema import ParallelConfig
from dtrain.distributed import hang
from dtrain.distributed import process_group as process_group_module
from dtrain.distributed import store as store_module
from dtrain.distributed.hang import HangWatch, Place
from dtrain.distributed.process_group import process_group
from dtrain.distributed.world import World
from tests.ranks import RanksFailed, run_ranks
from tests.store_proxy import store_behind_proxy

LIMITS = ParallelConfig(timeout_start=0.5, timeout_step=0.2)
PATIENT = ParallelConfig(timeout_start=100, timeout_step=100)


def asleep_in_code_of_its_own() -> None:
    time.sleep(30)


def stuck_in_c(library: ctypes.CDLL) -> None:
    """Waits for a mutex that this thread has locked: no signal and no exception ends that."""
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def test_every_rank_reports_where_it_waits_even_if_only_one_is_stuck(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank(number: int) -> None:
        # Rank 1 keeps moving as far as it can tell; only the store says that it has to report.
        def where() -> Place:
            return Place(7, [f"s/{number}"], 0 if number == 0 else time.monotonic())

        store.join()
        with process_group(20) as world, training(tmp_path, world, where):
            if number == 0:
                dist.all_reduce(torch.ones(1))
            asleep_in_code_of_its_own()

    with store_behind_proxy(tmp_path) as store, pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank, init=False)
    assert all("ended with code 1" in report for report in failed.value.reports.values())
    message = capfd.readouterr().err
    assert message.count("dtrain: the run hangs (rank 0: nothing has moved for 0.5 s)") == 1
    assert "  rank 0, step 7: in all_reduce (distributed_c10d.py:" in message
    assert "  rank 1, step 7: in asleep_in_code_of_its_own (test_hang.py:" in message
    for number in (0, 1):
        report = (tmp_path / f"hang-rank-{number:05d}.txt").read_text()
        assert f'last samples: ["s/{number}"]' in report
        assert "asleep_in_code_of_its_own" in report or "all_reduce" in report
        reason = json.loads((tmp_path / f"reason-{number}").read_text())
        assert "rank 0, step 7: in all_reduce" in reason
        assert "rank 1, step 7: in asleep" in reason


def test_the_limit_of_a_step_counts_from_the_first_finished_step_on(tmp_path: Path) -> None:
    declared = declarations(tmp_path, lambda clock: Place(1 + (clock > 1), [], clock), until=2.0)
    assert declared == ["nothing has moved for 0.2 s"]
    declared = declarations(tmp_path, lambda clock: Place(1, [], min(clock, 1)), until=2.0)
    assert declared == ["nothing has moved for 0.5 s"]


def test_steps_that_are_done_before_the_first_poll_count(tmp_path: Path) -> None:
    looks: list[float] = []

    def where(clock: float) -> Place:
        looks.append(clock)
        return Place(min(len(looks), 3), [], 0)

    assert declarations(tmp_path, where) == ["nothing has moved for 0.2 s"]


def test_a_run_that_moves_or_has_ended_does_not_hang(tmp_path: Path) -> None:
    assert declarations(tmp_path, lambda clock: Place(1, [], clock)) == []
    assert declarations(tmp_path, lambda clock: Place(1, [], 0), leave=True) == []


def test_a_wait_for_the_disk_of_rank_0_is_no_hang_while_the_store_answers(tmp_path: Path) -> None:
    def where(clock: float) -> Place:
        return Place(1, [], 0, waits_for_disk=True)

    assert declarations(tmp_path, where) == []
    assert declarations(tmp_path, where, ranks=2) == []
    assert declarations(tmp_path, where, ranks=2, silent_for=60) == ["nothing has moved for 0.5 s"]


def test_a_hang_that_two_threads_declare_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def rank(number: int) -> None:
        with process_group(20) as world:
            watch = HangWatch(world, PATIENT)
            report = watch._report

            def report_late(why: str) -> None:
                sys.stderr.write("a report begins\n")
                second = threading.Thread(target=watch.declare, args=("asked to stop",), daemon=True)
                second.start()
                second.join(0.5)  # for ever, if it does not report, too
                report(why)

            watch._report = report_late  # type: ignore[method-assign]
            threading.Thread(target=watch.declare, args=("no move",), daemon=True).start()
            asleep_in_code_of_its_own()

    with pytest.raises(RanksFailed):
        run_ranks(1, rank, init=False)
    assert capfd.readouterr().err.count("a report begins") == 1


def test_a_process_that_was_suspended_has_not_hung(tmp_path: Path) -> None:
    # It moves at each fourth poll, and is suspended for 100 s between two moves.
    assert declarations(tmp_path, lambda clock: Place(1, [], int(clock % 100 / 0.2)), suspended_at=2) == []


def test_a_hang_ends_the_process_even_on_a_write_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def rank(number: int) -> None:
        def failed(text: str) -> None:
            raise OSError(28, "No space left on device")

        with process_group(20) as world:
            watch = HangWatch(world, PATIENT, failed)
            with watch.following(lambda: Place(1, [], 0), tmp_path / "no folder"):
                threading.Thread(target=watch.declare, args=("no move",), daemon=True).start()
                asleep_in_code_of_its_own()

    with pytest.raises(RanksFailed) as failed:
        run_ranks(1, rank, init=False)
    assert "ended with code 1" in failed.value.reports[0]
    message = capfd.readouterr().err
    assert "dtrain: stacks could not be written: " in message
    assert "dtrain: the run hangs" in message


def test_a_rank_that_waits_in_a_collective_of_the_start_reports_after_the_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank(number: int) -> None:
        store.join()
        with process_group(20) as world, HangWatch(world, LIMITS):
            if number == 0:
                dist.all_reduce(torch.ones(1))
            asleep_in_code_of_its_own()

    with store_behind_proxy(tmp_path) as store, pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank, init=False)
    assert all("ended with code 1" in report for report in failed.value.reports.values())
    message = capfd.readouterr().err
    assert message.count("dtrain: the run hangs (rank 0: nothing has moved for 0.5 s)") == 1
    assert "  rank 1, step 0: in asleep_in_code_of_its_own (test_hang.py:" in message


def test_work_of_a_start_in_other_code_is_no_hang() -> None:
    def rank(number: int) -> bool:
        with process_group(20) as world, HangWatch(world, LIMITS):
            time.sleep(1.0)
        return True

    assert run_ranks(2, rank, init=False) == [True, True]


# -- without Python, without the store


@pytest.mark.slow
def test_a_failed_rank_ends_the_others_even_if_their_main_threads_are_stuck_in_c(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank(number: int) -> None:
        hang._GRACE = 0.2
        store.join()
        with process_group(100) as world, training(tmp_path, world, lambda: Place(3, [], 0), PATIENT):
            if number == 1:
                raise ZeroDivisionError("the culprit")
            stuck_in_c(ctypes.CDLL(None))

    with store_behind_proxy(tmp_path) as store, pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank, init=False)
    assert "ZeroDivisionError: the culprit" in failed.value.reports[1]
    assert "ended with code 1" in failed.value.reports[0]
    assert "dtrain: rank 0 stops: rank 1 failed: ZeroDivisionError: the culprit" in capfd.readouterr().err
    assert "the culprit" in (tmp_path / "reason-0").read_text()


@pytest.mark.slow
def test_a_rank_whose_c_code_holds_the_interpreter_lock_ends_and_shows_its_stack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def rank(number: int) -> None:
        hang._LOCK_HELD, hang._REPORT_TIMEOUT = 0.5, 1.0
        with process_group(100) as world, training(tmp_path, world, lambda: Place(3, [], 0), LIMITS):
            if number == 1:
                stuck_in_c(ctypes.PyDLL(None))
            asleep_in_code_of_its_own()

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, rank, init=False)
    assert all("ended with code 1" in report for report in failed.value.reports.values())
    message = capfd.readouterr().err
    assert "in stuck_in_c" in message
    assert "  rank 1 on " in message
    assert ": no answer" in message


def test_a_hang_is_declared_without_the_store_and_names_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with store_behind_proxy(tmp_path) as store:

        def rank(number: int) -> None:
            store.join(through_proxy=number == 1)
            store_module._ANSWER, hang._REPORT_TIMEOUT = 0.5, 0.5
            with process_group(100) as world:
                dist.barrier()
                store.frozen.touch()
                with training(tmp_path, world, lambda: Place(3, [], 0), LIMITS):
                    if number == 1:
                        stuck_in_c(ctypes.CDLL(None))
                    dist.all_reduce(torch.ones(1))

        with pytest.raises(RanksFailed) as failed:
            run_ranks(2, rank, init=False)
    assert all("ended with code 1" in report for report in failed.value.reports.values())
    message = capfd.readouterr().err
    assert "(rank 1: nothing has moved for 0.5 s; the store on 127.0.0.1:" in message
    assert "has not answered for" in message
    assert "  rank 1 on " in message  # as rank 0, which has the store, says
    assert "stuck_in_c" in (tmp_path / "hang-rank-00001.txt").read_text()


def test_a_start_ends_if_the_store_stops_to_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with store_behind_proxy(tmp_path) as store:

        def rank(number: int) -> None:
            store.join(through_proxy=number == 1)
            process_group_module.BACKSTOP = 0.2
            wait = process_group_module._wait_until_all_joined

            def cut(*arguments: object) -> None:
                store.frozen.touch()
                wait(*arguments)  # type: ignore[arg-type]

            process_group_module._wait_until_all_joined = cut  # type: ignore[assignment]
            with process_group(1):
                pass

        with pytest.raises(RanksFailed) as failed:
            run_ranks(2, rank, init=False)
    assert "ended with code 1" in failed.value.reports[1]
    assert "(parallel.timeout_start): their store on 127.0.0.1:" in capfd.readouterr().err


def declarations(
    tmp_path: Path,
    where: Callable[[float], Place],
    *,
    until: float = float("inf"),
    leave: bool = False,
    suspended_at: int = 0,
    ranks: int = 1,
    silent_for: float = 0.0,
) -> list[str]:
    """What a watch declares within a hundred polls, by a clock that a poll moves by 0.05 s.

    Args:
        where: By that clock.
        until: ``where`` sees the clock stand still from then on.
        suspended_at: The poll before which the clock jumps by 100 s.
        ranks: Size of the world.
        silent_for: Seconds since the store has answered.
    """

    def rank(number: int) -> list[str]:
        clock, looks = [0.0], [0]

        class Left(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                looks[0] += 1
                clock[0] += 0.05 + 100 * (looks[0] == suspended_at)
                return looks[0] > 100 or self.is_set()

        hang.time.monotonic = lambda: clock[0]  # type: ignore[assignment]
        with process_group(20) as world:
            watch = HangWatch(replace(world, size=ranks), LIMITS)
            watch._store._answered = clock[0] - silent_for
            declared: list[str] = []
            watch._left = Left()
            watch.declare = lambda why: (declared.append(why), watch._left.set())  # type: ignore[assignment,func-returns-value]
            if leave:
                watch._left.set()
            with watch.following(lambda: where(min(clock[0], until)), tmp_path):
                watch._watch()
            return declared

    return run_ranks(1, rank, init=False)[0]


def test_a_listener_that_waits_for_the_store_keeps_no_model(tmp_path: Path) -> None:
    """The model keeps the process group, whose threads abort the process if they are left at its end."""

    def rank(number: int) -> bool:
        with process_group(20) as world:
            model = torch.nn.Linear(1, 1)
            left, asked, answered = weakref.ref(model), threading.Event(), threading.Event()
            watch = HangWatch(world, LIMITS, lambda text, model=model: None)  # type: ignore[misc]
            watch._store.read = lambda *keys: (asked.set(), answered.wait(), [None, None])[2]  # type: ignore[func-returns-value,method-assign]
            with watch, watch.following(lambda model=model: Place(1, [], object()), tmp_path):  # type: ignore[misc]
                asked.wait()
            del model
            gc.collect()
            is_left = watch._threads[1].is_alive() and left() is not None
            answered.set()
            return is_left

    assert run_ranks(2, rank, init=False) == [False, False]


@contextmanager
def training(folder: Path, world: World, where: Callable[[], Place], cfg: ParallelConfig = LIMITS) -> Iterator[None]:
    """A watched training whose reason for an end is written to ``reason-<rank>``."""

    def failed(text: str) -> None:
        (folder / f"reason-{world.rank}").write_text(json.dumps(text))

    with HangWatch(world, cfg, failed) as watch, watch.following(where, folder):
        yield


def test_the_records_of_gloo_and_nccl_are_both_in_a_report_and_a_blocked_recorder_delays_it_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(name: str) -> Callable[[bool, bool], bytes]:
        return lambda include_collectives, only_active: f'{{"entries":[{{"name": "{name}"}}]}}'.encode()

    backend = torch._C._distributed_c10d
    monkeypatch.setattr(backend, "_dump_fr_trace_json", record("of gloo"), raising=False)
    monkeypatch.setattr(backend, "_dump_nccl_trace_json", record("of nccl"), raising=False)
    assert hang._flight_records().count("flight recorder:") == 2
    assert "of gloo" in hang._flight_records()
    assert "of nccl" in hang._flight_records()
    monkeypatch.setattr(hang, "_REPORT_TIMEOUT", 0.05)
    forever = threading.Event()
    monkeypatch.setattr(backend, "_dump_nccl_trace_json", lambda *arguments: forever.wait())
    assert "of gloo" in hang._flight_records()
    assert "_dump_nccl_trace_json: TimeoutError" in hang._flight_records()
    forever.set()


def test_looking_at_the_main_thread_cannot_deadlock_with_a_garbage_collection() -> None:
    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(0)  # other threads run in the middle of the collection

    def look(rank: int) -> None:
        gc.set_threshold(1)  # each new object collects
        done = threading.Event()

        def start_threads() -> None:
            while not done.is_set():
                threading.Thread(target=int).start()

        starter = threading.Thread(target=start_threads)
        starter.start()
        for _ in range(200):
            Garbage()
            hang.main_frame()
        done.set()
        starter.join()
        assert gc.isenabled()

    run_ranks(1, look, init=False, timeout=60)


@pytest.mark.parametrize(("module", "debugged"), [("bdb", True), ("pydevd.core", True), ("pdb_files", False)])
def test_only_a_debugger_makes_the_main_thread_wait(module: str, debugged: bool) -> None:
    frames = {"__name__": module, "look": hang._is_debugged}
    exec("found = look()", frames)
    assert frames["found"] == debugged
