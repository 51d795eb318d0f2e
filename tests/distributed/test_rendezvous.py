from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtrain.distributed.process_group import failure, process_group, publish_failure
from dtrain.distributed.rendezvous import fresh_store
from tests.ranks import run_ranks

SOON = timedelta(seconds=20)


def in_two_attempts(rank: int, attempt: object) -> list[object]:
    """Runs ``attempt`` twice in processes that keep one store, as torchrun's restarts do."""
    assert callable(attempt)
    # As an agent does: the store belongs to neither attempt.
    server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, timeout=SOON)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    results = [attempt(), attempt()]
    server.set(f"done/{rank}", "")
    if rank == 0:  # the server ends with it, and the others have to be done by then
        server.wait([f"done/{other}" for other in range(int(os.environ["WORLD_SIZE"]))])
    return results


def test_a_restarted_attempt_sees_nothing_of_the_one_before() -> None:
    def rank(number: int) -> list[object]:
        def attempt() -> object:
            store = fresh_store(number, 3, SOON)
            seen = store.check(["left behind"])
            store.set(f"looked/{number}", "")
            store.wait([f"looked/{other}" for other in range(3)])
            store.set("left behind", "poison")
            return seen

        return in_two_attempts(number, attempt)

    assert run_ranks(3, rank, init=False) == [[False, False]] * 3


def test_the_failure_of_an_attempt_does_not_end_the_next_one() -> None:
    def rank(number: int) -> list[object]:
        def attempt() -> object:
            with process_group(20):
                before = failure()
                dist.barrier()
                publish_failure("rank 1 failed: the first attempt")
                return before

        return in_two_attempts(number, attempt)

    assert run_ranks(2, rank, init=False) == [[None, None]] * 2


def test_ranks_that_do_not_come_are_counted() -> None:
    def rank(number: int) -> str:
        server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, timeout=SOON)
        server.set("dtrain/hello/1", "a rank of an attempt that is over")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        with pytest.raises(RuntimeError) as raised:
            fresh_store(0, 3, timedelta(seconds=0.2))
        return str(raised.value)

    assert "1 of 3 ranks came within 0.2 s" in run_ranks(1, rank, init=False)[0]
