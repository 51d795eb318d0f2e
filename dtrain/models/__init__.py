"""Reference models. Any other ``torch.nn.Module`` is used by naming it in ``model._target_``.

Files: ``convnets`` (ResNet, ResNet-9, SmallCNN), ``mlp`` (MLP, coordinate network, polynomial), ``textbook`` (networks from
tutorials), ``transformer`` (blocks, ViT, adapter for Hugging Face models), ``gpt`` (GPT, generation).
"""

from dtrain.models.convnets import ResNet, ResNet9, SmallCNN
from dtrain.models.gpt import GPT
from dtrain.models.mlp import MLP, CoordinateNet, Polynomial
from dtrain.models.textbook import ConvNet1d, GRUClassifier, LeNet, ResidualMLP
from dtrain.models.transformer import Logits, ViT

__all__ = [
    "GPT",
    "MLP",
    "ConvNet1d",
    "CoordinateNet",
    "GRUClassifier",
    "LeNet",
    "Logits",
    "Polynomial",
    "ResNet",
    "ResNet9",
    "ResidualMLP",
    "SmallCNN",
    "ViT",
]
