"""DDP with mosaicml-streaming, as its guide "Fast Resumption": the state of ``StreamingDataLoader`` in the checkpoint.

``num_canonical_nodes`` fixes the order, so that another number of ranks continues it ("Elastic Determinism").
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness
from benchmarks.faults import protocol

harness.declare_torchvision_operators()  # which streaming imports

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402


def prepare(data: Path) -> None:
    """Writes the samples."""
    columns = {"number": "int64", "features": f"ndarray:float32:{protocol.FEATURES}", "target": "float32"}
    with MDSWriter(out=str(data), columns=columns, size_limit=1 << 18) as shards:
        for number, (features, target) in enumerate(zip(*protocol.arrays(), strict=True)):
            shards.write({"number": number, "features": features, "target": target})


def main() -> None:
    """One start."""
    dist.init_process_group("gloo")
    batch = protocol.BATCH // protocol.ranks()
    options = {"shuffle": True, "shuffle_seed": protocol.SEED, "num_canonical_nodes": 1, "batch_size": batch}
    dataset = StreamingDataset(local=str(protocol.data_folder()), **options)
    loader = StreamingDataLoader(dataset, batch_size=batch)
    model = protocol.model()
    optimizer = protocol.optimizer(model)
    path, epoch, step = protocol.folder() / "snapshot.pt", 0, 0  # resume
    if path.exists():  # resume
        snapshot = torch.load(path)  # resume
        model.load_state_dict(snapshot["model"])  # resume
        optimizer.load_state_dict(snapshot["optimizer"])  # resume
        epoch, step = snapshot["loader"]["epoch"], snapshot["step"]  # resume
        loader.load_state_dict(snapshot["loader"])  # resume
    net = DistributedDataParallel(model)
    log = protocol.Log(step)
    for _ in range(epoch, protocol.EPOCHS):
        for samples in loader:
            protocol.train_step(net, optimizer, log, samples["number"], samples["features"], samples["target"])
            step += 1
            if step % protocol.SAVE_EVERY == 0 and protocol.rank() == 0:  # resume
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # resume
                torch.save(states | {"step": step, "loader": loader.state_dict()}, path)  # resume
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
