"""A small transformer, of operations that have second derivatives everywhere, and a model of an embedding table."""

from __future__ import annotations

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
    """A number for each row of an embedding table that is looked up."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, width), nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Map [batch] to [batch]."""
        return self.head(self.table(ids).tanh()).squeeze(-1)
