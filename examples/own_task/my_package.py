import torch.nn.functional as F
from torch import nn

from dtrain.training.task import Output


class MyModel(nn.Sequential):
    def __init__(self, width=32, classes=10):
        layers = nn.Conv2d(3, width, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        super().__init__(*layers, nn.Linear(16 * width, classes))


class MyTask:
    def __call__(self, model, batch) -> Output:  # runs under autocast
        logits, labels, valid = model(batch["image"]).float(), batch["label"], batch.valid
        losses = F.cross_entropy(logits, labels, reduction="none")  # [rows]
        right = (logits.topk(2, dim=1).indices == labels[:, None]).any(dim=1)
        # Sums and counts, not means. Masked rows do not count.
        metrics = {"top2_accuracy": ((right & valid).sum(), valid.sum())}
        return Output(losses.masked_fill(~valid, 0).sum(), valid.sum(), metrics)
