"""torchft, as its example ``train_ddp.py``: replica groups of one rank, which go on while one of them restarts and recovers.

Its comments recommend to save the state of the loader in every step, by each group, and model, optimizer and manager less
often, for the case that all groups end. "This sampler is inherently lossy", says its documentation: a group that is down
leaves out its part of the samples, and a step that fails is not repeated.

Started without ``REPLICA_GROUP_ID`` this is the launcher: a lighthouse, and a torchrun for each group, which starts it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from benchmarks import harness
from benchmarks.faults import protocol

#: A rank that is killed does not end the job.
RECOVERS = True


def launch() -> int:
    """Starts all groups and waits for them."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000)
    groups = int(os.environ["FAULTS_RANKS"])
    environ = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "NUM_REPLICA_GROUPS": str(groups)}
    torchrun = harness.python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=10")
    command = [*torchrun, "-m", "benchmarks.faults.torchft"]
    jobs = [subprocess.Popen(command, env=environ | {"REPLICA_GROUP_ID": str(group)}) for group in range(groups)]
    codes = [job.wait() for job in jobs]
    lighthouse.shutdown()
    return max(codes)


def train(group: int, groups: int) -> None:
    """One start of a group."""
    dataset = protocol.Samples()
    sampler = DistributedSampler(dataset, group, groups, group_rank=0, num_replicas=1, seed=protocol.SEED)
    loader = StatefulDataLoader(dataset, protocol.BATCH // groups, sampler=sampler)
    bare = protocol.model()

    def states() -> dict[str, Any]:  # resume
        return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}  # resume

    def load(states: dict[str, Any]) -> None:  # resume
        net.load_state_dict(states["model"])  # resume
        optimizer.load_state_dict(states["optimizer"])  # resume

    manager = Manager(  # resume
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),  # resume
        min_replica_size=1,  # resume
        load_state_dict=load,  # resume
        state_dict=states,  # resume
        replica_id=f"group_{group}",  # resume
        timeout=timedelta(seconds=30),  # resume
    )  # resume
    net = DistributedDataParallel(manager, bare)
    optimizer = Optimizer(manager, protocol.optimizer(bare))
    path, own, epoch = protocol.folder() / "snapshot.pt", protocol.folder() / f"loader-{group}.pt", 0  # resume
    if path.exists():  # resume
        snapshot = torch.load(path)  # resume
        load(snapshot["states"])  # resume
        manager.load_state_dict(snapshot["manager"])  # resume
    if own.exists():  # resume
        saved = torch.load(own)  # resume
        epoch = saved["epoch"]  # resume
        loader.load_state_dict(saved["loader"])  # resume
    log = None
    while True:
        sampler.set_epoch(epoch)
        for samples, features, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(features), targets)
            loss.backward()
            before = manager.current_step()
            optimizer.step()
            step = manager.current_step()
            if step > before:  # the step was not left out
                log = log or protocol.Log(before)
                log.step(samples, loss, before)
            _save({"epoch": epoch, "loader": loader.state_dict()}, own)  # resume
            if manager.participating_rank() == 0 and step % protocol.SAVE_EVERY == 0:  # resume
                _save({"states": states(), "manager": manager.state_dict()}, path)  # resume
            if step >= protocol.STEPS:
                manager.shutdown()
                return
        epoch += 1


def _save(states: dict[str, Any], path: os.PathLike[str]) -> None:  # resume
    torch.save(states, f"{path}.new-{os.getpid()}")  # resume
    os.replace(f"{path}.new-{os.getpid()}", path)  # resume


if __name__ == "__main__":
    if "REPLICA_GROUP_ID" not in os.environ:
        sys.exit(launch())
    train(int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"]))
