"""MNIST-1D as published (Greydanus and Kobak 2024), in plain torch.

DTRAIN_MNIST1D=/data/mnist1d python -m benchmarks.plain.mnist1d MODEL [--steps 6001] [--seed 42] [--out FOLDER]
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2, self.linear3 = nn.Linear(40, 100), nn.Linear(100, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear1(x).relu()
        return self.linear3(hidden + self.linear2(hidden).relu())


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 25, 5, stride=2, padding=1)
        self.conv2 = nn.Conv1d(25, 25, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(25, 25, 3, stride=2, padding=1)
        self.linear = nn.Linear(125, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv2(self.conv1(x[:, None]).relu()).relu()
        return self.linear(self.conv3(hidden).relu().flatten(1))


class GRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 6, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(2 * 6 * 40, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.gru(x[:, :, None])[0].flatten(1))


MODELS = {"logistic": lambda: nn.Sequential(nn.Linear(40, 10)), "mlp": MLP, "conv": Conv, "gru": GRU}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", choices=MODELS)
parser.add_argument("--steps", type=int, default=6001)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--out", type=Path, default=Path(), help="folder for initial.safetensors and losses.json")
options = parser.parse_args()
file = np.load(Path(os.environ["DTRAIN_MNIST1D"], "mnist1d.npz"))
x, y, x_test, y_test = (torch.from_numpy(file[name]) for name in ("x", "y", "x_test", "y_test"))
x, x_test = x.float(), x_test.float()
torch.manual_seed(options.seed)
model = MODELS[options.model]()
save_file(model.state_dict(), options.out / "initial.safetensors")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses, began = [], time.perf_counter()
for step in range(options.steps):
    rows = slice(100 * step % len(x), 100 * step % len(x) + 100)
    loss = F.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step and step % 1000 == 0:
        logits = model(x_test).detach()
        test, right = F.cross_entropy(logits, y_test).item(), (logits.argmax(1) == y_test).sum().item()
        print(f"step {step}: loss {loss.item():.3e}, test loss {test:.3e}, test accuracy {right / 10:.1f} %")
(options.out / "losses.json").write_text(json.dumps({"losses": losses, "seconds": time.perf_counter() - began}))
