from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtrain.distributed import store as module
from dtrain.distributed.process_group import process_group
from dtrain.distributed.store import GroupStore, StoreLost, fresh_store, publish_failure, published_failure
from dtrain.distributed.world import World
from tests.ranks import run_ranks
from tests.toys import CPU

ALONE = World(0, 1, 0, 1, CPU, "gloo", launched=False)


def test_a_late_call_is_abandoned_and_the_next_ones_fail_at_once_until_it_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, answer = GroupStore(dist.HashStore(), ALONE), threading.Event()
    assert store.call(lambda one: one.compare_set("key", "", "value")) == b"value"
    monkeypatch.setattr(module, "_ANSWER", 0.01)
    with pytest.raises(StoreLost):
        store.call(lambda one: answer.wait())
    monkeypatch.setattr(module, "_ANSWER", 100.0)
    assert store._late is not None
    for _ in range(3):
        with pytest.raises(StoreLost):
            store.read("key")
    assert store.hosts([0, 1]) == ["?", "?"]
    answer.set()
    store._late.join()
    assert store.read("key", "another") == ["value", None]


def test_a_store_is_silent_since_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = GroupStore(dist.HashStore(), ALONE), time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 60)
    assert store.silent_for >= 59
    store.read("key")
    assert store.silent_for < 1


def test_a_connection_that_is_closed_is_a_lost_store() -> None:
    store = GroupStore(dist.HashStore(), ALONE)

    def closed(one: dist.Store) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(StoreLost):
        store.call(closed)


def test_without_a_process_group_there_is_no_published_failure() -> None:
    assert published_failure() is None


# -- rendezvous


SOON = timedelta(seconds=20)


def test_a_failure_that_names_a_file_whose_name_is_no_text_is_published() -> None:
    def rank(number: int) -> tuple[str | None, str | None]:
        name = os.fsdecode(b"caf\xe9.tar")
        with process_group(20):
            return publish_failure(f"rank 0 failed: {name}"), published_failure()

    assert run_ranks(1, rank, init=False) == [("rank 0 failed: caf?.tar",) * 2]


def test_a_restarted_attempt_sees_nothing_of_the_one_before() -> None:
    def rank(number: int) -> list[object]:
        def attempt() -> object:
            store = fresh_store(number, 3, SOON)
            seen = store.check(["left behind"])
            store.set(f"looked/{number}", "")
            store.wait([f"looked/{other}" for other in range(3)])
            store.set("left behind", "poison")
            return seen

        return [attempt(), attempt()]  # on one store, as torchrun's restarts

    assert run_ranks(3, rank, init=False) == [[False, False]] * 3


@pytest.mark.slow
def test_the_failure_of_an_attempt_does_not_end_the_next_one() -> None:
    def rank(number: int) -> list[object]:
        def attempt() -> object:
            with process_group(20):
                before = published_failure()
                dist.barrier()
                publish_failure("rank 1 failed: the first attempt")
                return before

        return [attempt(), attempt()]  # on one store, as torchrun's restarts

    assert run_ranks(2, rank, init=False) == [[None, None]] * 2


def test_missing_ranks_are_counted() -> None:
    def rank(number: int) -> str:
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=SOON)
        store.set("dtrain/hello/1", "a rank of an attempt that is over")
        with pytest.raises(RuntimeError) as raised:
            fresh_store(0, 3, timedelta(seconds=0.2))
        return str(raised.value)

    assert "1 of 3 ranks arrived within 0.2 s" in run_ranks(1, rank, init=False)[0]


def test_rank_0_makes_two_calls_a_poll_and_answers_each_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls, polls = dist.HashStore(), list[str](), list[int]()
    attempt = dist.PrefixStore("dtrain/x", store)

    def sleep(seconds: float) -> None:
        if len(polls) % 3 == 0:  # another rank arrives
            store.append("dtrain/callers", f"name{len(polls)} ")
            attempt.add("arrived", 1)
        polls.append(0)

    monkeypatch.setattr(module.time, "sleep", sleep)
    module._answer_all(Counted(store, calls), attempt, "x", 100, SOON)
    answers = [key for key in calls if key.startswith("dtrain/answer/")]
    assert len(answers) == len(set(answers)) == 98  # the last one has arrived before it needs an answer here
    assert calls.count("get") == len(polls)
    assert len(calls) == 1 + len(polls) + 2 * 98


class Counted:
    """A store that notes the names of its calls and the keys of what is set."""

    def __init__(self, store: dist.Store, calls: list[str]) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> object:
        def call(key: str, *arguments: object) -> object:
            self._calls.extend([name, key] if name == "set" else [name])
            return getattr(self._store, name)(key, *arguments)

        return call
