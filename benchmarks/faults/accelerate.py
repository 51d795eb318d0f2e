"""Accelerate, as its guide "Checkpointing": ``save_state`` every few steps, and ``skip_first_batches`` after a resume.

``use_seedable_sampler`` gives each epoch an order of its own that a new start repeats; ``split_batches`` keeps the global
batch on another number of ranks.
"""

from __future__ import annotations

import os

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.faults import protocol


def main() -> None:
    """One start."""
    set_seed(protocol.SEED)
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = DataLoader(protocol.Samples(), protocol.BATCH, shuffle=True)
    model = protocol.model()
    optimizer = protocol.optimizer(model)
    net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    folder, step, skipped = protocol.folder(), 0, 0
    saved = [entry for entry in os.scandir(folder) if entry.name.startswith("step_")]  # resume
    if saved:  # resume
        newest = max(saved, key=lambda entry: entry.stat().st_ctime)  # resume
        accelerator.load_state(newest.path)  # resume
        step = int(newest.name.removeprefix("step_"))  # resume
        skipped = step % len(loader)  # resume
    log = protocol.Log(step)
    for epoch in range(step // len(loader), protocol.EPOCHS):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader  # resume
        skipped = 0  # resume
        for samples, features, targets in batches:
            loss = nn.functional.mse_loss(net(features), targets)
            log.step(samples, loss)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % protocol.SAVE_EVERY == 0:  # resume
                accelerator.save_state(str(folder / f"step_{step}"))  # resume
    accelerator.end_training()


if __name__ == "__main__":
    main()
