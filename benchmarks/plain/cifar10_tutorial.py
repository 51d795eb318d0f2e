"""PyTorch's tutorial "Training a classifier" on CIFAR-10 as JPEG shards, in plain torch.

DTRAIN_CIFAR10=/data/cifar10 python -m benchmarks.plain.cifar10_tutorial [--steps 25000] [--order shuffled] [--out FOLDER]
"""

import argparse
import io
import json
import os
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2).flatten(1)
        return self.fc3(self.fc2(self.fc1(x).relu()).relu())


def read(split: str) -> tuple[Tensor, Tensor]:
    images, labels = [], []
    for path in sorted(Path(os.environ["DTRAIN_CIFAR10"]).glob(f"{split}-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                if member.name.endswith(".jpg"):
                    images.append(np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))
                elif member.name.endswith(".cls"):
                    labels.append(int(content))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), torch.tensor(labels)


def scaled(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.5) / 0.5


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=25_000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--order", choices=["shuffled", "stored"], default="shuffled")
parser.add_argument("--out", type=Path, default=Path(), help="folder for initial.safetensors and losses.json")
options = parser.parse_args()

x, y = read("train")
torch.manual_seed(options.seed)
model = Net()
save_file(model.state_dict(), options.out / "initial.safetensors")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
losses, began = [], time.perf_counter()
for step in range(options.steps):
    if step % (len(x) // 4) == 0:
        order = torch.randperm(len(x)) if options.order == "shuffled" else torch.arange(len(x))
    rows = order[4 * step % len(x) :][:4]
    loss = F.cross_entropy(model(scaled(x[rows])), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
(options.out / "losses.json").write_text(json.dumps({"losses": losses, "seconds": time.perf_counter() - began}))
x, y = read("test")
with torch.no_grad():
    print(f"test accuracy {100 * (model(scaled(x)).argmax(1) == y).float().mean().item():.1f} %")
