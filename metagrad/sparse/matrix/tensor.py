"""Sparse matrices: a pattern and a differentiable vector of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch import Tensor

from metagrad.core._torch import add_safe_globals, pytree
from metagrad.core.checks import check_type, is_a, refuse
from metagrad.sparse.checks import check_device, check_floating, check_same
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.matrix.conversions import Conversions
from metagrad.sparse.operations import products
from metagrad.sparse.operations.arithmetic import Arithmetic
from metagrad.sparse.operations.entries import Entries, as_sparse, like
from metagrad.sparse.operations.reduce import Reductions
from metagrad.sparse.pattern import Pattern
from metagrad.sparse.policy import count_densified

if TYPE_CHECKING:
    from typing_extensions import Self

_CALL = "SparseTensor(pattern, values)"


def _keeps_zero(function: Callable[[Tensor], Tensor]) -> Callable[[Operators], SparseTensor]:
    def method(self: Operators) -> SparseTensor:
        a: SparseTensor = as_sparse(f"{function.__name__}(a)", "a", self)
        return like(a, a.pattern, function(a.values))

    method.__name__ = function.__name__
    method.__doc__ = (
        f"Apply ``torch.{function.__name__}`` to every entry. Cells that are not stored stay zero."
    )
    return method


class Operators(Arithmetic["SparseTensor"], Reductions["SparseTensor"]):
    """The operators and methods of :class:`SparseTensor` and :class:`Parameter`.

    Elementwise functions apply torch's function to the values, with torch's derivatives of every order. The
    derivative of ``sqrt`` is infinite at a stored zero. For other functions use ``a.with_values(f(a.values))``.
    """

    __slots__ = ()

    abs = _keeps_zero(torch.abs)
    expm1 = _keeps_zero(torch.expm1)
    log1p = _keeps_zero(torch.log1p)
    neg = _keeps_zero(torch.neg)
    relu = _keeps_zero(torch.relu)
    sign = _keeps_zero(torch.sign)
    sin = _keeps_zero(torch.sin)
    sqrt = _keeps_zero(torch.sqrt)
    square = _keeps_zero(torch.square)
    tanh = _keeps_zero(torch.tanh)
    __abs__ = abs
    __neg__ = neg

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: SparseTensor) -> SparseTensor: ...
    def __matmul__(self, other: Tensor | SparseTensor) -> Tensor | SparseTensor:
        if isinstance(other, Tensor):
            return products.spmm(self._matrix, other)
        return products.spgemm(self._matrix, as_sparse("a @ b", "b", other))

    def __rmatmul__(self, other: Tensor) -> Tensor:
        check_floating("x @ a", "x", other)
        n, m = self._matrix.shape
        if not other.ndim or other.shape[-1] != n:
            raise ValueError(f"x @ a: a is ({n}, {m}), so x must be [..., {n}], got {list(other.shape)}.")
        transposed = self._matrix.t()
        return products.spmm(transposed, other) if other.ndim == 1 else products.spmm(transposed, other.mT).mT


class SparseTensor(Conversions, Operators):
    """A sparse matrix: the entries of a :class:`Pattern`.

    The values are a dense vector with an ordinary autograd graph. Every derivative is a vector of values on the same
    pattern. No tensor is as large as the matrix unless you call :meth:`to_dense`. A ``SparseTensor`` is a pytree, so
    ``torch.func`` transforms, ``metagrad.grad``, ``checkpoint`` and ``unroll`` accept and return it.

    Args:
        pattern: The stored cells.
        values: Floating point, [nnz], in the order of the pattern.

    Raises:
        ValueError: The number of values is wrong, or values and pattern are on different devices.
        TypeError: The values are not a dense floating-point tensor.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0])).requires_grad_()
        >>> (a @ torch.tensor([1.0, 10.0])).square().sum().backward()
        >>> a.grad
        SparseTensor(shape=(2, 2), nnz=2, values=tensor([400.,   6.]))
    """

    __slots__ = ()
    __array_priority__ = 1000  # NumPy leaves mixed arithmetic to this class, which raises

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"SparseTensor has no attribute {name!r}. A function of its entries is a.with_values(f(a.values)), "
                "a function of all cells is f(a.to_dense())."
            )

    def __init__(self, pattern: Pattern, values: Tensor) -> None:
        check_type(f"{_CALL}: pattern", pattern, Pattern)
        check_floating(_CALL, "values", values)
        if list(values.shape) != [pattern.nnz]:
            raise ValueError(
                f"{_CALL}: the pattern has {pattern.nnz} entries, so values must have shape [{pattern.nnz}], got "
                f"{list(values.shape)}."
            )
        check_device(_CALL, "pattern and values", pattern, values)
        self.pattern: Pattern = pattern
        self.values: Tensor = values

    def with_values(self, values: Tensor) -> SparseTensor:
        """Return a matrix on the same pattern with other values."""
        return SparseTensor(self.pattern, values)

    # Properties

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return self.pattern.nnz

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the values and the pattern."""
        return self.values.device

    def __repr__(self) -> str:
        return f"SparseTensor(shape={self.pattern.shape}, nnz={self.nnz}, values={self.values!r})"

    # Autograd

    @property
    def requires_grad(self) -> bool:
        """True if the values require grad."""
        return self.values.requires_grad

    @property
    def is_leaf(self) -> bool:
        """True if the values are a leaf of the autograd graph."""
        return self.values.is_leaf

    @property
    def grad(self) -> SparseTensor | None:
        """Gradient that ``backward`` has accumulated, on the same pattern, or None."""
        gradient = self.values.grad
        return None if gradient is None else SparseTensor._of(self.pattern, gradient)

    @grad.setter
    def grad(self, gradient: SparseTensor | None) -> None:
        if gradient is not None and (
            not is_a(gradient, SparseTensor) or gradient.pattern is not self.pattern
        ):
            refuse("SparseTensor.grad", "None or a SparseTensor on the same Pattern", gradient, TypeError)
        self.values.grad = None if gradient is None else gradient.values

    def requires_grad_(self, requires_grad: bool = True) -> SparseTensor:
        """Set whether the values require grad, and return this matrix."""
        self.values.requires_grad_(requires_grad)
        return self

    def detach(self) -> SparseTensor:
        """Return a matrix with the same values, detached."""
        return SparseTensor._of(self.pattern, self.values.detach())

    def clone(self) -> SparseTensor:
        """Return a matrix with a differentiable copy of the values."""
        return SparseTensor._of(self.pattern, self.values.clone())

    def to(self, *args: torch.device | torch.dtype | str | Tensor, **options: bool) -> SparseTensor:
        """Move to a device or convert to a floating-point dtype, as ``Tensor.to`` does."""
        untyped: Any = self.values
        values: Tensor = untyped.to(*args, **options)
        check_floating("SparseTensor.to(...)", "the result", values)
        return SparseTensor._of(self.pattern.to(values.device), values)

    def double(self) -> SparseTensor:
        """Convert to float64."""
        return self.to(torch.float64)

    def float(self) -> SparseTensor:
        """Convert to float32."""
        return self.to(torch.float32)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        name = getattr(func, "__name__", str(func))
        raise TypeError(
            f"torch's {name} does not take a SparseTensor: it would have to be made dense, or its gradient cut. "
            "Use the functions of metagrad.sparse, .values on the same pattern, or .to_dense()."
        )

    def __reduce__(self) -> tuple[type[SparseTensor], tuple[Pattern, Tensor]]:
        return SparseTensor, (self.pattern, self.values)

    @property
    def _matrix(self) -> Self:
        return self

    # Other forms

    T = property(Entries.t)

    def to_dense(self) -> Tensor:
        """Return the dense matrix, [rows, columns], differentiable at every order."""
        rows, columns = self.pattern.shape
        flat = self.values.new_zeros(rows * columns)
        count_densified(flat.nbytes)
        return flat.index_add(0, self.pattern.cells, self.values).reshape(rows, columns)


def _unflatten(children: Iterable[Tensor], pattern: Pattern) -> SparseTensor:
    (values,) = children
    return like(SparseTensor, pattern, values)


def _flatten_with_keys(a: SparseTensor) -> tuple[list[tuple[Any, Any]], Pattern]:
    return [(pytree.GetAttrKey("values"), a.values)], a.pattern


pytree.register_pytree_node(
    SparseTensor,
    lambda a: ([a.values], a.pattern),
    _unflatten,
    serialized_type_name="metagrad.sparse.SparseTensor",
    flatten_with_keys_fn=_flatten_with_keys,
)
# safe for torch.load(weights_only=True): both constructors check their arguments
add_safe_globals([Pattern, SparseTensor])


def sddmm(a: Tensor, b: Tensor, pattern: Pattern) -> SparseTensor:
    r"""Multiply two dense matrices, only at the entries of a pattern (sampled dense-dense product).

    .. math:: y_{ij} = \sum_k a_{ik} \, b_{kj} \quad \text{for } (i, j) \text{ in the pattern}

    Args:
        a: Dense, [n, K].
        b: Dense, [K, m]. A transposed view is not copied.
        pattern: The cells to compute, with shape (n, m).

    Returns:
        The product on the pattern.

    Raises:
        ValueError: Shapes or devices do not match.
        TypeError: An operand has another type, or dtypes differ.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> metagrad.sparse.sddmm(a, a.mT, pattern)
        SparseTensor(shape=(2, 2), nnz=2, values=tensor([11., 11.]))
    """
    call = "sddmm(a, b, pattern)"
    check_type(f"{call}: pattern", pattern, Pattern)
    check_floating(call, "a", a)
    check_floating(call, "b", b)
    check_same(call, "a and b", a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or (a.shape[0], b.shape[1]) != pattern.shape:
        n, m = pattern.shape
        raise ValueError(
            f"{call}: the pattern is {pattern.shape}, so a must be [{n}, K] and b [K, {m}], "
            f"got {list(a.shape)} and {list(b.shape)}."
        )
    check_device(call, "a and pattern", a, pattern)
    return like(SparseTensor, pattern, rules.sample(pattern, a, b.mT))
