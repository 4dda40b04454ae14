"""A sparse matrix: a pattern, and the values of its entries on the ordinary tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metagrad.core._torch import pytree
from metagrad.sparse.checks import check_floating
from metagrad.sparse.kernels import derivatives as rules
from metagrad.sparse.matrix.convert import Conversions
from metagrad.sparse.matrix.operators import Operators
from metagrad.sparse.matrix.pattern import Pattern
from metagrad.sparse.policies.stats import count_densified

_CALL = "SparseTensor(pattern, values)"


class SparseTensor(Operators, Conversions):
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

    __slots__ = ("__weakref__", "pattern", "values")
    __array_priority__ = 1000  # numpy leaves mixed arithmetic to us, which refuses it

    pattern: Pattern
    values: Tensor

    def __init__(self, pattern: Pattern, values: Tensor) -> None:
        if not isinstance(pattern, Pattern):
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
        self.pattern, self.values = pattern, values

    @classmethod
    def _of(cls, pattern: Pattern, values: Tensor) -> SparseTensor:
        """Make one of parts that fit, or of what a torch.func transform put in the place of values."""
        made = cls.__new__(cls)
        made.pattern, made.values = pattern, values
        return made

    def with_values(self, values: Tensor) -> SparseTensor:
        """Return a matrix on the same pattern with other values."""
        return SparseTensor(self.pattern, values)

    # What it is

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        rows, columns = self.pattern.shape
        p, q = self.block_shape
        return torch.Size((rows * p, columns * q))

    @property
    def block_shape(self) -> tuple[int, int]:
        """The size of an entry: (1, 1) for scalars."""
        return (1, 1) if self.values.ndim == 1 else (self.values.shape[1], self.values.shape[2])

    @property
    def is_blocked(self) -> bool:
        """Whether the entries are blocks."""
        return self.values.ndim == 3

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
            not isinstance(gradient, SparseTensor) or gradient.pattern is not self.pattern
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
        if not isinstance(gradient, SparseTensor) or gradient.pattern is not self.pattern:
            raise TypeError(
                "SparseTensor.backward(gradient): gradient must be a SparseTensor on the same Pattern."
            )
        self.values.backward(gradient.values, retain_graph=retain_graph, create_graph=create_graph)

    def detach(self) -> SparseTensor:
        """Return the same values outside the tape."""
        return SparseTensor._of(self.pattern, self.values.detach())

    def clone(self) -> SparseTensor:
        """Return a differentiable copy of the values on the same pattern."""
        return SparseTensor._of(self.pattern, self.values.clone())

    def to(self, *args: torch.device | torch.dtype | str | Tensor, **options: bool) -> SparseTensor:
        """Move to a device, convert to a floating dtype, or both, as ``Tensor.to`` does."""
        values = self.values.to(*args, **options)  # type: ignore[reportCallIssue, reportArgumentType]
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
        cls, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: dict | None = None
    ):
        name = getattr(func, "__name__", str(func))
        raise TypeError(
            f"torch's {name} does not take a SparseTensor: it would have to be made dense, or its gradient cut. "
            "Use the functions of metagrad.sparse, .values on the same pattern, or .to_dense()."
        )

    def __reduce__(self) -> tuple[type[SparseTensor], tuple[Pattern, Tensor]]:
        return SparseTensor, (self.pattern, self.values)

    # Other forms

    def t(self) -> SparseTensor:
        """Return the transpose, differentiable; its pattern is the cached transpose."""
        order = self.pattern.csc_order
        values = self.values.index_select(0, order)
        return SparseTensor._of(self.pattern.t(), values.transpose(1, 2) if self.is_blocked else values)

    T = property(t)

    def to_dense(self) -> Tensor:
        """Return the whole matrix, differentiable at every order; memory is rows x columns."""
        scalar = self.scalar()
        rows, columns = scalar.pattern.shape
        flat = scalar.values.new_zeros(rows * columns)
        count_densified(flat.nbytes)
        place = scalar.pattern.row * columns + scalar.pattern.col
        return flat.index_add(0, place, scalar.values).reshape(rows, columns)

    def scalar(self) -> SparseTensor:
        """Return the same matrix with a number for each entry, where the entries are blocks."""
        if not self.is_blocked:
            return self
        pattern, order = self.pattern.unblocked(self.block_shape)
        return SparseTensor._of(pattern, rules.gather(self.values.reshape(-1), order))


def _unflatten(children: Sequence[Tensor], pattern: Pattern) -> SparseTensor:
    return SparseTensor._of(pattern, children[0])  # type: ignore[arg-type]


def _flatten_with_keys(a: SparseTensor) -> tuple[list[tuple[pytree.GetAttrKey, Tensor]], Pattern]:
    return [(pytree.GetAttrKey("values"), a.values)], a.pattern


pytree.register_pytree_node(
    SparseTensor,
    lambda a: ([a.values], a.pattern),
    _unflatten,  # type: ignore[arg-type]
    serialized_type_name="metagrad.sparse.SparseTensor",
    flatten_with_keys_fn=_flatten_with_keys,  # type: ignore[arg-type]
)
torch.serialization.add_safe_globals([Pattern, SparseTensor])  # both are checked as they are made
