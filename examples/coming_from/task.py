"""A task: what training_step of a LightningModule computes."""

import torch.nn.functional as F

from dtrain.training.task import Output


class Digits:
    def __call__(self, model, batch) -> Output:
        labels, valid = batch["label"], batch.valid
        logits = model(batch["image"]).float()
        losses = F.cross_entropy(logits, labels, reduction="none").masked_fill(~valid, 0)
        right = (logits.argmax(dim=1) == labels) & valid
        return Output(losses.sum(), valid.sum(), {"accuracy": (right.sum(), valid.sum())})
