"""webdataset: python examples/coming_from/their_webdataset.py"""

import torch
import torch.nn.functional as F
import webdataset as wds
from shared import Net, accuracy

from dtrain.data.digits import prepare, shard_dir


def to_tensor(image):
    return torch.from_numpy(image).permute(2, 0, 1) * 2 - 1


prepare()  # writes the shards of the digits
torch.manual_seed(0)
urls = f"{shard_dir()}/train-{{000000..000007}}.tar"
data = wds.WebDataset(urls, shardshuffle=8, nodesplitter=wds.split_by_node).shuffle(1000).decode("rgb")
data = data.to_tuple("png", "cls").map_tuple(to_tensor, int).batched(64)
loader = wds.WebLoader(data, batch_size=None, num_workers=2).with_epoch(22)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(6):
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
print(f"accuracy {accuracy(model):.4f}")
