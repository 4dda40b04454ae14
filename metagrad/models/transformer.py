"""A transformer for sequences or small images, with correct derivatives of every order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from metagrad.core.checks import check_count, refuse
from metagrad.core.norms import layer_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Transformer(nn.Module):
    r"""Transformer encoder for sequences, or for images that are split into patches.

    .. math::
        h \leftarrow h + A(N(h)), \quad h \leftarrow h + W_2 \, \mathrm{GELU}(W_1 N(h)), \qquad
        A(h) = W_o \, \mathrm{softmax}\bigl(Q K^\top / \sqrt{d}\bigr) V

    in every layer. The input of the first layer is a linear embedding of the tokens plus a learned position
    embedding. The input of the last linear layer is the mean of the tokens. Attention and layer norm consist of
    elementary operations. PyTorch's fused attention has no second derivative, and its layer norm has a wrong third
    derivative. There is no dropout.

    Args:
        outputs: Number of classes or output values.
        input_shape: Shape of one example: `(length, features)` for sequences, `(channels, height, width)` for images.
        patch: Height and width of an image patch in pixels. None for sequences.
        width: Number of features of a token.
        depth: Number of layers.
        heads: Number of attention heads, a divisor of `width`.

    Raises:
        ValueError: A size is less than 1, `input_shape` has the wrong length, `patch` does not divide the image, or
            `heads` does not divide `width`.

    Examples:
        >>> import torch
        >>> Transformer(5, (1, 28, 28), patch=7)(torch.zeros(10, 1, 28, 28)).shape
        torch.Size([10, 5])
        >>> Transformer(1, (20, 3), width=8, heads=2)(torch.zeros(10, 20, 3)).shape
        torch.Size([10, 1])

    References:
        Vaswani et al., Attention Is All You Need, 2017, section 3; Dosovitskiy et al., An Image is Worth 16x16
        Words, 2021, section 3.1; Xiong et al., On Layer Normalization in the Transformer Architecture, 2020.
    """

    def __init__(
        self,
        outputs: int,
        input_shape: Sequence[int],
        *,
        patch: int | None = None,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        _check(outputs, input_shape, patch, width, depth, heads)
        self.input_shape = tuple(input_shape)
        self.patch: int | None = patch
        length, features = _tokens(self.input_shape, patch)
        self.embedding: nn.Linear = nn.Linear(features, width)
        self.positions: nn.Parameter = nn.Parameter(torch.empty(length, width).normal_(std=0.02))
        self.layers: nn.Sequential = nn.Sequential(*(_Layer(width, heads) for _ in range(depth)))
        self.norm: _LayerNorm = _LayerNorm(width)
        self.head: nn.Linear = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, *input_shape] to [batch, outputs].

        Raises:
            ValueError: ``x`` has another shape.
        """
        if x.shape[1:] != self.input_shape or x.ndim != 1 + len(self.input_shape):
            refuse("Transformer(x)", f"[batch, {', '.join(map(str, self.input_shape))}]", list(x.shape))
        tokens = x if self.patch is None else _patches(x, self.patch)
        return self.head(self.norm(self.layers(self.embedding(tokens) + self.positions)).mean(1))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(_LayerNorm(width), _Attention(width, heads))
        self.perceptron = nn.Sequential(
            _LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.perceptron(x)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, length, width]`` to the same shape."""
        # [3, batch, heads, length, features of a head]
        query, key, value = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
        return self.leave((weights @ value).transpose(1, 2).flatten(2))


class _LayerNorm(nn.LayerNorm):
    """Layer norm with correct derivatives of every order."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def _tokens(input_shape: tuple[int, ...], patch: int | None) -> tuple[int, int]:
    """Return the number of tokens of an example, and the number of their features."""
    if patch is None:
        length, features = input_shape
        return length, features
    channels, height, width = input_shape
    return (height // patch) * (width // patch), channels * patch**2


def _patches(x: Tensor, patch: int) -> Tensor:
    """Split images ``[batch, channels, height, width]`` into ``[batch, patches, features]``."""
    cut = torch.unflatten(torch.unflatten(x, 3, (-1, patch)), 2, (-1, patch))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _check(
    outputs: int, input_shape: Sequence[int], patch: int | None, width: int, depth: int, heads: int
) -> None:
    axes = "(length, features)" if patch is None else "(channels, height, width)"
    if len(input_shape) != (2 if patch is None else 3) or min(input_shape) < 1:
        refuse(f"Transformer(patch={patch}): input_shape", f"{axes}, at least 1 each", tuple(input_shape))
    sizes = {"outputs": outputs, "patch": patch or 1, "width": width, "heads": heads, "depth": depth}
    for name, size in sizes.items():
        check_count(f"Transformer({name})", size)
    if patch is not None and any(size % patch for size in input_shape[1:]):
        raise ValueError(f"Transformer: patch must divide the image {tuple(input_shape[1:])}, got {patch}.")
    if width % heads:
        raise ValueError(f"Transformer: heads must divide width={width}, got {heads}.")
