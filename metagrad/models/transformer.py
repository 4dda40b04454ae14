"""A transformer over sequences or small images, which can be differentiated to any order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from metagrad.core.checks import check_count
from metagrad.core.norms import layer_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Transformer(nn.Module):
    r"""Map a sequence, or an image cut into patches, to outputs by self-attention.

    .. math::
        h \leftarrow h + A(N(h)), \quad h \leftarrow h + W_2 \, \mathrm{GELU}(W_1 N(h)), \qquad
        A(h) = W_o \, \mathrm{softmax}\bigl(Q K^\top / \sqrt{d}\bigr) V

    in every layer, from an embedding of the tokens and a learned one of their positions; a linear layer sees the mean
    of the tokens. Attention and normalisation are written out in elementary operations, since torch has no second
    derivative of its fused attention and a wrong third one of its layer norm. Nothing is dropped out.

    Args:
        outputs: Number of classes, or of values.
        input_shape: Of one example: `(length, features)` of a sequence, `(channels, height, width)` of an image.
        patch: Pixels along a side of a patch of an image; None for sequences.
        width: Features of a token.
        depth: Number of layers.
        heads: Number of heads, which divides `width`.

    Raises:
        ValueError: For sizes below one, an `input_shape` of another form, a `patch` that does not divide the image,
            or `heads` that do not divide `width`.

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
            ValueError: When x has another shape.
        """
        if x.shape[1:] != self.input_shape or x.ndim != 1 + len(self.input_shape):
            raise ValueError(
                f"Transformer(x): x must be [batch, {', '.join(map(str, self.input_shape))}], got {list(x.shape)}."
            )
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
        """Attend from every token to all; ``[batch, length, width]``."""
        # [3, batch, heads, length, features of a head]
        query, key, value = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
        return self.leave((weights @ value).transpose(1, 2).flatten(2))


class _LayerNorm(nn.LayerNorm):
    """A layer norm whose derivatives of every order are right."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def _tokens(input_shape: tuple[int, ...], patch: int | None) -> tuple[int, int]:
    """Return how many tokens an example has, and their features."""
    if patch is None:
        length, features = input_shape
        return length, features
    channels, height, width = input_shape
    return (height // patch) * (width // patch), channels * patch**2


def _patches(x: Tensor, patch: int) -> Tensor:
    """Cut images ``[batch, channels, height, width]`` into ``[batch, patches, features]``."""
    cut = torch.unflatten(torch.unflatten(x, 3, (-1, patch)), 2, (-1, patch))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _check(
    outputs: int, input_shape: Sequence[int], patch: int | None, width: int, depth: int, heads: int
) -> None:
    axes = "(length, features)" if patch is None else "(channels, height, width)"
    if len(input_shape) != (2 if patch is None else 3) or min(input_shape) < 1:
        raise ValueError(
            f"Transformer: with patch={patch}, input_shape must be {axes}, at least 1 each, got {tuple(input_shape)}."
        )
    sizes = {"outputs": outputs, "patch": patch or 1, "width": width, "heads": heads, "depth": depth}
    for name, size in sizes.items():
        check_count(f"Transformer({name})", size)
    if patch is not None and any(size % patch for size in input_shape[1:]):
        raise ValueError(f"Transformer: patch must divide the image {tuple(input_shape[1:])}, got {patch}.")
    if width % heads:
        raise ValueError(f"Transformer: heads must divide width={width}, got {heads}.")
