"""Lightning, as its guide "Save and load training progress": ``ModelCheckpoint`` every few steps, ``ckpt_path="last"``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks import harness
from benchmarks.faults import protocol

harness.declare_torchvision_operators()  # Lightning imports torchvision where it is installed

import lightning  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402


class Module(lightning.LightningModule):
    """The model and its step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = protocol.model()
        self.log_file: protocol.Log | None = None

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        samples, features, targets = batch
        loss = nn.functional.mse_loss(self.model(features), targets)
        if self.log_file is None:
            self.log_file = protocol.Log(self.global_step)
        self.log_file.step(samples, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return protocol.optimizer(self.model)


def main() -> None:
    """One start."""
    lightning.seed_everything(protocol.SEED)
    folder = protocol.folder()
    loader = DataLoader(protocol.Samples(), protocol.BATCH // protocol.ranks(), shuffle=True)
    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=protocol.SAVE_EVERY, save_last=True)  # resume
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=protocol.ranks(),
        max_epochs=protocol.EPOCHS,
        callbacks=[saving],  # resume
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), loader, ckpt_path="last")  # resume


if __name__ == "__main__":
    main()
