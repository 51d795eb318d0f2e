"""nanoGPT's setting for a CPU (Karpathy 2022): characters of Shakespeare, in plain torch.

DTRAIN_TEXT=/data/text python -m benchmarks.plain.nanogpt [--steps 2000] [--order random] [--out FOLDER]
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

WIDTH, DEPTH, HEADS, CONTEXT, BATCH, HORIZON, SPLIT = 128, 4, 4, 64, 12, 2000, 1_003_854


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        qkv, out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.attention = nn.ModuleDict({"qkv": qkv, "out": out})
        up, down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention["qkv"](self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention["out"](mixed)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.position_embedding = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(DEPTH))), nn.LayerNorm(WIDTH, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                last = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * DEPTH) if last else 0.02)

    def loss(self, rows: Tensor) -> Tensor:
        x = self.blocks(self.embedding(rows[:, :-1]) + self.position_embedding.weight)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight).flatten(0, 1), rows[:, 1:].flatten())


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=HORIZON)
parser.add_argument("--order", choices=["random", "stored"], default="random")
parser.add_argument("--out", type=Path, default=Path(), help="folder for initial.safetensors and losses.json")
options = parser.parse_args()
text = Path(os.environ["DTRAIN_TEXT"], "tinyshakespeare.txt").read_text()
tokens = torch.tensor([*map(sorted(set(text)).index, text)])
train, val = tokens[:SPLIT].unfold(0, CONTEXT + 1, 1), tokens[SPLIT:].unfold(0, CONTEXT + 1, CONTEXT)
torch.manual_seed(1337)
model = GPT(len(set(text)))
save_file(model.state_dict(), options.out / "initial.safetensors")
decays = {0.1: [p for p in model.parameters() if p.dim() > 1], 0.0: [p for p in model.parameters() if p.dim() == 1]}
optimizer = torch.optim.AdamW([{"params": p, "weight_decay": decay} for decay, p in decays.items()], betas=(0.9, 0.99))
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda t: min((t + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * max(0, t - 100) / (HORIZON - 100)))
)
losses, began = [], time.perf_counter()
for step in range(options.steps):
    stored = CONTEXT * (BATCH * step + torch.arange(BATCH))
    loss = model.loss(train[stored if options.order == "stored" else torch.randint(len(train), (BATCH,))])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
(options.out / "losses.json").write_text(json.dumps({"losses": losses, "seconds": time.perf_counter() - began}))
if options.steps >= HORIZON:
    print(f"validation loss {sum(model.loss(row[None]).item() for row in val) / len(val):.4f}")
