"""DDP with torchdata's StatefulDataLoader, as its README: each rank saves the state of its loader, in the middle of an epoch.

The state is that of one rank, so another number of ranks has none for some of them: those begin the epoch anew.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from benchmarks.faults import protocol


def main() -> None:
    """One start."""
    dist.init_process_group("gloo")
    dataset = protocol.Samples()
    sampler = StatefulDistributedSampler(dataset, seed=protocol.SEED)
    loader = StatefulDataLoader(dataset, protocol.BATCH // protocol.ranks(), sampler=sampler)
    model = protocol.model()
    optimizer = protocol.optimizer(model)
    path, epoch, step = protocol.folder() / "snapshot.pt", 0, 0  # resume
    if path.exists():  # resume
        snapshot = torch.load(path)  # resume
        model.load_state_dict(snapshot["model"])  # resume
        optimizer.load_state_dict(snapshot["optimizer"])  # resume
        epoch, step = snapshot["epoch"], snapshot["step"]  # resume
        if protocol.rank() < len(snapshot["loaders"]):  # resume
            loader.load_state_dict(snapshot["loaders"][protocol.rank()])  # resume
    net = DistributedDataParallel(model)
    log = protocol.Log(step)
    for current in range(epoch, protocol.EPOCHS):
        sampler.set_epoch(current)
        for batch in loader:
            protocol.train_step(net, optimizer, log, *batch)
            step += 1
            if step % protocol.SAVE_EVERY == 0:  # resume
                loaders = [None] * protocol.ranks()  # resume
                dist.all_gather_object(loaders, loader.state_dict())  # resume
                if protocol.rank() == 0:  # resume
                    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # resume
                    torch.save(states | {"epoch": current, "step": step, "loaders": loaders}, path)  # resume
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
