"""Plain DDP: torchrun --standalone --nproc-per-node=2 examples/coming_from/their_ddp.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import Net, accuracy, digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
sampler = DistributedSampler(data := digits("train"))
loader = DataLoader(data, batch_size=32, sampler=sampler)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
if dist.get_rank() == 0:
    print(f"accuracy {accuracy(model.module):.4f}")
dist.destroy_process_group()
