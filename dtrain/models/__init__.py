"""Small reference models; everything else comes in by `_target_`."""

from dtrain.models.coordinate_net import CoordinateNet
from dtrain.models.gpt import GPT
from dtrain.models.logits import Logits
from dtrain.models.mlp import MLP
from dtrain.models.polynomial import Polynomial
from dtrain.models.resnet import ResNet
from dtrain.models.resnet9 import ResNet9
from dtrain.models.small_cnn import SmallCNN
from dtrain.models.vit import ViT

__all__ = ["GPT", "MLP", "CoordinateNet", "Logits", "Polynomial", "ResNet", "ResNet9", "SmallCNN", "ViT"]
