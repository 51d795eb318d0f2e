"""DDP with webdataset, as its tutorial for several nodes: shards drawn with replacement, an epoch is a number of batches.

A pipeline has no state, so a resumed run draws anew: nothing is promised about the samples of an epoch.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import webdataset
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.faults import protocol


def prepare(data: Path) -> None:
    """Writes the samples."""
    data.mkdir(parents=True)
    with webdataset.ShardWriter(f"{data}/train-%06d.tar", maxcount=500, verbose=0) as shards:
        for number, (features, target) in enumerate(zip(*protocol.arrays(), strict=True)):
            row = io.BytesIO()
            np.save(row, np.append(features, target))
            shards.write({"__key__": f"{number:06d}", "npy": row.getvalue()})


def decoded(sample: dict[str, bytes]) -> tuple[int, Tensor, Tensor]:
    """A sample as the other contenders have it."""
    row = torch.from_numpy(np.load(io.BytesIO(sample["npy"])))
    return int(sample["__key__"]), row[:-1], row[-1]


def main() -> None:
    """One start."""
    dist.init_process_group("gloo")
    urls = [str(path) for path in sorted(protocol.data_folder().glob("*.tar"))]
    shards = {"resampled": True, "shardshuffle": True, "nodesplitter": webdataset.split_by_node}
    dataset = webdataset.WebDataset(urls, **shards).shuffle(1000).map(decoded)
    batches = protocol.SAMPLES // protocol.BATCH
    loader = webdataset.WebLoader(dataset.batched(protocol.BATCH // protocol.ranks()), batch_size=None)
    loader = loader.with_epoch(batches)
    model = protocol.model()
    optimizer = protocol.optimizer(model)
    path, step = protocol.folder() / "snapshot.pt", 0  # resume
    if path.exists():  # resume
        snapshot = torch.load(path)  # resume
        model.load_state_dict(snapshot["model"])  # resume
        optimizer.load_state_dict(snapshot["optimizer"])  # resume
        step = snapshot["step"]  # resume
    net = DistributedDataParallel(model)
    log = protocol.Log(step)
    while step < protocol.STEPS:
        for samples, features, targets in loader:
            protocol.train_step(net, optimizer, log, torch.as_tensor(samples), features, targets)
            step += 1
            if step % protocol.SAVE_EVERY == 0 and protocol.rank() == 0:  # resume
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # resume
                torch.save(states | {"step": step}, path)  # resume
            if step == protocol.STEPS:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
