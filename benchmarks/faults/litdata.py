"""DDP with litdata, as its README "Pause, resume data streaming": the state of ``StreamingDataLoader`` in the checkpoint.

The state is that of one rank; a loader with a state of another number of ranks or another batch refuses it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from litdata import StreamingDataLoader, StreamingDataset, optimize
from torch.nn.parallel import DistributedDataParallel

from benchmarks.faults import protocol


def samples(numbers: range) -> Iterator[dict[str, Any]]:
    """The samples with these numbers."""
    features, targets = protocol.arrays()
    for number in numbers:
        yield {"number": number, "features": features[number], "target": targets[number]}


def prepare(data: Path) -> None:
    """Writes the samples."""
    shutil.rmtree(data, ignore_errors=True)
    inputs = [range(begin, min(begin + 1000, protocol.SAMPLES)) for begin in range(0, protocol.SAMPLES, 1000)]
    optimize(fn=samples, inputs=inputs, output_dir=str(data), chunk_bytes=1 << 18, num_workers=1, verbose=False)


def main() -> None:
    """One start."""
    dist.init_process_group("gloo")
    dataset = StreamingDataset(str(protocol.data_folder()), shuffle=True, seed=protocol.SEED, drop_last=True)
    loader = StreamingDataLoader(dataset, batch_size=protocol.BATCH // protocol.ranks(), shuffle=True)
    model = protocol.model()
    optimizer = protocol.optimizer(model)
    path, epoch, step = protocol.folder() / "snapshot.pt", 0, 0  # resume
    if path.exists():  # resume
        snapshot = torch.load(path)  # resume
        model.load_state_dict(snapshot["model"])  # resume
        optimizer.load_state_dict(snapshot["optimizer"])  # resume
        epoch, step = snapshot["epoch"], snapshot["step"]  # resume
        loader.load_state_dict(snapshot["loaders"][protocol.rank() % len(snapshot["loaders"])])  # resume
    net = DistributedDataParallel(model)
    log = protocol.Log(step)
    for current in range(epoch, protocol.EPOCHS):
        for batch in loader:
            protocol.train_step(net, optimizer, log, batch["number"], batch["features"], batch["target"].float())
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
