"""The table of operations on sparse matrices, each with its dense oracle.

Each operation in ``CASES`` is tested at every order against the dense oracle, in float32, under ``torch.func`` and
``unroll``. On a large matrix no dense tensor may be allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.sparse import Pattern, SparseTensor, sddmm, spgemm, spmm
from metagrad.sparse.operations.reduce import softmax
from metagrad.sparse.operations.segments import (
    gather,
    segment_max,
    segment_mean,
    segment_softmax,
    segment_sum,
)

WIDTH = 3


@dataclass(frozen=True)
class Case:
    name: str
    sparse: Callable[..., SparseTensor | Tensor]  # (a, *operands)
    dense: Callable[..., Tensor]  # (mask, a, *operands), all dense
    operands: tuple[str, ...] = ()  # see OPERANDS
    positive: bool = False  # only positive values
    is_dense: bool = False  # an operand or the result is as large as the matrix

    def __str__(self) -> str:
        return self.name


def arguments(
    case: Case, pattern: Pattern, *, seed: int = 0, dtype=torch.float64
) -> list[SparseTensor | Tensor]:
    """Return a matrix on the pattern and the other operands. Their tensors require grad."""
    generator = torch.Generator().manual_seed(seed)
    values = _spread_out(pattern.nnz, case, generator)
    a = SparseTensor(pattern, values.to(dtype).requires_grad_())
    return [a, *(OPERANDS[name](a, generator) for name in case.operands)]


def _spread_out(size: int, case: Case, generator: torch.Generator) -> Tensor:
    """Return distinct numbers away from 0, 1/2 and 1, where functions are not differentiable."""
    unit = (torch.randperm(size, generator=generator) + 1).double() / (size + 1)
    sign = 1 if case.positive else torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    return sign * (0.15 + 0.7 * unit)


def _dense(*shape: int) -> Callable[[SparseTensor, torch.Generator], Tensor]:
    def make(a: SparseTensor, generator: torch.Generator) -> Tensor:
        sizes = {-1: a.shape[0], -2: a.shape[1]}
        x = torch.rand([sizes.get(s, s) for s in shape], generator=generator, dtype=torch.float64) + 0.5
        return x.to(a.dtype).requires_grad_()

    return make


def _on_same_pattern(a: SparseTensor, generator: torch.Generator) -> SparseTensor:
    values = torch.randn(a.values.shape, generator=generator, dtype=torch.float64)
    return SparseTensor(a.pattern, values.to(a.dtype).requires_grad_())


def _on_other_pattern(a: SparseTensor, generator: torch.Generator) -> SparseTensor:
    """Share half of the entries, and have others."""
    n, m = a.pattern.shape
    kept = torch.rand(a.pattern.nnz, generator=generator) < 0.5
    new = [torch.randint(0, max(size, 1), (min(n, m),), generator=generator) for size in (n, m)]
    row, col = torch.cat([a.pattern.row[kept], new[0]]), torch.cat([a.pattern.col[kept], new[1]])
    pattern = Pattern.coalesce(row, col, (n, m))[0]
    values = torch.randn(pattern.nnz, generator=generator, dtype=torch.float64)
    return SparseTensor(pattern, values.to(a.dtype).requires_grad_())


OPERANDS = {
    "same": _on_same_pattern,
    "other": _on_other_pattern,
    "scalar": _dense(),
    "row": _dense(-2),
    "column": _dense(-1, 1),
    "matrix": _dense(-1, -2),
    "vector [m]": _dense(-2),
    "vector [n]": _dense(-1),
    "tall [n]": _dense(-1, WIDTH),
    "tall [m]": _dense(-2, WIDTH),
    "wide [n]": _dense(WIDTH, -1),
    "wide [m]": _dense(WIDTH, -2),
    "batch [m]": _dense(2, -2, WIDTH),
}


def _over(mask: Tensor, a: Tensor, dim: int, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply a function to rows or columns in which cells that are not stored are minus infinity, empty ones 0."""
    any_stored = mask.any(dim, keepdim=True)
    filled = torch.where(mask, a, -math.inf).masked_fill(~any_stored, 0)
    return function(filled, dim)


def _max(dim: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    def dense(mask: Tensor, a: Tensor) -> Tensor:
        if not mask.any():
            return a.sum() if dim is None else a.sum(dim)
        if dim is None:
            return a[mask].amax()
        return torch.where(mask.any(dim), _over(mask, a, dim, torch.amax), 0)

    return dense


def _softmax(dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda mask, a: torch.where(mask, _over(mask, a, dim, torch.softmax), 0)


def _log_softmax(dim: int) -> Callable[[Tensor, Tensor], Tensor]:
    def dense(mask: Tensor, a: Tensor) -> Tensor:
        scores = a.masked_fill(
            ~mask, -1e6
        )  # finite, so that the oracle has no NaN: exp of it is 0 all the same
        return torch.where(mask, torch.log_softmax(scores, dim), 0)

    return dense


def _mean_of_stored(mask: Tensor, a: Tensor) -> Tensor:
    return a.sum(1) / mask.sum(1).clamp(min=1)


def _norm(p: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda mask, a: torch.linalg.vector_norm(a[mask], p) if mask.any() else a.sum()


ELEMENTWISE = ("abs", "expm1", "log1p", "neg", "relu", "sign", "sin", "sqrt", "square", "tanh")


def _elementwise(name: str) -> Case:
    function = getattr(torch, name)
    return Case(
        name,
        lambda a: getattr(a, name)(),
        lambda _, a: function(torch.where(a == 0, 0, a)),
        positive=name == "sqrt",
    )


def _pow(exponent: float, positive: bool = False) -> Case:
    # torch's own derivatives of a fractional power of zero are infinite: the oracle does not see the zeros.
    def dense(mask: Tensor, a: Tensor) -> Tensor:
        return torch.where(mask, torch.where(mask, a, 1) ** exponent, 0)

    return Case(f"a ** {exponent}", lambda a: a**exponent, dense, positive=positive)


PRODUCTS = [
    Case("a @ x", lambda a, x: a @ x, lambda _, a, x: a @ x, ("tall [m]",)),
    Case("a @ vector", spmm, lambda _, a, x: a @ x, ("vector [m]",)),
    Case("a @ batch", spmm, lambda _, a, x: a @ x, ("batch [m]",)),
    Case("x @ a", lambda a, x: x @ a, lambda _, a, x: x @ a, ("wide [n]",)),
    Case("vector @ a", lambda a, x: x @ a, lambda _, a, x: x @ a, ("vector [n]",)),
    Case("a @ a.t()", lambda a: a @ a.t(), lambda _, a: a @ a.T),
    Case("spgemm", lambda a, b: spgemm(a.t(), b), lambda _, a, b: a.T @ b, ("other",)),
    Case(
        "sddmm",
        lambda a, x, y: a * sddmm(x, y, a.pattern),
        lambda _, a, x, y: a * (x @ y),
        ("tall [n]", "wide [m]"),
    ),
]

MERGES = [
    Case("a + b, one pattern", lambda a, b: a + b, lambda _, a, b: a + b, ("same",)),
    Case("a + b, two patterns", lambda a, b: a + b, lambda _, a, b: a + b, ("other",)),
    Case("a + dense", lambda a, x: a + x, lambda _, a, x: a + x, ("matrix",), is_dense=True),
    Case("a * b, one pattern", lambda a, b: a * b, lambda _, a, b: a * b, ("same",)),
    Case("a * b, two patterns", lambda a, b: a * b, lambda _, a, b: a * b, ("other",)),
    Case("row * a", lambda a, x: x * a, lambda _, a, x: x * a, ("row",)),
    Case("column * a", lambda a, x: x * a, lambda _, a, x: x * a, ("column",)),
    Case("a / column", lambda a, x: a / x, lambda _, a, x: a / x, ("column",)),
    Case("a / dense", lambda a, x: a / x, lambda _, a, x: a / x, ("matrix",), is_dense=True),
    Case("-2 * a / 4", lambda a: -2 * a / 4, lambda _, a: -2 * a / 4),
]

REDUCTIONS = [
    Case("sum", lambda a: a.sum(), lambda _, a: a.sum()),
    Case("sum of rows", lambda a: a.sum(1), lambda _, a: a.sum(1)),
    Case("sum of columns", lambda a: a.sum(-2, keepdim=True), lambda _, a: a.sum(-2, keepdim=True)),
    Case("mean", lambda a: a.mean(), lambda _, a: a.mean()),
    Case("mean of columns", lambda a: a.mean(0), lambda _, a: a.mean(0)),
    Case("max", lambda a: a.max(), _max(None)),
    Case("max of rows", lambda a: a.max(1), _max(1)),
    Case("max of columns", lambda a: a.max(0), _max(0)),
    Case("norm", lambda a: a.norm(), _norm(2)),
    Case("norm, p=3", lambda a: a.norm(3), _norm(3)),
    Case("softmax of rows", softmax, _softmax(1)),
    Case("log_softmax of rows", lambda a: a.log_softmax(), _log_softmax(1)),
    Case("log_softmax of columns", lambda a: a.log_softmax(-2), _log_softmax(0)),
]

SEGMENTS = [
    Case(
        "gather",
        lambda a, x: a.with_values(a.values * gather(x, a.pattern.rows).square()),
        lambda _, a, x: a * x.square()[:, None],
        ("vector [n]",),
    ),
    Case(
        "gather by ids",
        lambda a, x: a.with_values(a.values * gather(x, a.pattern.col).prod(1)),
        lambda _, a, x: a * x.prod(1),
        ("tall [m]",),
    ),
    Case(
        "segment_sum by ids",
        lambda a, x: segment_sum(a.values[:, None] * gather(x, a.pattern.cols), a.pattern.row, a.shape[0]),
        lambda _, a, x: a @ x,
        ("tall [m]",),
    ),
    Case("segment_mean", lambda a: segment_mean(a.values, a.pattern.rows), _mean_of_stored),
    Case(
        "segment_max by ids",
        lambda a: segment_max(
            a.values[:, None] * a.values.new_tensor([1.0, -2.0]), a.pattern.row, a.shape[0]
        ),
        lambda mask, a: torch.stack([_max(1)(mask, a), _max(1)(mask, -2 * a)], 1),
    ),
    Case(
        "segment_softmax by ids",
        lambda a: a.with_values(segment_softmax(a.values, a.pattern.col, a.shape[1])),
        _softmax(0),
    ),
]

FORMS = [
    Case("to_dense", lambda a: a.to_dense(), lambda _, a: a, is_dense=True),
    Case("t", lambda a: a.t(), lambda _, a: a.T),
]

POWERS = [_pow(2), _pow(1.5, positive=True)]

CASES = [
    *PRODUCTS,
    *MERGES,
    *REDUCTIONS,
    *SEGMENTS,
    *FORMS,
    *POWERS,
    *map(_elementwise, ("abs", "relu", "sqrt", "tanh")),
]
