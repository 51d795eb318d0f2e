"""ShardDataset in an ordinary DataLoader: python examples/coming_from/our_dataset.py, or with torchrun in several processes"""

import torch
import torch.nn.functional as F
from shared import Net, accuracy
from torch.utils.data import DataLoader

from dtrain.data import ShardDataset
from dtrain.data.digits import prepare, shard_dir

FIELDS = {"png": {"name": "image", "role": "image"}, "cls": {"name": "label", "role": "label"}}

prepare()  # writes the shards of the digits
torch.manual_seed(0)
data = ShardDataset(f"{shard_dir()}/train-*.tar", FIELDS, seed=0)
loader = DataLoader(data, batch_size=64, num_workers=2)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(6):
    data.set_epoch(epoch)
    for batch in loader:
        images = batch["image"].permute(0, 3, 1, 2) / 127.5 - 1
        optimizer.zero_grad()
        F.cross_entropy(model(images), batch["label"]).backward()
        optimizer.step()
print(f"accuracy {accuracy(model):.4f}")
