"""A small transformer with second derivatives on every device, a ResNet-20, and an embedding table."""

from __future__ import annotations

import itertools

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention by matrix products and a softmax, which is what `SDPBackend.MATH` computes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, sequence, width] to the same shape."""
        batch, length, width = x.shape
        split = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block with a GELU layer four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, sequence, width] to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """Classify the mean over the sequence."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, sequence, width] to logits [batch, classes]."""
        return self.linear(x.mean(1))


class Transformer(nn.Sequential):
    """Blocks in a chain, and a classifier: [batch, sequence, width] to logits [batch, 10]."""

    def __init__(self, layers: int, width: int = 128, heads: int = 4) -> None:
        super().__init__(*(Block(width, heads) for _ in range(layers)), Head(width, 10))
        self.heads = heads


class Lookup(nn.Module):
    """A regression from embedding rows: each index gives a scalar."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, width), nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Map [batch] to [batch]."""
        return self.head(self.table(ids).tanh()).squeeze(-1)


class ResidualBlock(nn.Module):
    """Two convolutions with a residual connection, which has a third convolution if the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(before, after, stride), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = _conv(after, after), nn.BatchNorm2d(after)
        shortcut = nn.Conv2d(before, after, 1, stride, bias=False)
        self.around = nn.Sequential(shortcut, nn.BatchNorm2d(after)) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, before, height, width] to [batch, after, height / stride, width / stride]."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.around(x))


class ResNet20(nn.Sequential):
    """The residual network of CIFAR-10 with 272k parameters: [batch, 3, 32, 32] to logits [batch, 10].

    References:
        He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016, section 4.2; shortcuts of
        option B.
    """

    def __init__(self) -> None:
        blocks = [ResidualBlock(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(_WIDTHS)]
        stem = [_conv(3, 16), nn.BatchNorm2d(16), nn.ReLU()]
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


_WIDTHS = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]


def _conv(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride, 1, bias=False)
