"""A sparse matrix: a pattern, and the values of its entries on the ordinary tape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeAlias, overload

import torch
from torch import Tensor

from metagrad.core._torch import add_safe_globals, backward, pytree
from metagrad.core.checks import is_a
from metagrad.sparse.checks import check_floating, check_same
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.matrix.conversions import Conversions
from metagrad.sparse.operations import arithmetic, products, reduce
from metagrad.sparse.operations.entries import Entries, as_sparse, like
from metagrad.sparse.pattern import Pattern
from metagrad.sparse.statistics import count_densified

if TYPE_CHECKING:
    from typing_extensions import Self

_CALL = "SparseTensor(pattern, values)"


KeepsZero: TypeAlias = "Callable[[Elementwise], SparseTensor]"
MovesZero: TypeAlias = "Callable[[Elementwise], NoReturn]"


def _keeps_zero(function: Callable[[Tensor], Tensor]) -> KeepsZero:
    name = function.__name__

    def method(self: Elementwise) -> SparseTensor:
        a: SparseTensor = as_sparse(f"{name}(a)", "a", self)
        return like(a, a.pattern, function(a.values))

    method.__name__ = name
    method.__doc__ = f"Apply ``torch.{name}`` to every entry; cells that are not stored stay zero."
    return method


def _moves_zero(function: Callable[[Tensor], Tensor]) -> MovesZero:
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
        """The matrix that the methods work on."""
        raise NotImplementedError

    abs: ClassVar[KeepsZero] = _keeps_zero(torch.abs)
    asin: ClassVar[KeepsZero] = _keeps_zero(torch.asin)
    asinh: ClassVar[KeepsZero] = _keeps_zero(torch.asinh)
    atan: ClassVar[KeepsZero] = _keeps_zero(torch.atan)
    atanh: ClassVar[KeepsZero] = _keeps_zero(torch.atanh)
    ceil: ClassVar[KeepsZero] = _keeps_zero(torch.ceil)
    deg2rad: ClassVar[KeepsZero] = _keeps_zero(torch.deg2rad)
    erf: ClassVar[KeepsZero] = _keeps_zero(torch.erf)
    erfinv: ClassVar[KeepsZero] = _keeps_zero(torch.erfinv)
    expm1: ClassVar[KeepsZero] = _keeps_zero(torch.expm1)
    floor: ClassVar[KeepsZero] = _keeps_zero(torch.floor)
    frac: ClassVar[KeepsZero] = _keeps_zero(torch.frac)
    log1p: ClassVar[KeepsZero] = _keeps_zero(torch.log1p)
    neg: ClassVar[KeepsZero] = _keeps_zero(torch.neg)
    rad2deg: ClassVar[KeepsZero] = _keeps_zero(torch.rad2deg)
    relu: ClassVar[KeepsZero] = _keeps_zero(torch.relu)
    round: ClassVar[KeepsZero] = _keeps_zero(torch.round)
    sgn: ClassVar[KeepsZero] = _keeps_zero(torch.sgn)
    sign: ClassVar[KeepsZero] = _keeps_zero(torch.sign)
    sin: ClassVar[KeepsZero] = _keeps_zero(torch.sin)
    sinh: ClassVar[KeepsZero] = _keeps_zero(torch.sinh)
    sqrt: ClassVar[KeepsZero] = _keeps_zero(torch.sqrt)
    square: ClassVar[KeepsZero] = _keeps_zero(torch.square)
    tan: ClassVar[KeepsZero] = _keeps_zero(torch.tan)
    tanh: ClassVar[KeepsZero] = _keeps_zero(torch.tanh)
    trunc: ClassVar[KeepsZero] = _keeps_zero(torch.trunc)

    acos: ClassVar[MovesZero] = _moves_zero(torch.acos)
    acosh: ClassVar[MovesZero] = _moves_zero(torch.acosh)
    cos: ClassVar[MovesZero] = _moves_zero(torch.cos)
    cosh: ClassVar[MovesZero] = _moves_zero(torch.cosh)
    digamma: ClassVar[MovesZero] = _moves_zero(torch.digamma)
    erfc: ClassVar[MovesZero] = _moves_zero(torch.erfc)
    exp: ClassVar[MovesZero] = _moves_zero(torch.exp)
    exp2: ClassVar[MovesZero] = _moves_zero(torch.exp2)
    lgamma: ClassVar[MovesZero] = _moves_zero(torch.lgamma)
    log: ClassVar[MovesZero] = _moves_zero(torch.log)
    log10: ClassVar[MovesZero] = _moves_zero(torch.log10)
    log2: ClassVar[MovesZero] = _moves_zero(torch.log2)
    logit: ClassVar[MovesZero] = _moves_zero(torch.logit)
    reciprocal: ClassVar[MovesZero] = _moves_zero(torch.reciprocal)
    rsqrt: ClassVar[MovesZero] = _moves_zero(torch.rsqrt)
    sigmoid: ClassVar[MovesZero] = _moves_zero(torch.sigmoid)

    __abs__ = abs
    __neg__ = neg


class Operators(Elementwise):
    """The operators and methods of :class:`SparseTensor`; each is a function of this package."""

    __slots__ = ()

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

    @overload
    def __add__(self, other: SparseTensor | float) -> SparseTensor: ...
    @overload
    def __add__(self, other: Tensor) -> Tensor: ...
    def __add__(self, other: SparseTensor | Tensor | float) -> SparseTensor | Tensor:
        return arithmetic.add(self._matrix, other)

    __radd__ = __add__

    @overload
    def __sub__(self, other: SparseTensor | float) -> SparseTensor: ...
    @overload
    def __sub__(self, other: Tensor) -> Tensor: ...
    def __sub__(self, other: SparseTensor | Tensor | float) -> SparseTensor | Tensor:
        return arithmetic.sub(self._matrix, other)

    @overload
    def __rsub__(self, other: float) -> SparseTensor: ...
    @overload
    def __rsub__(self, other: Tensor) -> Tensor: ...
    def __rsub__(self, other: Tensor | float) -> SparseTensor | Tensor:
        return self.neg() + other

    def __mul__(self, other: SparseTensor | Tensor | float) -> SparseTensor:
        """Multiply by elements."""
        return arithmetic.mul(self._matrix, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Tensor | float) -> SparseTensor:
        return arithmetic.div(self._matrix, other)

    def __rtruediv__(self, other: object) -> SparseTensor:
        raise TypeError(
            "x / a: a is a SparseTensor, and its zeros would divide. Use a.with_values(1 / a.values) for the stored "
            "entries alone."
        )

    def __pow__(self, exponent: float) -> SparseTensor:
        return self.pow(exponent)

    def pow(self, exponent: float) -> SparseTensor:
        """Raise every entry to a positive power: :func:`metagrad.sparse.pow`."""
        return arithmetic.pow(self._matrix, exponent)

    def dropout(self, p: float = 0.5, *, training: bool = True) -> SparseTensor:
        """Set entries to zero at random: :func:`metagrad.sparse.dropout`."""
        return arithmetic.dropout(self._matrix, p, training=training)

    def sum(self, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Add all cells, or those of each row or column: :func:`metagrad.sparse.sum`."""
        return reduce.sum(self._matrix, dim, keepdim=keepdim)

    def mean(self, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Average all cells, or those of each row or column: :func:`metagrad.sparse.mean`."""
        return reduce.mean(self._matrix, dim, keepdim=keepdim)

    def max(self, dim: int | None = None, *, keepdim: bool = False) -> Tensor:
        """Take the largest stored entry of all, or of each row or column: :func:`metagrad.sparse.max`."""
        return reduce.max(self._matrix, dim, keepdim=keepdim)

    def norm(self, p: float = 2) -> Tensor:
        """Compute the p-norm of the entries: :func:`metagrad.sparse.norm`."""
        return reduce.norm(self._matrix, p)

    def softmax(self, dim: int = -1) -> SparseTensor:
        """Normalise the exponentials of each row or column: :func:`metagrad.sparse.softmax`."""
        return reduce.softmax(self._matrix, dim)

    def log_softmax(self, dim: int = -1) -> SparseTensor:
        """Compute the logarithm of :meth:`softmax`: :func:`metagrad.sparse.log_softmax`."""
        return reduce.log_softmax(self._matrix, dim)


class SparseTensor(Conversions, Operators):
    """A matrix that stores the entries of a :class:`Pattern` alone.

    The values are an ordinary strided tensor: whatever is computed from them is on torch's own tape, every
    derivative is again a vector of values on the same pattern, and nothing is ever as large as the matrix unless
    :meth:`to_dense` says so. A ``SparseTensor`` is a node of torch's trees, so ``torch.func`` transforms,
    ``metagrad.grad``, ``checkpoint`` and ``unroll`` take and return it.

    Args:
        pattern: Which cells are stored.
        values: Floating point of shape [nnz], in the pattern's order; or [nnz, p, q], a p x q block for each entry:
            the matrix is then ``pattern.shape[0] * p`` by ``pattern.shape[1] * q`` (BSR).

    Raises:
        ValueError: There is not one value, or block, for each entry; or two devices.
        TypeError: The values are not a strided floating-point tensor.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = metagrad.sparse.SparseTensor(pattern, torch.tensor([2.0, 3.0])).requires_grad_()
        >>> (a @ torch.tensor([1.0, 10.0])).square().sum().backward()
        >>> a.grad
        SparseTensor(shape=(2, 2), nnz=2, values=tensor([400.,   6.]))
    """

    __slots__ = ()
    __array_priority__ = 1000  # numpy leaves mixed arithmetic to us, which refuses it

    def __init__(self, pattern: Pattern, values: Tensor) -> None:
        if not is_a(pattern, Pattern):
            raise TypeError(f"{_CALL}: pattern must be a Pattern, got {type(pattern).__name__}.")
        check_floating(_CALL, "values", values)
        if values.ndim not in (1, 3) or values.shape[0] != pattern.nnz:
            raise ValueError(
                f"{_CALL}: the pattern has {pattern.nnz} entries, so values must have shape "
                f"[{pattern.nnz}], or [{pattern.nnz}, p, q] for blocks, got {list(values.shape)}."
            )
        if values.device != pattern.device:
            raise ValueError(
                f"{_CALL}: the pattern is on {pattern.device} and the values are on {values.device}. "
                "Move one with .to(device)."
            )
        self.pattern: Pattern = pattern
        self.values: Tensor = values

    def with_values(self, values: Tensor) -> SparseTensor:
        """Return a matrix on the same pattern with other values."""
        return SparseTensor(self.pattern, values)

    # What it is

    @property
    def ndim(self) -> int:
        """Two."""
        return 2

    @property
    def nnz(self) -> int:
        """Numbers stored: entries, times the size of a block."""
        return self.values.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values and the pattern are."""
        return self.values.device

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def __repr__(self) -> str:
        blocks = f", blocks={self.block_shape}" if self.is_blocked else ""
        rows, columns = self.shape
        return f"SparseTensor(shape=({rows}, {columns}), nnz={self.nnz}{blocks}, values={self.values!r})"

    # On the tape

    @property
    def requires_grad(self) -> bool:
        """Whether the values require grad."""
        return self.values.requires_grad

    @property
    def is_leaf(self) -> bool:
        """Whether the values are a leaf of the tape."""
        return self.values.is_leaf

    @property
    def grad(self) -> SparseTensor | None:
        """The gradient that ``backward`` left, on the same pattern."""
        gradient = self.values.grad
        return None if gradient is None else SparseTensor._of(self.pattern, gradient)

    @grad.setter
    def grad(self, gradient: SparseTensor | None) -> None:
        if gradient is not None and (
            not is_a(gradient, SparseTensor) or gradient.pattern is not self.pattern
        ):
            raise TypeError(
                "SparseTensor.grad: a gradient must be a SparseTensor on the same Pattern, or None."
            )
        self.values.grad = None if gradient is None else gradient.values

    def requires_grad_(self, requires_grad: bool = True) -> SparseTensor:
        """Make the values a leaf that collects a gradient; returns itself."""
        self.values.requires_grad_(requires_grad)
        return self

    def retain_grad(self) -> None:
        """Keep the gradient of values that are not a leaf."""
        self.values.retain_grad()

    def backward(
        self, gradient: SparseTensor, *, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Run the backward pass from this matrix, given the gradient of a loss with respect to it."""
        if not is_a(gradient, SparseTensor) or gradient.pattern is not self.pattern:
            raise TypeError(
                "SparseTensor.backward(gradient): gradient must be a SparseTensor on the same Pattern."
            )
        backward(self.values, gradient.values, retain_graph=retain_graph, create_graph=create_graph)

    def detach(self) -> SparseTensor:
        """Return the same values outside the tape."""
        return SparseTensor._of(self.pattern, self.values.detach())

    def clone(self) -> SparseTensor:
        """Return a differentiable copy of the values on the same pattern."""
        return SparseTensor._of(self.pattern, self.values.clone())

    def to(self, *args: torch.device | torch.dtype | str | Tensor, **options: bool) -> SparseTensor:
        """Move to a device, convert to a floating dtype, or both, as ``Tensor.to`` does."""
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

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        raise TypeError(
            "nn.Parameter(a): a is a SparseTensor, and a module would not register it. "
            "Use metagrad.sparse.Parameter(a), whose values are an ordinary parameter."
        )

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
        """Return the whole matrix, differentiable at every order; memory is rows x columns."""
        scalar = self.scalar()
        rows, columns = scalar.pattern.shape
        flat = scalar.values.new_zeros(rows * columns)
        count_densified(flat.nbytes)
        place = scalar.pattern.row * columns + scalar.pattern.col
        return flat.index_add(0, place, scalar.values).reshape(rows, columns)


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
add_safe_globals([Pattern, SparseTensor])  # both are checked as they are made


def sddmm(a: Tensor, b: Tensor, pattern: Pattern) -> SparseTensor:
    r"""Multiply two dense matrices at the entries of a pattern alone (sampled dense-dense product).

    .. math:: y_{ij} = \sum_k a_{ik} \, b_{kj} \quad \text{for } (i, j) \text{ in the pattern}

    Args:
        a: Dense, [n, K].
        b: Dense, [K, m]; a transposed view costs nothing.
        pattern: The cells to compute, of shape (n, m).

    Returns:
        The product on the pattern.

    Raises:
        ValueError: Shapes that do not fit the pattern or each other, or two devices.
        TypeError: Operands of other types or of two dtypes.

    Example:
        >>> pattern = metagrad.sparse.Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
        >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> metagrad.sparse.sddmm(a, a.mT, pattern)
        SparseTensor(shape=(2, 2), nnz=2, values=tensor([11., 11.]))
    """
    call = "sddmm(a, b, pattern)"
    if not is_a(pattern, Pattern):
        raise TypeError(f"{call}: pattern must be a Pattern, got {type(pattern).__name__}.")
    check_floating(call, "a", a)
    check_floating(call, "b", b)
    check_same(call, "a and b", a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or (a.shape[0], b.shape[1]) != pattern.shape:
        n, m = pattern.shape
        raise ValueError(
            f"{call}: the pattern is {pattern.shape}, so a must be [{n}, K] and b [K, {m}], "
            f"got {list(a.shape)} and {list(b.shape)}."
        )
    if a.device != pattern.device:
        raise ValueError(
            f"{call}: a is on {a.device} and the pattern on {pattern.device}. Move one with .to(device)."
        )
    return like(SparseTensor, pattern, rules.sample(pattern, a, b.mT))
