"""How an operation of the capability table is written down: as a dense formula, in torch's layouts, and in ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.sparse import Pattern, SparseTensor

BLOCK = (2, 2)
WIDTH = 3
LAYOUTS = {
    "COO": torch.sparse_coo,
    "CSR": torch.sparse_csr,
    "CSC": torch.sparse_csc,
    "BSR": torch.sparse_bsr,
}


class Leaf(NamedTuple):
    """What a form is differentiated in."""

    tensor: Tensor
    read: Callable[[Tensor], Tensor]  # the part of its gradient that every form has, in one order
    cells: tuple[Tensor, Tensor] | None = None  # those stored of a matrix, which alone count in its gradient
    ones: Tensor | None = None  # at these cells, in the layout of the matrix


class Form(NamedTuple):
    """An operation written down in one way."""

    function: Callable[..., Tensor]
    leaves: Sequence[Leaf]


class Forms(NamedTuple):
    """An operation in three ways."""

    dense: Form
    torch: Form | None  # where torch has one
    metagrad: Form
    dense_numbers: int | None  # of the matrix or table that sparse forms must not make, if there is one


@dataclass(frozen=True)
class Setting:
    """Size and numbers: n x n matrices of 2 x 2 blocks, so that every layout stores the same cells."""

    n: int
    dtype: torch.dtype
    device: torch.device

    def numbers(self, *shape: int, seed: int = 0) -> Tensor:
        """Draw a dense operand."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator, dtype=self.dtype).to(self.device)

    def indices(self, high: int, size: int, seed: int = 0) -> Tensor:
        """Draw indices below ``high``."""
        return torch.randint(high, (size,), generator=torch.Generator().manual_seed(seed)).to(self.device)

    def pattern(self, seed: int) -> Pattern:
        """Draw cells: the blocks on the diagonal, so that no row is empty, and as many others."""
        size = self.n // BLOCK[0]
        diagonal = torch.arange(size, device=self.device)
        row, col = (torch.cat([diagonal, self.indices(size, size, seed + k)]) for k in range(2))
        within = torch.cartesian_prod(*map(torch.arange, BLOCK)).to(self.device)
        cells = (
            torch.stack([row, col], 1)[:, None] * torch.tensor(BLOCK, device=self.device) + within
        ).flatten(0, 1)
        return Pattern.coalesce(*cells.unbind(1), (self.n, self.n))[0]


@dataclass(frozen=True)
class MatrixOperation:
    """An operation on sparse matrices A and B, on the values v of one, and on dense matrices x and y."""

    name: str
    operands: str
    dense: Callable[..., Tensor]
    torch: Callable[..., Tensor]
    metagrad: Callable[..., Tensor | SparseTensor]
    layouts: Sequence[str] = tuple(LAYOUTS)

    def forms(self, setting: Setting, layout: str) -> Forms:
        """Write the operation down at a size, for a layout."""
        operands = [_operand(setting, name, LAYOUTS[layout]) for name in self.operands]
        dense, torch_leaves, ours, patterns = zip(*operands, strict=True)

        def on_values(*values: Tensor) -> Tensor:
            made = [v if p is None else SparseTensor._of(p, v) for p, v in zip(patterns, values, strict=True)]
            result = self.metagrad(*made)
            return result.values if isinstance(result, SparseTensor) else result

        return Forms(
            Form(self.dense, dense), Form(self.torch, torch_leaves), Form(on_values, ours), setting.n**2
        )


@dataclass(frozen=True)
class StridedOperation:
    """An operation on strided tensors."""

    name: str
    write: Callable[[Setting], Forms]
    layouts: Sequence[str] = ("-",)

    def forms(self, setting: Setting, layout: str) -> Forms:
        """Write the operation down at a size."""
        return self.write(setting)


def _operand(setting: Setting, name: str, layout: torch.layout) -> tuple[Leaf, Leaf, Leaf, Pattern | None]:
    if name in "xy":
        leaf = _whole(setting.numbers(setting.n, WIDTH, seed=ord(name)))
        return leaf, leaf, leaf, None
    pattern = setting.pattern(ord(name))
    made = SparseTensor(pattern, setting.numbers(pattern.nnz, seed=ord(name)))
    cells = (pattern.row, pattern.col)

    def read(gradient: Tensor) -> Tensor:
        return gradient.to_dense()[cells]

    matrix = _stored(made, layout)
    ones = _stored(made.with_values(torch.ones_like(made.values)), layout)
    ours = SparseTensor.from_torch(matrix)
    return (
        Leaf(made.to_dense(), read, cells),
        Leaf(matrix, read, cells, ones),
        Leaf(ours.values, lambda gradient: gradient),
        ours.pattern,
    )


def _stored(a: SparseTensor, layout: torch.layout) -> Tensor:
    return a.to_torch().to_sparse_bsr(BLOCK) if layout == torch.sparse_bsr else a.to_torch(layout)


def _whole(tensor: Tensor) -> Leaf:
    return Leaf(tensor, lambda gradient: gradient.to_dense())


def strided_forms(
    leaves: Sequence[Tensor],
    *,
    dense: Callable[..., Tensor],
    torch: Callable[..., Tensor] | None,
    metagrad: Callable[..., Tensor],
    dense_numbers: int | None = None,
) -> Forms:
    """Write down an operation on strided tensors, whose gradients are compared whole."""
    whole = [_whole(leaf) for leaf in leaves]
    return Forms(Form(dense, whole), torch and Form(torch, whole), Form(metagrad, whole), dense_numbers)
