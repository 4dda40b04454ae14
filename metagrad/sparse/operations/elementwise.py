"""Functions of the stored entries: those that are zero at zero, powers and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from metagrad.sparse.matrix.tensor import SparseTensor


def pow(a: SparseTensor, exponent: float) -> SparseTensor:
    r"""Raise every entry to a positive power.

    .. math:: y_{ij} = a_{ij}^p, \qquad p > 0

    Args:
        a: Sparse, [n, m], or with blocks.
        exponent: The power :math:`p`; at a stored zero a fractional one has the infinite derivatives that
            ``torch.pow`` gives there.

    Returns:
        The powers on the same pattern.

    Raises:
        ValueError: ``exponent`` is not positive: a cell that is not stored would become 1, or infinite.
        TypeError: ``a`` is not a SparseTensor, or ``exponent`` not a number.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, -3.0]))
        >>> (a**2).values, a.pow(3).values
        (tensor([4., 9.]), tensor([  8., -27.]))
    """
    a = as_sparse("pow(a, exponent)", "a", a)
    if not isinstance(exponent, (int, float)):
        raise TypeError(f"pow(a, exponent): exponent must be a number, got {type(exponent).__name__}.")
    if not exponent > 0:
        raise ValueError(
            f"pow(a, exponent): exponent must be positive, got {exponent}: cells that are not stored are zero and "
            f"would not stay so. Use a.with_values(a.values**{exponent}) for the stored entries alone."
        )
    return a._of(a.pattern, a.values**exponent)


def dropout(a: SparseTensor, p: float = 0.5, *, training: bool = True) -> SparseTensor:
    r"""Set entries to zero at random, and scale the others up so that the expectation stays.

    .. math:: y_{ij} = \frac{z_{ij}}{1 - p}\, a_{ij}, \qquad z_{ij} \sim \mathrm{Bernoulli}(1 - p)

    The pattern stays: an entry that is dropped is stored as a zero, and its gradient is zero.

    Args:
        a: Sparse, [n, m]; with blocks each number is drawn for itself.
        p: The probability of a zero, from 0 to 1.
        training: False returns ``a`` as it is.

    Returns:
        A matrix on the same pattern.

    Raises:
        ValueError: ``p`` is not a probability.
        TypeError: ``a`` is not a SparseTensor.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0]))
        >>> a.dropout(1.0).values, a.dropout(0.5, training=False).values
        (tensor([0., 0.]), tensor([2., 3.]))
    """
    a = as_sparse("dropout(a, p)", "a", a)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout(a, p): p must be from 0 to 1, got {p}.")
    return a._of(a.pattern, F.dropout(a.values, p, training)) if training else a


def _keeps_zero(function: Callable[[Tensor], Tensor]) -> Callable[[Elementwise], SparseTensor]:
    name = function.__name__

    def method(self: Elementwise) -> SparseTensor:
        a = self._matrix
        return a._of(a.pattern, function(a.values))

    method.__name__ = name
    method.__doc__ = f"Apply ``torch.{name}`` to every entry; cells that are not stored stay zero."
    return method


def _moves_zero(function: Callable[[Tensor], Tensor]) -> Callable[[Elementwise], NoReturn]:
    name = function.__name__

    def method(self: Elementwise) -> NoReturn:
        raise TypeError(
            f"{name}(a): {name}(0) is {function(torch.zeros(())).item():g}, so every cell that is not stored would "
            f"become that. Use a.with_values(a.values.{name}()) for the stored entries alone, or "
            f"a.to_dense().{name}()."
        )

    method.__name__ = name
    method.__doc__ = f"Refuse: ``torch.{name}`` is not zero at zero."
    return method


class Elementwise:
    """The functions of one number that a :class:`SparseTensor` has as methods, one a line.

    Each is torch's, on the values of the same pattern, with torch's derivatives of every order (``sqrt`` has an
    infinite one at a stored zero). Those that are not zero at zero are refused, with the way out.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([-2.0, 3.0]))
        >>> a.relu().to_dense()
        tensor([[0., 0.],
                [3., 0.]])
    """

    __slots__ = ()

    @property
    def _matrix(self) -> SparseTensor:
        """The matrix that the methods work on; what merely holds one says which."""
        from metagrad.sparse.matrix.tensor import SparseTensor

        assert isinstance(self, SparseTensor)
        return self

    abs = _keeps_zero(torch.abs)
    asin = _keeps_zero(torch.asin)
    asinh = _keeps_zero(torch.asinh)
    atan = _keeps_zero(torch.atan)
    atanh = _keeps_zero(torch.atanh)
    ceil = _keeps_zero(torch.ceil)
    deg2rad = _keeps_zero(torch.deg2rad)
    erf = _keeps_zero(torch.erf)
    erfinv = _keeps_zero(torch.erfinv)
    expm1 = _keeps_zero(torch.expm1)
    floor = _keeps_zero(torch.floor)
    frac = _keeps_zero(torch.frac)
    log1p = _keeps_zero(torch.log1p)
    neg = _keeps_zero(torch.neg)
    rad2deg = _keeps_zero(torch.rad2deg)
    relu = _keeps_zero(torch.relu)
    round = _keeps_zero(torch.round)
    sgn = _keeps_zero(torch.sgn)
    sign = _keeps_zero(torch.sign)
    sin = _keeps_zero(torch.sin)
    sinh = _keeps_zero(torch.sinh)
    sqrt = _keeps_zero(torch.sqrt)
    square = _keeps_zero(torch.square)
    tan = _keeps_zero(torch.tan)
    tanh = _keeps_zero(torch.tanh)
    trunc = _keeps_zero(torch.trunc)

    acos = _moves_zero(torch.acos)
    acosh = _moves_zero(torch.acosh)
    cos = _moves_zero(torch.cos)
    cosh = _moves_zero(torch.cosh)
    digamma = _moves_zero(torch.digamma)
    erfc = _moves_zero(torch.erfc)
    exp = _moves_zero(torch.exp)
    exp2 = _moves_zero(torch.exp2)
    lgamma = _moves_zero(torch.lgamma)
    log = _moves_zero(torch.log)
    log10 = _moves_zero(torch.log10)
    log2 = _moves_zero(torch.log2)
    logit = _moves_zero(torch.logit)
    reciprocal = _moves_zero(torch.reciprocal)
    rsqrt = _moves_zero(torch.rsqrt)
    sigmoid = _moves_zero(torch.sigmoid)

    __abs__ = abs
    __neg__ = neg


def as_sparse(call: str, name: str, a: object) -> SparseTensor:
    """Return the matrix that an argument is, or that a parameter holds, or refuse it."""
    from metagrad.sparse.matrix.parameter import Parameter
    from metagrad.sparse.matrix.tensor import SparseTensor

    if isinstance(a, Parameter):
        return a.tensor
    if isinstance(a, SparseTensor):
        return a
    raise TypeError(
        f"{call}: {name} must be a SparseTensor, got {type(a).__name__}. "
        "SparseTensor.from_torch(tensor) and from_scipy(matrix) convert."
    )
