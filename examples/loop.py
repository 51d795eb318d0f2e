"""A complete hand-written training loop with dtrain's loader and gradient scaler, without its trainer.

    torchrun --standalone --nproc-per-node=2 examples/loop.py --precision fp16 --out runs/loop

Trains a small CNN on scikit-learn's digits with DDP, on GPUs or on a CPU. Run the same command again to resume in the middle
of an epoch, on the same or a different number of processes.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from dtrain.data import Batch, ShardLoader, digits
from dtrain.models import SmallCNN
from dtrain.precision import CrossRankGradScaler

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIELDS = {"png": {"name": "image", "role": "image"}, "cls": {"name": "label", "role": "label"}}


def train(precision: str, out: Path, epochs: int, save_every: int) -> None:
    """Trains on this rank; the process group exists."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)  # equal initial weights; DDP would copy rank 0's in any case
    model = DistributedDataParallel(SmallCNN(width=16).to(device))  # parameters stay fp32 in every precision
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # bf16 has the range of fp32, so only fp16 needs scaling. Disabled, every method passes its argument through: scale()
    # returns the loss, step() calls optimizer.step(). The loop is the same in all precisions.
    scaler = CrossRankGradScaler(device.type, enabled=precision == "fp16")
    digits.prepare()  # writes the shards, if they are missing
    shards = f"{digits.shard_dir()}/train-*.tar"
    loader = ShardLoader(
        shards,
        FIELDS,
        global_batch_size=64,  # samples of one optimizer step over all ranks
        micro_batch_size=16,  # samples of one forward; with two ranks, two micro-batches per step are accumulated
        rank=rank,
        world_size=world_size,
        num_workers=1,
        precision=precision,
    )
    step = load(out, model, optimizer, scaler, loader) if out.exists() else 0

    while loader.position[0] < epochs:
        batches = loader.epoch(loader.position[0])  # the rest of the epoch, after a resume
        # The number of steps is known in advance and equal on all ranks, so no rank waits forever for another rank.
        for _ in range(loader.steps_left):
            window = [next(batches).to(device) for _ in range(loader.micro_batches_per_step)]
            loss = train_step(model, optimizer, scaler, window, DTYPES[precision])
            loader.commit()  # after the step: its samples count as used, whether or not the step was skipped
            step += 1
            if rank == 0 and step % 10 == 0:
                print(
                    f"step {step}  epoch {loader.position[0]}  loss {loss:.4f}  scale {scaler.get_scale():g}",
                    flush=True,
                )
            if step % save_every == 0:
                save(out, step, model, optimizer, scaler, loader)
    save(out, step, model, optimizer, scaler, loader)
    accuracy = evaluate(model, device, precision)
    if rank == 0:
        print(f"finished after step {step}: accuracy {accuracy:.4f}, {out}", flush=True)


def train_step(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: CrossRankGradScaler,
    window: list[Batch],
    dtype: torch.dtype,
) -> float:
    """One optimizer step over the micro-batches of ``window``. Returns the mean loss of the global batch."""
    device_type = window[0].valid.device.type
    # Rows that pad the last batch of an epoch, and samples that cannot be read, are masked. The loss is the mean over the
    # valid samples of all ranks: a mean of the ranks' means would weight samples differently.
    count = torch.stack([batch.valid.sum() for batch in window]).sum()
    dist.all_reduce(count)
    total = torch.zeros((), device=count.device)
    for number, batch in enumerate(window):
        last = number == len(window) - 1
        # DDP averages the gradients over the ranks in every backward outside no_sync(): once per step is enough.
        with nullcontext() if last else model.no_sync():
            # Forward and loss run under autocast. The backward does not: each operation uses the dtype of its forward.
            with torch.autocast(device_type, dtype=dtype, enabled=dtype != torch.float32):
                losses = F.cross_entropy(model(batch["image"]).float(), batch["label"], reduction="none")
            loss_sum = losses.masked_fill(~batch.valid, 0).sum()
            # DDP's average divides by the number of ranks, so multiply by it. scale() multiplies by the loss scale: small
            # gradients, which would be zero in fp16, become large enough.
            scaler.scale(loss_sum * (dist.get_world_size() / count)).backward()
        total += loss_sum.detach()
    # Divides the gradients by the scale and notes whether any of them is inf or NaN on this rank. Before clipping, which
    # compares the norm of the unscaled gradients with the limit.
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # Collective. Either every rank updates its parameters, or, if one rank has found inf or NaN, none does. With
    # torch.amp.GradScaler each rank decides alone.
    scaler.step(optimizer)
    # Halves the scale after a skipped step, doubles it after 2,000 steps without one. Once per step, after the last step().
    scaler.update()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total / count)


def save(
    out: Path,
    step: int,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: CrossRankGradScaler,
    loader: ShardLoader,
) -> None:
    """Rank 0 writes everything that a resume needs to one file. The states of loader and scaler are equal on all ranks."""
    if dist.get_rank() != 0:
        return
    tensors = {f"model.{name}": tensor for name, tensor in model.module.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in state.items()}
    # loader.state_dict() is the position: epoch and committed samples. It does not depend on the number of ranks or workers.
    state = {"step": step, "loader": loader.state_dict(), "scaler": scaler.state_dict()}
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.with_suffix(".staged")
    save_file(tensors, staged, metadata={"state": json.dumps(state)})
    os.replace(staged, out)  # a checkpoint is whole or absent, even if the process is killed here


def load(
    out: Path,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: CrossRankGradScaler,
    loader: ShardLoader,
) -> int:
    """Restores all ranks from the file of ``save``. Returns its step."""
    with safe_open(out, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        state = json.loads(file.metadata()["state"])
    model.module.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for kind, number, name in (key.split(".", 2) for key in tensors if key.startswith("optimizer.")):
        moments.setdefault(int(number), {})[name] = tensors[f"{kind}.{number}.{name}"]
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    scaler.load_state_dict(state["scaler"])  # collective: all ranks continue with the same scale
    loader.load_state_dict(state["loader"])  # refused if the shards differ from the checkpoint's
    return int(state["step"])


@torch.no_grad()
def evaluate(model: DistributedDataParallel, device: torch.device, precision: str) -> float:
    """Accuracy over the test set, each sample counted once on any number of ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shards = f"{digits.shard_dir()}/test-*.tar"
    loader = ShardLoader(
        shards,
        FIELDS,
        global_batch_size=64,
        rank=rank,
        world_size=world_size,
        num_workers=0,
        precision=precision,
        # A batch draws from 64 places in stored order, so that each rank opens only its share of the shards.
        shuffle="none",
        lanes=64,
    )
    sums = torch.zeros(2, device=device)
    for batch in loader.epoch(0):
        batch = batch.to(device)
        with torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision != "fp32"):
            predicted = model.module(batch["image"]).argmax(dim=1)
        sums += torch.stack([((predicted == batch["label"]) & batch.valid).sum(), batch.valid.sum()])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=DTYPES, default="bf16")
    parser.add_argument("--out", type=Path, default=Path("runs/loop"), help="folder of checkpoint.safetensors")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options.precision, options.out / "checkpoint.safetensors", options.epochs, options.save_every)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
