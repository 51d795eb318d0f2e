"""Plain DDP, as PyTorch's tutorial "Fault-tolerant Distributed Training with torchrun": a snapshot after each epoch.

The tutorial resumes at the beginning of an epoch, so it saves only there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.faults import protocol


def main() -> None:
    """One start."""
    dist.init_process_group("gloo")
    dataset = protocol.Samples()
    sampler: DistributedSampler[object] = DistributedSampler(dataset, seed=protocol.SEED)
    loader = DataLoader(dataset, protocol.BATCH // protocol.ranks(), sampler=sampler)
    model = protocol.model()
    optimizer = protocol.optimizer(model)
    path, first = protocol.folder() / "snapshot.pt", 0  # resume
    if path.exists():  # resume
        snapshot = torch.load(path)  # resume
        model.load_state_dict(snapshot["model"])  # resume
        optimizer.load_state_dict(snapshot["optimizer"])  # resume
        first = snapshot["epochs"]  # resume
    net = DistributedDataParallel(model)
    log = protocol.Log(first * len(loader))
    for epoch in range(first, protocol.EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            protocol.train_step(net, optimizer, log, *batch)
        if protocol.rank() == 0:  # resume
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # resume
            torch.save(states | {"epochs": epoch + 1}, path)  # resume
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
