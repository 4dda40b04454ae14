"""A loss of a chain of blocks with its data, and the changes that save memory whatever is computed of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import metagrad as mg

DENSE, IS_DENSE = "dense", "is_dense"


class Size(NamedTuple):
    """Layers, features of a layer, and examples (nodes of a graph)."""

    depth: int
    width: int
    batch: int


@dataclass(frozen=True)
class Work:
    """A loss of a chain of blocks; support and query examples.

    Attributes:
        tables: Embedding tables whose gradients are rows.
        steps: How many inner steps a meta-gradient goes through.
    """

    model: nn.Module
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    query_x: Tensor
    query_y: Tensor
    tables: tuple[str, ...] = ()
    steps: int = 1

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self.model.named_parameters())

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters."""
        return next(self.model.parameters()).dtype

    @property
    def head(self) -> dict[str, Tensor]:
        """Those of the last layer."""
        names = list(self.params)
        last = names[-1].rpartition(".")[0]
        return {name: p for name, p in self.params.items() if name.rpartition(".")[0] == last}

    def loss(self, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the loss at other parameters."""
        return self.loss_fn(functional_call(self.model, params, (x,)), y)

    def to(self, target: torch.device | torch.dtype) -> Work:
        """Return the same on another device, or in another dtype."""
        tensors = {name: _moved(getattr(self, name), target) for name in ("x", "y", "query_x", "query_y")}
        return replace(self, model=copy.deepcopy(self.model).to(target), **tensors)


def _moved(tensor: Tensor, target: torch.device | torch.dtype) -> Tensor:
    is_kept = isinstance(target, torch.dtype) and not tensor.is_floating_point()
    return tensor if is_kept else tensor.to(target)


class Recomputed(nn.Module):
    """A chain in about as many segments as each of them has blocks, which are recomputed in the backward pass."""

    def __init__(self, model: nn.Sequential, recompute: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        blocks, self.recompute = list(model), recompute
        size = math.isqrt(len(blocks) - 1) + 1
        cut = [nn.Sequential(*blocks[i : i + size]) for i in range(0, len(blocks), size)]
        self.segments = nn.ModuleList(cut)

    def forward(self, x: Tensor) -> Tensor:
        """Call one segment after the other."""
        for segment in self.segments:
            x = self.recompute(segment, x)
        return x


def recomputed(work: Work, recompute: Callable[..., Tensor]) -> Work:
    """Recompute segments of the model in the backward pass."""
    assert isinstance(work.model, nn.Sequential)
    model = Recomputed(work.model, recompute)
    names = {id(p): name for name, p in model.named_parameters()}
    return replace(work, model=model, tables=tuple(names[id(work.params[name])] for name in work.tables))


def densified(work: Work) -> Work:
    """Take the gradient of a table, or of edges, by way of dense matrices."""
    model = copy.deepcopy(work.model)
    parts = [part for part in model.modules() if hasattr(part, IS_DENSE)]
    if not parts:
        raise ValueError("there is nothing sparse in the model")
    for part in parts:
        setattr(part, IS_DENSE, True)
    return replace(work, model=model, tables=())


CHANGES: dict[str, Callable[[Work], Work]] = {
    "mg.checkpoint": lambda work: recomputed(work, mg.checkpoint),
    "torch checkpoint": lambda work: recomputed(work, _by_torch),
    "bfloat16": lambda work: work.to(torch.bfloat16),
    DENSE: densified,
}
"""What can be changed of any work, whatever is computed of it."""


def _by_torch(segment: nn.Module, x: Tensor) -> Tensor:
    return torch_checkpoint(segment, x, use_reentrant=False)  # type: ignore[reportReturnType]
