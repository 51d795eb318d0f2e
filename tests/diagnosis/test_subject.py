from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from dtrain.config import app
from dtrain.config.app import Composed
from dtrain.diagnosis.loader_rate import endless
from dtrain.diagnosis.subject import Subject
from dtrain.distributed.process_group import process_group
from tests.diagnosis import slow
from tests.ranks import run_ranks


@pytest.mark.parametrize("search", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_steps_take_turns_that_move_nothing_and_only_one_of_them_communicates(digits: Path, search: str) -> None:
    hook = "parallel.comm_hook={_target_: tests.diagnosis.slow.counting_hook, state: {}}"
    overrides = [
        "experiment=digits",
        "data.num_workers=0",
        f"parallel.find_unused_parameters={search}",
        hook,
        "optimizer.weight_decay=0.1",
    ]

    def one(rank: int) -> tuple[list[int], bool]:
        found: list[tuple[list[int], bool]] = []

        def job(composed: Composed) -> None:
            with process_group(30) as world:
                subject, _ = Subject.build(composed.cfg, world)
                assert subject.takes_turns
                with closing(subject.loader):
                    batch = next(endless(subject.loader))
                before = [parameter.clone() for parameter in subject.model.parameters()]
                steps = [subject.step_alone(), subject.step_with_others()]
                counted = []
                for _ in range(3):
                    for step in steps:
                        called = len(slow.calls)
                        step.accumulate([batch.to(world.device)], 1)
                        step.apply()
                        step.settle()
                        counted.append(len(slow.calls) - called)
                assert all(step.applied_steps == 3 for step in steps)
                same = all(map(torch.equal, before, subject.model.parameters()))
                found.append((counted, same))

        app.run(job, overrides)
        return found[0]

    for counted, same in run_ranks(2, one, init=False):
        assert counted[::2] == [0, 0, 0]
        assert min(counted[1::2]) >= 1
        assert same
