"""Networks from well-known tutorials, for runs that are compared with published results (docs/proof.md).

``ResidualMLP``, ``ConvNet1d`` and ``GRUClassifier`` are the networks of MNIST-1D (Greydanus and Kobak, "Scaling down deep
learning with MNIST-1D", 2024); ``LeNet`` is from PyTorch's CIFAR-10 tutorial. All use torch's default initialisation.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualMLP(nn.Module):
    """Three linear layers with ReLU; the second one has a residual connection.

    Takes vectors ``[rows, inputs]``, returns logits ``[rows, classes]``.

    Args:
        inputs: Length of the input vectors.
        width: Units of both hidden layers.
        classes: Number of classes.

    Example:
        >>> import torch
        >>> from dtrain.models import ResidualMLP
        >>> ResidualMLP()(torch.rand(2, 40)).shape
        torch.Size([2, 10])
    """

    def __init__(self, inputs: int = 40, width: int = 100, classes: int = 10) -> None:
        super().__init__()
        self.linear1 = nn.Linear(inputs, width)
        self.linear2 = nn.Linear(width, width)
        self.linear3 = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        hidden = F.relu(self.linear1(x))
        hidden = hidden + F.relu(self.linear2(hidden))
        return self.linear3(hidden)


class ConvNet1d(nn.Module):
    """Three 1-d convolutions of stride 2 (kernels of 5, 3 and 3) with ReLU, and a linear layer.

    Takes sequences ``[rows, length]``, returns logits ``[rows, classes]``.

    Args:
        length: Length of the input sequences, at least 4.
        width: Channels of each convolution.
        classes: Number of classes.

    Example:
        >>> import torch
        >>> from dtrain.models import ConvNet1d
        >>> ConvNet1d()(torch.rand(2, 40)).shape
        torch.Size([2, 10])
    """

    def __init__(self, length: int = 40, width: int = 25, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, width, 5, stride=2, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        for kernel in (5, 3, 3):
            length = (length + 2 - kernel) // 2 + 1
        self.linear = nn.Linear(width * length, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        hidden = F.relu(self.conv1(x.unsqueeze(1)))
        hidden = F.relu(self.conv2(hidden))
        hidden = F.relu(self.conv3(hidden))
        return self.linear(hidden.flatten(1))


class GRUClassifier(nn.Module):
    """A bidirectional GRU over sequences of single numbers, and a linear layer over its outputs at all time steps.

    Takes sequences ``[rows, length]``, returns logits ``[rows, classes]``.

    Args:
        length: Length of the input sequences.
        width: Hidden units of each direction.
        classes: Number of classes.

    Example:
        >>> import torch
        >>> from dtrain.models import GRUClassifier
        >>> GRUClassifier()(torch.rand(2, 40)).shape
        torch.Size([2, 10])
    """

    def __init__(self, length: int = 40, width: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.gru = nn.GRU(1, width, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(2 * width * length, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        output, _ = self.gru(x.unsqueeze(2))
        return self.linear(output.flatten(1))


class LeNet(nn.Module):
    """Two 5x5 convolutions of 6 and 16 channels with ReLU and 2x2 max pooling, and linear layers of 120, 84 and ``classes``.

    Takes images ``[rows, 3, 32, 32]``, returns logits ``[rows, classes]``. After LeNet-5 (LeCun et al. 1998).

    Args:
        classes: Number of classes.

    Example:
        >>> import torch
        >>> from dtrain.models import LeNet
        >>> LeNet()(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``[rows, classes]``."""
        features = F.max_pool2d(F.relu(self.conv1(images)), 2)
        features = F.max_pool2d(F.relu(self.conv2(features)), 2)
        hidden = F.relu(self.fc1(features.flatten(1)))
        return self.fc3(F.relu(self.fc2(hidden)))
