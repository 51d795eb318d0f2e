"""Crashes of nodes and scancel on a real SLURM, at random moments: a run never has two jobs, and a cancelled one stays so.

``DTRAIN_TEST_CRASHES=20`` sets the number of crashes; ``pytest -s`` prints what happened. Instead of torchrun the jobs start
a script that notes its start in the run directory.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.slurm_jobs import ENDED, ended, field, output, slurm, submit, wait

CRASHES = int(os.environ.get("DTRAIN_TEST_CRASHES", "3"))
# A run that was killed, with a new checkpoint in each allocation, so that it always asks for another one.
_TRAINING = """#!/bin/bash
cd {run_dir} || exit
if ((SLURM_PROCID == 0)); then
  read -r started </proc/uptime
  echo "${{started%% *}} $SLURM_JOB_ID" >>starts
  mkdir -p checkpoints/step-00000$((1000 + $(wc -l <starts)))
  echo "{{\\"state\\": \\"running\\", \\"step\\": 3, \\"reason\\": null, \\"time\\": ${{started%% *}}}}" >status.json
fi
# The failure of the other node ends this process, mostly before SLURM notices it.
while [[ ! -e peer_failed ]]; do sleep 0.1; done
rm -f peer_failed
exit 1
"""

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def now() -> float:
    """The clock of ``starts``."""
    return float(Path("/proc/uptime").read_text().split()[0])


@dataclass
class Disturbed:
    """A run on two nodes.

    Attributes:
        kind: ``requeue``; ``no requeue``: the job may not be requeued, so other jobs continue it; ``array``.
        cancelled: When ``scancel`` had returned.
    """

    run_dir: Path
    kind: str
    cancelled: float | None = None
    had_two_jobs: bool = False
    job: str = ""

    def submit(self) -> None:
        self.run_dir.mkdir(parents=True)
        script = self.run_dir / "training"
        script.write_text(_TRAINING.format(run_dir=self.run_dir))
        script.chmod(0o755)
        options = {"requeue": "", "no requeue": '"--no-requeue"', "array": '"--array=4"'}[self.kind]
        shape = ("launch.nodes=2", "launch.processes_per_node=1", "launch.gpus_per_node=0", "launch.cpus_per_process=1")
        name = f"run.name={self.run_dir.name}"
        self.job = submit(self.run_dir, f"launch.python={script}", f"launch.extra=[{options}]", name, shape=shape)

    @property
    def starts(self) -> list[tuple[float, str]]:
        path = self.run_dir / "starts"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(float(at), job) for at, job in lines]

    @property
    def came_back(self) -> bool:
        return self.cancelled is not None and any(at > self.cancelled for at, _ in self.starts)

    @property
    def jobs(self) -> list[str]:
        """The states of its jobs in the queue."""
        return slurm("squeue", "--noheader", "--array", f"--name={self.run_dir.name}", "--format=%T").split()

    def cancel(self) -> None:
        """Cancels the job that was submitted, as a user does; where requeue is forbidden, that of ``launch status``."""
        job = self.job if self.kind != "no requeue" else (self.run_dir / ".job").read_text().split()[0]
        subprocess.run(["scancel", job], check=False)
        self.cancelled = now()

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted((self.run_dir / "logs").glob("slurm-*.out")))


@contextmanager
def crashed(bed: Path, node: str) -> Iterator[None]:
    subprocess.run(["bash", str(bed / "crash-node.sh"), node], check=True)
    try:
        yield
    finally:
        subprocess.run([Path(os.environ["SLURM_BED_DIR"]) / "start-node.sh", node], check=True)
        wait(lambda: node in slurm("sinfo", "-h", "-N", "-t", "idle,alloc,mix", "-o", "%N"))


@pytest.mark.timeout(CRASHES * 120)
def test_no_run_has_two_jobs_and_no_cancelled_run_comes_back_after_crashes_of_nodes(
    tmp_path: Path, bed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = sorted(set(slurm("sinfo", "-h", "-N", "-o", "%N").split()))[:2]
    seen: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    outputs = ""
    for crash in range(CRASHES):
        draw = random.Random(crash)
        runs = [Disturbed(tmp_path / f"{crash}-{kind[:2]}", kind) for kind in ("requeue", "no requeue", "array")]
        for run in runs:
            run.submit()
        for run in runs:
            wait(lambda run=run: bool(run.starts), details=run.output)  # type: ignore[misc]
        # Seconds after the crash: before SLURM notices it, while it ends the jobs, when it has requeued them, or (60) after the
        # next start.
        moments = {
            run.kind: draw.choice((0.0, draw.uniform(0, 1), draw.uniform(1, 4), draw.uniform(4, 14), 60.0))
            for run in runs
        }
        node = draw.choice(nodes)  # that of the batch shell, or the other one
        with crashed(bed, node):
            at, noticed = time.monotonic(), False
            for run in runs:
                if draw.random() < 0.7:
                    (run.run_dir / "peer_failed").touch()
            while any(run.cancelled is None for run in runs):
                elapsed = time.monotonic() - at
                if elapsed > 1 and not noticed:
                    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=crash")
                    noticed = True
                for run in runs:
                    states = run.jobs
                    # One that waits for the end of another one is needed where requeue is forbidden only.
                    run.had_two_jobs |= states.count("RUNNING") > 1 or len(states) > 1 + (run.kind == "no requeue")
                    # Where requeue is forbidden the failure of a node ends the run.
                    goes_on = len(run.starts) == 2 or (run.kind == "no requeue" and not states)
                    if run.cancelled is None and (goes_on or elapsed >= moments[run.kind]):
                        run.cancel()
                time.sleep(0.1)
        for run in runs:
            # Without a job in the queue nothing can start the run again.
            wait(lambda run=run: run.came_back or run.jobs == [], details=run.output)  # type: ignore[misc]
            goes_on = moments[run.kind] < 60 or len(run.starts) == 2 or run.kind == "no requeue"
            found = {
                "came back": run.came_back,
                "had two jobs": run.had_two_jobs,
                "lost a signal": "unexpected EOF"
                in run.output(),  # as bash reports a handler that it could not execute
                "did not go on": not goes_on,
            }
            faults.update(name for name, is_so in found.items() if is_so)
            outputs += run.output() if any(found.values()) else ""
            subprocess.run(["scancel", f"--name={run.run_dir.name}"], check=False)
            seen[f"{run.kind}: {'before' if len(run.starts) == 1 else 'after'} the next start"] += 1
    print(f"\n{CRASHES} crashes, {sum(seen.values())} runs cancelled; faults: {dict(faults) or 'none'}")
    print("cancelled " + ", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    assert not faults, outputs


def test_a_run_that_was_handed_over_is_trained_by_the_new_job_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Disturbed(tmp_path / "r", "requeue")
    scontrol = tmp_path / "bin" / "scontrol"  # of a cluster where users may not requeue
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/bash\n[[ $1 != requeue ]] && exec {shutil.which("scontrol")} "$@"\n')
    scontrol.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
        run.submit()
    wait(lambda: len(run.starts) == 1, details=run.output)
    (run.run_dir / "peer_failed").touch()
    wait(lambda: len(run.starts) == 2, details=run.output)
    following = (run.run_dir / ".job").read_text().split()[0]
    assert following != run.job
    # An administrator starts the first job again, and a user submits the script again.
    slurm("scontrol", "requeue", run.job)
    again = slurm("sbatch", "--parsable", str(run.run_dir / "job.sbatch"))
    assert ended(again) == "FAILED"
    assert f"the run already has job {following} RUNNING" in output(again)
    wait(lambda: field(run.job, "Restarts") == "1" and field(run.job, "JobState") in ENDED)
    assert field(run.job, "JobState") == "COMPLETED"
    assert f"the run belongs to job {following} now" in output(run.job)
    assert (run.jobs, len(run.starts)) == (["RUNNING"], 2)
    slurm("scancel", following)
    wait(lambda: run.jobs == [], details=run.output)
    assert len(run.starts) == 2
