"""A GAN: two models and two optimizers, in a hand-written loop with dtrain's loader and gradient scaler.

    torchrun --standalone --nproc-per-node=2 examples/gan.py --precision fp16 --out runs/gan

Trains on scikit-learn's digits with DDP, on GPUs or on a CPU, and writes generated digits to ``samples.png``. Run the same
command again to resume. With two processes, a resumed run equals an uninterrupted one bit for bit. With more processes, this
also needs DDP's ``find_unused_parameters=True``; otherwise DDP chooses the order of summation again after a resume.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import ShardLoader, digits
from dtrain.models import MLP
from dtrain.precision import CrossRankGradScaler
from dtrain.training.task import png

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIELDS = {"png": {"name": "image", "role": "image", "mean": [0.5] * 3, "std": [0.5] * 3}}
NOISE, PIXELS = 32, 64


class Gan:
    """The state of the training. Every attribute is saved and restored."""

    def __init__(self, device: torch.device, precision: str) -> None:
        torch.manual_seed(0)  # equal initial weights; DDP would copy rank 0's in any case
        self.generator = DistributedDataParallel(MLP([NOISE, 256, 256, PIXELS]).to(device))
        self.discriminator = DistributedDataParallel(MLP([PIXELS, 256, 256, 1]).to(device))
        self.optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        # One for each optimizer: their gradients overflow at different scales.
        self.scaler_g = CrossRankGradScaler(device.type, enabled=precision == "fp16")
        self.scaler_d = CrossRankGradScaler(device.type, enabled=precision == "fp16")
        digits.prepare()  # writes the shards, if they are missing
        self.loader = ShardLoader(
            f"{digits.shard_dir()}/train-*.tar",
            FIELDS,
            global_batch_size=64,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            num_workers=1,
            precision=precision,
        )
        self.step = 0

    def save(self, path: Path) -> None:
        """Rank 0 writes the checkpoint. All states are equal on all ranks."""
        if dist.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            staged = path.with_suffix(".staged")
            torch.save({name: it if name == "step" else it.state_dict() for name, it in vars(self).items()}, staged)
            os.replace(staged, path)  # a checkpoint is whole or absent, even if the process is killed here

    def load(self, path: Path) -> None:
        """Restores all ranks from the file of ``save``."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.step = state.pop("step")
        for name, saved in state.items():
            getattr(self, name).load_state_dict(saved)  # the loader refuses other shards than the checkpoint's


def train(precision: str, out: Path, epochs: int, save_every: int) -> None:
    """Trains on this rank; the process group exists."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    gan, checkpoint = Gan(device, precision), out / "checkpoint.pt"
    if checkpoint.exists():
        gan.load(checkpoint)
    while gan.loader.position[0] < epochs:
        batches = gan.loader.epoch(gan.loader.position[0])  # the rest of the epoch, after a resume
        for _ in range(gan.loader.steps_left):  # equal on all ranks
            batch = next(batches).to(device)
            loss_d, loss_g = train_step(gan, batch["image"][:, 0].flatten(1), batch.valid, DTYPES[precision])
            gan.loader.commit()
            gan.step += 1
            if dist.get_rank() == 0 and gan.step % 10 == 0:
                print(f"step {gan.step}  discriminator {loss_d:.4f}  generator {loss_g:.4f}", flush=True)
            if gan.step % save_every == 0:
                gan.save(checkpoint)
    gan.save(checkpoint)
    if dist.get_rank() == 0:
        with torch.no_grad():
            drawn = gan.generator.module(noise(64, device, gan.step)).tanh().view(8, 8, 8, 8)
        (out / "samples.png").write_bytes(png((drawn.permute(0, 2, 1, 3).reshape(64, 64) / 2 + 0.5).cpu().numpy()))
        print(f"finished after step {gan.step}: {out / 'samples.png'}", flush=True)


def train_step(gan: Gan, real: Tensor, valid: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """One step of each optimizer, on all ranks. Returns the mean losses over the global batch."""
    rows, device = len(real), real.device
    dist.all_reduce(count := valid.sum())  # rows that pad the last batch of an epoch are masked

    def step(logits: Tensor, target: Tensor, optimizer: torch.optim.Optimizer, scaler: CrossRankGradScaler) -> float:
        losses = F.binary_cross_entropy_with_logits(logits[:, 0].float(), target, reduction="none")
        loss = losses.masked_fill(~valid.repeat(len(target) // rows), 0).sum() / count
        optimizer.zero_grad()
        scaler.scale(loss * dist.get_world_size()).backward()  # DDP's average divides by the number of ranks
        scaler.step(optimizer)  # collective: no rank updates if one has found inf or NaN
        scaler.update()
        dist.all_reduce(total := loss.detach().clone())
        return float(total)

    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    with autocast:
        fake = gan.generator(noise(rows, device, gan.step)).tanh()
        logits = gan.discriminator(torch.cat([real, fake.detach()]))  # DDP expects one forward for each backward
    labels = torch.ones(rows, device=device)
    loss_d = step(logits, torch.cat([labels, 0 * labels]), gan.optimizer_d, gan.scaler_d)
    gan.discriminator.requires_grad_(False)  # the generator learns through it, but without DDP
    with autocast:
        logits = gan.discriminator.module(fake)
    loss_g = step(logits, labels, gan.optimizer_g, gan.scaler_g)
    gan.discriminator.requires_grad_(True)
    return loss_d, loss_g


def noise(rows: int, device: torch.device, step: int) -> Tensor:
    """The inputs of the generator; they follow from step and rank, so there is no state to save."""
    seeded = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    return torch.randn(rows, NOISE, generator=seeded).to(device)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--out", type=Path, default=Path("runs/gan"))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options.precision, options.out, options.epochs, options.save_every)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
