"""A hand-written loop: torchrun --standalone --nproc-per-node=2 examples/coming_from/our_loop.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import Net, accuracy
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import ShardLoader
from dtrain.data.digits import prepare, shard_dir

FIELDS = {"png": {"name": "image", "role": "image"}, "cls": {"name": "label", "role": "label"}}

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
prepare()  # writes the shards of the digits
loader = ShardLoader(
    f"{shard_dir()}/train-*.tar",
    FIELDS,
    global_batch_size=64,
    micro_batch_size=16,
    rank=rank,
    world_size=world_size,
    precision="bf16",
)
for epoch in range(6):
    batches = loader.epoch(epoch)
    for _ in range(loader.steps_left):
        window = [next(batches).to("cpu") for _ in range(loader.micro_batches_per_step)]
        dist.all_reduce(count := sum(batch.valid.sum() for batch in window))
        for number, batch in enumerate(window):
            model.require_backward_grad_sync = number == len(window) - 1
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = F.cross_entropy(model(batch["image"]).float(), batch["label"], reduction="none")
            (losses.masked_fill(~batch.valid, 0).sum() * world_size / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loader.commit()
if rank == 0:
    print(f"accuracy {accuracy(model.module):.4f}")
dist.destroy_process_group()
