"""Lightning: python examples/coming_from/their_lightning.py"""

import lightning as L
import torch
import torch.nn.functional as F
from shared import Net, accuracy, digits
from torch.utils.data import DataLoader


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Net()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.model(images)
        self.log("train_accuracy", (logits.argmax(dim=1) == labels).float().mean())
        return F.cross_entropy(logits, labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    module = Digits()
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "precision": "bf16-mixed", "max_epochs": 6}
    trainer = L.Trainer(**options, accumulate_grad_batches=2, gradient_clip_val=1.0)
    trainer.fit(module, DataLoader(digits("train"), batch_size=16, shuffle=True))
    trainer.print(f"accuracy {accuracy(module.model):.4f}")
    trainer.save_checkpoint("lightning.ckpt")
